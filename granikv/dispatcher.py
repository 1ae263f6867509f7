"""Turns a batch into a StepPlan: where every byte is and which backend reads it.

For each HOT node and its group of rows it predicts the time of each choice (cascade, gemm, or the
prefix read flat by every row) from the hardware profile, and takes the least.
It runs once per step; no layer decides anything.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from granikv.attention.plan_cutter import PlanCutter
from granikv.cache.manager import CacheManager
from granikv.cache.prefix_tree import Node
from granikv.cache.spans_in_use import SlotWrite
from granikv.core import (
    Batch,
    Choice,
    Count,
    Move,
    Request,
    ScheduledExtend,
    SpanKind,
    StepPlan,
)
from granikv.cost_model import CostModel
from granikv.decode_spans import DecodeSpans
from granikv.gpu_cost_model import GpuCostModel

log = logging.getLogger("granikv.plan")

MAX_CACHED_CHOICES = (
    4096  # of (position, length, rows); a group keeps them while its members decode
)


class _Items(NamedTuple):
    """The decode part of a plan, see PLAN_FIELDS."""

    hot_items: np.ndarray
    hot_rows: np.ndarray
    cold_items: np.ndarray
    merge_indptr: np.ndarray
    merge_partials: np.ndarray
    num_partials: int
    layout: str


def _cut(cutter: PlanCutter, items: _Items, num_rows: int) -> _Items:
    cut = cutter.cut(items.hot_items, items.hot_rows, items.cold_items, num_rows)
    return _Items(
        cut.hot_items, cut.hot_rows, cut.cold_items, cut.merge_indptr, cut.merge_partials,
        cut.num_partials, cut.layout.name,
    )  # fmt: skip


def cheapest(cost: CostModel | GpuCostModel, position: int, kv_len: int, num_rows: int) -> Choice:
    """The cheapest way to read a node of kv_len tokens for its group of num_rows."""
    merge_us = cost.merge_us(num_rows)
    times = {
        "cascade": cost.hot_us("cascade", num_rows, kv_len) + merge_us,
        "gemm": cost.hot_us("gemm", num_rows, kv_len) + merge_us,
        "flat": cost.marginal_flat_us(num_rows, kv_len),
    }
    variant = min(times, key=times.__getitem__)
    reason = ", ".join(f"{k} {v:.0f} us" for k, v in times.items())
    return Choice(position, kv_len, num_rows, variant, f"{variant}: {reason}", times[variant])


class Dispatcher:
    """window: tokens that a row sees at most, its own included; None: its whole context."""

    def __init__(
        self,
        cost: CostModel | GpuCostModel,
        cache: CacheManager,
        cutter: PlanCutter | None = None,
        window: int | None = None,
    ):
        self.cost = cost
        self.window = window
        self.cutter = cutter  # of a GPU
        self.cache = cache
        self._spans: DecodeSpans | None = None  # of the step before
        self._named: tuple[DecodeSpans, str] | None = None  # whose requests know how they are read
        self._cheapest = lru_cache(MAX_CACHED_CHOICES)(self._predict)

    def plan(self, step_id: int, batch: Batch, moves: list[Move]) -> StepPlan:
        """The step of a batch whose requests hold their rows; `moves` come first in it."""
        spread, extends = self._spread(batch)
        visible = _join(batch.decode_positions, [_positions(e) for e in spread]) + 1
        spans = self._decode_spans(batch, spread, visible)
        num_decode_rows = len(visible)
        cold_items, tokens_read, tokens_flat = spans.cold_items(visible)
        choices, variant = spans.choices, spans.main_variant
        items = _Items(
            spans.hot_items, spans.hot_rows, cold_items, spans.merge_indptr, spans.merge_partials,
            spans.num_partials, "",
        )  # fmt: skip
        if self.cutter is not None:
            items = _cut(self.cutter, items, num_decode_rows)
            if len(spans.hot_items) and not len(items.hot_items):  # sharing does not pay this step
                choices, variant, tokens_read = spans.flat_choices(), "flat", tokens_flat
        if self._named != (spans, variant):
            self._named = (spans, variant)
            _name_paths(batch.decodes, variant)
        qo_indptr, extend_indptr, segments = _extend_segments(
            self.cache, extends, num_decode_rows, self.window
        )
        _name_paths([extend.request for extend in batch.extends], variant)
        sample_rows, sample_requests = _sample_rows(batch.decodes, [*spread, *extends])
        slot_writes = _slot_writes(self.cache.take_slot_writes())
        num_rows = int(qo_indptr[-1])
        counts = np.zeros(16, np.int32)
        for key, value in (
            (Count.NUM_ROWS, num_rows),
            (Count.NUM_DECODE_ROWS, num_decode_rows),
            (Count.NUM_EXTEND_REQUESTS, len(extends)),
            (Count.NUM_HOT_ITEMS, len(items.hot_items)),
            (Count.NUM_HOT_ROWS, len(items.hot_rows)),
            (Count.NUM_COLD_ITEMS, len(items.cold_items)),
            (Count.NUM_EXTEND_SEGMENTS, len(segments)),
            (Count.NUM_PARTIALS, items.num_partials),
            (Count.NUM_SAMPLE_ROWS, len(sample_rows)),
            (Count.NUM_SLOT_WRITES, len(slot_writes)),
        ):
            counts[key] = value
        in_order = [*spread, *extends]
        return StepPlan(
            step_id=step_id,
            counts=counts,
            row_token=_join(
                _decode_tokens(batch),
                [_row_tokens(e.request, e.start, e.num_tokens) for e in in_order],
            ),
            row_request=_join(
                spans.row_request, [np.full(e.num_tokens, e.request.row, np.int32) for e in extends]
            ),
            row_position=_join(batch.decode_positions, [_positions(e) for e in in_order]),
            slot_mapping=_join(batch.decode_slots, [e.slots for e in in_order]),
            hot_items=items.hot_items,
            hot_rows=items.hot_rows,
            cold_items=items.cold_items,
            merge_indptr=items.merge_indptr,
            merge_partials=items.merge_partials,
            layout=items.layout,
            qo_indptr=qo_indptr,
            extend_indptr=extend_indptr,
            extend_segments=segments,
            sample_rows=sample_rows,
            slot_writes=slot_writes,
            sample_requests=sample_requests,
            new_requests=batch.new_rows,
            moves=moves,
            choices=choices,
            regime=self.cost.label(num_rows, tokens_read, tokens_flat),
            predicted_us=sum((choice.predicted_us for choice in choices), 0.0),
            kv_tokens_read=tokens_read,
            kv_tokens_flat=tokens_flat,
        )

    def _spread(self, batch: Batch) -> tuple[list[ScheduledExtend], list[ScheduledExtend]]:
        """Extends of which each row decodes, and the others.

        A few rows behind a long HOT prefix leave most of a GPU idle as an extend, which takes its
        keys one after another; as rows of the prefix's group they read it cut into pieces. A window
        bounds those keys, and each row would see another part of the prefix.
        """
        if self.cutter is None or self.window is not None or not batch.extends:
            return [], batch.extends
        spread: list[ScheduledExtend] = []
        rest: list[ScheduledExtend] = []
        left = self.cutter.max_partials // 4  # partial states; the decodes have theirs
        for extend in batch.extends:
            path = self.cache.hot_path(extend.request)
            states = extend.num_tokens * (len(path) + 1)
            if states <= left and self._pays_spread(extend, path[-1].end if path else 0):
                left -= states
                spread.append(extend)
            else:
                rest.append(extend)
        return spread, rest

    def _pays_spread(self, extend: ScheduledExtend, hot_end: int) -> bool:
        """hot_end: tokens of the HOT path; every row has to see all of them."""
        assert self.cutter is not None and isinstance(self.cost, GpuCostModel)
        rows, start = extend.num_tokens, extend.start
        if not 0 < hot_end <= start + 1:
            return False
        own_tokens = rows * (start - hot_end) + rows * (rows + 1) // 2
        spread_us = self.cost.hot_us("gemm", rows, hot_end) + self.cost.read_us(own_tokens)
        spread_us += 2 * self.cost.merge_us(rows)
        return spread_us < self.cost.extend_us(rows, start + rows, self.cutter.num_sms)

    def _decode_spans(
        self, batch: Batch, spread: list[ScheduledExtend], visible: np.ndarray
    ) -> DecodeSpans:
        """The last step's spans where they still hold, else new ones."""
        version = (batch.running_version, self.cache.tree.version)
        spans = self._spans
        requests = batch.decodes
        if spread:
            requests = [*requests, *(e.request for e in spread for _ in range(e.num_tokens))]
        if spans is None or not spans.fits(requests, visible, version):
            paths, path_of_row = self.cache.tree.hot_paths(_leaf(r) for r in requests)
            spans = DecodeSpans(
                requests, visible, paths, path_of_row, self._cheapest, version, self.window
            )
            self._spans = spans
            for c in spans.choices if log.isEnabledFor(logging.DEBUG) else ():
                log.debug(
                    "rows=%d len=%d at %d: %s", c.num_rows, c.kv_len, c.node_position, c.reason
                )
        return spans

    def _predict(self, position: int, kv_len: int, num_rows: int) -> Choice:
        return cheapest(self.cost, position, kv_len, num_rows)


