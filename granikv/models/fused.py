"""What a decoder layer does between its matrix products, one launch each on a GPU.

On a CPU the same functions are plain torch: they are the twins that the kernels are tested
against. Rows in fp32 go to the compiled CPU kernel where there is one. Arithmetic is fp32 inside;
results are rounded once, to the dtype of x or to FP8 with a scale per row, where the next product
wants that (fp8: its `fp8_input`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from granikv import native
from granikv.models.fp8 import Fp8Input, Fp8Rows


def add_rms_norm(
    delta: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    fp8: Fp8Input | None = None,
) -> tuple[Any, torch.Tensor]:
    """delta, x [T, N], weight [N] -> (normed [T, N], sum [T, N]) with sum = x + delta.

    delta may be fp32 parts [S, T, N] to be summed. x None: the sum is delta itself. normed = sum / rms(sum) * weight, with fp8 as Fp8Rows.
    """
    if delta.is_cuda and delta.shape[-2]:
        return _kernels().add_rms_norm(delta, x, weight, eps, fp8)
    if delta.dim() == 3 and x is not None:
        delta = delta.sum(0)
    if fp8 is None and delta.dim() == 2 and native.takes(delta, x, weight):
        return native.add_rms_norm(delta, x, weight, eps)
    total = delta if x is None else (x + delta).to(x.dtype)
    if fp8 is not None:
        normed = F.rms_norm(total.float(), (total.shape[-1],), weight.float(), eps)
        return fp8.quantize(normed), total
    return F.rms_norm(total, (total.shape[-1],), weight, eps), total


def silu_mul(gate_up: torch.Tensor, fp8: Fp8Input | None = None) -> Any:
    """gate_up [T, 2 F] -> silu(gate) * up [T, F], with fp8 as Fp8Rows; gate is the first half."""
    if gate_up.is_cuda and gate_up.shape[0]:
        return _kernels().silu_mul(gate_up, fp8)
    if fp8 is None and native.takes(gate_up):
        return native.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    if fp8 is not None:
        return fp8.quantize(F.silu(gate.float()).mul_(up))
    return F.silu(gate).mul_(up)


def quantize_rows(x: torch.Tensor, fp8: Fp8Input) -> Fp8Rows:
    """x [T, N], the last axis contiguous, where no launch in front can write it as FP8."""
    if x.is_cuda and x.shape[0]:
        return _kernels().quantize_rows(x, fp8)
    return fp8.quantize(x)


@functools.cache
def _kernels() -> Any:
    from granikv.models import fused_kernels  # needs triton, so only on a GPU

    return fused_kernels
