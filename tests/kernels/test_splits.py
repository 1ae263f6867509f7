"""The split planner: every key once per row, the machine filled once, longest items first."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from granikv.attention.layout_choice import (
    Cuts,
    HotGroups,
    StepCosts,
    asked_layouts,
    choose_layout,
)
from granikv.attention.layout_costs import LAYOUT_COSTS
from granikv.attention.plan_cutter import PlanCutter
from granikv.attention.splits import SplitPlan, plan_splits
from granikv.attention.variants import LAYOUTS, AttentionShape
from granikv.core import SpanKind
from granikv.errors import InvalidArgument

LLAMA = AttentionShape(32, 8, 128, 2)
NUM_SMS = 132


def make(groups: list[tuple[int, int]], suffix: int = 512) -> tuple[HotGroups, np.ndarray, int]:
    """groups: (prefix tokens, rows) -> HOT groups, COLD spans, decode rows."""
    sizes = np.array([rows for _, rows in groups], np.int32)
    lens = np.array([n for n, _ in groups], np.int32)
    indptr = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    rows = np.arange(indptr[-1], dtype=np.int32)
    start = (np.cumsum(lens) - lens).astype(np.int32)
    at = np.repeat(lens, sizes)
    zero = np.zeros_like(at)
    spans = np.stack([rows, zero + SpanKind.SLOTS, at, zero + suffix, at], 1)
    return HotGroups(indptr, rows, start, lens, np.zeros_like(lens)), spans, len(rows)


LENS = (2048, 4096, 6144, 8192, 12288, 16384, 20480, 24576)
CASES = {
    "small": [(16384, 8)],
    "mid": [(16384, 32)],
    "even": [(16384, 256)],  # COLD takes nearly as long as HOT
    "dense": [(32768, 256)],
    "large": [(4096, 256)],
    "groups": [(n, 16) for n in LENS],
    "many": [(4096, 4)] * 64,
    "short": [(512, 128)],
}
# what the planner takes for them, of what one H200 measured; level ones are named together
TAKEN = {
    "small": {"small"},
    "mid": {"mid", "even"},
    "even": {"even"},
    "dense": {"dense", "even"},
    "large": {"mid", "even"},
    "groups": {"groups", "mid"},
    "many": {"many", "mid"},
    "short": {"short", "mid"},
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_taken(name):
    groups, spans, _ = make(CASES[name])
    layout, reason = choose_layout(groups, spans, LLAMA, NUM_SMS)
    assert layout.name in TAKEN[name] and reason.startswith(layout.name)


@pytest.mark.parametrize("name", CASES)
def test_layouts_and_coverage(name):
    groups, spans, num_rows = make(CASES[name])
    split = plan_splits(groups, spans, num_rows, LLAMA, NUM_SMS, 16384, LAYOUTS[name])
    assert split.layout is LAYOUTS[name] and split.reason.startswith(name)
    check_coverage(split, groups, CASES[name], num_rows)


@pytest.mark.parametrize("name", CASES)
def test_a_flat_layout_reads_groups_once_for_each_row(name):
    groups, spans, num_rows = make(CASES[name])
    split = plan_splits(groups, spans, num_rows, LLAMA, NUM_SMS, 16384, LAYOUTS["flat"])
    assert split.layout is LAYOUTS["flat"] and not len(split.hot_items)
    runs = split.cold_items[split.cold_items[:, 1] == SpanKind.RUN]
    assert runs[:, 3].sum() == np.diff(groups.indptr) @ groups.kv_len
    assert np.isin(runs[:, 2] - runs[:, 4], groups.kv_start).all()
    split.cold_items[split.cold_items[:, 1] == SpanKind.RUN, 2] = runs[:, 4]
    check_coverage(split, groups, CASES[name], num_rows)


def check_coverage(split: SplitPlan, groups: HotGroups, case: list, num_rows: int) -> None:
    """Every key of every row once, and listed in position order."""
    seen: dict[int, list[tuple[int, int, int]]] = {row: [] for row in range(num_rows)}
    for first, count, start, length, position, partial, _, _ in split.hot_items:
        assert start - position in groups.kv_start
        for i, row in enumerate(split.hot_rows[first : first + count]):
            seen[int(row)].append((position, length, partial + i))
    for row, _, start, length, position, partial, _, _ in split.cold_items:
        assert start == position
        seen[int(row)].append((position, length, partial))
    lens = np.repeat([n for n, _ in case], [rows for _, rows in case])
    for row, parts in seen.items():
        parts.sort()
        edge = 0
        for position, length, _ in parts:
            assert position == edge and length > 0
            edge += length
        assert edge == lens[row] + 512
        listed = split.merge_partials[split.merge_indptr[row] : split.merge_indptr[row + 1]]
        assert listed.tolist() == [partial for _, _, partial in parts], "not in position order"
    assert sorted(split.merge_partials) == list(range(split.num_partials))
    assert (np.diff(split.cold_items[:, 3]) <= 0).all()


@pytest.mark.parametrize("name", CASES)
def test_the_cuts_are_the_best_of_all_by_cost(name):
    """And one turn of a large group's blocks, which is where they are on an H200."""
    groups, spans, num_rows = make(CASES[name])
    costs = StepCosts(groups, spans, LLAMA, NUM_SMS)
    best_us, hot_tokens, cold_tokens = costs.best(LAYOUTS[name])
    for hot, cold in itertools.product((1, 2, 3, 6, 16), (1, 2, 4)):
        assert costs.predict_us(LAYOUTS[name], Cuts(hot, cold)) >= best_us
    split = plan_splits(groups, spans, num_rows, LLAMA, NUM_SMS, 16384)
    assert split.hot_items[:, 3].max() < hot_tokens + 64
    assert split.cold_items[:, 3].max() <= cold_tokens
    if name in ("even", "dense"):
        assert 0.8 * NUM_SMS <= len(split.hot_items) * LLAMA.num_kv_heads <= NUM_SMS


