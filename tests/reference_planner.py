"""The planner's readable twin: every step from nothing, one span at a time.

Groups are numbered in the order in which rows meet their nodes; partials over groups, then nodes
that a query lies inside of, then what a window lets single rows see of a node, then suffixes.
`Dispatcher.plan` must give the same arrays.
"""

from __future__ import annotations

import numpy as np

from granikv.cache.manager import CacheManager
from granikv.cache.prefix_tree import Node
from granikv.core import Batch, Choice, Count, HotVariant, Request, SpanKind, StepPlan
from granikv.cost_model import CostModel


def reference_plan(
    cost: CostModel,
    cache: CacheManager,
    step_id: int,
    batch: Batch,
    slot_writes: np.ndarray,
    window: int | None = None,
) -> StepPlan:
    """The plan without moves. slot_writes: int32 [num_writes, 3], as the cache gives them."""
    positions = batch.decode_positions.tolist()
    spans = SpanBuilder(cache, batch.decodes, positions, window)
    choices, predicted_us = choose(cost, spans)
    tokens, row_positions, rows, mapping = [], [], [], []
    sample_rows, sample_requests = [], []
    scheduled = [
        *((r, p, batch.decode_slots[i : i + 1], True)
          for i, (r, p) in enumerate(zip(batch.decodes, positions, strict=True))),
        *((e.request, e.start, e.slots, e.samples) for e in batch.extends),
    ]  # fmt: skip
    for request, start, slots, samples in scheduled:
        known = request.token_ids()
        for offset, slot in enumerate(slots):
            position = start + offset
            tokens.append(known[position] if position < len(known) else -1)
            row_positions.append(position)
            rows.append(request.row)
            mapping.append(slot)
        if samples:
            sample_rows.append(len(rows) - 1)
            sample_requests.append(request)
    qo_indptr, extend_indptr, segments = extend_segments(cache, batch, window)
    indptr, partials = spans.merge_lists()
    counts = np.zeros(16, np.int32)
    counts[Count.NUM_ROWS] = len(rows)
    counts[Count.NUM_DECODE_ROWS] = len(batch.decodes)
    counts[Count.NUM_EXTEND_REQUESTS] = len(batch.extends)
    counts[Count.NUM_HOT_ITEMS] = len(spans.hot_items)
    counts[Count.NUM_HOT_ROWS] = len(spans.hot_rows)
    counts[Count.NUM_COLD_ITEMS] = len(spans.cold_items)
    counts[Count.NUM_EXTEND_SEGMENTS] = len(segments)
    counts[Count.NUM_PARTIALS] = spans.num_partials
    counts[Count.NUM_SAMPLE_ROWS] = len(sample_rows)
    counts[Count.NUM_SLOT_WRITES] = len(slot_writes)
    return StepPlan(
        step_id=step_id,
        counts=counts,
        row_token=int32(tokens),
        row_request=int32(rows),
        row_position=int32(row_positions),
        slot_mapping=int32(mapping),
        hot_items=int32(spans.hot_items).reshape(-1, 8),
        hot_rows=int32(spans.hot_rows),
        cold_items=int32(spans.cold_items).reshape(-1, 8),
        merge_indptr=int32(indptr),
        merge_partials=int32(partials),
        qo_indptr=int32(qo_indptr),
        extend_indptr=int32(extend_indptr),
        extend_segments=int32(segments).reshape(-1, 8),
        sample_rows=int32(sample_rows),
        slot_writes=slot_writes,
        sample_requests=sample_requests,
        new_requests=batch.new_rows,
        choices=choices,
        regime=cost.label(len(rows), spans.tokens_read, spans.tokens_flat),
        predicted_us=predicted_us,
        kv_tokens_read=spans.tokens_read,
        kv_tokens_flat=spans.tokens_flat,
    )


def int32(values: list) -> np.ndarray:
    return np.asarray(values, np.int32)


def choose(cost: CostModel, spans: SpanBuilder) -> tuple[list[Choice], float]:
    choices, predicted_us = [], 0.0
    for node, group in spans.groups.items():
        start = spans.shared_from(node, group)
        together = [row for row in group if spans.first[row] <= start]
        rows, length = len(together), node.end - start
        times = {
            "cascade": cost.hot_us("cascade", rows, length) + cost.merge_us(rows),
            "gemm": cost.hot_us("gemm", rows, length) + cost.merge_us(rows),
            "flat": cost.marginal_flat_us(rows, length),
        }
        variant = min(times, key=times.__getitem__)
        reason = f"{variant}: " + ", ".join(f"{k} {v:.0f} us" for k, v in times.items())
        choices.append(Choice(start, length, rows, variant, reason, times[variant]))
        predicted_us += times[variant]
        spans.add_group(node, start, group, variant)
    spans.add_cold()
    return choices, predicted_us


