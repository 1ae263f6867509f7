"""Cuts HOT spans and COLD spans into work items that fill the machine once.

    HOT span x row tiles:   | item | item | item |     equal cuts, so that all blocks run at once
    COLD span of one row:   | item ............. |     longest first

Pure numpy, no loop over requests. Wrong cuts cost 1.3 to 2 times: more than any tile does.
It knows lengths and rows only, not where they come from; the dispatcher calls it for GPU plans.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from granikv.attention.variants import GLUON_WIDE, AttentionShape, Layout, layouts_of
from granikv.core import ColdItem, HotItem, HotVariant
from granikv.errors import InvalidArgument

GEMM_ROWS = 64  # stacked rows from which a tile is compute-bound: the gemm variant
MIN_COLD_TOKENS = 128  # below, a block's start-up (index, K, first product) is its time
MAX_CUTS = 256  # of one span
CUTS = np.concatenate([np.arange(1, 65), np.arange(68, MAX_CUTS + 1, 4)])  # numbers tried
SHORT_SHARE = 0.25  # HOT is "short" below this share of COLD's time
DENSE_SHARE, EVEN_SHARE = 0.6, 1.3  # of COLD's time in HOT's, where all groups are large


@dataclass(frozen=True)
class SmRates:
    """What one SM does beside all others, by which HOT's and COLD's times are compared."""

    flop_per_us: float = 500e6 / 132  # 500 TFLOP/s: what the HOT kernel reached on an H200
    bytes_per_us: float = 4.1e6 / 132  # 4.1 TB/s, on the same


@dataclass(frozen=True)
class Cuts:
    """Pieces that the longest HOT span, and the longest COLD span, are cut into.

    The others are cut to the same length. None: as many as fill the machine once.
    """

    hot: int | None = None
    cold: int | None = None


H200_RATES, FILL_ONCE = SmRates(), Cuts()


@dataclass(frozen=True)
class HotGroups:
    """HOT spans and the decode rows that read each; all int32."""

    indptr: np.ndarray  # [num_groups + 1], CSR over rows
    rows: np.ndarray  # [indptr[-1]]
    kv_start: np.ndarray  # [num_groups], first arena slot
    kv_len: np.ndarray  # [num_groups], tokens
    position: np.ndarray  # [num_groups], token position of kv_start

    @classmethod
    def empty(cls) -> HotGroups:
        none = np.zeros(0, np.int32)
        return cls(np.zeros(1, np.int32), none, none, none, none)


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


def plan_splits(
    groups: HotGroups,
    cold_spans: np.ndarray,
    num_decode_rows: int,
    shape: AttentionShape,
    num_sms: int,
    max_partials: int,
    layout: Layout | None = None,
    rates: SmRates = H200_RATES,
    cuts: Cuts = FILL_ONCE,
) -> SplitPlan:
    """Work items of one step.

    cold_spans: int32 [n, 5] of (row, SpanKind, start, len, position). layout None: chosen here,
    by `rates`. Given cuts are made coarser where a layout's shortest item or max_partials wants it.
    Raises InvalidArgument when even uncut spans need more than max_partials partial states.
    """
    reason = ""
    if layout is None:
        layout, reason = choose_layout(groups, cold_spans, shape, num_sms, rates)
    coarser = 1
    while True:
        hot = _hot_items(groups, shape, layout, num_sms, coarser, cuts.hot)
        cold = _cold_items(cold_spans, shape, layout, num_sms, coarser, cuts.cold)
        num_partials = int(hot[:, 1].sum()) + len(cold)
        if num_partials <= max_partials:
            break
        if coarser > MAX_CUTS:
            raise InvalidArgument("max_partials", max_partials, f"at least {num_partials}")
        coarser *= 2
    hot[:, 5] = np.cumsum(hot[:, 1]) - hot[:, 1]
    cold[:, 5] = int(hot[:, 1].sum()) + np.arange(len(cold))
    indptr, partials = _merge_lists(hot, groups.rows, cold, num_decode_rows)
    return SplitPlan(
        layout, hot, groups.rows, cold, indptr, partials, num_partials,
        f"{reason or layout.name}; {len(hot)} HOT and {len(cold)} COLD items",
    )  # fmt: skip


def choose_layout(
    groups: HotGroups,
    cold_spans: np.ndarray,
    shape: AttentionShape,
    num_sms: int,
    rates: SmRates = H200_RATES,
) -> tuple[Layout, str]:
    """The layout for these groups and the reason in words."""
    layouts = layouts_of(shape)
    if not len(groups.kv_len):
        return layouts["flat"], "flat: no HOT span"
    stacked = np.diff(groups.indptr) * shape.group_size
    most, least = int(stacked.max()), int(stacked.min())
    hot_us, cold_us = _estimate_us(groups, cold_spans, shape, num_sms, rates)
    if hot_us < SHORT_SHARE * cold_us:
        return layouts["short"], f"short: HOT {hot_us:.1f} us beside COLD {cold_us:.1f} us"
    if most > 128 and least <= 32:
        return layouts["mixed"], f"mixed: groups of {least} to {most} stacked rows"
    if most > 128:
        share = cold_us / hot_us
        name = "dense" if share <= DENSE_SHARE else "even" if share <= EVEN_SHARE else "large"
        if groups.kv_len.min() < GLUON_WIDE.block_n:
            name = "large"
        reason = f"{name}: {most} stacked rows, above 128; COLD takes {share:.2f} of HOT's time"
        return layouts[name], reason
    if most <= 64 and 3 * len(stacked) * shape.num_kv_heads >= num_sms:
        name = "many" if most <= 16 else "groups"
        return layouts[name], f"{name}: {len(stacked)} groups of at most {most} stacked rows"
    if most > 48:
        return layouts["mid"], f"mid: {most} stacked rows, above 48"
    return layouts["small"], f"small: {most} stacked rows, at most 48"


def _estimate_us(
    groups: HotGroups,
    cold_spans: np.ndarray,
    shape: AttentionShape,
    num_sms: int,
    rates: SmRates,
) -> tuple[float, float]:
    """Rough times of HOT and of COLD alone, per layer."""
    stacked = np.diff(groups.indptr).astype(float) * shape.group_size
    lengths = groups.kv_len.astype(float)
    heads = shape.num_kv_heads
    flop = 4 * float(stacked @ lengths) * heads * shape.head_dim
    token_bytes = shape.kv_bytes_per_token * heads
    hot_us = max(flop / rates.flop_per_us, lengths.sum() * token_bytes / rates.bytes_per_us)
    cold = np.asarray(cold_spans).reshape(-1, 5)[:, 3].sum() * token_bytes / rates.bytes_per_us
    return float(hot_us) / num_sms, float(cold) / num_sms


def cut_tokens(
    lengths: np.ndarray, blocks: np.ndarray, slots: float, shortest: int, longest: int
) -> int:
    """Tokens per item such that all blocks run at once: the fewest with at most `slots` blocks.

    lengths int [n] tokens; blocks int [n]: blocks that one cut of the span gives. When uncut
    spans are already more than `slots`, no item is longer than a slot's share of the whole.
    """
    top = int(lengths.max(initial=1))
    if int(blocks.sum()) <= slots:
        candidates = np.unique(np.maximum(-(-top // CUTS), shortest)).astype(np.int32)
        different, of_length = np.unique(lengths, return_inverse=True)
        weights = np.bincount(of_length, weights=blocks)  # spans of one length count together
        counts = -(-different.astype(np.int32)[None, :] // candidates[:, None]) @ weights
        tokens = int(candidates[np.argmax(counts <= slots)]) if (counts <= slots).any() else top
    else:
        tokens = int(np.ceil((lengths.astype(np.int64) * blocks).sum() / max(slots, 1)))
    return int(np.clip(tokens, shortest, max(shortest, longest)))


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


def _hot_items(
    groups: HotGroups,
    shape: AttentionShape,
    layout: Layout,
    num_sms: int,
    coarser: int,
    pieces: int | None,
) -> np.ndarray:
    """int32 [n, 8], FIRST_PARTIAL left 0; longest first, row tiles of one span side by side."""
    if not len(groups.kv_len):
        return np.zeros((0, 8), np.int32)
    num_rows = np.diff(groups.indptr).astype(np.int64)
    stacked = num_rows * shape.group_size
    use_gemm = stacked >= GEMM_ROWS
    block_m = np.full(len(stacked), layout.hot.fit(shape).block_m)
    if layout.gemm is not None:
        block_m = np.where(use_gemm, layout.gemm.fit(shape).block_m, block_m)
    rows_per_tile = np.maximum(block_m // shape.group_size, 1)
    tiles = -(-num_rows // rows_per_tile)
    unit = layout.hot.fit(shape).block_n
    if layout.hot_gluon is not None:  # with min_hot_tokens two units, no item is below one
        unit = max(unit, layout.hot_gluon.block_n)
    if pieces is None:
        tokens = cut_tokens(
            groups.kv_len,
            tiles * shape.num_kv_heads,
            num_sms * layout.hot_slots_per_sm,
            layout.min_hot_tokens,
            1 << 30,
        )
    else:
        tokens = max(layout.min_hot_tokens, -(-int(groups.kv_len.max()) // pieces))
    tokens *= coarser
    span, start, length = _even_cuts(groups.kv_len, tokens, unit)
    order = np.argsort(-(length * block_m[span]), kind="stable")
    span, start, length = span[order], start[order], length[order]
    cut = np.repeat(np.arange(len(span)), tiles[span])
    tile = np.arange(len(cut)) - np.repeat(np.cumsum(tiles[span]) - tiles[span], tiles[span])
    group = span[cut]
    first = tile * rows_per_tile[group]
    items = np.zeros((len(cut), 8), np.int32)
    items[:, 0] = groups.indptr[group] + first
    items[:, 1] = np.minimum(rows_per_tile[group], num_rows[group] - first)
    items[:, 2] = groups.kv_start[group] + start[cut]
    items[:, 3] = length[cut]
    items[:, 4] = groups.position[group] + start[cut]
    items[:, 6] = np.where(use_gemm[group], HotVariant.GEMM, HotVariant.CASCADE)
    return items


def _cold_items(
    cold_spans: np.ndarray,
    shape: AttentionShape,
    layout: Layout,
    num_sms: int,
    coarser: int,
    pieces: int | None,
) -> np.ndarray:
    """int32 [n, 8], FIRST_PARTIAL left 0; longest first."""
    spans = np.asarray(cold_spans, np.int32).reshape(-1, 5)
    spans = spans[spans[:, 3] > 0]
    if not len(spans):
        return np.zeros((0, 8), np.int32)
    if pieces is None:
        tokens = cut_tokens(
            spans[:, 3],
            np.full(len(spans), shape.num_kv_heads),
            num_sms * layout.cold_slots_per_sm,
            MIN_COLD_TOKENS,
            layout.max_cold_tokens,
        )
    else:
        tokens = max(MIN_COLD_TOKENS, -(-int(spans[:, 3].max()) // pieces))
    tokens *= coarser
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


@dataclass(frozen=True)
class PlanCutter:
    """Cuts the uncut items of a plan for one GPU; the dispatcher calls it once per step."""

    shape: AttentionShape
    num_sms: int
    max_partials: int
    hot_layout: Layout | None = None  # of every step with HOT items; None: what fits them
    rates: SmRates = H200_RATES

    def cut(
        self,
        hot_items: np.ndarray,
        hot_rows: np.ndarray,
        cold_items: np.ndarray,
        num_decode_rows: int,
    ) -> SplitPlan:
        """hot_items, cold_items: int32 [n, 8] as PLAN_FIELDS has them, one per span."""
        groups = HotGroups.empty()
        if len(hot_items):
            sizes = hot_items[:, HotItem.NUM_ROWS]
            indptr = np.zeros(len(sizes) + 1, np.int32)
            np.cumsum(sizes, out=indptr[1:])
            groups = HotGroups(
                indptr,
                hot_rows,
                hot_items[:, HotItem.KV_START],
                hot_items[:, HotItem.KV_LEN],
                hot_items[:, HotItem.POSITION],
            )
        columns = [ColdItem.ROW, ColdItem.KIND, ColdItem.START, ColdItem.LEN, ColdItem.POSITION]
        spans = cold_items[:, columns]
        layout = self.hot_layout if len(hot_items) else None
        return plan_splits(
            groups, spans, num_decode_rows, self.shape, self.num_sms, self.max_partials, layout,
            self.rates,
        )  # fmt: skip
