"""What a decoder layer does between its matrix products, one launch each on a GPU.

On a CPU the same functions are plain torch: they are the twins that the kernels are tested
against. Arithmetic is fp32 inside; results are rounded once to the dtype of x.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F


def add_rms_norm(
    delta: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """delta, x [T, N], weight [N] -> (normed [T, N], sum [T, N]) with sum = x + delta.

    x None: the sum is delta itself. normed = sum / rms(sum) * weight.
    """
    if delta.is_cuda and delta.shape[0]:
        return _kernels().add_rms_norm(delta, x, weight, eps)
    total = delta if x is None else x + delta
    return F.rms_norm(total, (total.shape[-1],), weight, eps), total


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 F] -> silu(gate) * up [T, F]; gate is the first half."""
    if gate_up.is_cuda and gate_up.shape[0]:
        return _kernels().silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@functools.cache
def _kernels() -> Any:
    from granikv.models import fused_kernels  # needs triton, so only on a GPU

    return fused_kernels
