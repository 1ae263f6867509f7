"""Triton kernels of `granikv.models.fused`: a row per program, no reduction across programs.

PDL: the launch may start before the one in front of it has ended, and waits for it before it reads
what that one wrote (compute capability 9 and up).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from granikv.attention.kernels.common import INTERPRET, start_dependents, to_e4m3, wait_for_previous
from granikv.attention.kernels.launch import Launcher
from granikv.attention.variants import FIRST_WITH_DEPENDENT_LAUNCHES
from granikv.models.fp8 import FP8, FP8_MAX, LEAST, Fp8Input, Fp8Rows

_FP8_MAX, _LEAST = tl.constexpr(FP8_MAX), tl.constexpr(LEAST)


@triton.jit
def _store_row(
    x,  # fp32 [BLOCK], zero where not kept
    out_ptr,  # [T, N]: e4m3 when FP8
    scales_ptr,  # fp32 [T], written when FP8
    fixed_scale,  # fp32; None: the row's own
    fixed_inverse,  # fp32: 1 / fixed_scale, or None
    row,
    at,  # [BLOCK]: columns
    keep,
    N,
    FP8: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """x as row `row` of the output, in its type; FP8: see granikv.models.fp8.Fp8Input."""
    if FP8:
        if fixed_scale is None:
            largest = tl.maximum(tl.max(tl.abs(x), axis=0), _LEAST)
            scale, inverse = largest * (1 / _FP8_MAX), tl.div_rn(_FP8_MAX, largest)
        else:
            scale, inverse = fixed_scale, fixed_inverse
        tl.store(scales_ptr + row, scale)
        tl.store(out_ptr + row * N + at, to_e4m3(x * inverse, INTERPRET), mask=keep)
    else:
        tl.store(out_ptr + row * N + at, x.to(out_ptr.dtype.element_ty), mask=keep)


@triton.jit
def sum_parts(
    delta_ptr,  # [PARTS, T, N], row stride delta_stride
    row,
    n,
    keep,
    delta_stride,
    part_stride,
    PARTS: tl.constexpr,
):
    """Row `row` of the sum over the parts, fp32 [BLOCK_N], zero where not kept."""
    total = tl.load(delta_ptr + row * delta_stride + n, mask=keep, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        more_ptr = delta_ptr + part * part_stride.to(tl.int64) + row * delta_stride
        total += tl.load(more_ptr + n, mask=keep, other=0.0).to(tl.float32)
    return total


@triton.jit
def norm_row(
    total,  # fp32 [BLOCK_N], zero where not kept
    weight,  # fp32 [BLOCK_N]
    normed_ptr,
    total_ptr,
    scales_ptr,
    fixed_scale,
    fixed_inverse,
    eps,
    row,
    n,
    keep,
    N: tl.constexpr,
    KEEP_TOTAL: tl.constexpr,
    FP8: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """total as row `row` of total_ptr where KEEP_TOTAL, and its norm as that of normed_ptr."""
    if KEEP_TOTAL:
        rounded = total.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * N + n, rounded, mask=keep)
        total = rounded.to(tl.float32)  # what the next layer adds to, not more than that
    scale = tl.rsqrt(tl.sum(total * total, axis=0) / N + eps)
    normed = total * scale * weight
    _store_row(
        normed, normed_ptr, scales_ptr, fixed_scale, fixed_inverse, row, n, keep, N, FP8, INTERPRET
    )  # fmt: skip


@triton.jit
def add_rms_norm_kernel(
    delta_ptr,  # [PARTS, T, N], row stride delta_stride
    x_ptr,  # [T, N], read when HAS_X
    weight_ptr,  # [N]
    normed_ptr,  # [T, N]
    total_ptr,  # [T, N], written when HAS_X
    scales_ptr,  # fp32 [T], written when FP8
    fixed_scale,  # fp32 or None, see _store_row
    fixed_inverse,
    eps,
    delta_stride,
    part_stride,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_X: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    start_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    keep = n < N
    weight = tl.load(weight_ptr + n, mask=keep, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    total = sum_parts(delta_ptr, row, n, keep, delta_stride, part_stride, PARTS)
    if HAS_X:
        total += tl.load(x_ptr + row * N + n, mask=keep, other=0.0).to(tl.float32)
    norm_row(
        total, weight, normed_ptr, total_ptr, scales_ptr, fixed_scale, fixed_inverse, eps, row, n,
        keep, N, HAS_X, FP8, INTERPRET,
    )  # fmt: skip


@triton.jit
def silu_mul_kernel(
    gate_up_ptr,  # [T, 2 F]
    out_ptr,  # [T, F]
    scales_ptr,  # fp32 [T], written when FP8
    fixed_scale,  # fp32 or None, see _store_row
    fixed_inverse,
    F: tl.constexpr,
    BLOCK_F: tl.constexpr,  # FP8: the whole row
    FP8: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    start_dependents(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    keep = f < F
    gate = tl.load(gate_up_ptr + row * 2 * F + f, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * F + F + f, mask=keep, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    _store_row(
        out, out_ptr, scales_ptr, fixed_scale, fixed_inverse, row, f, keep, F, FP8, INTERPRET
    )  # fmt: skip


@triton.jit
def quantize_rows_kernel(
    x_ptr,  # [T, N], row stride x_stride
    values_ptr,  # e4m3 [T, N]
    scales_ptr,  # fp32 [T]
    fixed_scale,  # fp32 or None, see _store_row
    fixed_inverse,
    x_stride,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    keep = n < N
    x = tl.load(x_ptr + row * x_stride + n, mask=keep, other=0.0).to(tl.float32)
    _store_row(
        x, values_ptr, scales_ptr, fixed_scale, fixed_inverse, row, n, keep, N, True, INTERPRET
    )  # fmt: skip


_add_rms_norm = Launcher(add_rms_norm_kernel)
_silu_mul = Launcher(silu_mul_kernel)
_quantize_rows = Launcher(quantize_rows_kernel)


def add_rms_norm(
    delta: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    fp8: Fp8Input | None = None,
) -> tuple[torch.Tensor | Fp8Rows, torch.Tensor]:
    """See granikv.models.fused.add_rms_norm; the last axis of delta is contiguous."""
    rows, width = delta.shape[-2:]
    parts = delta.shape[0] if delta.dim() == 3 else 1
    like = delta if x is None else x
    normed, scales, made = output_rows(like, width, fp8)
    total = delta if x is None else torch.empty_like(x)
    block, pdl = triton.next_power_of_2(width), has_pdl(delta.device)
    strides = delta.stride(-2), delta.stride(0)
    key = (
        like.dtype,
        delta.dtype,
        width,
        parts,
        x is None,
        fp8_kind(fp8),
        _aligned(delta.data_ptr(), *strides),
    )
    _add_rms_norm(
        key, (rows,),
        (delta, delta if x is None else x, weight, normed, total, scales, *fixed_scales(fp8), eps, *strides),
        {"N": width, "BLOCK_N": block, "PARTS": parts, "HAS_X": x is not None,
         "FP8": fp8 is not None, "PDL": pdl, "INTERPRET": INTERPRET},
        {"launch_pdl": pdl, "num_warps": 8 if block >= 4096 else 4},
    )  # fmt: skip
    return made, total


def silu_mul(gate_up: torch.Tensor, fp8: Fp8Input | None = None) -> torch.Tensor | Fp8Rows:
    """See granikv.models.fused.silu_mul; gate_up is contiguous."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out, scales, made = output_rows(gate_up, width, fp8)
    block = 1024 if fp8 is None else triton.next_power_of_2(width)
    grid, pdl = (rows, triton.cdiv(width, block)), has_pdl(gate_up.device)
    _silu_mul(
        (gate_up.dtype, width, fp8_kind(fp8)), grid, (gate_up, out, scales, *fixed_scales(fp8)),
        {"F": width, "BLOCK_F": block, "FP8": fp8 is not None, "PDL": pdl, "INTERPRET": INTERPRET},
        {"launch_pdl": pdl, "num_warps": silu_warps(block)},
    )  # fmt: skip
    return made


