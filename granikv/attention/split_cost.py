"""What a layout's step costs with its spans cut one way or another: the time that splits.py makes least.

    launch + (all work, shared by the SMs  ~bent by~  the longest item) + last turns + merge

All layouts and all ways to cut are computed at once: arrays are [layouts, ways of HOT, ways of COLD].
The constants are in layout_costs.py. Pure numpy; it knows no rows, slots or buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np

from granikv.attention.layout_costs import LAYOUT_COSTS, MEASURED_BYTES_PER_US, LayoutCost
from granikv.attention.variants import AttentionShape, Layout

LONG_SHARE = 0.5  # of the longest item, from which an item counts as one of the long
UNEVEN, EVEN = 1.45, 1.15  # longest over mean of the long: from turns that end apart to turns alike
PARTIAL_TURN = 0.005  # of a turn, which is no turn


@dataclass(frozen=True)
class CutTable:
    """Ways to cut the spans of one kind, for each layout; float [layouts, ways] unless said.

    tokens: int, of an item; blocks: of all KV heads; longest: tokens of the longest item; long,
    long_share: blocks that are long, and their share of all tokens; states: partial ones; deepest:
    pieces of the longest span. token_blocks [layouts]: tokens times blocks, before any cut; read and
    read_again [layouts]: tokens of one KV head that are read once, and by other rows again.
    """

    tokens: np.ndarray
    blocks: np.ndarray
    longest: np.ndarray
    long: np.ndarray
    long_share: np.ndarray
    states: np.ndarray
    deepest: np.ndarray
    token_blocks: np.ndarray
    read: np.ndarray
    read_again: np.ndarray

    @classmethod
    def of(
        cls,
        lengths: np.ndarray,
        tiles: np.ndarray,
        rows: np.ndarray,
        tokens: np.ndarray,
        units: np.ndarray,
        num_heads: int,
        read: np.ndarray,
    ) -> CutTable:
        """lengths [spans] and, for each layout, tiles and rows [layouts, spans]: blocks of a KV head
        and partial states of one piece, 0 where the layout has no such span. tokens [layouts, ways]: of
        an item; units [layouts]: items end at multiples of them; read [layouts]."""
        unit = units[:, None, None]
        cuts = np.ceil(lengths / tokens[:, :, None])
        np.minimum(cuts, np.ceil(lengths / unit), out=cuts)
        np.maximum(cuts, 1, out=cuts)  # of nothing
        items = np.minimum(np.ceil(lengths / (cuts * unit)) * unit, lengths)
        items *= tiles[:, None, :] > 0
        longest = items.max(2, initial=0.0)
        is_long = items >= LONG_SHARE * np.maximum(longest, 1)[:, :, None]
        of_tile = tiles[:, :, None]
        token_blocks = (tiles @ lengths) * num_heads
        long_tokens = ((is_long * lengths) @ of_tile)[:, :, 0] * num_heads
        return cls(
            tokens,
            (cuts @ of_tile)[:, :, 0] * num_heads,
            longest,
            ((cuts * is_long) @ of_tile)[:, :, 0] * num_heads,
            long_tokens / np.maximum(token_blocks, 1)[:, None],
            (cuts @ rows[:, :, None])[:, :, 0],
            (cuts * (tiles[:, None, :] > 0)).max(2, initial=0.0),
            token_blocks,
            read,
            np.maximum(token_blocks / num_heads - read, 0),
        )

    def take(self, index: np.ndarray) -> CutTable:
        """Layouts that share their cuts, once for each."""
        return CutTable(*(getattr(self, field.name)[index] for field in fields(self)))


@dataclass(frozen=True)
class CostArrays:
    """LayoutCost of several layouts, each field float [layouts]."""

    values: dict[str, np.ndarray]
    block_p: np.ndarray
    is_flat: np.ndarray

    def __getattr__(self, name: str) -> np.ndarray:
        return self.values[name]


@lru_cache(64)
def cost_arrays(layouts: tuple[Layout, ...], shape: AttentionShape) -> CostArrays:
    """Constants of these layouts for these heads."""
    found = [LAYOUT_COSTS[_measured_as(layout)][shape.head_dim > 64] for layout in layouts]
    names = [field.name for field in fields(LayoutCost)]
    values = {name: np.array([getattr(cost, name) for cost in found], float) for name in names}
    wider = max(shape.head_dim / 128, 1.0)  # than any that was measured
    for name in ("hot_token", "cold_token"):
        values[name] *= wider
    block_p = np.array([layout.merge.block_p for layout in layouts], float)
    return CostArrays(values, block_p, np.array([layout.name == "flat" for layout in layouts]))


def _measured_as(layout: Layout) -> str:
    """The name whose constants serve a layout: those of FP8 with 64 rows were not measured alone."""
    if layout.name in ("large", "dense", "even") and layout.hot.block_m == 64:
        return "groups"
    return layout.name


def predict_us(
    layouts: Sequence[Layout],
    shape: AttentionShape,
    num_sms: int,
    flop_per_us: float,
    bytes_per_us: float,
    block_m: np.ndarray,
    hot: CutTable,
    cold: CutTable,
) -> np.ndarray:
    """[layouts, ways of HOT, ways of COLD]: a layer's attention. flop_per_us, bytes_per_us: of an SM;
    block_m [layouts]: stacked rows of a HOT block."""
    c = cost_arrays(tuple(layouts), shape)
    measured = bytes_per_us * num_sms * MEASURED_BYTES_PER_US
    token_us = shape.kv_bytes_per_token * shape.num_kv_heads / measured
    hot_read = (hot.read * c.read + hot.read_again * c.hot_reread) * token_us
    cold_read = (cold.read * c.cold_read + cold.read_again * c.reread) * token_us
    hot_even, cold_even = _evenness(hot), _evenness(cold)

    turns = np.ceil(hot.long / num_sms - PARTIAL_TURN)
    idle = np.maximum(turns * num_sms / np.maximum(hot.long, 1), 1) - 1
    idle = np.where(turns > 1, c.turns[:, None] * hot_even * idle, 0)
    flop = 4.0 * block_m * shape.head_dim * hot.token_blocks
    products = (flop / (c.rate * flop_per_us * num_sms))[:, None] * (1 + idle)
    rest = np.maximum(products - hot_read[:, None], 0)
    at_once = hot.blocks <= num_sms * c.hot_per_sm[:, None]
    beside = np.where(at_once, (1 - c.overlap)[:, None], 0)
    hidden = np.minimum(rest, cold_read[:, None]) * beside
    hot_us = hot_read[:, None] + rest - hidden + _beyond_first(hot, num_sms, c.hot_block)
    cold_us = cold_read[:, None] + _beyond_first(cold, num_sms, c.cold_block)
    hot_item = hot.longest * c.hot_token[:, None] + (hot.longest > 0) * c.hot_start[:, None]
    cold_item = cold.longest * c.cold_token[:, None] + (cold.longest > 0) * c.cold_start[:, None]

    states = hot.states[:, :, None] + cold.states[:, None, :]
    depth = hot.deepest[:, :, None] + cold.deepest[:, None, :]
    merge = (c.partial * shape.head_dim / 128)[:, None, None] * states
    merge += c.merge_turn[:, None, None] * np.ceil(depth / c.block_p[:, None, None])
    last = c.launch[:, None] + c.hot_tail[:, None] * _last_turn(
        hot.long, num_sms * c.hot_per_sm, hot_read[:, None], hot_item, hot_even, c.bend
    )
    last_cold = c.cold_tail[:, None] * _last_turn(
        cold.long, num_sms * c.cold_per_sm, cold_us, cold_item, cold_even, c.bend
    )
    work = hot_us[:, :, None] + cold_us[:, None, :]
    item = np.maximum(hot_item[:, :, None], cold_item[:, None, :])
    even = np.where(c.is_flat[:, None, None], cold_even[:, None, :], hot_even[:, :, None])
    bend = c.bend[:, None, None] + c.even_bend[:, None, None] * even
    us = (work**bend + item**bend) ** (1 / bend)
    us += merge + last[:, :, None] + last_cold[:, None, :]
    return us * (1 + c.unfilled[:, None] * _unfilled(hot, num_sms * c.hot_per_sm))[:, :, None]


def _unfilled(hot: CutTable, slots: np.ndarray) -> np.ndarray:
    """[layouts, ways]: share of the HOT blocks' turns in which there is none."""
    in_turns = np.ceil(hot.blocks / slots[:, None]) * slots[:, None]
    return np.where(hot.blocks > 0, 1 - hot.blocks / np.maximum(in_turns, 1), 0)


