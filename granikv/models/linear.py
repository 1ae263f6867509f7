"""A weight matrix ready for products with few rows.

A decode step multiplies 1 to 64 rows; torch's plain fp32 product repacks the weight every time,
which costs it half its rate at 4 to 16 rows. oneDNN keeps the weight in the layout of its kernel.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

# Rows that the layout is made for; measured from 1 to 512 rows, it is best or equal from 4 on.
PACKED_ROWS = 32
MIN_PACKED_OUTPUTS = 1024  # smaller matrices stay in the cache: packing gains nothing


def can_pack(weight: torch.Tensor) -> bool:
    """Whether this torch has oneDNN's packed fp32 product and the matrix is large enough."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.shape[0] >= MIN_PACKED_OUTPUTS
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


class Linear:
    """x [T, N] -> x weight^T + bias [T, M]; weight [M, N], bias [M] or None."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        self.bias = bias
        self.weight = weight
        self.is_packed = can_pack(weight)
        if self.is_packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)
