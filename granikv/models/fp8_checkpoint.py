"""FP8 weights as Hugging Face checkpoints have them: which are served, and a weight's scales.

Two forms: of llm-compressor ("compressed-tensors", float-quantized) and "fp8" (AutoFP8's, vLLM's and
transformers' without blocks). https://github.com/neuralmagic/compressed-tensors,
https://docs.vllm.ai/en/latest/features/quantization/fp8.html. Beside `x_proj.weight` in e4m3 lies what a
value is multiplied with, and in calibrated ones the scale of the input.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch

from granikv.errors import ModelFileError, Unsupported
from granikv.models.fp8 import Fp8Input, Fp8Weight, is_product
from granikv.models.kv_scales import quantizes_kv_alone

SERVED = (
    "FP8 (e4m3) with a scale per tensor or output channel and FP8 activations, of llm-compressor "
    "(compressed-tensors, float-quantized) or quant_method 'fp8'; "
    "or start from a 16-bit checkpoint with quantization=fp8"
)
WEIGHT_SCALES = ("weight_scale", "weight_scale_inv")  # both are multiplied with
INPUT_SCALES = ("input_scale", "activation_scale")

Find = Callable[[str], torch.Tensor | None]  # a checkpoint's tensor by name


def holds_fp8(quantization: dict | None, where: Path) -> bool:
    """Whether a config.json's quantization_config is of FP8 weights; False: of none.

    Raises Unsupported for all else that changes weights, naming what is not served.
    """
    if quantization is None or quantizes_kv_alone(quantization):
        return False
    method = quantization.get("quant_method")
    if method == "compressed-tensors":
        reason = _not_served_of_llm_compressor(quantization)
    elif method == "fp8":
        reason = _not_served_of_fp8(quantization)
    else:
        reason = f"quant_method={method!r}"
    if reason:
        raise Unsupported(
            f"{where}: quantization_config: {reason} is not served; expected {SERVED}"
        )
    return True


def _not_served_of_fp8(quantization: dict) -> str | None:
    if quantization.get("weight_block_size"):
        return f"weight_block_size={quantization['weight_block_size']}"
    if quantization.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        return f"fmt={quantization['fmt']!r}"
    scheme = quantization.get("activation_scheme", "dynamic")
    return None if scheme in ("static", "dynamic") else f"activation_scheme={scheme!r}"


def _not_served_of_llm_compressor(quantization: dict) -> str | None:
    if quantization.get("format", "float-quantized") != "float-quantized":
        return f"format={quantization['format']!r}"
    groups = quantization.get("config_groups") or {}
    if not groups:
        return "config_groups={}"
    for name, group in groups.items():
        for part, strategies in (
            ("weights", ("tensor", "channel")),
            ("input_activations", ("tensor", "token")),
        ):
            found = group.get(part) or {}
            if (found.get("type"), found.get("num_bits")) != ("float", 8):
                return f"config_groups.{name}.{part}={found or None}"
            if found.get("strategy") not in strategies:
                return f"config_groups.{name}.{part}.strategy={found.get('strategy')!r}"
    return None


def check_fp8_names(name: str, stored_dtype: str, has: Callable[[str], bool]) -> None:
    """Raises ModelFileError for a tensor of 8 bits without scales, as far as names tell.

    stored_dtype: of safetensors.
    """
    if stored_dtype.startswith("F8_") and not any(map(has, _names(name, WEIGHT_SCALES))):
        raise ModelFileError(
            f"{name}: {stored_dtype}: expected {WEIGHT_SCALES[0]} beside it: missing"
        )


def read_fp8_weight(name: str, values: torch.Tensor, first: int, rows: int, find: Find) -> Fp8Weight:  # fmt: skip
    """Rows [first, first + M) of the tensor `name` with `rows` rows, as a weight.

    values [M, N] as stored. Raises Unsupported, or ModelFileError for scales that are no scales.
    """
    if values.dtype != torch.float8_e4m3fn or not is_product(name):
        raise Unsupported(f"{name}: {values.dtype} is not served here; expected {SERVED}")
    found = [scale for n in _names(name, WEIGHT_SCALES) if (scale := find(n)) is not None]
    if not found:
        raise ModelFileError(f"{name}: expected {WEIGHT_SCALES[0]} beside it: missing")
    scales = found[0].float().cpu()
    if scales.numel() not in (1, rows):
        raise Unsupported(
            f"{name}: scale: expected one, or {rows} of the output channels, got "
            f"{list(scales.shape)} (blocks or groups are not served)"
        )
    of_input = [scale for n in _names(name, INPUT_SCALES) if (scale := find(n)) is not None]
    if of_input and of_input[0].numel() != 1:
        raise Unsupported(f"{name}: input_scale: expected one, got {list(of_input[0].shape)}")
    for scale in (scales, *of_input[:1]):
        if not ((scale.float() > 0) & (scale.float() < math.inf)).all():
            raise ModelFileError(f"{name}: scales: expected positive numbers, got {scale.min()}")
    own = scales.reshape(-1).expand(rows)[first : first + values.shape[0]].contiguous()
    return Fp8Weight(values, own, Fp8Input(float(of_input[0])) if of_input else Fp8Input())


def _names(name: str, suffixes: tuple[str, ...]) -> list[str]:
    return [f"{name.removesuffix('weight')}{suffix}" for suffix in suffixes]
