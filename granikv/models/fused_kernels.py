"""Triton kernels of `granikv.models.fused`: a row per program, no reduction across programs.

PDL: the launch may start before the one in front of it has ended, and waits for it before it reads
what that one wrote (compute capability 9 and up).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from granikv.attention.kernels.common import wait_for_previous
from granikv.attention.variants import FIRST_WITH_DEPENDENT_LAUNCHES


@triton.jit
def add_rms_norm_kernel(
    delta_ptr,  # [T, N], row stride delta_stride
    x_ptr,  # [T, N], read when HAS_X
    weight_ptr,  # [N]
    normed_ptr,  # [T, N]
    total_ptr,  # [T, N], written when HAS_X
    eps,
    delta_stride,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_X: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    keep = n < N
    weight = tl.load(weight_ptr + n, mask=keep, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    total = tl.load(delta_ptr + row * delta_stride + n, mask=keep, other=0.0).to(tl.float32)
    if HAS_X:
        total += tl.load(x_ptr + row * N + n, mask=keep, other=0.0).to(tl.float32)
        rounded = total.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * N + n, rounded, mask=keep)
        total = rounded.to(tl.float32)  # what the next layer adds to, not more than that
    scale = tl.rsqrt(tl.sum(total * total, axis=0) / N + eps)
    normed = (total * scale * weight).to(normed_ptr.dtype.element_ty)
    tl.store(normed_ptr + row * N + n, normed, mask=keep)


@triton.jit
def silu_mul_kernel(
    gate_up_ptr,  # [T, 2 F]
    out_ptr,  # [T, F]
    F: tl.constexpr,
    BLOCK_F: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    keep = f < F
    gate = tl.load(gate_up_ptr + row * 2 * F + f, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * F + F + f, mask=keep, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * F + f, out.to(out_ptr.dtype.element_ty), mask=keep)


def add_rms_norm(
    delta: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See granikv.models.fused.add_rms_norm; the last axis of delta is contiguous."""
    rows, width = delta.shape
    normed = torch.empty(rows, width, dtype=delta.dtype, device=delta.device)
    total = delta if x is None else torch.empty_like(normed)
    block, pdl = triton.next_power_of_2(width), _has_pdl(delta.device)
    add_rms_norm_kernel[(rows,)](
        delta, delta if x is None else x, weight, normed, total, eps, delta.stride(0),
        N=width, BLOCK_N=block, HAS_X=x is not None, PDL=pdl, launch_pdl=pdl,
        num_warps=8 if block >= 4096 else 4,
    )  # fmt: skip
    return normed, total


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See granikv.models.fused.silu_mul; gate_up is contiguous."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    block, pdl = 1024, _has_pdl(gate_up.device)
    grid = (rows, triton.cdiv(width, block))
    silu_mul_kernel[grid](
        gate_up, out, F=width, BLOCK_F=block, PDL=pdl, launch_pdl=pdl, num_warps=4
    )
    return out


@functools.cache
def _has_pdl(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor >= FIRST_WITH_DEPENDENT_LAUNCHES
