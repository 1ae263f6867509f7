"""Checks an engine's configuration against machine, model and profile before weights are loaded.

One place for every way in: the engine itself, `granikv serve` before it starts a server, inspect.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import torch

from granikv.config import INT32_MAX, EngineConfig, ModelConfig
from granikv.cost_model import CostModel
from granikv.engines.manifest import load_manifest
from granikv.engines.sharding import Shard
from granikv.errors import EngineMismatch, InvalidArgument, Unavailable, Unsupported
from granikv.executor import resolve_device
from granikv.executor.tensorrt_executor import engine_sizes
from granikv.executor.torch_executor import check_memory
from granikv.gpu_cost_model import GpuCostModel
from granikv.models import check_weights, find_model, load_config, stores_fp8
from granikv.models.random_weights import read_shape
from granikv.text import load_tokenizer


def check_engine(config: EngineConfig) -> tuple[EngineConfig, ModelConfig]:
    """The config with its device and quantization decided, and the model's shape.

    Raises InvalidArgument naming the field, value and range; Unavailable without the GPU asked
    for; and what load_config raises.
    """
    if config.executor == "tensorrt":
        config, model = _engines(config)
    else:
        config = resolve_device(_with_quantization(config))
        model = model_shape(config)
        _check_ranks(config, model)
    if config.max_seq_len > model.max_position:
        expected = f"0 to {model.max_position}, the model's context"
        raise InvalidArgument("max_seq_len", config.max_seq_len, expected)
    dtype: torch.dtype = getattr(torch, config.dtype)
    if config.profile is not None and config.device == "cuda":
        GpuCostModel.load(config.profile, model, dtype.itemsize, "")
    elif config.profile is not None:
        CostModel.load(config.profile, model, config.num_threads)
    if config.device == "cpu":
        check_memory(config, model)
    return config, model


def longest_request(config: EngineConfig, model: ModelConfig) -> int:
    """Prompt and output together, tokens."""
    return min(config.max_seq_len or model.max_position, _stored_tokens(config))


def check_served_model(config: EngineConfig, model: ModelConfig, probe: str) -> None:
    """The weights' headers, the tokenizer, and that a server can answer its own probe.

    Raises ModelFileError, Unsupported, Unavailable or InvalidArgument.
    """
    if config.random_weights:
        raise Unsupported("random_weights: such a model has no tokenizer, so it cannot be served")
    if config.executor == "torch":
        check_weights(find_model(config.model))
    elif importlib.util.find_spec("tensorrt") is None:
        raise Unavailable(
            "executor: expected the package tensorrt for 'tensorrt', found none; it is in the "
            "container, or use executor=torch"
        )
    needed = len(load_tokenizer(config.model).encode(probe)) + 1
    if needed > longest_request(config, model):
        name = "capacity_tokens" if needed > _stored_tokens(config) else "max_seq_len"
        lowest = f"enough for a prompt and output of {needed} tokens"
        raise InvalidArgument(name, getattr(config, name), lowest)


def _stored_tokens(config: EngineConfig) -> int:
    """Of one request that has the arena for itself; the last slot is for padding.

    An arena that is planned when the weights are loaded sets no limit before.
    """
    if config.capacity_tokens is None:
        return INT32_MAX
    return (config.capacity_tokens - 1) // config.page_tokens * config.page_tokens - 1


def _engines(config: EngineConfig) -> tuple[EngineConfig, ModelConfig]:
    """The same from engines; the tokenizer will be that of config.model. Raises EngineMismatch
    when this is another model, and what load_manifest and engine_sizes raise.
    """
    folder = Path(str(config.engine_dir))
    manifest = load_manifest(folder)
    sizes = engine_sizes(config, manifest)
    resolved = resolve_device(dataclasses.replace(config, dtype="auto"))
    model, built = load_config(config.model), manifest.model
    for name in ("architecture", "num_layers", "hidden_size", "num_qo_heads", "vocab_size"):
        if getattr(model, name) != getattr(built, name):
            raise EngineMismatch(
                f"{folder}: {name}: expected {getattr(model, name)}, as model={config.model!r} "
                f"has it, got engines with {getattr(built, name)}; set model to the checkpoint "
                "that they were built from"
            )
    model = dataclasses.replace(built, max_position=manifest.limits.max_seq_len)
    capacity = sizes.capacity_tokens
    return dataclasses.replace(resolved, dtype=sizes.dtype, capacity_tokens=capacity), model


def _check_ranks(config: EngineConfig, model: ModelConfig) -> None:
    """Raises InvalidArgument where the model or the device cannot be cut, Unavailable without the
    GPUs for it."""
    if config.tp == 1:
        return
    Shard(model, config.tp)
    if config.device == "cpu":
        return
    found = torch.cuda.device_count()
    if found < config.tp:
        raise Unavailable(f"tp={config.tp}: expected as many GPUs, torch sees {found}")


def _with_quantization(config: EngineConfig) -> EngineConfig:
    """FP8 for a checkpoint that is. Raises InvalidArgument where it would be quantised again."""
    if config.random_weights:
        return config
    path = find_model(config.model)
    if not path.is_dir() or not stores_fp8(path):
        return config
    if config.quantization == "fp8_per_tensor":
        expected = f"'fp8' or None: {path} has FP8 weights already, with scales of its own"
        raise InvalidArgument("quantization", config.quantization, expected)
    return dataclasses.replace(config, quantization="fp8")


def model_shape(config: EngineConfig) -> ModelConfig:
    """The whole model's, without its weights. Raises InvalidArgument, and what load_config raises."""
    if not config.random_weights:
        return load_config(config.model)
    if config.model is None:
        raise InvalidArgument("model", None, "a folder with config.json, with random_weights")
    return read_shape(config.model)