def _leaf(request: Request) -> Node:
    assert request.leaf is not None
    return request.leaf


def _name_paths(requests: list[Request], main_variant: str) -> None:
    for request in requests:
        request.attention_path = main_variant if request.num_hot_tokens else "cold"


def _decode_tokens(batch: Batch) -> np.ndarray:
    """int32 [num_decodes]: input ids; -1 for a token that the step before is still sampling."""
    tokens = []
    for request, position in zip(batch.decodes, batch.decode_positions.tolist(), strict=True):
        made = position - len(request.prompt_token_ids)
        if made < 0:
            tokens.append(request.prompt_token_ids[position])
        else:
            output = request.output_token_ids
            tokens.append(output[made] if made < len(output) else -1)
    return np.array(tokens, np.int32)


def _row_tokens(request: Request, start: int, count: int) -> np.ndarray:
    """Input ids of an extend; -1 for a token that the step before is still sampling."""
    if start + count <= request.prompt_len:
        return request.prompt_token_ids[start : start + count]
    known = request.token_ids()[start : start + count]
    return np.concatenate([known, np.full(count - len(known), -1, np.int32)])


def _sample_rows(
    decodes: list[Request], extends: list[ScheduledExtend]
) -> tuple[np.ndarray, list[Request]]:
    """Rows whose logits are sampled: every decode row, and the last row of a finished prompt.

    extends: in the order of their rows, which follow those of the decodes.
    """
    rows = np.arange(len(decodes), dtype=np.int32)
    if not extends:
        return rows, decodes
    ends = len(decodes) + np.cumsum([extend.num_tokens for extend in extends])
    sampled = [i for i, extend in enumerate(extends) if extend.samples]
    requests = [*decodes, *(extends[i].request for i in sampled)]
    return np.concatenate([rows, ends[sampled].astype(np.int32) - 1]), requests