def test_every_layout_has_a_cost():
    assert LAYOUT_COSTS.keys() == LAYOUTS.keys()


# what one H200 measured, us: groups of (prefix, rows), own tokens [docs/results/attention-H200-*]
MEASURED = [
    ("small", [(16384, 8)], 512, 29.5),
    ("mid", [(16384, 32)], 512, 44.3),
    ("even", [(16384, 256)], 512, 184.0),
    ("dense", [(16384, 128)], 208, 82.3),
    ("groups", [(n, 16) for n in LENS], 512, 164.4),
    ("many", [(4096, 4)] * 64, 512, 378.8),
    ("short", [(512, 128)], 512, 77.3),
]


@pytest.mark.parametrize(("name", "groups", "own", "us"), MEASURED)
def test_predictions_are_near_what_was_measured(name, groups, own, us):
    found, spans, _ = make(groups, own)
    predicted = StepCosts(found, spans, LLAMA, NUM_SMS).best(LAYOUTS[name])[0]
    assert predicted == pytest.approx(us, rel=0.12)


def test_uneven_groups_do_not_go_to_a_layout_of_two_tiles():
    """On 43 groups of 1 to 43 requests `mixed` took 971 us, `mid` 282."""
    groups, spans, _ = make([(n, 1 + i % 43) for i, n in enumerate(range(12500, 36800, 570))], 39)
    shape = AttentionShape(32, 4, 64, 2)
    assert choose_layout(groups, spans, shape, NUM_SMS)[0].name == "mid"


def test_one_request_is_cut_to_fill_the_machine():
    groups, spans, rows = make([(65536, 1)], 16)
    split = plan_splits(groups, spans, rows, LLAMA, NUM_SMS, 16384)
    assert split.layout.name == "small" and len(split.hot_items) >= 12


def test_ragged_lengths_leave_one_short_block():
    groups, spans, num_rows = make([(16384 + 37, 64)])
    split = plan_splits(groups, spans, num_rows, LLAMA, NUM_SMS, 16384)
    ragged = split.hot_items[:, 3] % split.layout.hot.block_n
    assert len(set(split.hot_items[ragged != 0, 4])) == 1  # only the last cut of the span


@pytest.mark.parametrize("name", ["dense", "even"])
def test_no_item_is_below_a_gluon_block(name):
    """Its kernel reads whole blocks; the plugin cannot look at the items, which are on the device."""
    layout = LAYOUTS[name]
    assert layout.hot_gluon is not None
    block = layout.hot_gluon.block_n
    for length in [*range(block, 520, 3), *range(520, 1100, 17), 4097, 16384 + 127]:
        for num_rows in (33, 256):
            groups, spans, rows = make([(length, num_rows), (block, 64), (3000, 7)])
            items = plan_splits(groups, spans, rows, LLAMA, NUM_SMS, 1 << 20, layout).hot_items
            assert items[:, 3].min() >= block, (length, num_rows)
    shortest = max(LAYOUTS[n].hot_gluon.block_n for n in ("dense", "even"))
    for length in (shortest - 1, shortest):  # which is picked does not depend on the GPU
        names = {asked.name for asked in asked_layouts(LLAMA, length)}
        assert ("dense" in names) == ("even" in names) == (length >= shortest)
        assert ("large" in names) == (length < shortest)


