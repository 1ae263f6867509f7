"""Building blocks of the decoder: rotary embedding.

Plain functions on tensors; they know nothing of weights files, caches or batches.
"""

from __future__ import annotations

import math

import torch

from granikv.errors import Unsupported

ROPE_TYPES = ("default", "linear", "llama3")


def rope_type(scaling: dict | None) -> str:
    """The kind of a Hugging Face rope dictionary. Raises Unsupported for one not served."""
    if not scaling:
        return "default"
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise Unsupported(
            f"rope scaling: expected one of {', '.join(ROPE_TYPES)}, got {kind!r}; "
            "use a model with one of these"
        )
    return kind


def rope_inv_freq(head_dim: int, theta: float, scaling: dict | None) -> torch.Tensor:
    """Angles per position, float64 [head_dim / 2].

    llama3 scaling: https://github.com/meta-llama/llama-models, `apply_scaling`.
    """
    inv_freq = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    kind = rope_type(scaling)
    if kind == "default" or scaling is None:
        return inv_freq
    factor = float(scaling["factor"])
    if kind == "linear":
        return inv_freq / factor
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    wavelen = 2 * math.pi / inv_freq
    smooth = ((original / wavelen - low) / (high - low)).clamp(0.0, 1.0)  # 0: scaled, 1: kept
    return (1 - smooth) * inv_freq / factor + smooth * inv_freq


class RotaryTable:
    """cos and sin of every position, float32 [max_position, head_dim / 2] each."""

    def __init__(
        self,
        head_dim: int,
        max_position: int,
        theta: float,
        scaling: dict | None = None,
        freq_divisors: torch.Tensor | None = None,
        device: torch.device | str = "cpu",
    ):
        """freq_divisors: float [head_dim / 2], the factors that a GGUF file carries, or None;
        device: where positions are looked up."""
        inv_freq = rope_inv_freq(head_dim, theta, scaling)
        if freq_divisors is not None:
            inv_freq = inv_freq / freq_divisors.double()
        # float32 angles, as the reference implementations compute them
        angles = torch.outer(torch.arange(max_position).float(), inv_freq.float())
        self.cos, self.sin = angles.cos().to(device), angles.sin().to(device)

    def lookup(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """positions int64 [T] -> (cos, sin), each [T, 1, head_dim].

        sin carries the sign of half-split rotation: negative in the first half.
        """
        cos, sin = self.cos[positions].to(dtype), self.sin[positions].to(dtype)
        return (
            torch.cat((cos, cos), dim=-1).unsqueeze(1),
            torch.cat((-sin, sin), dim=-1).unsqueeze(1),
        )


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, H, D], cos and sin of RotaryTable.lookup -> rotated [T, H, D], half-split pairs."""
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((second, first), dim=-1), sin)
