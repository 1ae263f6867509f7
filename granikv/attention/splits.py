"""Cuts HOT spans and COLD spans into the work items of a step.

    HOT span x row tiles:   | item | item | item |     equal cuts
    COLD span of one row:   | item ............. |     longest first

Pure numpy, no loop over requests. Wrong cuts cost 1.3 to 2 times: more than any tile does; how long
items are is for layout_choice.py. It knows lengths and rows only, not where they come from.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from granikv.attention.layout_choice import (
    BEST_CUTS,
    GEMM_ROWS,
    H200_RATES,
    Cuts,
    HotGroups,
    SmRates,
    StepCosts,
    hot_unit,
    row_tiles,
)
from granikv.attention.variants import AttentionShape, Layout
from granikv.core import HotVariant, SpanKind
from granikv.errors import InvalidArgument

MAX_CUTS = 256  # of one span


@dataclass(frozen=True)
class SplitPlan:
    """The arrays of a StepPlan that depend on the cuts, and the layout that launches them."""

    layout: Layout
    hot_items: np.ndarray  # int32 [num_hot_items, 8]
    hot_rows: np.ndarray  # int32
    cold_items: np.ndarray  # int32 [num_cold_items, 8]
    merge_indptr: np.ndarray  # int32 [num_decode_rows + 1]
    merge_partials: np.ndarray  # int32 [num_partials]
    num_partials: int
    reason: str
    hot_tokens: int  # of an item, at most


@dataclass(frozen=True)
class Cutting:
    """How the spans of a step become items; tokens are those of an item."""

    layout: Layout
    hot_tokens: int
    cold_tokens: int
    reason: str


def plan_splits(
    groups: HotGroups,
    cold_spans: np.ndarray,
    num_decode_rows: int,
    shape: AttentionShape,
    num_sms: int,
    max_partials: int,
    layout: Layout | None = None,
    rates: SmRates = H200_RATES,
    cuts: Cuts = BEST_CUTS,
) -> SplitPlan:
    """Work items of one step.

    cold_spans: int32 [n, 5] of (row, SpanKind, start, len, position). layout None: chosen here,
    by `rates`. Given cuts are made coarser where a layout's shortest item or max_partials wants it.
    Raises InvalidArgument when even uncut spans need more than max_partials partial states.
    """
    costs = StepCosts(groups, cold_spans, shape, num_sms, rates, max_partials)
    reason = "" if layout is None else layout.name
    if layout is None:
        layout, reason = costs.choose()
    cutting = Cutting(layout, *costs.tokens(layout, cuts), reason)
    return cut_spans(groups, cold_spans, num_decode_rows, shape, max_partials, cutting)


def cut_spans(
    groups: HotGroups,
    cold_spans: np.ndarray,
    num_decode_rows: int,
    shape: AttentionShape,
    max_partials: int,
    cutting: Cutting,
    before: SplitPlan | None = None,
) -> SplitPlan:
    """As plan_splits. before: a plan of the same groups, whose arrays are taken again where they would
    be the same. In the flat layout each row reads HOT for itself, as runs."""
    layout = cutting.layout
    if layout.name == "flat" and len(groups.kv_len):
        groups, cold_spans = HotGroups.empty(), with_runs(groups, cold_spans)
    coarser = 1
    while True:
        if before is not None and before.hot_tokens == coarser * cutting.hot_tokens:
            hot = before.hot_items
        else:
            hot = _hot_items(groups, shape, layout, coarser * cutting.hot_tokens)
        cold = _cold_items(cold_spans, shape, layout, coarser * cutting.cold_tokens)
        num_hot = int(hot[:, 1].sum())
        num_partials = num_hot + len(cold)
        if num_partials <= max_partials:
            break
        if coarser > MAX_CUTS:
            raise InvalidArgument("max_partials", max_partials, f"at least {num_partials}")
        coarser *= 2
    cold[:, 5] = np.arange(num_hot, num_partials)
    if before is not None and hot is before.hot_items and _same_parts(cold, before.cold_items):
        indptr, partials = before.merge_indptr, before.merge_partials
    else:
        indptr, partials = _merge_lists(hot, groups.rows, cold, num_decode_rows)
    return SplitPlan(
        layout, hot, groups.rows, cold, indptr, partials, num_partials,
        f"{cutting.reason}; {len(hot)} HOT and {len(cold)} COLD items",
        coarser * cutting.hot_tokens,
    )  # fmt: skip


def with_runs(groups: HotGroups, cold_spans: np.ndarray) -> np.ndarray:
    """int32 [n, 5]: the COLD spans, behind a run of each row of a group."""
    sizes = np.diff(groups.indptr)
    runs = np.zeros((len(groups.rows), 5), np.int32)
    runs[:, 0] = groups.rows
    runs[:, 1] = SpanKind.RUN
    for column, values in ((2, groups.kv_start), (3, groups.kv_len), (4, groups.position)):
        runs[:, column] = np.repeat(values, sizes)
    return np.concatenate([runs, np.asarray(cold_spans, np.int32).reshape(-1, 5)])


def _same_parts(cold: np.ndarray, before: np.ndarray) -> bool:
    """Whether the items are of the same rows and positions, in the same order."""
    return (
        len(cold) == len(before)
        and np.array_equal(cold[:, 0], before[:, 0])
        and np.array_equal(cold[:, 4], before[:, 4])
    )


def _even_cuts(lengths: np.ndarray, tokens: int, unit: int) -> tuple[np.ndarray, ...]:
    """(span, start, len) of the cuts of all spans, near equal, starts at multiples of unit."""
    lengths = lengths.astype(np.int64)
    units = np.maximum(-(-lengths // unit), 1)
    cuts = np.minimum(np.maximum(-(-lengths // tokens), 1), units)
    span = np.repeat(np.arange(len(lengths)), cuts)
    index = np.arange(len(span)) - np.repeat(np.cumsum(cuts) - cuts, cuts)
    start = units[span] * index // cuts[span] * unit
    end = np.minimum(units[span] * (index + 1) // cuts[span] * unit, lengths[span])
    return span, start, end - start


def _hot_items(groups: HotGroups, shape: AttentionShape, layout: Layout, tokens: int) -> np.ndarray:
    """int32 [n, 8]; longest first, row tiles of one span side by side."""
    if not len(groups.kv_len):
        return np.zeros((0, 8), np.int32)
    num_rows = np.diff(groups.indptr).astype(np.int64)
    use_gemm = num_rows * shape.group_size >= GEMM_ROWS
    _, rows_per_tile, tiles = row_tiles(num_rows, shape, layout)
    span, start, length = _even_cuts(groups.kv_len, tokens, hot_unit(layout, shape))
    order = np.argsort(-length, kind="stable")
    span, start, length = span[order], start[order], length[order]
    cut = np.repeat(np.arange(len(span)), tiles[span])
    tile = np.arange(len(cut)) - np.repeat(np.cumsum(tiles[span]) - tiles[span], tiles[span])
    group = span[cut]
    first = tile * rows_per_tile
    items = np.zeros((len(cut), 8), np.int32)
    items[:, 0] = groups.indptr[group] + first
    items[:, 1] = np.minimum(rows_per_tile, num_rows[group] - first)
    items[:, 2] = groups.kv_start[group] + start[cut]
    items[:, 3] = length[cut]
    items[:, 4] = groups.position[group] + start[cut]
    items[:, 6] = np.where(use_gemm[group], HotVariant.GEMM, HotVariant.CASCADE)
    items[:, 5] = np.cumsum(items[:, 1]) - items[:, 1]
    return items


def _cold_items(
    cold_spans: np.ndarray, shape: AttentionShape, layout: Layout, tokens: int
) -> np.ndarray:
    """int32 [n, 8], FIRST_PARTIAL left 0; longest first."""
    spans = np.asarray(cold_spans, np.int32).reshape(-1, 5)
    spans = spans[spans[:, 3] > 0]
    if not len(spans):
        return np.zeros((0, 8), np.int32)
    if int(spans[:, 3].max()) <= tokens:  # the usual: nothing is cut
        spans = spans[np.argsort(-spans[:, 3], kind="stable")]
        items = np.zeros((len(spans), 8), np.int32)
        items[:, :5] = spans
        return items
    span, start, length = _even_cuts(spans[:, 3], tokens, layout.cold.fit(shape).block_n)
    order = np.argsort(-length, kind="stable")
    span, start, length = span[order], start[order], length[order]
    items = np.zeros((len(span), 8), np.int32)
    items[:, 0:2] = spans[span, 0:2]
    items[:, 2] = spans[span, 2] + start
    items[:, 3] = length
    items[:, 4] = spans[span, 4] + start
    return items


def _merge_lists(
    hot: np.ndarray, hot_rows: np.ndarray, cold: np.ndarray, num_decode_rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """CSR of each decode row's partials in position order."""
    counts = hot[:, 1].astype(np.int64)
    item = np.repeat(np.arange(len(hot)), counts)
    index = np.arange(len(item)) - np.repeat(np.cumsum(counts) - counts, counts)
    row = np.concatenate([hot_rows[hot[item, 0] + index], cold[:, 0]]).astype(np.int64)
    position = np.concatenate([hot[item, 4], cold[:, 4]])
    partial = np.concatenate([hot[item, 5] + index, cold[:, 5]])
    order = np.lexsort((partial, position, row))
    indptr = np.zeros(num_decode_rows + 1, np.int32)
    np.cumsum(np.bincount(row, minlength=num_decode_rows), out=indptr[1:])
    return indptr, partial[order].astype(np.int32)