def test_many_long_spans_make_a_bounded_number_of_items():
    _, spans, rows = make([(0, 5001)], 128)
    spans[0, 3] = 65536
    split = plan_splits(HotGroups.empty(), spans, rows, LLAMA, NUM_SMS, 1 << 20)
    assert split.cold_items[:, 3].max() > 1000 and len(split.cold_items) < 5100


def test_partials_are_bounded():
    groups, spans, num_rows = make([(16384, 8)])
    split = plan_splits(groups, spans, num_rows, LLAMA, NUM_SMS, 40)
    assert split.num_partials <= 40
    with pytest.raises(InvalidArgument, match="max_partials"):
        plan_splits(groups, spans, num_rows, LLAMA, NUM_SMS, 15)


def test_empty_and_zero_length_spans():
    nothing = plan_splits(HotGroups.empty(), np.zeros((0, 5)), 0, LLAMA, NUM_SMS, 8)
    assert nothing.num_partials == 0 and nothing.merge_indptr.tolist() == [0]
    _, spans, _ = make([(0, 3)], suffix=0)
    split = plan_splits(HotGroups.empty(), spans, 3, LLAMA, NUM_SMS, 8)
    assert len(split.cold_items) == 0 and split.merge_indptr.tolist() == [0, 0, 0, 0]


def test_choice_names_its_numbers():
    groups, spans, _ = make(CASES["large"])
    assert "1024 stacked rows" in choose_layout(groups, spans, LLAMA, NUM_SMS)[1]


def as_items(groups: HotGroups, spans: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """hot_items, hot_rows and cold_items as the dispatcher has them: one per span."""
    hot = np.zeros((len(groups.kv_len), 8), np.int32)
    hot[:, 0], hot[:, 1] = groups.indptr[:-1], np.diff(groups.indptr)
    hot[:, 2], hot[:, 3], hot[:, 4] = groups.kv_start, groups.kv_len, groups.position
    cold = np.zeros((len(spans), 8), np.int32)
    cold[:, :5] = spans
    return hot, groups.rows, cold


@pytest.mark.parametrize("name", CASES)
def test_a_cutters_steps_are_plans_of_their_own_lengths(name):
    """What it keeps from the step before changes no plan, also where cuts or an order change."""
    case = CASES[name]
    groups, spans, num_rows = make(case)
    rng = np.random.default_rng(1)
    spans[:, 3] = rng.integers(1, 700, num_rows)
    hot, rows, cold = as_items(groups, spans)
    cutter, found = PlanCutter(LLAMA, NUM_SMS, 16384), set()
    for _ in range(40):
        split = cutter.cut(hot, rows, cold, num_rows)
        fresh = PlanCutter(LLAMA, NUM_SMS, 16384)
        fresh.kept.choices.update(cutter.kept.choices)
        want = fresh.cut(hot.copy(), rows, cold, num_rows)
        for field in ("hot_items", "cold_items", "merge_indptr", "merge_partials"):
            assert np.array_equal(getattr(split, field), getattr(want, field)), field
        found.add(split.layout.name)
        cold = cold.copy()
        cold[:, 3] += rng.integers(1, 9)
    assert len(cutter.kept.choices) < 40 and len(found) <= 3


def test_a_kept_choice_is_near_the_best_of_its_step():
    groups, spans, num_rows = make(CASES["groups"])
    hot, rows, cold = as_items(groups, spans)
    cutter = PlanCutter(LLAMA, NUM_SMS, 16384)
    for step in range(0, 400, 7):
        cold[:, 3] = 512 + step
        split = cutter.cut(hot, rows, cold.copy(), num_rows)
        costs = StepCosts(groups, cold[:, :5], LLAMA, NUM_SMS, max_partials=16384)
        best_us = costs.best(costs.choose()[0])[0]
        pieces = Cuts(
            -(-max(LENS) // split.hot_tokens), -(-(512 + step) // int(split.cold_items[:, 3].max()))
        )
        assert costs.predict_us(split.layout, pieces) < 1.06 * best_us
