"""Products of FP8 rows with FP8 weights: torch._scaled_mm on a GPU, its arithmetic elsewhere.

The rows come quantised from the launch in front (granikv.models.fused), or are quantised here.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from granikv.errors import InvalidArgument, Unsupported
from granikv.models.fp8 import Fp8Input, Fp8Rows, Fp8Weight, Weight
from granikv.models.fused import quantize_rows, silu_mul
from granikv.models.linear import Linear

ALIGNMENT = 16  # elements: what the matrix instructions' copies ask of both sizes


class Product(Protocol):
    """x [T, N] -> [T, M]; x is Fp8Rows where fp8_input says so, or a tensor."""

    @property
    def fp8_input(self) -> Fp8Input | None: ...

    def __call__(self, x: Any) -> torch.Tensor: ...

    def partial_sums(self, x: Any) -> torch.Tensor:
        """See Linear.partial_sums."""

    def gated(self, x: Any, fp8: Fp8Input | None = None) -> Any:
        """See Linear.gated."""


def make_product(weight: Weight, bias: torch.Tensor | None, dtype: torch.dtype) -> Product:
    """weight [M, N], bias [M] or None; dtype: of the results."""
    if isinstance(weight, Fp8Weight):
        return Fp8Linear(weight, bias, dtype)
    return Linear(weight, bias)


class Fp8Linear:
    """x [T, N] -> (values of x) (values of weight)^T * scales of rows * scales of channels + bias.

    On a GPU dtype is bfloat16 and sums are the tensor cores' (`use_fast_accum`); elsewhere the
    values are multiplied in fp32. Raises Unsupported and InvalidArgument for a size or a dtype that
    the GPU's product has not.
    """

    def __init__(self, weight: Fp8Weight, bias: torch.Tensor | None, dtype: torch.dtype):
        self.fp8_input = weight.input
        self.bias, self.dtype = bias, dtype
        self.scales = weight.scales.view(1, -1)  # fp32 [1, M]
        self.values: Any = None  # e4m3 [N, M], column-major
        self.widened: Linear | None = None
        if not weight.values.is_cuda:
            self.widened = Linear(weight.values.float())
            return
        self.values = weight.values.t()
        if dtype != torch.bfloat16:
            raise InvalidArgument("dtype", dtype, "bfloat16 with FP8 weights on a GPU")
        if weight.shape[0] % ALIGNMENT or weight.shape[1] % ALIGNMENT:
            raise Unsupported(
                f"FP8 weight [M, N]: expected multiples of {ALIGNMENT}, got {list(weight.shape)}; "
                "leave the model in bfloat16, or cut it over fewer ranks"
            )

    def __call__(self, x: torch.Tensor | Fp8Rows) -> torch.Tensor:
        rows = quantize_rows(x, self.fp8_input) if isinstance(x, torch.Tensor) else x
        if self.widened is not None:
            out = self.widened(rows.values.float()) * rows.scales * self.scales
            return (out if self.bias is None else out + self.bias).to(self.dtype)
        if not rows.values.shape[0]:
            return self.scales.new_empty(0, self.scales.shape[1], dtype=self.dtype)
        return torch._scaled_mm(
            rows.values, self.values, scale_a=rows.scales, scale_b=self.scales, bias=self.bias,
            out_dtype=self.dtype, use_fast_accum=True,
        )  # fmt: skip

    partial_sums = __call__

    def gated(self, x: torch.Tensor | Fp8Rows, fp8: Fp8Input | None = None) -> Any:
        """See Linear.gated."""
        return silu_mul(self(x), fp8)
