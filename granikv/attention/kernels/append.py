"""append_kv: new K and V rows to their slots, with rope on the way in when asked.

KV is stored after rope at absolute positions, FP8 KV divided by its scale and saturated. With rope,
the same launch writes the rotated q, in place or elsewhere. Rows beyond the step's count write nothing.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from granikv.attention.kernels.build import KernelBuild, scale_arguments, scales_of
from granikv.attention.kernels.common import (
    INTERPRET,
    start_dependents,
    to_e4m3,
    wait_for_previous,
)
from granikv.attention.variants import AttentionShape
from granikv.core import Count

_NUM_ROWS = tl.constexpr(int(Count.NUM_ROWS))


@triton.jit
def _rotate(low, high, cos, sin):
    """Halves of the heads, fp32 [heads, D / 2], turned by the row's angles [D / 2]."""
    return low * cos[None, :] - high * sin[None, :], high * cos[None, :] + low * sin[None, :]


@triton.jit
def _stored(x, inverse_scale, dtype: tl.constexpr, INTERPRET: tl.constexpr):
    """x as the arena keeps it; FP8: x / scale, saturated and rounded to even, NaN stays NaN."""
    if inverse_scale is None:
        return x.to(dtype)
    else:
        return to_e4m3(x.to(tl.float32) * inverse_scale, INTERPRET)


