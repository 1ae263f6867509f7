"""CPU attention: append, HOT, COLD, merge and extend over a token-major arena.

Layout: [num_layers, capacity, Hkv, D]. Token-major was measured against head-major: views are
equal (both feed the same fused kernel), while a gather copies whole tokens and is 1.5x faster.
Queries of one KV head are stacked as query rows of it, so K and V are never copied per query head.
All index work is done once per step in `prepare`. LSE is natural here, as the fused op gives it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from granikv import native
from granikv.attention.plan_parts import Bucket, Extend, Scattered, StepParts, View
from granikv.config import ModelConfig
from granikv.core import HotVariant, StepPlan

# Of one row alone: the compiled kernel's call costs less, torch's reads long runs faster.
MAX_NATIVE_ROW_TOKENS = 2048

HAS_FLASH = hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")


def flash_attention_state(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sm_scale: float,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """State (o [B, H, M, D], natural-log lse [B, H, M]) of q [B, H, M, D] over k, v [B, H, N, D].

    mask: additive, broadcast to [B, H, M, N]. causal: row i sees keys 0..i.
    """
    if HAS_FLASH:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=sm_scale
        )
    if causal:
        mask = torch.full((q.shape[2], k.shape[2]), -math.inf).triu_(1)
    return gemm_attention_state(q, k, v, sm_scale, mask)


def gemm_attention_state(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sm_scale: float,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same state with two batched matmuls and the scores [B, H, M, N] in memory."""
    scores = torch.matmul(q * sm_scale, k.transpose(-1, -2))
    if mask is not None:
        scores += mask
    peak = scores.amax(-1, keepdim=True)
    scores.sub_(peak).exp_()
    total = scores.sum(-1, keepdim=True)
    return torch.matmul(scores, v).div_(total), (peak + total.log()).squeeze(-1)


