"""Weights in the layout the decoder runs, and the reader of Hugging Face folders.

Q, K, V and gate, up are fused here, once, so that a decode step has four matrix products a layer.
It knows nothing of GGUF and nothing of how the forward pass uses the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from granikv.config import ModelConfig
from granikv.errors import InvalidArgument, ModelFileError, Unsupported, shown
from granikv.models.fp8 import Weight, join_rows, quantizing
from granikv.models.fp8_checkpoint import check_fp8_names, holds_fp8, read_fp8_weight
from granikv.models.kv_scales import read_kv_scales
from granikv.models.layers import rope_inv_freq, rope_type

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# What transformers takes where config.json is silent
DEFAULT_WINDOW, QWEN_MAX_WINDOW_LAYERS = 4096, 28


@dataclass
class LayerWeights:
    """Hq and Hkv are the head counts, D the head size, N hidden, F intermediate."""

    input_norm: torch.Tensor  # [N]
    qkv: Weight  # [(Hq + 2 Hkv) * D, N]
    qkv_bias: torch.Tensor | None  # [(Hq + 2 Hkv) * D]
    qk_norm: torch.Tensor | None  # [Hq + Hkv, D]: the q weight per q head, then the k weight
    out: Weight  # [N, Hq * D]
    post_norm: torch.Tensor  # [N]
    gate_up: Weight  # [2 F, N]
    down: Weight  # [N, F]


@dataclass
class ModelWeights:
    embedding: torch.Tensor  # [vocab, N]
    layers: list[LayerWeights]
    final_norm: torch.Tensor  # [N]
    lm_head: torch.Tensor  # [vocab, N]; the embedding itself when tied
    rope_divisors: torch.Tensor | None = None  # [D / 2], GGUF only
    kv_scales: torch.Tensor | None = None  # fp32 [layers, 2]: of FP8 K and V; None: none stored


def build_weights(config: ModelConfig, get: Callable[[str, tuple[int, ...]], Any]) -> ModelWeights:
    """Fused weights. get(name, shape) returns the tensor of a Hugging Face name, checked, or of a
    layer's projection an Fp8Weight."""
    n, f, d = config.hidden_size, config.intermediate_size, config.head_dim
    rows = {
        "q": config.num_qo_heads * d,
        "k": config.num_kv_heads * d,
        "v": config.num_kv_heads * d,
    }
    layers = []
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        attn, mlp = prefix + "self_attn.", prefix + "mlp."
        bias = qk_norm = None
        if config.attention_bias:
            bias = torch.cat([get(f"{attn}{x}_proj.bias", (r,)) for x, r in rows.items()])
        if config.qk_norm:
            qk_norm = torch.cat(
                [
                    get(attn + "q_norm.weight", (d,)).expand(config.num_qo_heads, d),
                    get(attn + "k_norm.weight", (d,)).expand(config.num_kv_heads, d),
                ]
            )
        layers.append(
            LayerWeights(
                input_norm=get(prefix + "input_layernorm.weight", (n,)),
                qkv=join_rows(
                    f"{attn}qkv", [get(f"{attn}{x}_proj.weight", (r, n)) for x, r in rows.items()]
                ),
                qkv_bias=bias,
                qk_norm=qk_norm,
                out=get(attn + "o_proj.weight", (n, rows["q"])),
                post_norm=get(prefix + "post_attention_layernorm.weight", (n,)),
                gate_up=join_rows(
                    f"{mlp}gate_up", [get(f"{mlp}{x}_proj.weight", (f, n)) for x in ("gate", "up")]
                ),
                down=get(mlp + "down_proj.weight", (n, f)),
            )
        )
    embedding = get("model.embed_tokens.weight", (config.vocab_size, n))
    lm_head = embedding
    if not config.tie_embeddings:
        lm_head = get("lm_head.weight", (config.vocab_size, n))
    return ModelWeights(embedding, layers, get("model.norm.weight", (n,)), lm_head)


def check_architecture(name: object, where: Path) -> str:
    """The name, if it is one of ARCHITECTURES. Raises ModelFileError."""
    if name not in ARCHITECTURES:
        raise ModelFileError(
            f"{where}: architecture: expected one of {', '.join(ARCHITECTURES)}, got {name!r}"
        )
    return str(name)