def _slot_writes(writes: list[SlotWrite]) -> np.ndarray:
    """int32 [num_writes, 3]: (row, position, slot)."""
    out = np.empty((sum(len(slots) for _, _, slots in writes), 3), np.int32)
    filled = 0
    for rows, positions, slots in writes:
        part = out[filled : filled + len(slots)]
        if not isinstance(positions, np.ndarray):
            positions = np.arange(positions, positions + len(slots))
        part[:, 0], part[:, 1], part[:, 2] = rows, positions, slots
        filled += len(slots)
    return out


def _extend_segments(
    cache: CacheManager, extends: list[ScheduledExtend], num_decode_rows: int, window: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(qo_indptr, extend_indptr, extend_segments): what some row of each extend sees."""
    qo_indptr, indptr = [num_decode_rows], [0]
    segments: list[tuple[int, ...]] = []
    for extend in extends:
        visible, hot_end = extend.start + extend.num_tokens, 0
        first = 0 if window is None else max(0, extend.start + 1 - window)
        for node in cache.hot_path(extend.request):
            if node.start >= visible:
                break
            hot_end, start = min(node.end, visible), max(node.start, first)
            if start < hot_end:
                assert node.extent is not None
                slot = node.extent + start - node.start
                segments.append((SpanKind.RUN, slot, hot_end - start, start, 0, 0, 0, 0))
        start = max(hot_end, first)
        if visible > start:
            segments.append((SpanKind.SLOTS, start, visible - start, start, 0, 0, 0, 0))
        extend.request.num_hot_tokens = hot_end
        qo_indptr.append(qo_indptr[-1] + extend.num_tokens)
        indptr.append(len(segments))
    return (
        np.asarray(qo_indptr, np.int32),
        np.asarray(indptr, np.int32),
        np.asarray(segments, np.int32).reshape(-1, 8),
    )


def _positions(extend: ScheduledExtend) -> np.ndarray:
    return np.arange(extend.start, extend.start + extend.num_tokens, dtype=np.int32)


def _join(decodes: np.ndarray, extends: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([decodes, *extends]) if extends else decodes
