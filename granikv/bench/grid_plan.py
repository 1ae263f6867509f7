"""What is measured of a grid point: the planner's choice, and all else that it could have chosen.

A candidate is a layout, the groups that share their prefix, and the cuts of HOT and of COLD.
Planning only: it runs without a GPU, also on results that were measured elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from granikv.attention.layout_choice import BEST_CUTS, Cuts, SmRates, choose_layout
from granikv.attention.splits import SplitPlan
from granikv.attention.variants import Layout, layouts_of
from granikv.bench.attention_step import (
    MAX_COLD_ITEMS,
    MAX_HOT_ITEMS,
    MAX_PARTIALS,
    CaseSpans,
)
from granikv.bench.grid_points import GridPoint
from granikv.config import ModelConfig
from granikv.dispatcher import cheapest
from granikv.errors import InvalidArgument
from granikv.gpu_cost_model import GpuCostModel

HOT_CUTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # of 1..32, thinned where neighbours differ little
COLD_CUTS = (1, 2, 4, 8)
ALL, NONE = "all", "none"  # of the groups with a prefix


@dataclass(frozen=True)
class Candidate:
    """shared: ALL, NONE, or a 1 for each group that shares its prefix and a 0 for another."""

    layout: str
    shared: str
    cuts: Cuts
    split: SplitPlan

    @property
    def fields(self) -> dict:
        """Of a result line: how the step is cut."""
        return {
            "layout": self.layout,
            "shared": self.shared,
            "hot_cuts": self.cuts.hot,
            "cold_cuts": self.cuts.cold,
            "hot_items": len(self.split.hot_items),
            "cold_items": len(self.split.cold_items),
        }


@dataclass(frozen=True)
class Choice:
    """What the planner takes. predicted_us: a layer's attention, by the cost model; rates: by which
    the step is cut. The flat layout reads nothing once, whatever the dispatcher asks for."""

    layout: str
    asked: np.ndarray  # bool [num_groups]: the dispatcher would have its prefix read once
    mask: np.ndarray  # bool [num_groups]: it is
    shared: str
    reason: str
    predicted_us: float
    rates: SmRates


def cost_model(profile: dict, point: GridPoint) -> GpuCostModel:
    """Raises InvalidArgument for a profile without the needed fields."""
    return GpuCostModel(profile, model_config(point), point.shape.element_bytes)


def model_config(point: GridPoint) -> ModelConfig:
    shape = point.shape
    return ModelConfig(
        "llama", 1, 4096, 14336, shape.num_qo_heads, shape.num_kv_heads, shape.head_dim, 128256,
        point.case.longest,
    )  # fmt: skip


def choose(spans: CaseSpans, cost: GpuCostModel, num_sms: int) -> Choice:
    """As dispatcher and PlanCutter choose for such a step: each group alone, then the layout."""
    case = spans.case
    lens, sizes = spans.prefix_lens.tolist(), spans.sizes.tolist()
    kinds = {pair: cheapest(cost, 0, *pair) for pair in set(zip(lens, sizes, strict=True))}
    chosen = [kinds[pair] for pair in zip(lens, sizes, strict=True)]
    asked = np.array([choice.variant != "flat" for choice in chosen])
    groups, cold = spans.spans(asked)
    layout, reason = choose_layout(groups, cold, spans.shape, num_sms, cost.sm_rates)
    suffix_us = cost.read_us(float(case.suffix_lens.sum())) + cost.merge_us(case.batch)
    predicted = cost.profile.get("step_us", 0.0) + suffix_us
    predicted += sum(choice.predicted_us for choice in chosen)
    mask = asked & (layout.name != "flat")
    name = mask_name(mask, spans.prefix_lens)
    return Choice(layout.name, asked, mask, name, reason, predicted, cost.sm_rates)


def mask_name(mask: np.ndarray, prefix_lens: np.ndarray) -> str:
    used = mask[prefix_lens > 0]
    if not used.any():
        return NONE
    return ALL if used.all() else "".join("01"[int(bit)] for bit in mask)


def chosen_candidate(spans: CaseSpans, choice: Choice, num_sms: int) -> Candidate:
    """Raises InvalidArgument when even uncut spans need too many partial states."""
    layout = layouts_of(spans.shape)[choice.layout]
    split = spans.split(num_sms, MAX_PARTIALS, layout, choice.asked, choice.rates)
    return Candidate(choice.layout, choice.shared, BEST_CUTS, split)


def candidates(spans: CaseSpans, chosen: Candidate, mask: np.ndarray, num_sms: int) -> Iterator:
    """Every legal candidate once, the chosen one (mask: its groups) first."""
    seen = {_digest(chosen)}
    yield chosen
    everything = np.ones(len(spans.sizes), bool)
    for shared in (mask, everything, ~everything):
        name = mask_name(shared, spans.prefix_lens)
        for layout in layouts_of(spans.shape).values():
            if (layout.name == "flat") != (name == NONE):
                continue  # a layout for HOT items without any, or the reverse
            for cuts in _cuts(name):
                try:
                    split = spans.split(num_sms, MAX_PARTIALS, layout, shared, cuts=cuts)
                except InvalidArgument:
                    continue  # too many partial states
                made = Candidate(layout.name, name, cuts, split)
                if is_legal(split, layout) and _digest(made) not in seen:
                    seen.add(_digest(made))
                    yield made


def _cuts(shared: str) -> list[Cuts]:
    cold = [Cuts(cold=n) for n in (HOT_CUTS if shared == NONE else COLD_CUTS)]
    return [BEST_CUTS, *([] if shared == NONE else [Cuts(hot=n) for n in HOT_CUTS]), *cold]


def is_legal(split: SplitPlan, layout: Layout) -> bool:
    """Whether the buffers hold it, and no item is below the Gluon kernel's tile."""
    if len(split.hot_items) > MAX_HOT_ITEMS or len(split.cold_items) > MAX_COLD_ITEMS:
        return False
    tile = layout.hot_gluon
    return tile is None or int(split.hot_items[:, 3].min(initial=tile.block_n)) >= tile.block_n


def _digest(candidate: Candidate) -> int:
    split = candidate.split
    return hash((candidate.layout, split.hot_items.tobytes(), split.cold_items.tobytes()))


def pieces_of_longest(split: SplitPlan) -> tuple[int, int]:
    """Into how many the HOT span and the COLD row with the most pieces are cut."""
    hot = split.hot_items
    starts = {(int(first), int(start)) for first, start in hot[:, [0, 2]]}
    per_tile = np.bincount([first for first, _ in starts]) if starts else np.zeros(1, int)
    per_row = np.bincount(split.cold_items[:, 0], minlength=1)
    return int(per_tile.max()), int(per_row.max())
