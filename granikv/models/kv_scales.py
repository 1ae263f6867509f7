"""Scales of an FP8 KV cache as a Hugging Face checkpoint has them: one for K, one for V, per layer.

A stored value is x / scale in e4m3. Names are those that vLLM reads: of llm-compressor, of NVIDIA's
model optimizer, and the older scale that K and V share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container

import torch

from granikv.errors import ModelFileError

PLACES = ("{x}_scale", "attn.{x}_scale", "{x}_proj.{x}_scale", "kv_scale")


def read_kv_scales(
    names: Container[str], get: Callable[[str], float], num_layers: int
) -> torch.Tensor | None:
    """fp32 [num_layers, 2]: of K and of V; None when no layer has one.

    names: of the checkpoint's tensors; get: the value of one. Raises ModelFileError when only some
    are there, or one is not a positive number.
    """
    found: list[list[float | None]] = []
    for index in range(num_layers):
        prefix = f"model.layers.{index}.self_attn."
        found.append([_read(prefix, x, names, get) for x in ("k", "v")])
    missing = [(i, x) for i, pair in enumerate(found) for x, s in zip("kv", pair, strict=True) if s is None]  # fmt: skip
    if len(missing) == 2 * num_layers:
        return None
    if missing:
        layer, x = missing[0]
        raise ModelFileError(
            f"model.layers.{layer}.self_attn.{x}_scale: expected a scale for K and V of every "
            f"layer, as others have one; {len(missing)} are missing"
        )
    return torch.tensor(found, dtype=torch.float32)


def quantizes_kv_alone(quantization: dict) -> bool:
    """Whether a config.json's quantization_config leaves all weights as they are."""
    is_known = quantization.get("quant_method") == "compressed-tensors"
    scheme = quantization.get("kv_cache_scheme") or {}
    is_fp8 = (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)
    return is_known and is_fp8 and quantization.get("config_groups") == {}


def _read(prefix: str, x: str, names: Container[str], get: Callable[[str], float]) -> float | None:
    for place in PLACES:
        name = prefix + place.format(x=x)
        if name in names:
            scale = get(name)
            if not 0 < scale < math.inf:
                raise ModelFileError(f"{name}: expected a positive number, got {scale}")
            return scale
    return None
