"""The GPU recipe against the twins: groups, trees, runs, slots, traps and every head shape."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from support import ABSURD, DEVICE, DTYPES, ON_GPU, Row, Step, compare

from granikv.attention import reference
from granikv.attention.kernels.append import append_kv
from granikv.attention.kernels.merge import merge_states
from granikv.attention.variants import LAYOUTS, MERGE, AttentionShape
from granikv.core import Count
from granikv.errors import InvalidArgument, Unsupported

EVERYONE, TOOLS, OTHER = (0, 8, 150), (1, 170, 61), (2, 240, 97)
MIXED = [
    Row([EVERYONE, TOOLS], 37),
    Row([EVERYONE], 5),
    Row([OTHER], 1),  # group of size 1
    Row([], 64),  # no prefix; a tile's multiple
    Row([EVERYONE, TOOLS], 90),
    Row([EVERYONE], 40, flat=True),
]
EXTENDS = [
    Row([EVERYONE, TOOLS], 20, num_new=9),
    Row([], 33, num_new=33),
    Row([OTHER], 1, num_new=1),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ragged_groups_in_every_layout(layout, dtype):
    if layout == "flat":
        rows = [dataclasses.replace(r, flat=True) for r in MIXED]
    else:
        rows = MIXED + EXTENDS if layout == "large" or ON_GPU else MIXED
    Step(rows, dtype=dtype, layout=LAYOUTS[layout]).check()


@pytest.mark.parametrize("heads", [(9, 3), (5, 1), (6, 1), (7, 1), (16, 1), (3, 3), (8, 1)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_c29_group_sizes(heads, dtype):
    rows = [Row([EVERYONE], 37), Row([EVERYONE], 5), Row([OTHER], 9, num_new=4)]
    Step(rows, heads=heads, dtype=dtype).check()


@pytest.mark.parametrize("dim", [96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_c29_head_sizes(dim, dtype):
    Step([*MIXED[:3], EXTENDS[0]], heads=(4, 1), dim=dim, dtype=dtype).check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_types(dtype):
    """Under the interpreter this is the canary of the dot helper: bf16 there is bit patterns."""
    Step([MIXED[0], MIXED[5], EXTENDS[0]], dtype=dtype).check()


@triton.jit
def _plain_dot(a_ptr, b_ptr, out_ptr):
    i = tl.arange(0, 16)
    at = i[:, None] * 16 + i[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


@pytest.mark.skipif(ON_GPU, reason="about the interpreter")
def test_canary_the_interpreter_still_multiplies_bf16_bits():
    """When this fails the interpreter has learned bf16: the dot helpers may stop widening."""
    a, b = torch.randn(16, 16).bfloat16(), torch.randn(16, 16).bfloat16()
    out = torch.zeros(16, 16)
    _plain_dot[(1,)](a, b, out)
    assert not torch.allclose(out, a.float() @ b.float(), rtol=0.1, atol=0.1)


def test_prefix_only_and_zero_length_suffix():
    Step([Row([(0, 10, 300)], 0), Row([(1, 320, 3)], 0)]).check()


def test_empty_work_lists():
    Step([Row([], n) for n in (1, 2, 64, 3)]).check()  # no HOT items
    Step(EXTENDS[:1]).check()  # no decode rows
    Step([]).check()
    Step([], padding=3).check()


@pytest.mark.parametrize("layout", ["small", "large"])
def test_padded_rows_and_grid_classes(layout):
    Step(MIXED, layout=LAYOUTS[layout], padding=3).check(capture=True)


def test_c32_rows_inside_the_shared_prefix():
    span = (0, 100, 200)
    rows = [Row([span], 3), Row([span], 0), Row([span], 0, seen=133), Row([span], 0, seen=2)]
    Step(rows).check()
    rows = [Row([span], 0, num_new=6), Row([span], 0, num_new=6, seen=133), Row([span], 4)]
    Step(rows).check()


def test_c23_scores_far_below_any_sentinel():
    Step(MIXED[:3], scale=120.0).check()


def test_c22_a_long_prefix_and_a_short_suffix_merge_in_one_base():
    """Against one pass of fp32 attention; scores of 0 then show the base of each part's LSE."""
    suffixes = (1, 5, 16)
    rows = [Row([(0, 0, 4096)], n) for n in suffixes]
    step = Step(rows, heads=(2, 1), dtype=torch.float16, capacity=4160, cold_from=4096, max_seq_len=4128)  # fmt: skip
    attention = step.attention()
    out = step.run(attention).float().view(3, 2, 64)
    k, v = attention.k_arena[1].cpu().float(), attention.v_arena[1].cpu().float()
    for i, slots in enumerate(step.slots):
        index = torch.from_numpy(slots).long()
        weights = (step.q[i].float() @ k[index, 0].T * 64**-0.5).softmax(-1)
        assert float((out[i] - weights @ v[index, 0]).abs().max()) < 2e-3
    step.q.zero_()
    step.run(attention)
    plan, lse = step.plan, attention.lse_partials.cpu()
    for i, n in enumerate(suffixes):
        parts = plan.merge_partials[plan.merge_indptr[i] : plan.merge_indptr[i + 1]]
        assert len(parts) > 1
        num_keys = torch.exp2(lse[torch.from_numpy(parts).long()]).sum(0)
        torch.testing.assert_close(num_keys, torch.full((2,), 4096.0 + n), rtol=1e-4, atol=0.0)


