"""The parts of a step on the CPU: what `CpuAttention` reads in place, gathers and merges.

    decode row   |--- HOT view ---|-- long run: view --|. scattered slots: bucket .|
    extend rows  |~ window's edge ~|-- prefix: views and one gather --|-- own chunk --|

Of edge and own chunk each extend row sees a part: one call with a mask, or causal without an edge.
Built once per step from the StepPlan with numpy. Spans of one row are folded into as few parts
as possible: the plan's merge lists say which spans count, not how many calls serve them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from granikv.core import ColdItem, Count, ExtendSegment, HotItem, HotVariant, SpanKind, StepPlan

# A contiguous run this long is attended in place: its own call (about 25 us) costs less than
# gathering it (about 0.17 us per token and row); shorter runs join the batched gather.
MIN_VIEW_TOKENS = 256
# Tokens of one batched gather: its K and V stay in the L2 cache between copy and attention.
MAX_GATHER_TOKENS = 8192
# Padding that one bucket may add, in tokens: about the cost of one more call.
MAX_BUCKET_WASTE_TOKENS = 512
MIN_SPLIT_TOKENS = 512  # a part of a split view below this is all overhead


@dataclass
class View:
    """One contiguous span, read in place for all its rows; gives num_splits * num_rows parts."""

    rows: torch.Tensor | slice
    num_rows: int
    start: int
    length: int  # a multiple of num_splits
    num_splits: int
    variant: HotVariant
    mask: torch.Tensor | None  # [1, 1, num_rows * G, length]
    first_part: int = 0  # split i of the view's row r is part first_part + i * num_rows + r

    @property
    def row_indices(self) -> np.ndarray:
        """int64 [num_rows]."""
        if isinstance(self.rows, slice):
            return np.arange(self.rows.start, self.rows.stop)
        return self.rows.numpy()


@dataclass
class Bucket:
    """Rows of similar length whose scattered slots are gathered by one index_select."""

    rows: torch.Tensor | slice
    slots: torch.Tensor  # int32 [num_rows * length], padded with a slot of the same row
    num_rows: int
    length: int
    mask: torch.Tensor | None  # [num_rows, 1, 1, length]
    first_part: int = 0


@dataclass
class Scattered:
    """Slots of one row that are read where they lie; one part."""

    row: int
    slots: np.ndarray  # int32 [n]
    first_part: int


@dataclass
class Extend:
    """Rows [first, last) of one extend request: parts of the prefix, then what rows see part of."""

    first: int
    last: int
    views: list[View]
    gather: torch.Tensor | None  # int32 [n]: slots that every row sees
    edges: slice | torch.Tensor  # slots of other keys, in position order: the own chunk comes last
    mask: torch.Tensor | None  # [1, 1, m, keys of `edges`]; None: the own chunk alone, causal


class StepParts:
    """Views, buckets, merge indices and extend requests of one StepPlan.

    request_slots: int32 [max_requests, max_seq_len]. gather: scattered slots in buckets, for
    torch; else each row's on their own. window: keys that an extend row sees at most (None: all);
    the plan clips decode rows. Raises ValueError for an unknown kind or variant, and
    for an extend request whose segments miss its own chunk.
    """

    def __init__(
        self,
        plan: StepPlan,
        request_slots: np.ndarray,
        num_kv_heads: int,
        group_size: int,
        gather: bool = True,
        window: int | None = None,
    ):
        self.num_kv_heads, self.group_size = num_kv_heads, group_size
        self.request_slots, self.window = request_slots, window
        self.num_rows = int(plan.counts[Count.NUM_ROWS])
        self.num_decode_rows = int(plan.counts[Count.NUM_DECODE_ROWS])
        self.append = _index(plan.slot_mapping[: self.num_rows])
        self.views: list[View] = []
        self.merge_index: torch.Tensor | None = None  # int64 [num_decode_rows, most parts]
        self.select: torch.Tensor | None = None  # int64 [num_decode_rows]
        self._row_parts: list[list[int]] = [[] for _ in range(self.num_decode_rows)]
        self._rest: list[list[np.ndarray]] = [[] for _ in range(self.num_decode_rows)]
        self.num_parts = 0
        row_of_partial = _row_of_partial(plan, self.num_decode_rows)
        self._prepare_hot(plan, row_of_partial)
        self._prepare_cold(plan, row_of_partial)
        self.buckets = self._prepare_buckets() if gather else []
        self.scattered = [] if gather else self._prepare_scattered()
        self._prepare_merge()
        self.extends = [
            self._prepare_extend(plan, i)
            for i in range(int(plan.counts[Count.NUM_EXTEND_REQUESTS]))
        ]

    def _prepare_hot(self, plan: StepPlan, row_of_partial: np.ndarray) -> None:
        for item in plan.hot_items[: plan.counts[Count.NUM_HOT_ITEMS]]:
            first, num_rows = int(item[HotItem.FIRST_ROW_ENTRY]), int(item[HotItem.NUM_ROWS])
            partial = int(item[HotItem.FIRST_PARTIAL])
            variant = HotVariant(int(item[HotItem.VARIANT]))
            rows = np.asarray(plan.hot_rows[first : first + num_rows], dtype=np.int64)
            visible = plan.row_position[rows].astype(np.int64) + 1 - int(item[HotItem.POSITION])
            visible = visible.clip(0, int(item[HotItem.KV_LEN]))
            merged = row_of_partial[partial : partial + num_rows] == rows
            keep = merged & (visible > 0)
            if keep.any():
                self._add_view(rows[keep], int(item[HotItem.KV_START]), visible[keep], variant)

    def _add_view(
        self, rows: np.ndarray, start: int, visible: np.ndarray, variant: HotVariant
    ) -> None:
        """Decode rows [R] over the span at `start`; row i sees visible[i] >= 1 keys."""
        view = make_view(rows, start, visible, variant, self.num_kv_heads, self.group_size)
        for slot in range(start + view.length, start + int(visible.max())):
            for row in rows:
                self._rest[row].append(np.array([slot], np.int32))
        view.first_part = self.num_parts
        for part in range(view.num_splits * view.num_rows):
            self._row_parts[rows[part % view.num_rows]].append(self.num_parts + part)
        self.num_parts += view.num_splits * view.num_rows
        self.views.append(view)

    def _prepare_cold(self, plan: StepPlan, row_of_partial: np.ndarray) -> None:
        for item in plan.cold_items[: plan.counts[Count.NUM_COLD_ITEMS]]:
            row, start = int(item[ColdItem.ROW]), int(item[ColdItem.START])
            kind = SpanKind(int(item[ColdItem.KIND]))
            visible = int(plan.row_position[row]) + 1 - int(item[ColdItem.POSITION])
            length = min(int(item[ColdItem.LEN]), visible)
            if length <= 0 or row_of_partial[int(item[ColdItem.FIRST_PARTIAL])] != row:
                continue
            runs, rest = self._runs(kind, start, length, int(plan.row_request[row]))
            for run_start, run_len in runs:
                self._add_view(np.array([row]), run_start, np.array([run_len]), HotVariant.CASCADE)
            self._rest[row] += rest

    def _runs(
        self, kind: SpanKind, start: int, length: int, request_row: int
    ) -> tuple[list[tuple[int, int]], list[np.ndarray]]:
        """Long runs (first slot, length) of a span, and the slots outside of them."""
        if kind is SpanKind.SLOTS:
            return split_runs(self.request_slots[request_row, start : start + length])
        if length >= MIN_VIEW_TOKENS:
            return [(start, length)], []
        return [], [np.arange(start, start + length, dtype=np.int32)]

    def _prepare_buckets(self) -> list[Bucket]:
        """Rows by falling length, cut where padding or the gather would grow too large."""
        slots = {row: np.concatenate(s) for row, s in enumerate(self._rest) if s}
        order = sorted(slots, key=lambda row: -len(slots[row]))
        groups: list[list[int]] = []
        length = waste = 0
        for row in order:
            n = len(slots[row])
            fits = groups and (len(groups[-1]) + 1) * length <= MAX_GATHER_TOKENS
            if fits and waste + length - n <= MAX_BUCKET_WASTE_TOKENS:
                groups[-1].append(row)
                waste += length - n
            else:
                groups.append([row])
                length, waste = n, 0
        buckets = []
        for group in groups:
            group.sort()
            lengths = np.array([len(slots[row]) for row in group])
            length = int(lengths.max())
            padded = np.empty((len(group), length), np.int32)
            for i, row in enumerate(group):
                padded[i, : lengths[i]] = slots[row]
                padded[i, lengths[i] :] = slots[row][0]  # finite, whatever else the arena holds
                self._row_parts[row].append(self.num_parts + i)
            mask = None
            if lengths.min() < length:
                hidden = np.arange(length)[None, :] >= lengths[:, None]
                mask = torch.from_numpy(np.where(hidden, -np.inf, 0.0).astype(np.float32))
                mask = mask[:, None, None, :]
            flat = torch.from_numpy(padded.reshape(-1))
            rows = _index(np.array(group))
            buckets.append(Bucket(rows, flat, len(group), length, mask, self.num_parts))
            self.num_parts += len(group)
        return buckets

    def _prepare_scattered(self) -> list[Scattered]:
        found = []
        for row, slots in enumerate(self._rest):
            if slots:
                found.append(Scattered(row, np.concatenate(slots), self.num_parts))
                self._row_parts[row].append(self.num_parts)
                self.num_parts += 1
        return found

    def _prepare_merge(self) -> None:
        """Part indices [num_decode_rows, most]; direct when every row has just one part."""
        most = max((len(p) for p in self._row_parts), default=0)
        if all(len(p) == 1 for p in self._row_parts):
            order = np.array([p[0] for p in self._row_parts], np.int64)
            if not np.array_equal(order, np.arange(self.num_parts)):
                self.select = torch.from_numpy(order)
            return
        index = np.full((self.num_decode_rows, max(most, 1)), self.num_parts, np.int64)
        for row, parts in enumerate(self._row_parts):
            index[row, : len(parts)] = parts
            if not parts:
                index[row, 0] = self.num_parts + 1
        self.merge_index = torch.from_numpy(index)

    def _prepare_extend(self, plan: StepPlan, i: int) -> Extend:
        first, last = int(plan.qo_indptr[i]), int(plan.qo_indptr[i + 1])
        position, request_row = int(plan.row_position[first]), int(plan.row_request[first])
        views: list[View] = []
        gather: list[np.ndarray] = []
        ragged: list[np.ndarray] = []  # slots of the prefix that only the earlier rows see
        edge_positions: list[np.ndarray] = []
        chunk: list[np.ndarray] = []
        num_rows = last - first
        rows = np.arange(first, last)
        all_see = 0 if self.window is None else max(0, position + num_rows - self.window)
        for seg in plan.extend_segments[plan.extend_indptr[i] : plan.extend_indptr[i + 1]]:
            kind, start = SpanKind(int(seg[ExtendSegment.KIND])), int(seg[ExtendSegment.START])
            offset, length = int(seg[ExtendSegment.POSITION]), int(seg[ExtendSegment.LEN])
            length = min(length, position + num_rows - offset)
            before = max(0, min(length, position - offset))  # of the prefix
            hidden = max(0, min(before, all_see - offset))
            if hidden:
                ragged.append(self._slots(kind, start, hidden, request_row))
                edge_positions.append(np.arange(offset, offset + hidden))
            span = (kind, start + hidden, before - hidden, request_row)  # every row sees it
            runs, rest = self._runs(*span) if before > hidden else ([], [])
            gather += rest
            for run_start, run_len in runs:
                view = make_view(
                    rows,
                    run_start,
                    np.array([run_len]),
                    HotVariant.CASCADE,
                    self.num_kv_heads,
                    self.group_size,
                )
                views.append(view)
                if view.length < run_len:
                    tail = np.arange(run_start + view.length, run_start + run_len)
                    gather.append(tail.astype(np.int32))
            if length > before:
                chunk.append(self._slots(kind, start + before, length - before, request_row))
        own_slots = np.concatenate(chunk) if chunk else np.empty(0, np.int32)
        if len(own_slots) != num_rows:
            raise ValueError(
                f"extend request {i}: expected {num_rows} keys from position {position} on, "
                f"got {len(own_slots)}"
            )
        joined = torch.from_numpy(np.concatenate(gather)) if gather else None
        mask = None
        if self.window is not None and (ragged or all_see > position):
            own = np.arange(position, position + num_rows)
            mask = _band(own, np.concatenate([*edge_positions, own]), self.window)
        edges = _index(np.concatenate([*ragged, own_slots]))
        return Extend(first, last, views, joined, edges, mask)

    def _slots(self, kind: SpanKind, start: int, length: int, request_row: int) -> np.ndarray:
        """int32 [length]: of a span."""
        if kind is SpanKind.SLOTS:
            return self.request_slots[request_row, start : start + length]
        return np.arange(start, start + length, dtype=np.int32)


def make_view(
    rows: np.ndarray,
    start: int,
    visible: np.ndarray,
    variant: HotVariant,
    num_kv_heads: int,
    group_size: int,
) -> View:
    """View of rows int64 [R] over the span at `start`; visible [R] or [1]: keys that a row sees.

    A split view may leave the last few of visible.max() keys out: the caller serves them.
    """
    length, mask, num_splits = int(visible.max()), None, 1
    if visible.min() < length:
        hidden = np.arange(length)[None, :] >= visible[:, None]
        per_row = np.where(hidden, -np.inf, 0.0).astype(np.float32)
        mask = torch.from_numpy(np.repeat(per_row, group_size, axis=0))[None, None]
    elif variant is HotVariant.CASCADE:
        # one task per KV head, or few: split the span so that tasks divide among the threads
        threads = torch.get_num_threads()
        num_splits = threads // math.gcd(num_kv_heads, threads)
        num_splits = max(1, min(num_splits, length // MIN_SPLIT_TOKENS))
        length -= length % num_splits
    return View(_index(rows), len(rows), start, length, num_splits, variant, mask)


def split_runs(slots: np.ndarray) -> tuple[list[tuple[int, int]], list[np.ndarray]]:
    """Runs of at least MIN_VIEW_TOKENS neighbouring slots, and what is left.

    slots: int32 [n], distinct, of keys that the row sees all of: their order does not matter, so
    pieces that were written apart but lie side by side are one run.
    """
    if len(slots) < MIN_VIEW_TOKENS:
        return [], [slots.copy()]
    ordered = np.sort(slots)
    breaks = np.flatnonzero(np.diff(ordered) != 1) + 1
    first = np.concatenate(([0], breaks))
    length = np.diff(np.concatenate((first, [len(ordered)])))
    long = length >= MIN_VIEW_TOKENS
    runs = [(int(ordered[a]), int(n)) for a, n in zip(first[long], length[long], strict=True)]
    rest = ordered[~np.repeat(long, length)]
    return runs, ([rest] if len(rest) else [])


def _band(rows: np.ndarray, keys: np.ndarray, window: int) -> torch.Tensor:
    """Additive mask [1, 1, R, N] of rows and keys at these positions."""
    hidden = (keys > rows[:, None]) | (keys <= rows[:, None] - window)
    return torch.from_numpy(np.where(hidden, -np.inf, 0.0).astype(np.float32))[None, None]


def _row_of_partial(plan: StepPlan, num_decode_rows: int) -> np.ndarray:
    """int64 [num_partials]: the decode row whose merge list names the partial, or -1."""
    out = np.full(int(plan.counts[Count.NUM_PARTIALS]), -1, np.int64)
    indptr = plan.merge_indptr[: num_decode_rows + 1].astype(np.int64)
    if num_decode_rows:
        named = plan.merge_partials[indptr[0] : indptr[-1]]
        out[named] = np.repeat(np.arange(num_decode_rows), np.diff(indptr))
    return out


def _index(values: np.ndarray) -> slice | torch.Tensor:
    """A slice when the values rise by one (a view, no gather), else an int64 tensor."""
    n = len(values)
    if n and values[-1] - values[0] == n - 1 and (np.diff(values) == 1).all():
        return slice(int(values[0]), int(values[-1]) + 1)
    return torch.from_numpy(np.asarray(values, dtype=np.int64))
