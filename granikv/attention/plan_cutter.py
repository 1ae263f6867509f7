"""Cuts the plan of each step for one GPU, and keeps what stays the same from one step to the next.

From step to step only suffixes grow, by a token. So a choice is kept for all steps of about the same
sizes, the HOT items while the groups are the same, the merge lists while the cuts are.
It knows nothing of requests; the dispatcher calls it once per step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from granikv.attention.layout_choice import BEST_CUTS, H200_RATES, HotGroups, SmRates, StepCosts
from granikv.attention.splits import Cutting, SplitPlan, cut_spans
from granikv.attention.variants import AttentionShape, Layout
from granikv.core import ColdItem, HotItem

CLASSES = 16.0  # of sizes, for each factor e: a choice serves steps that differ by less than 6%
MAX_KEPT = 256  # choices
COLD_COLUMNS = [ColdItem.ROW, ColdItem.KIND, ColdItem.START, ColdItem.LEN, ColdItem.POSITION]


@dataclass
class KeptCuts:
    """Choices by classes of sizes, and the last plan with what it was made of."""

    choices: dict[tuple, tuple[Cutting, int, int]] = field(default_factory=dict)
    hot_items: np.ndarray | None = None
    groups: HotGroups = field(default_factory=HotGroups.empty)
    cutting: Cutting | None = None
    plan: SplitPlan | None = None


@dataclass(frozen=True)
class PlanCutter:
    """hot_layout: of every step with HOT items; None: what fits them."""

    shape: AttentionShape
    num_sms: int
    max_partials: int
    hot_layout: Layout | None = None
    rates: SmRates = H200_RATES
    kept: KeptCuts = field(default_factory=KeptCuts, init=False, compare=False, repr=False)

    def cut(
        self,
        hot_items: np.ndarray,
        hot_rows: np.ndarray,
        cold_items: np.ndarray,
        num_decode_rows: int,
    ) -> SplitPlan:
        """hot_items, cold_items: int32 [n, 8] as PLAN_FIELDS has them, one per span. Arrays of the
        plan are shared by later ones: nothing is written into them."""
        kept = self.kept
        if hot_items is not kept.hot_items or hot_rows is not kept.groups.rows:
            kept.groups, kept.plan = _groups(hot_items, hot_rows), None
            kept.hot_items = hot_items
        spans = cold_items[:, COLD_COLUMNS]
        cutting = self._cutting(kept.groups, spans)
        same = kept.cutting is not None and kept.cutting.layout is cutting.layout
        kept.plan = cut_spans(
            kept.groups, spans, num_decode_rows, self.shape, self.max_partials, cutting,
            kept.plan if same and _has_rows(kept.plan, num_decode_rows) else None,
        )  # fmt: skip
        kept.cutting = cutting
        return kept.plan

    def _cutting(self, groups: HotGroups, spans: np.ndarray) -> Cutting:
        """Chosen at the first step of these sizes; later ones have as many pieces."""
        lengths, sizes = groups.kv_len, np.diff(groups.indptr)
        longest_hot, longest_cold = int(lengths.max(initial=1)), int(spans[:, 3].max(initial=1))
        numbers = (
            len(lengths), lengths.sum(), longest_hot, sizes.sum(), sizes.max(initial=0),
            sizes @ lengths.astype(np.int64), len(spans), spans[:, 3].sum(), longest_cold,
        )  # fmt: skip
        key = tuple((np.log(np.array(numbers, float) + 1) * CLASSES).astype(int).tolist())
        if key not in self.kept.choices:
            if len(self.kept.choices) >= MAX_KEPT:
                self.kept.choices.clear()
            self.kept.choices[key] = self._choose(groups, spans, longest_hot, longest_cold)
        cutting, hot_pieces, cold_pieces = self.kept.choices[key]
        if cutting.layout.name == "flat":
            longest_cold = max(longest_hot, longest_cold)
        hot_tokens = max(-(-longest_hot // hot_pieces), cutting.layout.min_hot_tokens)
        return Cutting(cutting.layout, hot_tokens, -(-longest_cold // cold_pieces), cutting.reason)

    def _choose(
        self, groups: HotGroups, spans: np.ndarray, longest_hot: int, longest_cold: int
    ) -> tuple[Cutting, int, int]:
        """And the pieces of the longest HOT and COLD span."""
        costs = StepCosts(groups, spans, self.shape, self.num_sms, self.rates, self.max_partials)
        if self.hot_layout is None or not len(groups.kv_len):
            layout, reason = costs.choose()
        else:
            layout, reason = self.hot_layout, self.hot_layout.name
        hot_tokens, cold_tokens = costs.tokens(layout, BEST_CUTS)
        if layout.name == "flat":
            longest_cold = max(longest_hot, longest_cold)
        cutting = Cutting(layout, hot_tokens, cold_tokens, reason)
        return cutting, -(-longest_hot // hot_tokens), -(-longest_cold // cold_tokens)


def _has_rows(plan: SplitPlan | None, num_decode_rows: int) -> bool:
    return plan is not None and len(plan.merge_indptr) == num_decode_rows + 1


def _groups(hot_items: np.ndarray, hot_rows: np.ndarray) -> HotGroups:
    if not len(hot_items):
        return HotGroups.empty()
    sizes = hot_items[:, HotItem.NUM_ROWS]
    indptr = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=indptr[1:])
    return HotGroups(
        indptr,
        hot_rows,
        hot_items[:, HotItem.KV_START],
        hot_items[:, HotItem.KV_LEN],
        hot_items[:, HotItem.POSITION],
    )
