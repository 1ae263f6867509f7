"""A weight matrix ready for products with few rows.

A decode step multiplies 1 to 64 rows; torch's plain fp32 product repacks the weight every time,
which costs it half its rate at 4 to 16 rows. Few rows go to our compiled product, which reads the
weight as it lies; for more, oneDNN keeps it in the layout of its kernel.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from granikv import native
from granikv.models.fp8 import Fp8Input
from granikv.models.fused import silu_mul

# Rows that the layout is made for; measured from 1 to 512 rows, it is best or equal from 4 on.
PACKED_ROWS = 32
MAX_PLAIN_ROWS = 2  # so few rows are read at memory speed by the plain product already
# Small matrices are kept in both layouts (a third more memory for a small model, nothing for a
# large one): as they lie few rows are faster, packed many. Of large ones both are level.
MAX_BOTH_ELEMENTS = 2**21
HALF = (torch.bfloat16, torch.float16)
MIN_PACKED_ELEMENTS = 2**16  # a smaller matrix is all call overhead


def is_large(weight: torch.Tensor) -> bool:
    """Whether it is an fp32 matrix on the CPU, large enough for a product other than torch's plain."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.numel() >= MIN_PACKED_ELEMENTS
    )


def can_pack(weight: torch.Tensor) -> bool:
    """Whether this torch has oneDNN's packed fp32 product and the matrix is large enough."""
    return (
        is_large(weight)
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


class Linear:
    """x [T, N] -> x weight^T + bias [T, M]; weight [M, N], bias [M] or None.

    held: somebody else holds the weight as well, so that a packed copy of it would be one too many.
    """

    fp8_input = None  # rows are taken as they are

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, held: bool = False):
        self.bias = None if bias is None else bias.contiguous()  # as products read it
        self.packed: torch.Tensor | None = None
        self.weight: torch.Tensor | None = weight
        if can_pack(weight) and not (held and native.library() is not None):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
            if weight.numel() > MAX_BOTH_ELEMENTS:
                self.weight = None
        self._is_native = self.weight is not None and is_large(weight) and weight.is_contiguous()
        self._is_native &= bias is None or bias.dtype == torch.float32

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_native and len(x) > MAX_PLAIN_ROWS and native.multiplies(x):
            assert self.weight is not None
            return native.product(x, self.weight, self.bias)
        if self.weight is not None and (self.packed is None or x.shape[0] <= MAX_PLAIN_ROWS):
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def partial_sums(self, x: torch.Tensor) -> torch.Tensor:
        """The product of a few rows as add_rms_norm takes it: [T, M], or fp32 parts [S, T, M]."""
        if self._is_skinny(x, gated=False):
            return _skinny().partial_sums(x, self.weight)
        return self(x)

    def gated(self, x: torch.Tensor, fp8: Fp8Input | None = None) -> Any:
        """weight [2 F, N], gate first: silu_mul of the product of a few rows, [T, F]."""
        if fp8 is None and self._is_skinny(x, gated=True):
            return _skinny().gated(x, self.weight)
        return silu_mul(self(x), fp8)

    def _is_skinny(self, x: torch.Tensor, gated: bool) -> bool:
        return x.is_cuda and self.bias is None and _skinny().takes(x, self.weight, gated)

    def in_fp32(self, x: torch.Tensor) -> torch.Tensor:
        """The same in float32. On a GPU the product itself writes it, from its fp32 sums."""
        if self.weight is not None and self.bias is None and x.is_cuda and x.dtype in HALF:
            return torch.mm(x, self.weight.t(), out_dtype=torch.float32)
        return self(x).float()


@functools.cache
def _skinny() -> Any:
    from granikv.models import skinny  # needs triton, so only on a GPU

    return skinny
