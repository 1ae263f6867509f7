"""Turns a batch into a StepPlan: where every byte is and which backend reads it.

For each HOT node and its group of rows it predicts the time of each choice (cascade, gemm, or the
prefix read flat by every row) from the hardware profile, and takes the least.
It runs once per step; no layer decides anything.
"""

from __future__ import annotations

import logging

import numpy as np

from granikv.cache.manager import CacheManager
from granikv.cache.prefix_tree import Node
from granikv.core import (
    Batch,
    Choice,
    Count,
    HotVariant,
    Move,
    NewRow,
    Request,
    SpanKind,
    StepPlan,
)
from granikv.cost_model import CostModel

log = logging.getLogger("granikv.plan")


class Dispatcher:
    def __init__(self, cost: CostModel, cache: CacheManager):
        self.cost = cost
        self.cache = cache

    def plan(
        self,
        step_id: int,
        batch: Batch,
        slots: dict[Request, np.ndarray],
        moves: list[Move],
        new_rows: list[NewRow],
    ) -> StepPlan:
        """slots: of every scheduled request, int32 [num_tokens]. Requests hold their rows."""
        decodes, extends = batch.decodes, batch.extends
        builder = _SpanBuilder(self.cache, [d.request for d in decodes], [d.start for d in decodes])
        choices, predicted = self._choose(builder)
        qo_indptr, extend_indptr, segments = _extend_segments(self.cache, batch)
        tokens, positions, rows, mapping = [], [], [], []
        sample_rows, sample_requests = [], []
        next_row = 0
        for scheduled in batch.scheduled:
            request, start, count = scheduled.request, scheduled.start, scheduled.num_tokens
            tokens.append(_row_tokens(request, start, count))
            positions.append(np.arange(start, start + count, dtype=np.int32))
            rows.append(np.full(count, request.row, np.int32))
            mapping.append(slots[request])
            next_row += count
            if scheduled.samples:
                sample_rows.append(next_row - 1)
                sample_requests.append(request)
        writes = self.cache.take_slot_writes()
        slot_writes = np.empty((sum(len(s) for _, _, s in writes), 3), np.int32)
        filled = 0
        for row, position, values in writes:
            part = slot_writes[filled : filled + len(values)]
            part[:, 0] = row
            part[:, 1] = np.arange(position, position + len(values))
            part[:, 2] = values
            filled += len(values)
        counts = np.zeros(16, np.int32)
        for key, value in (
            (Count.NUM_ROWS, next_row),
            (Count.NUM_DECODE_ROWS, len(decodes)),
            (Count.NUM_EXTEND_REQUESTS, len(extends)),
            (Count.NUM_HOT_ITEMS, len(builder.hot_items)),
            (Count.NUM_HOT_ROWS, len(builder.hot_rows)),
            (Count.NUM_COLD_ITEMS, len(builder.cold_items)),
            (Count.NUM_EXTEND_SEGMENTS, len(segments)),
            (Count.NUM_PARTIALS, builder.num_partials),
            (Count.NUM_SAMPLE_ROWS, len(sample_rows)),
            (Count.NUM_SLOT_WRITES, len(slot_writes)),
        ):
            counts[key] = value
        indptr, partials = builder.merge_lists()
        plan = StepPlan(
            step_id=step_id,
            counts=counts,
            row_token=_concat(tokens),
            row_request=_concat(rows),
            row_position=_concat(positions),
            slot_mapping=_concat(mapping),
            hot_items=np.asarray(builder.hot_items, np.int32).reshape(-1, 8),
            hot_rows=np.asarray(builder.hot_rows, np.int32),
            cold_items=np.asarray(builder.cold_items, np.int32).reshape(-1, 8),
            merge_indptr=indptr,
            merge_partials=partials,
            qo_indptr=qo_indptr,
            extend_indptr=extend_indptr,
            extend_segments=segments,
            sample_rows=np.asarray(sample_rows, np.int32),
            slot_writes=slot_writes,
            sample_requests=sample_requests,
            new_requests=new_rows,
            moves=moves,
            choices=choices,
            predicted_us=predicted,
        )
        plan.kv_tokens_read, plan.kv_tokens_flat = builder.tokens_read, builder.tokens_flat
        plan.regime = self.cost.label(next_row, plan.kv_tokens_read, plan.kv_tokens_flat)
        return plan

    def _choose(self, builder: _SpanBuilder) -> tuple[list[Choice], float]:
        choices, predicted = [], 0.0
        for node, group in builder.groups.items():
            rows, length = len(group), len(node)
            times = {
                "cascade": self.cost.hot_us("cascade", rows, length) + self.cost.merge_us(rows),
                "gemm": self.cost.hot_us("gemm", rows, length) + self.cost.merge_us(rows),
                "flat": self.cost.marginal_flat_us(rows, length),
            }
            variant = min(times, key=times.__getitem__)
            reason = ", ".join(f"{k} {v:.0f} us" for k, v in times.items())
            choices.append(
                Choice(node.start, length, rows, variant, f"{variant}: {reason}", times[variant])
            )
            log.debug("rows=%d len=%d at %d: %s", rows, length, node.start, choices[-1].reason)
            predicted += times[variant]
            builder.add_group(node, group, variant)
        builder.add_cold()
        return choices, predicted