def test_c25_lengths_at_a_block_multiple():
    Step([Row([], n) for n in (15, 16, 17, 31, 32, 33, 48, 63, 64, 65)]).check()


def test_c26_short_sequences_give_identical_rows():
    step = Step([Row([], 1), Row([], 1)])
    step.q[1], step.new_k[1], step.new_v[1] = step.q[0], step.new_k[0], step.new_v[0]
    out = step.run()
    assert torch.equal(out[0], out[1]) and out.abs().min() > 0


def test_results_repeat_bit_for_bit():
    step = Step(MIXED[:3] + EXTENDS[:1])
    assert torch.equal(step.run(), step.run())


def test_c20_merge_treats_empty_states_as_the_identity():
    shape = AttentionShape(4, 2, 64, 4)
    o, lse = torch.randn(5, 4, 64), torch.randn(5, 4)
    o[1], lse[1] = math.nan, -math.inf  # an empty state's output is never used
    lists = [[0], [1], [0, 1], [1, 0], [], [2, 3, 4, 0, 1]]
    indptr = np.cumsum([0, *(len(x) for x in lists)])
    counts = torch.zeros(16, dtype=torch.int32)
    counts[Count.NUM_ROWS] = counts[Count.NUM_DECODE_ROWS] = len(lists)
    flat = torch.tensor([p for x in lists for p in x] + [ABSURD], dtype=torch.int32)
    plan = {"counts": counts, "merge_indptr": torch.tensor(indptr, dtype=torch.int32)}
    plan = {k: v.to(DEVICE) for k, v in (plan | {"merge_partials": flat}).items()}
    out = torch.full((len(lists) + 1, 4, 64), math.nan, device=DEVICE)
    merge_states(plan, o.to(DEVICE), lse.to(DEVICE), out, shape=shape, tile=MERGE)
    out = out.cpu()
    for row in (0, 2, 3):
        assert torch.equal(out[row], o[0])
    for row in (1, 4, 6):
        assert torch.equal(out[row], torch.zeros(4, 64))
    want_o, want_lse = o[2], lse[2]
    for p in (3, 4, 0):
        want_o, want_lse = reference.merge_states(want_o, want_lse, o[p], lse[p])
    compare(out[5], want_o, torch.float32)


@pytest.mark.parametrize("dim", [64, 96])
def test_append_applies_rope_on_the_way_in(dim):
    shape, rows = AttentionShape(6, 2, dim, 4), 5
    layers = pytest.importorskip("granikv.models.layers")
    table = layers.RotaryTable(dim, 50, 10000.0)
    position = torch.tensor([0, 3, 49, 7, 1])
    q, k, v = (torch.randn(rows, h, dim) for h in (6, 2, 2))
    arena = torch.full((2, 32, 2, dim), math.nan, device=DEVICE)
    counts = torch.zeros(16, dtype=torch.int32)
    counts[Count.NUM_ROWS] = rows - 1  # the last row is padding
    slots = torch.tensor([4, 9, 2, 31, ABSURD], dtype=torch.int32)
    plan = {"counts": counts, "slot_mapping": slots, "row_position": position.int()}
    plan = {name: value.to(DEVICE) for name, value in plan.items()}
    got_q = q.to(DEVICE, copy=True)
    append_kv(
        arena[0], arena[1], plan, got_q, k.to(DEVICE), v.to(DEVICE), shape=shape,
        rope=(table.cos.to(DEVICE), table.sin.to(DEVICE)),
    )  # fmt: skip
    cos, sin = table.lookup(position, torch.float32)
    index = slots[:4].long()
    compare(got_q[:4].cpu(), layers.apply_rope(q, cos, sin)[:4], torch.float32)
    assert torch.equal(got_q[4].cpu(), q[4])
    compare(arena[0, index].cpu(), layers.apply_rope(k, cos, sin)[:4], torch.float32)
    assert torch.equal(arena[1, index].cpu(), v[:4])
    assert int(torch.isnan(arena).all(-1).all(-1).sum()) == 2 * (32 - 4)