@triton.jit(do_not_specialize=["k_stride", "v_stride", "q_stride", "q_out_stride"])
def append_kernel(
    k_ptr,  # [T, HKV, D], row stride k_stride
    v_ptr,
    q_ptr,  # [T, HQ, D], row stride q_stride
    q_out_ptr,  # the same rotated, when ROPE; may be q_ptr
    k_arena_ptr,  # [capacity, HKV, D]
    v_arena_ptr,
    counts_ptr,  # int32 [16]
    slot_mapping_ptr,  # int32 [T]
    row_position_ptr,  # int32 [T]
    cos_ptr,  # fp32 [max_position, D / 2]
    sin_ptr,
    k_stride,
    v_stride,
    q_stride,
    q_out_stride,
    k_inverse,  # fp32: 1 / scale of FP8 KV; None: KV is stored as it is
    v_inverse,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_HQ: tl.constexpr,
    BLOCK_HKV: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    ROPE: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    start_dependents(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    if row >= tl.load(counts_ptr + _NUM_ROWS):
        return
    HALF: tl.constexpr = D // 2
    slot = tl.load(slot_mapping_ptr + row).to(tl.int64)
    row64 = row.to(tl.int64)
    half = tl.arange(0, BLOCK_HALF)
    h = tl.arange(0, BLOCK_HKV)
    offsets = h[:, None] * D + half[None, :]
    keep = (h[:, None] < HKV) & (half[None, :] < HALF)
    source, target = k_ptr + row64 * k_stride, k_arena_ptr + slot * (HKV * D)
    low = tl.load(source + offsets, mask=keep, other=0.0)
    high = tl.load(source + HALF + offsets, mask=keep, other=0.0)
    if ROPE:
        position = tl.load(row_position_ptr + row)
        cos = tl.load(cos_ptr + position * HALF + half, mask=half < HALF, other=0.0)
        sin = tl.load(sin_ptr + position * HALF + half, mask=half < HALF, other=0.0)
        low, high = _rotate(low.to(tl.float32), high.to(tl.float32), cos, sin)
    dtype = k_arena_ptr.dtype.element_ty
    tl.store(target + offsets, _stored(low, k_inverse, dtype, INTERPRET), mask=keep)
    tl.store(target + HALF + offsets, _stored(high, k_inverse, dtype, INTERPRET), mask=keep)
    source, target = v_ptr + row64 * v_stride, v_arena_ptr + slot * (HKV * D)
    low = tl.load(source + offsets, mask=keep, other=0.0)
    high = tl.load(source + HALF + offsets, mask=keep, other=0.0)
    tl.store(target + offsets, _stored(low, v_inverse, dtype, INTERPRET), mask=keep)
    tl.store(target + HALF + offsets, _stored(high, v_inverse, dtype, INTERPRET), mask=keep)
    if ROPE:
        h_q = tl.arange(0, BLOCK_HQ)
        offsets_q = h_q[:, None] * D + half[None, :]
        keep_q = (h_q[:, None] < HQ) & (half[None, :] < HALF)
        pointers = q_ptr + row64 * q_stride + offsets_q
        low_q = tl.load(pointers, mask=keep_q, other=0.0).to(tl.float32)
        high_q = tl.load(pointers + HALF, mask=keep_q, other=0.0).to(tl.float32)
        low_q, high_q = _rotate(low_q, high_q, cos, sin)
        pointers = q_out_ptr + row64 * q_out_stride + offsets_q
        tl.store(pointers, low_q.to(q_out_ptr.dtype.element_ty), mask=keep_q)
        tl.store(pointers + HALF, high_q.to(q_out_ptr.dtype.element_ty), mask=keep_q)


@lru_cache(maxsize=64)
def append_build(shape: AttentionShape, rope: bool, pdl: bool) -> KernelBuild:
    """append_kv's kernel; pdl: it and the next launch may start early, and wait."""
    scales = scales_of(shape, "k_inverse", "v_inverse")
    pointers = ["k_ptr", "v_ptr", "q_ptr", "q_out_ptr"]
    angles = "*fp32" if rope else "*i32"  # without rope any pointer is passed
    return KernelBuild(
        append_kernel,
        {
            **dict.fromkeys(pointers, "*T"),
            **dict.fromkeys(["k_arena_ptr", "v_arena_ptr"], f"*{shape.kv_type}"),
            **dict.fromkeys(["counts_ptr", "slot_mapping_ptr", "row_position_ptr"], "*i32"),
            **dict.fromkeys(["cos_ptr", "sin_ptr"], angles),
            **dict.fromkeys(["k_stride", "v_stride", "q_stride", "q_out_stride"], "i32"),
            **scales.types,
        },
        {
            **scales.constants,
            "HQ": shape.num_qo_heads,
            "HKV": shape.num_kv_heads,
            "D": shape.head_dim,
            "BLOCK_HQ": triton.next_power_of_2(shape.num_qo_heads),
            "BLOCK_HKV": triton.next_power_of_2(shape.num_kv_heads),
            "BLOCK_HALF": shape.block_d // 2,
            "ROPE": rope,
            "PDL": pdl,
            "INTERPRET": INTERPRET,
        },
        {"num_warps": 4, "launch_pdl": pdl},
    )


def append_kv(
    k_arena: torch.Tensor,
    v_arena: torch.Tensor,
    plan: dict[str, torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    shape: AttentionShape,
    rope: tuple[torch.Tensor, torch.Tensor] | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
    pdl: bool = False,
) -> None:
    """Rows k, v [T, Hkv, D] to slots slot_mapping [T] of the arenas [capacity, Hkv, D].

    rope: (cos, sin), fp32 [max_position, D / 2] each; then k is rotated on the way in and
    q [T, Hq, D] in place. kv_scales: of K and V where the arenas are FP8. pdl: it and the next launch
    may start early, and wait. Halves are paired as in Llama: (i, i + D / 2).
    """
    if k.shape[0] == 0:
        return
    cos, sin = rope if rope is not None else (plan["counts"], plan["counts"])
    append_build(shape, rope is not None, pdl).launch(
        (k.shape[0],), k, v, q, q, k_arena, v_arena, plan["counts"], plan["slot_mapping"],
        plan["row_position"], cos, sin, k.stride(0), v.stride(0), q.stride(0), q.stride(0),
        *scale_arguments(shape, 1 / kv_scales[0], 1 / kv_scales[1]),
    )  # fmt: skip