class _SpanBuilder:
    """Collects the spans of the decode rows and their partials."""

    def __init__(self, cache: CacheManager, requests: list[Request], positions: list[int]):
        self.hot_items: list[tuple[int, ...]] = []
        self.hot_rows: list[int] = []
        self.cold_items: list[tuple[int, ...]] = []
        self.num_partials = 0
        self.tokens_read = self.tokens_flat = 0
        self.groups: dict[Node, list[int]] = {}
        self._requests, self._visible = requests, [p + 1 for p in positions]
        self._partials: list[list[tuple[int, int]]] = [[] for _ in requests]  # (position, partial)
        self._hot_end = [0] * len(requests)
        self._clipped: list[tuple[int, Node, int]] = []  # queries inside a node: row, node, length
        for row, request in enumerate(requests):
            visible, hot_tokens = self._visible[row], 0
            for node in cache.hot_path(request):
                if node.end <= visible:
                    self.groups.setdefault(node, []).append(row)
                elif node.start < visible:
                    self._clipped.append((row, node, visible - node.start))
                hot_tokens = min(node.end, visible)
            self._hot_end[row] = hot_tokens
            request.num_hot_tokens = hot_tokens

    def _partial(self, row: int, position: int) -> int:
        self._partials[row].append((position, self.num_partials))
        self.num_partials += 1
        return self.num_partials - 1

    def _add_cold(self, row: int, kind: SpanKind, start: int, length: int, position: int) -> None:
        partial = self._partial(row, position)
        self.cold_items.append((row, kind, start, length, position, partial, 0, 0))
        self.tokens_read += length
        self.tokens_flat += length

    def add_group(self, node: Node, rows: list[int], variant: str) -> None:
        assert node.extent is not None
        if variant == "flat":
            for row in rows:
                self._add_cold(row, SpanKind.RUN, node.extent, len(node), node.start)
            return
        first = self.num_partials
        for row in rows:
            self._partial(row, node.start)
        kind = HotVariant.GEMM if variant == "gemm" else HotVariant.CASCADE
        self.hot_items.append(
            (len(self.hot_rows), len(rows), node.extent, len(node), node.start, first, kind, 0)
        )
        self.hot_rows.extend(rows)
        self.tokens_read += len(node)
        self.tokens_flat += len(node) * len(rows)

    def add_cold(self) -> None:
        for row, node, length in self._clipped:
            assert node.extent is not None
            self._add_cold(row, SpanKind.RUN, node.extent, length, node.start)
        for row, (visible, hot_end) in enumerate(zip(self._visible, self._hot_end, strict=True)):
            if visible > hot_end:
                self._add_cold(row, SpanKind.SLOTS, hot_end, visible - hot_end, hot_end)

    def merge_lists(self) -> tuple[np.ndarray, np.ndarray]:
        indptr = np.zeros(len(self._partials) + 1, np.int32)
        flat: list[int] = []
        for row, parts in enumerate(self._partials):
            parts.sort()
            flat.extend(partial for _, partial in parts)
            indptr[row + 1] = len(flat)
        return indptr, np.asarray(flat, np.int32)


def _row_tokens(request: Request, start: int, count: int) -> np.ndarray:
    """Input ids; -1 for a token that the step before is still sampling."""
    if start + count <= request.prompt_len:
        return request.prompt_token_ids[start : start + count]
    known = request.token_ids()[start : start + count]
    return np.concatenate([known, np.full(count - len(known), -1, np.int32)])


def _extend_segments(
    cache: CacheManager, batch: Batch
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    qo_indptr, indptr = [len(batch.decodes)], [0]
    segments: list[tuple[int, ...]] = []
    for scheduled in batch.extends:
        visible, hot_end = scheduled.start + scheduled.num_tokens, 0
        for node in cache.hot_path(scheduled.request):
            length = min(node.end, visible) - node.start
            if length <= 0:
                break
            assert node.extent is not None
            segments.append((SpanKind.RUN, node.extent, length, node.start, 0, 0, 0, 0))
            hot_end = node.start + length
        if visible > hot_end:
            segments.append((SpanKind.SLOTS, hot_end, visible - hot_end, hot_end, 0, 0, 0, 0))
        scheduled.request.num_hot_tokens = hot_end
        qo_indptr.append(qo_indptr[-1] + scheduled.num_tokens)
        indptr.append(len(segments))
    return (
        np.asarray(qo_indptr, np.int32),
        np.asarray(indptr, np.int32),
        np.asarray(segments, np.int32).reshape(-1, 8),
    )


def _concat(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts).astype(np.int32, copy=False) if parts else np.empty(0, np.int32)