def merge_parts(o: torch.Tensor, lse: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows [R, Hq, D] from parts o [P, Hq, D], natural lse [P, Hq]; index int64 [R, most].

    A row with one part has the exact weights 1 and 0: its part comes back bit for bit.
    """
    rows, most = index.shape
    flat = index.reshape(-1)
    weight = lse.index_select(0, flat).view(rows, most, -1, 1).softmax(dim=1)
    return o.index_select(0, flat).view(rows, most, *o.shape[1:]).mul_(weight).sum(dim=1)


class CpuAttention:
    """Attention of one engine on the CPU: `prepare` once per step, `run` once per layer.

    k_arena, v_arena: float32 [num_layers, capacity, Hkv, D]; request_slots: int32
    [max_requests, max_seq_len]. The caller owns all three; run appends to the arenas.
    rope: cos and sin [positions, D / 2] if run shall rotate q and k; only with `use_native`.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        k_arena: torch.Tensor,
        v_arena: torch.Tensor,
        request_slots: torch.Tensor,
    ):
        self.num_kv_heads = model_config.num_kv_heads
        self.group_size = model_config.gqa_group_size
        self.num_qo_heads = model_config.num_qo_heads
        self.head_dim = model_config.head_dim
        self.sm_scale = self.head_dim**-0.5
        self.window = model_config.sliding_window
        self.k_arena, self.v_arena = k_arena, v_arena
        self.request_slots = request_slots.numpy()
        expected = (self.num_kv_heads, self.head_dim)
        for name, arena in (("k_arena", k_arena), ("v_arena", v_arena)):
            if tuple(arena.shape[2:]) != expected:
                raise ValueError(f"{name}: expected [L, capacity, {expected}], got {arena.shape}")
        self._native = native.library()
        self.use_native = self._native is not None and self.head_dim <= native.MAX_HEAD_DIM
        self.rope: tuple[torch.Tensor, torch.Tensor] | None = None
        self._rows: native.Rows | None = None
        self._o = torch.empty(0)
        self._k_work = torch.empty(0)
        self._v_work = torch.empty(0)

    # -- once per step -------------------------------------------------------------------------

    def prepare(self, plan: StepPlan) -> None:
        """Turn the plan into parts. Raises ValueError for an unknown kind or variant."""
        heads = (self.num_kv_heads, self.group_size)
        gather = not self.use_native
        self.parts = StepParts(plan, self.request_slots, *heads, gather, self.window)
        self.num_rows, self.num_decode_rows = self.parts.num_rows, self.parts.num_decode_rows
        self.reserve_gather(max((b.slots.numel() for b in self.parts.buckets), default=0))
        self._views = [v for v in self.parts.views if not self.is_native(v)]
        native_views = [v for v in self.parts.views if self.is_native(v)]
        self._spans = self._native_spans(native_views, self.parts.scattered)
        self._rows = self._native_rows(plan)
        self._reserve_parts(self.parts.num_parts)

    def is_native(self, view: View) -> bool:
        """Whether the compiled kernel serves the view."""
        if not self.use_native or view.variant is not HotVariant.CASCADE or view.mask is not None:
            return False
        return view.num_rows > 1 or view.length <= MAX_NATIVE_ROW_TOKENS

    def _native_spans(
        self, views: Sequence[View], scattered: Sequence[Scattered] = ()
    ) -> native.Spans | None:
        """What the compiled kernel reads in one call per layer; None if that is nothing."""
        if self._native is None or not (views or scattered):
            return None
        heads = native.Heads(self.num_kv_heads, self.group_size, self.head_dim, self.sm_scale)
        spans = [
            native.Span(v.row_indices, v.length, v.first_part, v.start, v.num_splits) for v in views
        ]
        for rest in scattered:
            rows = np.array([rest.row])
            spans.append(native.Span(rows, len(rest.slots), rest.first_part, slots=rest.slots))
        return native.Spans(self._native, heads, spans)

    def _native_rows(self, plan: StepPlan) -> native.Rows | None:
        if self._native is None or not self.use_native:
            return None
        positions = torch.from_numpy(plan.row_position[: self.num_rows]).long()
        angles = None if self.rope is None else (self.rope[0][positions], self.rope[1][positions])
        shape = native.RowShape(self.num_qo_heads, self.num_kv_heads, self.head_dim)
        return native.Rows(self._native, shape, plan.slot_mapping[: self.num_rows], angles)

    def _reserve_parts(self, num_parts: int) -> None:
        """Workspace of the parts and two sentinels: the identity of the merge, and the state of
        a row without keys."""
        if self._o.shape[0] < num_parts + 2:
            self._o = torch.empty(num_parts + 2, self.num_qo_heads, self.head_dim)
            self._lse = torch.empty(num_parts + 2, self.num_qo_heads)
        self._o[num_parts : num_parts + 2] = 0.0
        self._lse[num_parts], self._lse[num_parts + 1] = -math.inf, 0.0

    def reserve_gather(self, num_tokens: int) -> None:
        """Workspace for buckets of up to num_tokens tokens; kept between steps."""
        if self._k_work.shape[0] < num_tokens:
            self._k_work = torch.empty(num_tokens, self.num_kv_heads * self.head_dim)
            self._v_work = torch.empty_like(self._k_work)

    # -- once per layer ------------------------------------------------------------------------

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq * D]; append comes first.

        q and k come after rope, unless `rope` is set. Within a row, heads lie side by side.
        """
        num_rows, width = q.shape[0], self.num_qo_heads * self.head_dim
        k_layer, v_layer = self.k_arena[layer], self.v_arena[layer]
        if self._rows is not None:
            q = self._rows.append(q, k, v, k_layer, v_layer)
        else:
            self._write(k_layer, k)
            self._write(v_layer, v)
        if self.num_decode_rows == num_rows:
            return self._decode(q, k_layer, v_layer).reshape(num_rows, width)
        out = torch.zeros(num_rows, self.num_qo_heads, self.head_dim)
        if self.num_decode_rows:
            out[: self.num_decode_rows] = self._decode(q, k_layer, v_layer)
        for extend in self.parts.extends:
            out[extend.first : extend.last] = self._extend(extend, q, k_layer, v_layer)
        return out.view(num_rows, width)

    def _write(self, arena: torch.Tensor, x: torch.Tensor) -> None:
        if isinstance(self.parts.append, slice):
            arena[self.parts.append] = x[: self.num_rows]
        else:
            arena.index_copy_(0, self.parts.append, x[: self.num_rows])

    def _decode(
        self, q: torch.Tensor, k_layer: torch.Tensor, v_layer: torch.Tensor
    ) -> torch.Tensor:
        """State of the decode rows [num_decode_rows, Hq, D]: all parts, merged."""
        num_parts = self.parts.num_parts
        o, lse = self._o[: num_parts + 2], self._lse[: num_parts + 2]
        if self._spans is not None:
            self._spans.run(q.contiguous(), k_layer, v_layer, o, lse)
        for view in self._views:
            end = view.first_part + view.num_splits * view.num_rows
            o[view.first_part : end], lse[view.first_part : end] = self.view_state(
                view, q, k_layer, v_layer
            )
        for bucket in self.parts.buckets:
            end = bucket.first_part + bucket.num_rows
            o[bucket.first_part : end], lse[bucket.first_part : end] = self.bucket_state(
                bucket, q, k_layer, v_layer
            )
        if self.parts.merge_index is not None:
            if self._rows is not None:
                return self._rows.merge(o, lse, self.parts.merge_index)
            return merge_parts(o, lse, self.parts.merge_index)
        return o[:num_parts] if self.parts.select is None else o.index_select(0, self.parts.select)

    def alone(
        self,
        what: View | Bucket,
        q: torch.Tensor,
        k_layer: torch.Tensor,
        v_layer: torch.Tensor,
    ) -> Callable[[], object]:
        """A call that attends just this view or bucket, as a layer of a step does: for timing."""
        if isinstance(what, View):
            if not self.is_native(what):
                return lambda: self.view_state(what, q, k_layer, v_layer)
            spans = self._native_spans([what])
            num_parts = what.num_splits * what.num_rows
        else:
            if not self.use_native:
                self.reserve_gather(what.slots.numel())
                return lambda: self.bucket_state(what, q, k_layer, v_layer)
            slots = what.slots.view(what.num_rows, -1).numpy()
            spans = self._native_spans([], [Scattered(i, s, i) for i, s in enumerate(slots)])
            num_parts = what.num_rows
        o = torch.empty(num_parts, self.num_qo_heads, self.head_dim)
        lse = torch.empty(num_parts, self.num_qo_heads)
        assert spans is not None
        return lambda: spans.run(q, k_layer, v_layer, o, lse)

    def view_state(
        self, view: View, q: torch.Tensor, k_layer: torch.Tensor, v_layer: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Parts of a view, split-major: o [num_splits * num_rows, Hq, D], lse likewise."""
        heads, group, dim = self.num_kv_heads, self.group_size, self.head_dim
        num_rows, num_splits = view.num_rows, view.num_splits
        stacked = q[view.rows].view(num_rows, heads, group, dim).permute(1, 0, 2, 3)
        stacked = stacked.reshape(1, heads, num_rows * group, dim)
        span = slice(view.start, view.start + view.length)
        shape = (num_splits, view.length // num_splits, heads, dim)
        keys = k_layer[span].view(shape).transpose(1, 2)
        values = v_layer[span].view(shape).transpose(1, 2)
        if view.variant is HotVariant.GEMM:
            o, lse = gemm_attention_state(stacked, keys, values, self.sm_scale, view.mask)
        else:
            stacked = stacked.expand(num_splits, -1, -1, -1)
            o, lse = flash_attention_state(stacked, keys, values, self.sm_scale, view.mask)
        o = o.reshape(num_splits, heads, num_rows, group, dim).permute(0, 2, 1, 3, 4)
        lse = lse.reshape(num_splits, heads, num_rows, group).permute(0, 2, 1, 3)
        parts = num_splits * num_rows
        return o.reshape(parts, heads * group, dim), lse.reshape(parts, heads * group)

    def bucket_state(
        self, bucket: Bucket, q: torch.Tensor, k_layer: torch.Tensor, v_layer: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Parts of a bucket: o [num_rows, Hq, D], lse [num_rows, Hq]."""
        heads, dim, num_rows = self.num_kv_heads, self.head_dim, bucket.num_rows
        count = num_rows * bucket.length
        k_work, v_work = self._k_work[:count], self._v_work[:count]
        torch.index_select(k_layer.view(-1, heads * dim), 0, bucket.slots, out=k_work)
        torch.index_select(v_layer.view(-1, heads * dim), 0, bucket.slots, out=v_work)
        shape = (num_rows, bucket.length, heads, dim)
        o, lse = flash_attention_state(
            q[bucket.rows].view(num_rows, heads, self.group_size, dim),
            k_work.view(shape).transpose(1, 2),
            v_work.view(shape).transpose(1, 2),
            self.sm_scale,
            bucket.mask,
        )
        return o.reshape(num_rows, -1, dim), lse.reshape(num_rows, -1)

    def _extend(
        self, extend: Extend, q: torch.Tensor, k_layer: torch.Tensor, v_layer: torch.Tensor
    ) -> torch.Tensor:
        """Rows of one extend request [m, Hq, D]: prefix parts without a mask, then the edges."""
        heads, group, dim = self.num_kv_heads, self.group_size, self.head_dim
        m = extend.last - extend.first
        rows = q[extend.first : extend.last].view(m, heads, group, dim)
        # K of a head is shared by its query heads through a zero stride, not copied
        keys, values = (
            x[extend.edges].transpose(0, 1)[:, None].expand(heads, group, -1, dim)
            for x in (k_layer, v_layer)
        )
        o, lse = flash_attention_state(
            rows.permute(1, 2, 0, 3), keys, values, self.sm_scale, extend.mask, extend.mask is None
        )
        parts = [o.permute(2, 0, 1, 3).reshape(1, m, -1, dim)]
        weights = [lse.permute(2, 0, 1).reshape(1, m, -1)]
        for view in extend.views:
            o, lse = self.view_state(view, q, k_layer, v_layer)
            parts.append(o.view(view.num_splits, m, -1, dim))
            weights.append(lse.view(view.num_splits, m, -1))
        if extend.gather is not None:
            stacked = rows.permute(1, 0, 2, 3).reshape(1, heads, m * group, dim)
            o, lse = flash_attention_state(
                stacked,
                k_layer.index_select(0, extend.gather).transpose(0, 1)[None],
                v_layer.index_select(0, extend.gather).transpose(0, 1)[None],
                self.sm_scale,
            )
            o = o.view(heads, m, group, dim).permute(1, 0, 2, 3)
            parts.append(o.reshape(1, m, -1, dim))
            weights.append(lse.view(heads, m, group).permute(1, 0, 2).reshape(1, m, -1))
        if len(parts) == 1:
            return parts[0][0]
        weight = torch.cat(weights).softmax(dim=0)
        return (torch.cat(parts) * weight[..., None]).sum(dim=0)