class SpanBuilder:
    """Collects the spans of the decode rows and their partials."""

    def __init__(
        self,
        cache: CacheManager,
        requests: list[Request],
        positions: list[int],
        window: int | None,
    ):
        self.hot_items: list[tuple[int, ...]] = []
        self.hot_rows: list[int] = []
        self.cold_items: list[tuple[int, ...]] = []
        self.num_partials = 0
        self.tokens_read = self.tokens_flat = 0
        self.groups: dict[Node, list[int]] = {}
        self.hot_end = [0] * len(requests)
        self._visible = [p + 1 for p in positions]
        self.first = [first_key(p, window) for p in positions]
        self._partials: list[list[tuple[int, int]]] = [[] for _ in requests]  # (position, partial)
        self._alone: list[tuple[int, Node, int, int]] = []  # row, node, its positions [a, b)
        for row, request in enumerate(requests):
            visible, first = self._visible[row], self.first[row]
            for node in cache.hot_path(request):
                a, b = max(node.start, first), min(node.end, visible)
                if a < b == node.end:
                    self.groups.setdefault(node, []).append(row)
                elif a < b:
                    self._alone.append((row, node, a, b))
                self.hot_end[row] = min(node.end, visible)

    def _partial(self, row: int, position: int) -> int:
        self._partials[row].append((position, self.num_partials))
        self.num_partials += 1
        return self.num_partials - 1

    def _add_cold(self, row: int, kind: SpanKind, start: int, length: int, position: int) -> None:
        partial = self._partial(row, position)
        self.cold_items.append((row, kind, start, length, position, partial, 0, 0))
        self.tokens_read += length
        self.tokens_flat += length

    def shared_from(self, node: Node, rows: list[int]) -> int:
        """The rows' first position from which reading together takes the fewest tokens."""
        starts = sorted({max(node.start, self.first[row]) for row in rows})

        def num_read(start: int) -> int:
            begins = [max(node.start, self.first[row]) for row in rows]
            rests = sum((start if a <= start else node.end) - a for a in begins)
            return node.end - start + rests

        return min(starts, key=num_read)

    def add_group(self, node: Node, start: int, rows: list[int], variant: str) -> None:
        begins = {row: max(node.start, self.first[row]) for row in rows}
        slot, length = node.extent + start - node.start, node.end - start
        together = [row for row in rows if begins[row] <= start]
        if variant == "flat" and set(begins.values()) == {node.start}:
            for row in rows:
                self._add_cold(row, SpanKind.RUN, slot, length, start)
            return
        if variant == "flat":
            together = []
        for row in rows:
            end = start if row in together else node.end
            if begins[row] < end:
                self._alone.append((row, node, begins[row], end))
        if not together:
            return
        first = self.num_partials
        for row in together:
            self._partial(row, start)
        kind = HotVariant.GEMM if variant == "gemm" else HotVariant.CASCADE
        self.hot_items.append(
            (len(self.hot_rows), len(together), slot, length, start, first, kind, 0)
        )
        self.hot_rows.extend(together)
        self.tokens_read += length
        self.tokens_flat += length * len(together)

    def add_cold(self) -> None:
        for row, node, a, b in self._alone:
            self._add_cold(row, SpanKind.RUN, node.extent + a - node.start, b - a, a)
        for row, (visible, hot_end) in enumerate(zip(self._visible, self.hot_end, strict=True)):
            if visible > hot_end:
                start = max(hot_end, self.first[row])
                self._add_cold(row, SpanKind.SLOTS, start, visible - start, start)

    def merge_lists(self) -> tuple[list[int], list[int]]:
        indptr, flat = [0], []
        for parts in self._partials:
            flat.extend(partial for _, partial in sorted(parts))
            indptr.append(len(flat))
        return indptr, flat


def first_key(position: int, window: int | None) -> int:
    """The first position that a query sees."""
    return 0 if window is None else max(0, position - window + 1)


def extend_segments(
    cache: CacheManager, batch: Batch, window: int | None
) -> tuple[list, list, list]:
    qo_indptr, indptr = [len(batch.decodes)], [0]
    segments: list[tuple[int, ...]] = []
    for extend in batch.extends:
        visible, hot_end = extend.start + extend.num_tokens, 0
        first = first_key(extend.start, window)
        for node in cache.hot_path(extend.request):
            a, b = max(node.start, first), min(node.end, visible)
            if a < b:
                segments.append((SpanKind.RUN, node.extent + a - node.start, b - a, a, 0, 0, 0, 0))
            if node.start < visible:
                hot_end = b
        start = max(hot_end, first)
        if visible > start:
            segments.append((SpanKind.SLOTS, start, visible - start, start, 0, 0, 0, 0))
        qo_indptr.append(qo_indptr[-1] + extend.num_tokens)
        indptr.append(len(segments))
    return qo_indptr, indptr, segments
