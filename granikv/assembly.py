"""Puts an engine together: model, sampler, executor and dispatcher of one device.

The only place that knows which executor goes with which cost model.
"""

from __future__ import annotations

from typing import Any

import torch

from granikv.cache.manager import CacheManager
from granikv.config import EngineConfig
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
    config, _ = check_engine(config)
    decoder, tokenizer = _load(config, tokenizer)
    eos = set(decoder.config.eos_token_ids)
    eos |= set(tokenizer.eos_token_ids if tokenizer is not None else ())
    sampler = Sampler(
        config.max_requests, decoder.config.vocab_size, eos_token_ids=tuple(sorted(eos))
    )
    return config, make_executor(config, decoder, sampler), tokenizer


def _load(config: EngineConfig, tokenizer: Tokenizer | None) -> tuple[Decoder, Tokenizer | None]:
    """The model of a resolved config, and its tokenizer; random weights need none."""
    dtype = getattr(torch, config.dtype)
    if not config.random_weights:
        decoder = load_model(config.model, dtype, config.device)
        return decoder, tokenizer or load_tokenizer(config.model)
    assert config.model is not None  # check_engine
    return load_random(config.model, dtype, config.device), tokenizer


def build_dispatcher(config: EngineConfig, executor: Any, cache: CacheManager) -> Dispatcher:
    """Costs and, on a GPU, the cuts that fit the executor's device."""
    model = executor.decoder.config
    cutter = getattr(executor, "plan_cutter", None)
    if cutter is None:
        return Dispatcher(CostModel.load(config.profile, model, config.num_threads), cache)
    element_bytes = cutter.shape.element_bytes
    cost = GpuCostModel.load(config.profile, model, element_bytes, executor.device_name)
    return Dispatcher(cost, cache, cutter)
