"""CPU attention and its twins against dense float64 attention over the concatenated KV."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from granikv import native
from granikv.attention import cpu, reference
from granikv.attention.cpu import CpuAttention
from granikv.attention.plan_parts import split_runs
from granikv.config import ModelConfig
from granikv.core import Count, HotVariant, SpanKind, StepPlan

HEADS = [(9, 3), (8, 8), (8, 1), (4, 2)]
ABSURD = 2**30  # in every index that no kernel may read
CAPACITY = 8192
MAX_SEQ_LEN = 4160
DIM = 16


@dataclass
class Row:
    """A request of a test: hot spans [(group, start, length)], then slots of the rest."""

    hot: list[tuple[int, int, int]]
    slots: np.ndarray
    num_new: int = 0  # 0: a decode row; else an extend request with this many rows
    flat: bool = False  # serve the hot spans as RUN spans of the row
    seen: int | None = None  # rows sit before the end: position of the last row + 1

    @property
    def all_slots(self) -> np.ndarray:
        runs = [np.arange(s, s + n) for _, s, n in self.hot]
        return np.concatenate([*runs, self.slots]).astype(np.int32)


@dataclass
class Lists:
    hot_items: list = field(default_factory=list)
    hot_rows: list = field(default_factory=list)
    cold_items: list = field(default_factory=list)
    parts: list = field(default_factory=list)


def build_plan(rows: list[Row], variant: HotVariant, request_slots: torch.Tensor) -> StepPlan:
    """The plan a planner would make; unused entries hold ABSURD."""
    decodes = [r for r in rows if not r.num_new]
    extends = [r for r in rows if r.num_new]
    request_of = {id(r): 3 + 2 * i for i, r in enumerate(rows)}
    lists, partial = Lists(parts=[[] for _ in decodes]), 0
    row_request, row_position, mapping = [], [], []
    groups: dict[tuple[int, int, int, int], list[int]] = {}
    for i, r in enumerate(decodes):
        ends = len(r.all_slots) if r.seen is None else r.seen
        row_request.append(request_of[id(r)])
        row_position.append(ends - 1)
        mapping.append(r.all_slots[ends - 1])
        at = 0
        for group, start, n in r.hot:
            if r.flat:
                lists.cold_items.append([i, SpanKind.RUN, start, n, at, partial, 0, 0])
                lists.parts[i].append(partial)
                partial += 1
            else:
                groups.setdefault((group, start, n, at), []).append(i)
            at += n
    for (_, start, n, at), members in groups.items():
        first = len(lists.hot_rows)
        lists.hot_rows += members
        lists.hot_items.append([first, len(members), start, n, at, partial, variant, 0])
        for i in members:
            lists.parts[i].append(partial)
            partial += 1
    for i, r in enumerate(decodes):
        at = sum(n for _, _, n in r.hot)
        if len(r.slots):
            lists.cold_items.append([i, SpanKind.SLOTS, at, len(r.slots), at, partial, 0, 0])
            lists.parts[i].append(partial)
            partial += 1
    qo, seg_ptr, segments = [len(decodes)], [0], []
    for r in extends:
        ends = len(r.all_slots) if r.seen is None else r.seen
        row_request += [request_of[id(r)]] * r.num_new
        row_position += range(ends - r.num_new, ends)
        mapping += list(r.all_slots[ends - r.num_new : ends])
        qo.append(qo[-1] + r.num_new)
        at = 0
        for _, start, n in r.hot:
            segments.append([SpanKind.RUN, start, n, at, 0, 0])
            at += n
        if len(r.slots):
            segments.append([SpanKind.SLOTS, at, len(r.slots), at, 0, 0])
        seg_ptr.append(len(segments))
    for r in rows:
        request_slots[request_of[id(r)], : len(r.all_slots)] = torch.from_numpy(r.all_slots)
    counts = np.zeros(16, np.int32)
    counts[Count.NUM_ROWS] = qo[-1]
    counts[Count.NUM_DECODE_ROWS] = len(decodes)
    counts[Count.NUM_EXTEND_REQUESTS] = len(extends)
    counts[Count.NUM_HOT_ITEMS] = len(lists.hot_items)
    counts[Count.NUM_HOT_ROWS] = len(lists.hot_rows)
    counts[Count.NUM_COLD_ITEMS] = len(lists.cold_items)
    counts[Count.NUM_EXTEND_SEGMENTS] = len(segments)
    counts[Count.NUM_PARTIALS] = partial

    def padded(values: list, width: int = 0) -> np.ndarray:
        shape = (len(values) + 3, width) if width else (len(values) + 3,)
        out = np.full(shape, ABSURD, np.int32)
        if values:
            out[: len(values)] = np.asarray(values, np.int32)
        return out

    indptr = np.concatenate([[0], np.cumsum([len(p) for p in lists.parts])]).tolist()
    return StepPlan(
        step_id=0,
        counts=counts,
        row_token=np.zeros(qo[-1], np.int32),
        row_request=padded(row_request),
        row_position=padded(row_position),
        slot_mapping=padded(mapping),
        hot_items=padded(lists.hot_items, 8),
        hot_rows=padded(lists.hot_rows),
        cold_items=padded(lists.cold_items, 8),
        merge_indptr=padded(indptr),
        merge_partials=padded([p for parts in lists.parts for p in parts]),
        qo_indptr=padded(qo),
        extend_indptr=padded(seg_ptr),
        extend_segments=padded(segments, 6),
        sample_rows=np.zeros(0, np.int32),
        slot_writes=np.zeros((0, 3), np.int32),
    )


class Bench:
    """Arenas whose unused slots hold NaN, and the three ways to compute a step."""

    def __init__(self, heads: tuple[int, int], seed: int = 0):
        self.rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        self.hq, self.hkv = heads
        self.config = ModelConfig("llama", 2, 64, 64, self.hq, self.hkv, DIM, 32, MAX_SEQ_LEN)
        shape = (2, CAPACITY, self.hkv, DIM)
        self.k, self.v = torch.full(shape, math.nan), torch.full(shape, math.nan)
        self.request_slots = torch.full((64, MAX_SEQ_LEN), ABSURD, dtype=torch.int32)
        self.free = self.rng.permutation(np.arange(4096, CAPACITY - 1)).astype(np.int32)

    def slots(self, n: int) -> np.ndarray:
        """n shuffled slots, taken from the arena."""
        out, self.free = self.free[:n], self.free[n:]
        return out

    def check(self, rows: list[Row], variant: HotVariant) -> torch.Tensor:
        """All implementations against dense attention; returns the output [T, Hq * D]."""
        for r in rows:
            ends = len(r.all_slots) if r.seen is None else r.seen
            known = torch.from_numpy(r.all_slots[: ends - max(1, r.num_new)]).long()
            fresh = torch.isnan(self.k[1, known, 0, 0])
            self.k[1, known[fresh]] = torch.randn(int(fresh.sum()), self.hkv, DIM)
            self.v[1, known[fresh]] = torch.randn(int(fresh.sum()), self.hkv, DIM)
        plan = build_plan(rows, variant, self.request_slots)
        total = int(plan.counts[Count.NUM_ROWS])
        q = torch.randn(total, self.hq, DIM)
        k, v = torch.randn(total, self.hkv, DIM), torch.randn(total, self.hkv, DIM)
        twin_k, twin_v = self.k[1].clone(), self.v[1].clone()
        twin = reference.attention_step(
            q, k, v, twin_k, twin_v, self.request_slots, plan, DIM**-0.5
        )
        outs = {"twin": twin}
        for kernel in KERNELS:
            attention = CpuAttention(self.config, self.k, self.v, self.request_slots)
            attention.use_native = kernel == "native"
            attention.prepare(plan)
            outs[kernel] = got = attention.run(1, q, k, v)
            assert got.shape == (total, self.hq * DIM)
        want = self.dense(rows, q)
        if total:
            for name, out in outs.items():
                error = (out.double() - want).abs()
                worst = np.unravel_index(int(error.nan_to_num(9.9).argmax()), error.shape)
                assert torch.isfinite(out).all() and error.max() < 5e-6, (name, worst)
        assert torch.isnan(self.k[0]).all(), "another layer was written"
        return got

    def dense(self, rows: list[Row], q: torch.Tensor) -> torch.Tensor:
        """float64 [T, Hq * D]: plain causal attention over each request's own KV."""
        outs, at = [], 0
        for r in [*(r for r in rows if not r.num_new), *(r for r in rows if r.num_new)]:
            ends = len(r.all_slots) if r.seen is None else r.seen
            m = max(1, r.num_new)
            index = torch.from_numpy(r.all_slots[:ends]).long()
            group = self.hq // self.hkv
            keys = self.k[1, index].double().repeat_interleave(group, 1)
            values = self.v[1, index].double().repeat_interleave(group, 1)
            for i in range(m):
                n = ends - m + 1 + i
                scores = torch.einsum("hd,nhd->hn", q[at + i].double(), keys[:n]) * DIM**-0.5
                outs.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), values[:n]).flatten())
            at += m
        return torch.stack(outs) if outs else torch.zeros(0, self.hq * DIM)