def effective_window(window: int | None, max_position: int) -> int | None:
    """The sliding window, or None where it hides nothing: 0, or as long as the context."""
    return window if window and window < max_position else None


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFileError(f"{path}: expected a readable JSON file: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: expected valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelFileError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def _window_of(raw: dict, architecture: str, where: Path) -> int | None:
    """The window of all layers, read as transformers does: Llama has none, Qwen a switch for it.

    Raises Unsupported where layers differ.
    """
    is_qwen = architecture.startswith("Qwen")
    if architecture == "LlamaForCausalLM" or (is_qwen and not raw.get("use_sliding_window")):
        return None
    window = effective_window(
        raw.get("sliding_window", DEFAULT_WINDOW), raw["max_position_embeddings"]
    )
    num_layers, types = raw["num_hidden_layers"], raw.get("layer_types")
    num_sliding = num_layers
    if types is not None:
        num_sliding = types.count("sliding_attention")
    elif is_qwen:
        num_sliding = max(0, num_layers - raw.get("max_window_layers", QWEN_MAX_WINDOW_LAYERS))
    if window is not None and 0 < num_sliding < num_layers:
        raise Unsupported(
            f"{where}: sliding_window={window} in {num_sliding} of {num_layers} layers: expected "
            "one window in all layers or none; models that mix sliding and full attention are not "
            "served: lower max_position_embeddings to the window"
        )
    return window if num_sliding else None


def _refuse_unserved(raw: dict, architecture: str, where: Path) -> None:
    """Raises Unsupported for settings that would change the result and are not served."""
    rope = raw.get("rope_parameters") or {}
    holds_fp8(raw.get("quantization_config"), where)
    unserved = {
        "hidden_act": raw.get("hidden_act", "silu") not in ("silu", "swish"),
        "mlp_bias": bool(raw.get("mlp_bias")),
        "attention_bias": bool(raw.get("attention_bias")) and architecture != "Qwen2ForCausalLM",
        "partial_rotary_factor": float(
            raw.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0
        )
        != 1.0,
    }
    for name, found in unserved.items():
        if found:
            raise Unsupported(f"{where}: {name}={raw.get(name)!r} is not served for {architecture}")


def read_hf_config(folder: Path) -> ModelConfig:
    """ModelConfig of a Hugging Face folder. Raises ModelFileError or Unsupported."""
    path = folder / "config.json"
    raw = _read_json(path)
    eos = raw.get("eos_token_id")
    generation = folder / "generation_config.json"
    if generation.exists():
        eos = _read_json(generation).get("eos_token_id", eos)
    try:
        return _parse_config(raw, eos, path)
    except KeyError as error:
        raise ModelFileError(f"{path}: expected the key {error}, which is missing") from error
    except (ModelFileError, Unsupported):
        raise
    except (TypeError, ValueError, AttributeError, ArithmeticError, InvalidArgument) as error:
        raise ModelFileError(f"{path}: expected a decoder's configuration: {error}") from error


def _parse_config(raw: dict, eos: Any, path: Path) -> ModelConfig:
    """eos: a token id, a list of them, or None. A value of another type raises what it raises."""
    names = raw.get("architectures") or [None]
    architecture = check_architecture(names[0] if isinstance(names, list) else names, path)
    _refuse_unserved(raw, architecture, path)
    rope = raw.get("rope_parameters") or raw.get("rope_scaling")
    heads = raw["num_attention_heads"]
    config = ModelConfig(
        architecture=architecture,
        num_layers=raw["num_hidden_layers"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_qo_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        vocab_size=raw["vocab_size"],
        max_position=raw["max_position_embeddings"],
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=float((rope or {}).get("rope_theta") or raw.get("rope_theta") or 10000.0),
        rope_scaling=rope if rope_type(rope) != "default" else None,
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=architecture == "Qwen2ForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,)),
        sliding_window=_window_of(raw, architecture, path),
    )
    some = rope_inv_freq(min(config.head_dim, 128), config.rope_theta, config.rope_scaling)
    if not some.isfinite().all():
        raise InvalidArgument("rope_parameters", rope, "factors that scale by a finite number")
    return config


def shard_paths(folder: Path) -> list[Path]:
    """The *.safetensors files, those of the index if there is one. Raises ModelFileError."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = _read_json(index).get("weight_map", {})
        names: list[Any] = list(shards.values()) if isinstance(shards, dict) else [None]
        for name in names:
            if not isinstance(name, str) or Path(name).name != name:
                raise ModelFileError(
                    f"{index}: weight_map: expected names of files beside it, got {shown(name)}"
                )
        paths = [folder / name for name in sorted(set(names))]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelFileError(f"{folder}: expected *.safetensors files, found none")
    for path in paths:
        if not path.is_file():
            raise ModelFileError(f"{path}: expected this shard of {index.name}, it is missing")
    return paths


class _Shards:
    """The *.safetensors files of a folder as one map from name to tensor."""

    def __init__(self, folder: Path, dtype: torch.dtype):
        self.folder, self.dtype = folder, dtype
        paths = shard_paths(folder)
        self.file_of: dict[str, tuple[Path, safe_open]] = {}
        for path in paths:
            try:
                handle = safe_open(str(path), framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelFileError(
                    f"{path}: expected a complete safetensors file (truncated or corrupt?): {error}"
                ) from error
            self.file_of.update({name: (path, handle) for name in handle.keys()})  # noqa: SIM118

    def header(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor of that shape without values. Raises ModelFileError when it is not there."""
        if name not in self.file_of:
            raise ModelFileError(
                f"{self.folder}: expected the tensor {name} {list(shape)}: missing"
            )
        path, handle = self.file_of[name]
        entry = handle.get_slice(name)
        found = entry.get_shape()
        if tuple(found) != shape:
            raise ModelFileError(f"{path}: {name}: expected shape {list(shape)}, got {list(found)}")
        check_fp8_names(name, entry.get_dtype(), self.file_of.__contains__)
        return torch.empty(shape, device="meta")

    def get(self, name: str, shape: tuple[int, ...]) -> Weight:
        """The tensor, in the model's dtype unless it is FP8. Raises ModelFileError, Unsupported."""
        self.header(name, shape)
        tensor = self._stored(name)
        if tensor.dtype.itemsize == 1:
            return read_fp8_weight(name, tensor, 0, shape[0], self.find)
        return tensor.to(self.dtype)

    def find(self, name: str) -> torch.Tensor | None:
        """The tensor as it is stored, or None. Raises ModelFileError."""
        return self._stored(name) if name in self.file_of else None

    def scalar(self, name: str) -> float:
        """The value of a tensor with one element. Raises ModelFileError."""
        value = self._stored(name)
        if value.numel() != 1:
            path, _ = self.file_of[name]
            raise ModelFileError(f"{path}: {name}: expected one value, got {list(value.shape)}")
        return float(value)

    def _stored(self, name: str) -> torch.Tensor:
        path, handle = self.file_of[name]
        try:
            return handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelFileError(f"{path}: {name}: unreadable: {error}") from error


def check_hf_weights(folder: Path) -> None:
    """Names and shapes of all tensors, none of which is read. Raises ModelFileError."""
    build_weights(read_hf_config(folder), _Shards(folder, torch.float32).header)


def stores_fp8(folder: Path) -> bool:
    """Whether a Hugging Face folder has FP8 weights. Raises ModelFileError or Unsupported."""
    path = folder / "config.json"
    return holds_fp8(_read_json(path).get("quantization_config"), path)


def load_hf(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    quantization: str | None = None,
) -> tuple[ModelConfig, ModelWeights]:
    """Configuration and weights of a Hugging Face folder; quantization: see load_model.

    Raises ModelFileError (missing, truncated, wrong shape) or Unsupported.
    """
    config, shards = read_hf_config(folder), _Shards(folder, dtype)
    weights = build_weights(config, quantizing(shards.get, quantization, device))
    weights.kv_scales = read_kv_scales(shards.file_of, shards.scalar, config.num_layers)
    return config, weights
