"""Steps for the kernel tests: arenas full of traps, plans from spans, the twin's answer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from granikv.attention import reference
from granikv.attention.gpu import GpuAttention
from granikv.attention.layout_choice import HotGroups
from granikv.attention.plan_buffers import attention_shape
from granikv.attention.splits import SplitPlan, plan_splits
from granikv.attention.variants import AttentionShape, Layout, layouts_of
from granikv.config import ModelConfig
from granikv.core import Count, PlanCapacities, SpanKind, StepPlan

ABSURD = 2**30  # in every index that no kernel may read
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# The interpreter cuts fp32 to bf16 instead of rounding; its other types are exact.
DTYPES = [torch.bfloat16, torch.float16, torch.float32] if ON_GPU else [torch.float32]
# Of max|got - want| / max|want|: P is rounded to the type, and the output too.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
MAX_REQUESTS = 160


@dataclass
class Row:
    """One request: HOT spans (group, first slot, length), then a suffix of scattered slots."""

    hot: list[tuple[int, int, int]] = field(default_factory=list)
    suffix: int = 0
    num_new: int = 0  # 0: a decode row; else an extend request with so many rows
    flat: bool = False  # the HOT spans as RUN spans of this row
    seen: int | None = None  # tokens up to and with the last row; None: all


class Step:
    """Arenas [2, capacity, Hkv, D] with NaN in every slot that no row of `rows` sees.

    kv_scales: of K and V in FP8 arenas; None: arenas of `dtype`. window: keys that a row sees at
    most (0: all); those that none of a request's rows sees have absurd request_slots.
    """

    def __init__(
        self,
        rows: list[Row],
        heads: tuple[int, int] = (4, 2),
        dim: int = 64,
        dtype: torch.dtype = torch.float32,
        capacity: int = 1024,
        cold_from: int = 512,
        max_seq_len: int = 640,
        num_sms: int = 8,
        layout: Layout | None = None,
        scale: float = 1.0,
        padding: int = 0,
        seed: int = 0,
        kv_scales: tuple[float, float] | None = None,
        window: int = 0,
    ):
        self.kv_scales, self.window = kv_scales, window
        self.rows = [r for r in rows if not r.num_new] + [r for r in rows if r.num_new]
        self.heads, self.dim, self.dtype, self.layout = heads, dim, dtype, layout
        torch.manual_seed(seed)
        rng = np.random.default_rng(seed)
        self.config = ModelConfig(
            "llama", 2, 64, 64, heads[0], heads[1], dim, 32, max(max_seq_len, 32),
            sliding_window=window or None,
        )  # fmt: skip
        # the interpreter reads an FP8 NaN as 480
        trap = math.nan if kv_scales is None or ON_GPU else reference.FP8_MAX
        k_arena = torch.full((2, capacity, heads[1], dim), trap)
        v_arena = k_arena.clone()
        free = rng.permutation(np.arange(cold_from, capacity - 1)).astype(np.int32)
        self.request_slots = torch.full((MAX_REQUESTS, max_seq_len), ABSURD, dtype=torch.int32)
        self.slots, written = [], []
        for i, r in enumerate(self.rows):
            own, free = free[: r.suffix], free[r.suffix :]
            runs = [np.arange(s, s + n) for _, s, n in r.hot]
            slots = np.concatenate([*runs, own]).astype(np.int32)
            self.slots.append(slots)
            first = self._first(i)
            seen = torch.from_numpy(slots[first:])
            self.request_slots[self._request(i), first : len(slots)] = seen
            written.append(slots[first:])
        index = torch.from_numpy(np.unique(np.concatenate([[0], *written])).astype(np.int64))
        shape = (len(index), heads[1], dim)
        k_scale, v_scale = kv_scales or (1.0, 1.0)
        k_arena[1, index] = torch.randn(shape) * (scale / k_scale)
        v_arena[1, index] = torch.randn(shape) / v_scale
        self.k, self.v = (self._stored(x) for x in (k_arena, v_arena))
        self.num_sms = num_sms
        self.plan, self.split = self._build()
        total = int(self.plan.counts[Count.NUM_ROWS])
        self.q = (torch.randn(total + padding, heads[0], dim) * scale).to(dtype)
        self.new_k = torch.randn(total + padding, heads[1], dim).to(dtype)
        self.new_v = torch.randn(total + padding, heads[1], dim).to(dtype)
        first: dict[int, int] = {}  # row of each slot: who recompute one token write the same to it
        writer = [first.setdefault(int(s), i) for i, s in enumerate(self.plan.slot_mapping[:total])]
        self.new_k[:total], self.new_v[:total] = self.new_k[writer], self.new_v[writer]

    def _stored(self, arena: torch.Tensor) -> torch.Tensor:
        if self.kv_scales is None:
            return arena.to(self.dtype)
        return reference.quantize_kv(arena, 1.0)

    def _request(self, i: int) -> int:
        return MAX_REQUESTS - 1 - i

    def _end(self, i: int) -> int:
        seen = self.rows[i].seen
        return len(self.slots[i]) if seen is None else seen

    def _first(self, i: int) -> int:
        """The first position that a row of request i sees."""
        position = self._end(i) - max(1, self.rows[i].num_new)
        return max(0, position + 1 - self.window) if self.window else 0

    def _spans(self, i: int) -> list[tuple[int, int, int, int, int]]:
        """(group or -1, kind, start, len, position) of what rows of request i see, clipped."""
        at, first, spans = 0, self._first(i), []
        for group, start, n in self.rows[i].hot:
            skipped = min(max(0, first - at), n)
            is_shared = not skipped and not self.rows[i].flat
            if skipped < n:
                run = (SpanKind.RUN, start + skipped, n - skipped, at + skipped)
                spans.append((group if is_shared else -1, *run))
            at += n
        a = max(at, first)
        return [*spans, (-1, SpanKind.SLOTS, a, max(0, at + self.rows[i].suffix - a), a)]

    def _build(self) -> tuple[StepPlan, SplitPlan]:
        decodes = [i for i, r in enumerate(self.rows) if not r.num_new]
        groups: dict[tuple[int, int, int, int], list[int]] = {}
        cold: list[tuple[int, ...]] = []
        for i in decodes:
            for group, kind, start, n, at in self._spans(i):
                if group < 0:
                    cold.append((i, kind, start, n, at))
                else:
                    groups.setdefault((group, start, n, at), []).append(i)
        members = list(groups.values())
        spans = np.asarray(list(groups), np.int32).reshape(-1, 4)
        indptr = np.concatenate([[0], np.cumsum([len(m) for m in members])]).astype(np.int32)
        flat_rows = np.asarray([i for m in members for i in m], np.int32)
        hot = HotGroups(indptr, flat_rows, spans[:, 1], spans[:, 2], spans[:, 3])
        spans = np.asarray(cold, np.int32).reshape(-1, 5)
        attention = attention_shape(self.config, self.dtype, self.kv_scales is not None)
        split = plan_splits(
            hot, spans, len(decodes), attention, self.num_sms, 4096,
            layout=self.layout or _usual_layout(members, attention),
        )  # fmt: skip
        request, position, mapping = [], [], []
        qo, seg_ptr, segments = [len(decodes)], [0], []
        for i, r in enumerate(self.rows):
            m, end = max(1, r.num_new), self._end(i)
            request += [self._request(i)] * m
            position += range(end - m, end)
            mapping += list(self.slots[i][end - m : end])
            if r.num_new:
                qo.append(qo[-1] + m)
                segments += [[*span, 0, 0, 0, 0] for _, *span in self._spans(i)]
                seg_ptr.append(len(segments))
        counts = np.zeros(16, np.int32)
        for key, value in (
            (Count.NUM_ROWS, len(request)),
            (Count.NUM_DECODE_ROWS, len(decodes)),
            (Count.NUM_EXTEND_REQUESTS, len(qo) - 1),
            (Count.NUM_HOT_ITEMS, len(split.hot_items)),
            (Count.NUM_HOT_ROWS, len(split.hot_rows)),
            (Count.NUM_COLD_ITEMS, len(split.cold_items)),
            (Count.NUM_EXTEND_SEGMENTS, len(segments)),
            (Count.NUM_PARTIALS, split.num_partials),
        ):
            counts[key] = value
        plan = StepPlan(
            step_id=0,
            counts=counts,
            row_token=np.zeros(len(request), np.int32),
            row_request=np.asarray(request, np.int32),
            row_position=np.asarray(position, np.int32),
            slot_mapping=np.asarray(mapping, np.int32),
            hot_items=split.hot_items,
            hot_rows=split.hot_rows,
            cold_items=split.cold_items,
            merge_indptr=split.merge_indptr,
            merge_partials=split.merge_partials,
            qo_indptr=np.asarray(qo, np.int32),
            extend_indptr=np.asarray(seg_ptr, np.int32),
            extend_segments=np.asarray(segments, np.int32).reshape(-1, 8),
            sample_rows=np.zeros(0, np.int32),
            slot_writes=np.zeros((0, 3), np.int32),
        )
        return plan, split

    def capacities(self) -> PlanCapacities:
        return PlanCapacities(MAX_REQUESTS, 256, 1024, 256, 1024, 4096, 256, 1)

    def attention(self) -> GpuAttention:
        """GPU attention over copies of the arenas; unused plan entries are absurd."""
        scales = None
        if self.kv_scales is not None:
            scales = torch.tensor([(7.0, 7.0), self.kv_scales])  # layer 0 is another
        made = GpuAttention(
            self.config,
            self.k.to(DEVICE, copy=True),
            self.v.to(DEVICE, copy=True),
            self.request_slots.to(DEVICE),
            self.capacities(),
            dtype=self.dtype,
            kv_scales=scales,
        )
        for staging in made._staging:
            staging.fill_(ABSURD)
        made.o_partials.fill_(math.nan)
        made.lse_partials.fill_(math.nan)
        return made

    def run(self, attention: GpuAttention | None = None, capture: bool = False) -> torch.Tensor:
        """The kernels' output [T, Hq * D], on the CPU."""
        attention = attention or self.attention()
        attention.out.fill_(math.nan)
        attention.prepare(self.plan, self.split.layout, capture)
        out = attention.run(1, *(x.to(DEVICE) for x in (self.q, self.new_k, self.new_v)))
        other = [x[0].cpu().view(torch.uint8) for x in (attention.k_arena, self.k)]
        assert torch.equal(*other), "another layer was written"
        return out.cpu()

    def twin(self) -> torch.Tensor:
        """The oracle's output [T, Hq * D] in fp32, from the same values."""
        total = int(self.plan.counts[Count.NUM_ROWS])
        arenas = [x[1].float() for x in (self.k, self.v)]
        new = [x[:total].float() for x in (self.q, self.new_k, self.new_v)]
        return reference.attention_step(
            *new, *arenas, self.request_slots, self.plan, self.dim**-0.5, self.kv_scales,
            self.window,
        )  # fmt: skip

    def check(self, capture: bool = False) -> torch.Tensor:
        got, want = self.run(capture=capture).float(), self.twin()
        total = len(want)
        assert torch.equal(got[total:], torch.zeros_like(got[total:])), "padded rows are not 0"
        # beside FP8 K queries may be pairs of e4m3, which hold 8 bits, whatever their own type has
        coarsest = self.dtype == torch.float16 and self.kv_scales is not None
        compare(got[:total], want, torch.bfloat16 if coarsest else self.dtype)
        return got


def compare(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Asserts max|got - want| / max|want| within the type's budget; names the worst place."""
    if not want.numel():
        return
    error = (got.float() - want).abs().nan_to_num(math.inf)
    worst = np.unravel_index(int(error.argmax()), error.shape)
    relative = float(error.max() / want.abs().max().clamp_min(1e-6))
    assert relative <= TOLERANCE[dtype], f"relative error {relative:.2e} at {worst}"


def _usual_layout(groups: list[list[int]], shape: AttentionShape) -> Layout | None:
    """A layout with HOT items, where there are groups: so short, the planner would read them flat."""
    if not groups:
        return None
    stacked = max(len(rows) for rows in groups) * shape.group_size
    name = "small" if stacked <= 48 else "mid" if stacked <= 128 else "large"
    return layouts_of(shape)[name]