VARIANTS = list(HotVariant)
KERNELS = ["torch", *(["native"] if native.library() else [])]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_ragged_groups_and_shuffled_slots(heads, variant):
    b = Bench(heads)
    everyone, tools, other = (0, 64, 1500), (1, 1700, 301), (2, 2100, 700)
    rows = [
        Row([everyone, tools], b.slots(37)),
        Row([everyone], b.slots(5)),
        Row([other], b.slots(1)),  # group of size 1
        Row([], b.slots(64)),  # no prefix
        Row([everyone, tools], b.slots(400)),
        Row([everyone], b.slots(130), flat=True),
        Row([everyone, tools], b.slots(45), num_new=9),
        Row([], b.slots(33), num_new=33),
        Row([other], b.slots(1), num_new=1),
    ]
    b.check(rows, variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefix_only_and_zero_length_suffix(variant):
    b = Bench((9, 3))
    b.check([Row([(0, 10, 600)], b.slots(0)), Row([(1, 700, 3)], b.slots(0))], variant)


def test_zero_hot_items():
    b = Bench((4, 2))
    b.check([Row([], b.slots(n)) for n in (1, 2, 64, 700, 3)], HotVariant.GEMM)


def test_zero_decode_rows_and_empty_plan():
    b = Bench((8, 1))
    b.check([Row([(0, 0, 300)], b.slots(20), num_new=7)], HotVariant.GEMM)
    b.check([], HotVariant.GEMM)


@pytest.mark.parametrize("length", [255, 256, 257, 1024, 1025, 1027])
def test_views_and_gathers_meet(length):
    """Lengths around the in-place threshold and around an uneven split."""
    b = Bench((9, 3))
    falling = np.arange(3000 + length, 3000, -1).astype(np.int32)
    rising = np.arange(1000, 1000 + length).astype(np.int32)
    mixed = np.concatenate([rising, b.slots(3)])
    b.check([Row([], falling), Row([], mixed), Row([], b.slots(9))], HotVariant.CASCADE)
    b.check([Row([], mixed, num_new=2)], HotVariant.CASCADE)


def test_c20_merge_of_empty_states():
    o, lse = torch.randn(3, 4, 8), torch.randn(3, 4)
    zero, empty = torch.zeros(3, 4, 8), torch.full((3, 4), -math.inf)
    for left, right in (((o, lse), (zero, empty)), ((zero, empty), (o, lse))):
        got_o, got_lse = reference.merge_states(*left, *right)
        assert torch.equal(got_o, o) and torch.equal(got_lse, lse)
    got_o, got_lse = reference.merge_states(zero, empty, zero, empty)
    assert torch.equal(got_o, zero) and torch.equal(got_lse, empty)


@pytest.mark.parametrize("kernel", KERNELS)
def test_c20_row_without_partials_gives_zero(kernel):
    b = Bench((4, 2))
    rows = [Row([(0, 0, 300)], b.slots(4)), Row([(0, 0, 300)], b.slots(2))]
    plan = build_plan(rows, HotVariant.GEMM, b.request_slots)
    plan.merge_indptr[2] = plan.merge_indptr[1]  # the second row merges nothing
    b.k[1, :300], b.v[1, :300] = 1.0, 1.0
    b.k[1, torch.from_numpy(rows[0].slots).long()] = 1.0
    b.v[1, torch.from_numpy(rows[0].slots).long()] = 1.0
    attention = CpuAttention(b.config, b.k, b.v, b.request_slots)
    attention.use_native = kernel == "native"
    attention.prepare(plan)
    out = attention.run(1, torch.ones(2, 4, DIM), torch.ones(2, 2, DIM), torch.ones(2, 2, DIM))
    assert torch.allclose(out[0], torch.ones(4 * DIM)) and torch.equal(out[1], torch.zeros(64))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_c20_one_part_beside_an_empty_side_comes_back_bit_for_bit(variant, kernel):
    """All scores are -4e6: beside an LSE of any usual size the part would have no weight."""
    b = Bench((4, 2))
    b.k[1], b.v[1] = -1000.0, torch.randn(b.v[1].shape)
    prefix = [(0, 0, 300)]
    rows = [Row(prefix, b.slots(4)), Row([], b.slots(5)), Row(prefix, b.slots(0))]
    attention = CpuAttention(b.config, b.k, b.v, b.request_slots)
    attention.use_native = kernel == "native"
    attention.prepare(build_plan(rows, variant, b.request_slots))
    q, k = torch.full((3, 4, DIM), 1000.0), torch.full((3, 2, DIM), -1000.0)
    out = attention.run(1, q, k, torch.randn(3, 2, DIM))
    parts, empty = attention.parts.merge_index, attention.parts.num_parts
    assert parts is not None and (parts == empty).sum(1).tolist() == [0, 1, 1]
    for row in (1, 2):
        assert torch.equal(out[row], attention._o[parts[row, 0]].flatten())


@pytest.mark.parametrize("suffix", [1, 5, 16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_c22_long_prefix_short_suffix(variant, suffix):
    b = Bench((9, 3))
    b.check([Row([(0, 0, 4096)], b.slots(suffix)) for _ in range(3)], variant)


def test_c22_lse_is_base_2():
    q, k = torch.ones(1, 1, 4), torch.ones(8, 1, 4)
    _, lse_log2 = reference.attention_state(q, k, k, sm_scale=0.0)
    assert lse_log2.item() == pytest.approx(3.0)  # log2 of 8 equal scores of 0


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_c22_lse_of_every_part_is_natural_on_the_cpu(variant, kernel):
    """As its interface says. All scores are 0, so a part's exp(lse) is the number of its keys."""
    b, suffixes = Bench((9, 3)), (1, 5, 16)
    b.k[1], b.v[1] = torch.randn(b.k[1].shape), torch.randn(b.v[1].shape)
    rows = [Row([(0, 0, 4096)], b.slots(n)) for n in suffixes]
    attention = CpuAttention(b.config, b.k, b.v, b.request_slots)
    attention.use_native = kernel == "native"
    attention.prepare(build_plan(rows, variant, b.request_slots))
    attention.run(1, torch.zeros(3, 9, DIM), *torch.randn(2, 3, 3, DIM))
    parts = attention.parts.merge_index
    assert parts is not None and parts.shape[1] > 1
    num_keys = attention._lse[parts].double().exp().sum(1)
    want = torch.tensor([[4096.0 + n] * 9 for n in suffixes], dtype=torch.float64)
    torch.testing.assert_close(num_keys, want, rtol=1e-5, atol=0.0)


def test_c25_lengths_at_a_page_multiple_read_nothing_stale():
    b = Bench((9, 3))
    b.k.fill_(1e6)
    b.v.fill_(1e6)
    slots = np.arange(512, 512 + 48).astype(np.int32)
    index = torch.from_numpy(slots).long()
    b.k[1, index], b.v[1, index] = torch.randn(48, 3, DIM), torch.randn(48, 3, DIM)
    b.k[0], b.v[0] = math.nan, math.nan
    for n in (15, 16, 17, 31, 32, 33, 47, 48):
        b.check([Row([], slots[:n])], HotVariant.CASCADE)


@pytest.mark.parametrize("kernel", KERNELS)
def test_c26_short_sequences_give_identical_rows(kernel):
    """No page to choose here: slots are named one by one. test_reused_kv.py has pages of 16."""
    b = Bench((4, 2))
    plan = build_plan([Row([], b.slots(1)), Row([], b.slots(1))], VARIANTS[0], b.request_slots)
    attention = CpuAttention(b.config, b.k, b.v, b.request_slots)
    attention.use_native = kernel == "native"
    attention.prepare(plan)
    kv = torch.randn(1, 2, DIM).expand(2, -1, -1)
    out = attention.run(0, torch.randn(1, 4, DIM).expand(2, -1, -1).contiguous(), kv, kv)
    assert torch.equal(out[0], out[1]) and out.abs().min() > 0


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("num_new", [0, 1, 6])
def test_c32_rows_inside_the_shared_prefix(variant, num_new):
    b = Bench((9, 3))
    span = (0, 100, 500)
    rows = [
        Row([span], b.slots(3)),
        Row([span], b.slots(0), num_new=num_new),  # full hit, last token computed again
        Row([span], b.slots(0), num_new=num_new, seen=333),  # a strict prefix of the other
    ]
    # every key exists, the later ones with values that would be seen if they leaked
    b.k[1, 100:600], b.v[1, 100:600] = torch.randn(500, 3, DIM), torch.randn(500, 3, DIM)
    b.check(rows, variant)


def test_split_runs_keeps_every_slot_once():
    parts = [np.arange(900, 300, -1), [5, 9, 7], np.arange(2000, 2256), np.arange(10, 100)]
    slots = np.concatenate(parts).astype(np.int32)
    runs, rest = split_runs(slots)
    assert runs == [(301, 600), (2000, 256)]
    covered = np.concatenate([*(np.arange(s, s + n) for s, n in runs), *rest])
    assert sorted(covered) == sorted(slots)


def test_without_the_fused_op(monkeypatch):
    monkeypatch.setattr(cpu, "HAS_FLASH", False)
    test_ragged_groups_and_shuffled_slots((9, 3), HotVariant.CASCADE)


def test_unknown_variant_is_an_error():
    b = Bench((4, 2))
    plan = build_plan([Row([(0, 0, 300)], b.slots(4))], HotVariant.GEMM, b.request_slots)
    plan.hot_items[0, 6] = 7
    attention = CpuAttention(b.config, b.k, b.v, b.request_slots)
    with pytest.raises(ValueError, match="7"):
        attention.prepare(plan)