def test_bad_input_names_the_argument():
    step = Step(MIXED[:2])
    with pytest.raises(Unsupported, match="head_dim.*80"):
        AttentionShape(8, 2, 80, 2)
    with pytest.raises(Unsupported, match="17"):
        AttentionShape(17, 1, 64, 2)
    step.k = step.k[:, :, :1].contiguous()
    with pytest.raises(InvalidArgument, match="k_arena"):
        step.attention()
    step = Step(MIXED[:2])
    attention = step.attention()
    attention.prepare(step.plan, step.split.layout)
    good = [x.to(DEVICE) for x in (step.q, step.new_k, step.new_v)]
    for index, name, bad in (
        (0, "q", good[0].double()),
        (0, "q", good[0][:, :-1]),
        (1, "k", good[1].transpose(1, 2).contiguous().transpose(1, 2)),
        (2, "v", torch.zeros(good[2].numel() + 1, device=DEVICE)[1:].view(good[2].shape)),
    ):
        inputs = [bad if i == index else x for i, x in enumerate(good)]
        with pytest.raises(InvalidArgument, match=f"^{name}: expected"):
            attention.run(1, *inputs)
    step.plan.hot_items[0, 6] = 7
    with pytest.raises(ValueError, match="7"):
        step.run()


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_c28_slots_past_2_to_31_elements():
    """One layer of 2.2e9 elements: the last slots give what the first give."""
    capacity, dim = 1_050_000, 128
    low = Step(MIXED[:3], (32, 16), dim, torch.bfloat16)
    arenas = [torch.empty(1, capacity, 16, dim, dtype=torch.bfloat16, device="cuda") for _ in "kv"]
    offset = capacity - 1024
    for arena, values in zip(arenas, (low.k, low.v), strict=True):
        arena[0, offset:] = values[1].cuda()
    want = low.run()
    from granikv.attention.gpu import GpuAttention

    slots = torch.where(low.request_slots < ABSURD, low.request_slots + offset, 0)
    high = GpuAttention(low.config, *arenas, slots.cuda(), low.capacities())
    low.plan.slot_mapping += offset
    low.plan.hot_items[:, 2] += offset
    high.prepare(low.plan, low.split.layout)
    out = high.run(0, low.q.cuda(), low.new_k.cuda(), low.new_v.cuda())
    assert torch.equal(out.cpu(), want)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("layout", ["small", "mid", "large"])
def test_a_captured_graph_serves_other_plans(layout):
    rows = [Row([EVERYONE], n) for n in (3, 40, 70)]
    first = Step(rows, layout=LAYOUTS[layout], dtype=torch.bfloat16)
    other = Step(
        [Row([EVERYONE, TOOLS], 33), Row([OTHER], 9), Row([EVERYONE, TOOLS], 2)],
        layout=LAYOUTS[layout], dtype=torch.bfloat16, seed=1,
    )  # fmt: skip
    attention = first.attention()
    q, k, v = first.q.cuda(), first.new_k.cuda(), first.new_v.cuda()
    attention.prepare(first.plan, first.split.layout, capture=True)
    key = attention.graph_key
    attention.run(1, q, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.run(1, q, k, v)
    for step in (other, first, other):
        attention.k_arena.copy_(step.k)
        attention.v_arena.copy_(step.v)
        attention.request_slots.copy_(step.request_slots)
        for target, source in zip((q, k, v), (step.q, step.new_k, step.new_v), strict=True):
            target.copy_(source)
        attention.prepare(step.plan, step.split.layout, capture=True)
        assert attention.graph_key == key
        results = []
        for _ in range(50):
            graph.replay()
            results.append(out.clone())
        assert all(torch.equal(r, results[0]) for r in results)
        compare(results[0].cpu(), step.twin(), torch.bfloat16)
