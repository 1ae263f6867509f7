"""Puts an engine together: model, sampler, executor and dispatcher of one device.

The only place that knows which executor goes with which cost model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from granikv.cache.manager import CacheManager
from granikv.config import EngineConfig, ModelConfig
from granikv.config_check import check_engine
from granikv.cost_model import CostModel
from granikv.dispatcher import Dispatcher
from granikv.executor import make_executor
from granikv.gpu_cost_model import GpuCostModel
from granikv.models import Decoder, load_model
from granikv.models.random_weights import load_random
from granikv.sampling import Sampler
from granikv.text import Tokenizer, load_tokenizer


def build_executor(
    config: EngineConfig, tokenizer: Tokenizer | None
) -> tuple[EngineConfig, Any, Tokenizer | None]:
    """The config with its device decided, the executor of its model, and the tokenizer.

    Raises what check_engine and loading a model raise.
    """
    config, model = check_engine(config)
    if config.executor == "tensorrt":
        return _build_tensorrt(config, tokenizer)
    if config.tp > 1:
        from granikv.executor.ranks import start_torch

        tokenizer = _tokenizer(config, tokenizer)
        executor = start_torch(config, _eos_token_ids(model, tokenizer))
        return _with_capacity(config, executor), executor, tokenizer
    decoder, tokenizer = _load(config, tokenizer)
    sampler = _make_sampler(config, decoder.config, tokenizer)
    executor = make_executor(config, decoder, sampler)
    return _with_capacity(config, executor), executor, tokenizer


def executor_beside(
    config: EngineConfig, tokenizer: Tokenizer | None, decoder: Decoder
) -> tuple[EngineConfig, Any]:
    """As build_executor, for a second engine in this process on the same weights."""
    config, _ = check_engine(config)
    sampler = _make_sampler(config, decoder.config, tokenizer)
    executor = make_executor(config, decoder, sampler)
    return _with_capacity(config, executor), executor


def _with_capacity(config: EngineConfig, executor: Any) -> EngineConfig:
    """config with the capacity of the executor's arenas."""
    return replace(config, capacity_tokens=executor.config.arena_tokens)


def _make_sampler(config: EngineConfig, model: ModelConfig, tokenizer: Tokenizer | None) -> Sampler:
    eos_token_ids = _eos_token_ids(model, tokenizer)
    return Sampler(config.max_requests, model.vocab_size, eos_token_ids=eos_token_ids)


def _eos_token_ids(model: ModelConfig, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    eos = set(model.eos_token_ids)
    eos |= set(tokenizer.eos_token_ids if tokenizer is not None else ())
    return tuple(sorted(eos))


def _build_tensorrt(
    config: EngineConfig, tokenizer: Tokenizer | None
) -> tuple[EngineConfig, Any, Tokenizer | None]:
    """Executor of the engines in config.engine_dir; the tokenizer is that of config.model."""
    from granikv.engines.manifest import load_manifest
    from granikv.executor.ranks import start_tensorrt

    manifest = load_manifest(Path(str(config.engine_dir)))
    tokenizer = tokenizer or load_tokenizer(config.model)
    sampler = _make_sampler(config, manifest.model, tokenizer)
    return config, start_tensorrt(config, manifest, sampler), tokenizer


def _load(config: EngineConfig, tokenizer: Tokenizer | None) -> tuple[Decoder, Tokenizer | None]:
    """The model of a resolved config, and its tokenizer; random weights need none."""
    dtype = getattr(torch, config.dtype)
    if config.random_weights:
        decoder = load_random(
            str(config.model), dtype, config.device, quantization=config.quantization
        )
    else:
        decoder = load_model(config.model, dtype, config.device, config.quantization)
    return decoder, _tokenizer(config, tokenizer)


def _tokenizer(config: EngineConfig, tokenizer: Tokenizer | None) -> Tokenizer | None:
    return tokenizer if config.random_weights else tokenizer or load_tokenizer(config.model)


def build_dispatcher(config: EngineConfig, executor: Any, cache: CacheManager) -> Dispatcher:
    """Costs and, on a GPU, the cuts that fit the executor's device."""
    model = executor.decoder.config
    cutter = getattr(executor, "plan_cutter", None)
    if cutter is None:
        cost = CostModel.load(config.profile, model, config.num_threads)
        return Dispatcher(cost, cache, window=model.sliding_window)
    shape = cutter.shape
    gpu_cost = GpuCostModel.load(
        config.profile, model, shape.element_bytes, executor.device_name, shape.kv_element_bytes,
        shape.element_bytes if config.quantization is None else 1,
    )  # fmt: skip
    gpu_cost.sum_times = getattr(executor, "sum_times", None)
    cutter = replace(cutter, rates=gpu_cost.sm_rates)
    return Dispatcher(gpu_cost, cache, cutter, model.sliding_window)