def silu_warps(block: int) -> int:
    """32 numbers of each operand in a thread; with 256 the widest rows of today spill."""
    return max(4, min(32, block // 1024))


def quantize_rows(x: torch.Tensor, fp8: Fp8Input) -> Fp8Rows:
    """See granikv.models.fused.quantize_rows."""
    rows, width = x.shape
    values, scales, made = output_rows(x, width, fp8)
    block, pdl = triton.next_power_of_2(width), has_pdl(x.device)
    key = x.dtype, width, fp8_kind(fp8), _aligned(x.data_ptr(), x.stride(0))
    _quantize_rows(
        key, (rows,), (x, values, scales, *fixed_scales(fp8), x.stride(0)),
        {"N": width, "BLOCK_N": block, "PDL": pdl, "INTERPRET": INTERPRET},
        {"launch_pdl": pdl, "num_warps": 8 if block >= 4096 else 4},
    )  # fmt: skip
    return made


def output_rows(like: torch.Tensor, width: int, fp8: Fp8Input | None) -> tuple[Any, Any, Any]:
    """Rows for a kernel to write, their scales (any pointer without FP8), and both as made."""
    if fp8 is None:
        out = like.new_empty(like.shape[0], width)
        return out, out, out
    made = Fp8Rows(
        like.new_empty(like.shape[0], width, dtype=FP8),
        like.new_empty(like.shape[0], 1, dtype=torch.float32),
    )
    return made.values, made.scales, made


def fixed_scales(fp8: Fp8Input | None) -> tuple[float | None, float | None]:
    """A checkpoint's scale and its inverse, or neither."""
    if fp8 is None or fp8.scale is None:
        return None, None
    return fp8.scale, 1 / fp8.scale


def fp8_kind(fp8: Fp8Input | None) -> bool | None:
    """Which of the three a kernel is compiled for: no FP8, a scale per row, a fixed one."""
    return None if fp8 is None else fp8.scale is None


def _aligned(*numbers: int) -> tuple[bool, ...]:
    """Triton compiles for multiples of 16 apart, so that rows are read in vectors."""
    return tuple(number % 16 == 0 for number in numbers)


@functools.cache
def has_pdl(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor >= FIRST_WITH_DEPENDENT_LAUNCHES
