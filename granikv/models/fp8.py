"""FP8 weights and FP8 rows: e4m3 values beside fp32 scales, a value is e4m3 * scale.

A scale per row of a matrix, always: of a weight per output channel, of a step's rows per token. A
scale that a file gives for a whole tensor is that of every channel of it, so fused projections keep
the values that their parts had. It knows no file format and no kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from granikv.errors import Unsupported

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # e4m3 has no infinity
LEAST = 1e-30  # a row's largest number counts as no less, so that rows of zeros have a scale


@dataclass(frozen=True)
class Fp8Rows:
    """Rows [T, N] of a product's input."""

    values: torch.Tensor  # e4m3 [T, N]
    scales: torch.Tensor  # fp32 [T, 1]


@dataclass(frozen=True)
class Fp8Input:
    """How a product wants its rows: scaled each by its own largest number, or all by `scale`."""

    scale: float | None = None  # of a calibrated checkpoint

    def quantize(self, x: torch.Tensor) -> Fp8Rows:
        """x [T, N] in fp32 arithmetic, saturated, rounded to even; NaN stays NaN."""
        x = x.float()
        if self.scale is None:
            largest = x.abs().amax(dim=-1, keepdim=True).clamp_min(LEAST)
            scales = largest * (1 / FP8_MAX)
            inverse: torch.Tensor | float = FP8_MAX / largest
        else:
            scales = torch.full_like(x[:, :1], self.scale)
            inverse = 1 / self.scale
        return Fp8Rows((x * inverse).clamp_(-FP8_MAX, FP8_MAX).to(FP8), scales)


@dataclass(frozen=True)
class Fp8Weight:
    """A weight [M, N] in the layout of a 16-bit one."""

    values: torch.Tensor  # e4m3 [M, N]
    scales: torch.Tensor  # fp32 [M], of the output channels
    input: Fp8Input = Fp8Input()

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def to(self, device: torch.device) -> Fp8Weight:
        return Fp8Weight(self.values.to(device), self.scales.to(device), self.input)

    def cut(self, first: int, count: int, columns: tuple[int, int] | None) -> Fp8Weight:
        """A copy of rows [first, first + count), of these the half-open `columns` (None: all)."""
        values = self.values[first : first + count, slice(*columns or (None,))]
        return Fp8Weight(
            values.contiguous().clone(), self.scales[first : first + count].clone(), self.input
        )


Weight = torch.Tensor | Fp8Weight


def is_product(name: str) -> bool:
    """Whether a Hugging Face name is of a layer's projection: what FP8 is for."""
    return name.startswith("model.layers.") and name.endswith("_proj.weight")


def quantize_weight(weight: torch.Tensor, quantization: str) -> Fp8Weight:
    """weight [M, N] with a scale per row ("fp8") or one of the tensor ("fp8_per_tensor")."""
    if quantization == "fp8":
        rows = Fp8Input().quantize(weight)
    else:
        rows = Fp8Input(max(float(weight.abs().max()), LEAST) / FP8_MAX).quantize(weight)
    return Fp8Weight(rows.values, rows.scales.view(-1))


def quantizing(
    get: Callable[[str, tuple[int, ...]], Weight],
    quantization: str | None,
    device: torch.device | str,
) -> Callable[[str, tuple[int, ...]], Weight]:
    """`get` with the projections in FP8, quantised one by one on the device; those that are FP8
    already stay as they are. quantization: of EngineConfig."""

    def get_quantized(name: str, shape: tuple[int, ...]) -> Weight:
        weight = get(name, shape)
        if quantization is None or isinstance(weight, Fp8Weight) or not is_product(name):
            return weight
        return quantize_weight(weight.to(device), quantization)

    return get_quantized


def join_rows(name: str, parts: Sequence[Weight]) -> Weight:
    """Weights [M_i, N] one below another: `name` [sum M_i, N].

    Calibrated input scales of the parts become the largest, with which nothing saturates that did
    not before. Raises Unsupported for parts that are not all FP8, or not all calibrated.
    """
    fp8 = [part for part in parts if isinstance(part, Fp8Weight)]
    if not fp8:
        return torch.cat([part for part in parts if isinstance(part, torch.Tensor)])
    calibrated = [part.input.scale for part in fp8 if part.input.scale is not None]
    if len(fp8) < len(parts) or len(calibrated) not in (0, len(parts)):
        what = "FP8 weights" if len(fp8) < len(parts) else "FP8 weights with an input_scale"
        raise Unsupported(
            f"{name}: its {len(parts)} parts are one product here: expected all or none of them as "
            f"{what}, got {min(len(fp8), len(calibrated) or len(fp8))}; quantise them alike"
        )
    return Fp8Weight(
        torch.cat([part.values.view(torch.uint8) for part in fp8]).view(FP8),
        torch.cat([part.scales for part in fp8]),
        Fp8Input(max(calibrated, default=None)),
    )
