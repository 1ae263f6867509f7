"""Picks a step's layout and how long its items are: what takes the least time by split_cost.py.

    HOT spans in pieces:  1  2  3  4 ..        every layout with every way to cut HOT and COLD,
    COLD spans in pieces: 1  2  3  4 ..        and `flat`, in which each row reads HOT for itself

Pure numpy, no loop over requests. It knows lengths and rows only, not where they come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from granikv.attention.fill_once import MIN_COLD_TOKENS, fill_once, layout_by_rules
from granikv.attention.split_cost import CutTable, predict_us
from granikv.attention.variants import (
    GLUON_HEAD_DIM,
    GLUON_WIDE,
    AttentionShape,
    Layout,
    layouts_of,
)

# pieces tried of the longest span; finer steps change a time by less than the model errs
HOT_PIECES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 128)
COLD_PIECES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
GEMM_ROWS = 64  # stacked rows from which a tile is compute-bound: the gemm variant
MAX_ITEMS = 4096  # HOT or COLD that cuts may make; buffers hold as many


@dataclass(frozen=True)
class SmRates:
    """What one SM does beside all others, by which HOT's and COLD's times are compared."""

    flop_per_us: float = 500e6 / 132  # 500 TFLOP/s: what the HOT kernel reached on an H200
    bytes_per_us: float = 4.1e6 / 132  # 4.1 TB/s, on the same


@dataclass(frozen=True)
class Cuts:
    """Pieces that the longest HOT span, and the longest COLD span, are cut into.

    The others are cut to the same length. None: what takes the least time by split_cost.py.
    """

    hot: int | None = None
    cold: int | None = None


H200_RATES, BEST_CUTS = SmRates(), Cuts()


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


def choose_layout(
    groups: HotGroups,
    cold_spans: np.ndarray,
    shape: AttentionShape,
    num_sms: int,
    rates: SmRates = H200_RATES,
) -> tuple[Layout, str]:
    """The layout for these groups and the reason in words."""
    return StepCosts(groups, cold_spans, shape, num_sms, rates).choose()


class StepCosts:
    """Times of one step by layout and cuts. Arguments as plan_splits has them."""

    def __init__(
        self,
        groups: HotGroups,
        cold_spans: np.ndarray,
        shape: AttentionShape,
        num_sms: int,
        rates: SmRates = H200_RATES,
        max_partials: int | None = None,
    ):
        self.groups, self.shape, self.num_sms, self.rates = groups, shape, num_sms, rates
        self.cold_lengths = np.asarray(cold_spans).reshape(-1, 5)[:, 3].astype(float)
        self.hot_lengths = groups.kv_len.astype(float)
        self.num_rows = np.diff(groups.indptr).astype(np.int64)
        self.max_partials = max_partials
        self._best: dict[str, tuple[float, int, int]] = {}

    def choose(self) -> tuple[Layout, str]:
        """The layout of the least time, and the reason in words."""
        layouts = layouts_of(self.shape)
        if not len(self.hot_lengths):
            return layouts["flat"], "flat: no HOT span"
        if self.shape.fp8_kv:  # not measured: widening costs what the model does not know
            return layout_by_rules(
                self.num_rows, self.hot_lengths, self.cold_lengths, self.shape, self.num_sms,
                self.rates.flop_per_us, self.rates.bytes_per_us,
            )  # fmt: skip
        self._search(asked_layouts(self.shape, int(self.hot_lengths.min())), BEST_CUTS)
        found = sorted(self._best, key=lambda name: self._best[name][0])
        why = ", ".join(f"{name} {self._best[name][0]:.1f} us" for name in found[:3])
        return layouts[found[0]], f"{found[0]} of {why}; {self._rows_in_words()}"

    def best(self, layout: Layout) -> tuple[float, int, int]:
        """(us, tokens of a HOT item, of a COLD item) of the best cuts."""
        if layout.name not in self._best:
            self._search((layout,), BEST_CUTS)
        return self._best[layout.name]

    def tokens(self, layout: Layout, cuts: Cuts) -> tuple[int, int]:
        """Of a HOT and of a COLD item: the best ones where `cuts` does not say how many pieces."""
        if cuts != BEST_CUTS:
            return self._search((layout,), cuts)[1:]
        if self.shape.fp8_kv:
            hot_lengths, num_rows = self.hot_lengths, self.num_rows
            lengths = self.cold_lengths[self.cold_lengths > 0]
            if layout.name == "flat":
                lengths = np.concatenate([np.repeat(hot_lengths, num_rows), lengths])
            tiles = row_tiles(num_rows, self.shape, layout)[2]
            return fill_once(layout, hot_lengths, tiles, lengths, self.shape, self.num_sms)
        return self.best(layout)[1:]

    def predict_us(self, layout: Layout, cuts: Cuts) -> float:
        """A layer's attention, cut so."""
        return self._search((layout,), cuts)[0]

    def _search(self, layouts: tuple[Layout, ...], cuts: Cuts) -> tuple[float, int, int]:
        """Of the last layout; with BEST_CUTS all are kept in _best."""
        hot, block_m = self._hot_table(layouts, cuts.hot)
        cold = self._cold_table(layouts, cuts.cold)
        us = predict_us(
            layouts, self.shape, self.num_sms, self.rates.flop_per_us, self.rates.bytes_per_us,
            block_m, hot, cold,
        )  # fmt: skip
        most = MAX_ITEMS * self.shape.num_kv_heads
        refused = (hot.blocks > most)[:, :, None] | (cold.blocks > most)[:, None, :]
        if self.max_partials is not None:
            refused = refused | (
                hot.states[:, :, None] + cold.states[:, None, :] > self.max_partials
            )
        flat = np.where(refused, us + us.max(), us).reshape(len(layouts), -1)
        at = flat.argmin(1)  # all refused: the fewest us
        found = (0.0, 1, 1)
        for index, layout in enumerate(layouts):
            i, j = divmod(int(at[index]), us.shape[2])
            found = (float(us[index, i, j]), int(hot.tokens[index, i]), int(cold.tokens[index, j]))
            if cuts == BEST_CUTS:
                self._best[layout.name] = found
        return found

    def _hot_table(
        self, layouts: tuple[Layout, ...], pieces: int | None
    ) -> tuple[CutTable, np.ndarray]:
        """And the stacked rows of a block [layouts]. The flat layout has no HOT spans."""
        kinds: dict[tuple, int] = {}
        kind_of = []
        for layout in layouts:
            key = (layout.hot.fit(self.shape).block_m, hot_unit(layout, self.shape),
                   layout.min_hot_tokens, layout.name != "flat")  # fmt: skip
            kind_of.append(kinds.setdefault(key, len(kinds)))
        rows_of = np.array([max(key[0] // self.shape.group_size, 1) for key in kinds])
        has = np.array([key[3] for key in kinds])
        tiles = -(-self.num_rows // rows_of[:, None]) * has[:, None]
        top = int(self.hot_lengths.max(initial=1))
        tokens = _tried(top, HOT_PIECES if pieces is None else (pieces,))
        table = CutTable.of(
            self.hot_lengths,
            tiles.astype(float),
            (self.num_rows * has[:, None]).astype(float),
            np.maximum(tokens, np.array([key[2] for key in kinds])[:, None]),
            np.array([key[1] for key in kinds], float),
            self.shape.num_kv_heads,
            self.hot_lengths.sum() * has,
        )
        block_m = [layout.hot.fit(self.shape).block_m for layout in layouts]
        return table.take(np.array(kind_of)), np.array(block_m, float)

    def _cold_table(self, layouts: tuple[Layout, ...], pieces: int | None) -> CutTable:
        """Of the flat layout HOT spans too, once for each of their rows."""
        block_n = layouts[0].cold.fit(self.shape).block_n
        lengths, counts = _by_blocks(self.cold_lengths, block_n)
        both = np.concatenate([self.hot_lengths, lengths])
        spans = np.stack([np.zeros(len(both)), np.concatenate([self.num_rows, counts])])
        spans[0, len(self.hot_lengths) :] = counts
        tried = COLD_PIECES if pieces is None else (pieces,)
        longest = self.cold_lengths.max(initial=1), both.max(initial=1)
        tokens = [_tried(int(length), tried) for length in longest]
        tokens = np.clip(np.stack(tokens), MIN_COLD_TOKENS, None)
        if pieces is None:
            tokens = np.minimum(tokens, layouts[0].max_cold_tokens)
        own = self.cold_lengths.sum()
        table = CutTable.of(
            both, spans, spans, tokens,
            np.full(2, float(block_n)), self.shape.num_kv_heads,
            np.array([own, own + self.hot_lengths.sum()]),
        )  # fmt: skip
        return table.take(np.array([int(layout.name == "flat") for layout in layouts]))

    def _rows_in_words(self) -> str:
        most = int(self.num_rows.max()) * self.shape.group_size
        return f"{len(self.num_rows)} groups of at most {most} stacked rows"


def _tried(top: int, pieces: Sequence[int]) -> np.ndarray:
    """int [ways]: tokens of an item when a span of `top` tokens is cut into so many pieces."""
    return -(-top // np.array(pieces))


def _by_blocks(lengths: np.ndarray, block_n: int) -> tuple[np.ndarray, np.ndarray]:
    """(mean length, number) of the spans with so many blocks each: few kinds of many spans."""
    blocks = np.ceil(lengths / block_n).astype(np.int64)
    counts = np.bincount(blocks)
    kinds = np.flatnonzero(counts)
    return np.bincount(blocks, lengths)[kinds] / counts[kinds], counts[kinds].astype(float)


def asked_layouts(shape: AttentionShape, shortest_hot: int) -> tuple[Layout, ...]:
    """Those that may serve HOT spans of at least so many tokens; not `large` where the Gluon kernels
    can take its place, nor at small heads, of which M64 blocks multiply 426 TFLOP/s and M128 330.
    Which they are does not depend on the GPU: without those kernels `dense` is what `large` is."""
    gluon = shape.head_dim == GLUON_HEAD_DIM and shape.element_bytes == 2
    gluon = gluon and shortest_hot >= GLUON_WIDE.block_n
    refused = {"large"} if gluon else {"dense", "even"}
    if shape.head_dim <= 64:
        refused.add("large")
    layouts = layouts_of(shape)
    return tuple(layout for name, layout in layouts.items() if name not in refused)


def hot_unit(layout: Layout, shape: AttentionShape) -> int:
    """Tokens of a block: HOT items end at multiples of it, or with their span."""
    unit = layout.hot.fit(shape).block_n
    if layout.hot_gluon is not None:  # with min_hot_tokens two units, no item is below one
        unit = max(unit, layout.hot_gluon.block_n)
    return unit


def row_tiles(
    num_rows: np.ndarray, shape: AttentionShape, layout: Layout
) -> tuple[int, int, np.ndarray]:
    """(stacked rows of a block, decode rows of a block, blocks per KV head and cut of each group)."""
    block_m = layout.hot.fit(shape).block_m
    rows_per_tile = max(block_m // shape.group_size, 1)
    return block_m, rows_per_tile, -(-num_rows // rows_per_tile)