def _beyond_first(table: CutTable, num_sms: int, block_us: np.ndarray) -> np.ndarray:
    """[layouts, ways]: starts of the blocks that an SM has beyond its first."""
    return np.maximum(table.blocks / num_sms - 1, 0) * block_us[:, None]


def _evenness(table: CutTable) -> np.ndarray:
    """[layouts, ways] 0 to 1: whether the long items are of one length, and nearly all there is."""
    long_tokens = table.long_share * table.token_blocks[:, None]
    over_mean = table.longest * table.long / np.maximum(long_tokens, 1)
    alike = np.clip((UNEVEN - over_mean) / (UNEVEN - EVEN), 0, 1)
    return alike * np.clip(2 * table.long_share - 1, 0, 1)


def _last_turn(
    blocks: np.ndarray,
    slots: np.ndarray,
    work: np.ndarray,
    item: np.ndarray,
    even: np.ndarray,
    bend: np.ndarray,
) -> np.ndarray:
    """[layouts, ways]: by what the last of several turns outlasts its share of the work."""
    turns = np.ceil(blocks / slots[:, None] - PARTIAL_TURN)
    share = np.maximum(1 - (turns - 1) * slots[:, None] / np.maximum(blocks, 1), 0.01)
    part, power = work * share, bend[:, None]
    longer = (part**power + item**power) ** (1 / power) - part
    return np.where(turns > 1, even * longer, 0)
