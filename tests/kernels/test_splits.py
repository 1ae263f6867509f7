"""The split planner: every key once per row, the machine filled once, longest items first."""

from __future__ import annotations

import numpy as np
import pytest

from granikv.attention.splits import HotGroups, choose_layout, cut_tokens, plan_splits
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
    "mixed": [(16384, 64), (1000, 3), (700, 5)],
}


@pytest.mark.parametrize("name", CASES)
def test_layouts_and_coverage(name):
    groups, spans, num_rows = make(CASES[name])
    split = plan_splits(groups, spans, num_rows, LLAMA, NUM_SMS, 16384)
    assert split.layout is LAYOUTS[name] and split.reason.startswith(name)
    seen: dict[int, list[tuple[int, int, int]]] = {row: [] for row in range(num_rows)}
    for first, count, start, length, position, partial, _, _ in split.hot_items:
        assert start - position in groups.kv_start
        for i, row in enumerate(split.hot_rows[first : first + count]):
            seen[int(row)].append((position, length, partial + i))
    for row, _, start, length, position, partial, _, _ in split.cold_items:
        assert start == position
        seen[int(row)].append((position, length, partial))
    lens = np.repeat([n for n, _ in CASES[name]], [rows for _, rows in CASES[name]])
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


@pytest.mark.parametrize("name", ["small", "mid", "dense", "even", "large", "groups", "many"])
def test_hot_blocks_fill_the_machine_once(name):
    groups, spans, num_rows = make(CASES[name])
    split = plan_splits(groups, spans, num_rows, LLAMA, NUM_SMS, 16384)
    slots = NUM_SMS * split.layout.hot_slots_per_sm
    assert 0.8 * slots <= len(split.hot_items) * LLAMA.num_kv_heads <= slots
    lengths = split.hot_items[:, 3]
    assert lengths.max() <= 1.5 * lengths.mean()


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
        groups, spans, _ = make([(16384, 256), (length, 64)])
        picked = choose_layout(groups, spans, LLAMA, NUM_SMS)[0]
        assert (picked.hot_gluon is None) == (length < shortest)


def test_many_long_spans_are_not_cut_below_a_slots_share():
    lengths = np.array([65536] + [128] * 5000)
    tokens = cut_tokens(lengths, np.full(5001, 8), NUM_SMS * 4, 128, 1 << 30)
    assert 1000 < tokens < 65536


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
