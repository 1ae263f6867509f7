"""How a GPU's memory is divided: by numbers, without a GPU."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
import torch

from granikv import device_sampling
from granikv.assembly import _with_capacity
from granikv.attention.plan_buffers import PlanBuffers, attention_shape, step_capacities
from granikv.config import CPU_CAPACITY_TOKENS, EngineConfig, ModelConfig
from granikv.core import PLAN_FIELDS
from granikv.errors import InvalidArgument, Unavailable
from granikv.executor import device_executor, memory_plan, resolve_device
from granikv.executor.device_executor import DeviceExecutor
from granikv.executor.memory_plan import LOWER, fixed_bytes, plan_memory, usable_bytes
from granikv.executor.tensorrt_executor import TensorRTExecutor
from granikv.sampling import Sampler

GIB = 2**30
LLAMA = ModelConfig("LlamaForCausalLM", 32, 4096, 14336, 32, 8, 128, 128256, 131072)
TOKEN_BYTES = LLAMA.kv_bytes_per_token(2)
FIXED = {"request table": 1 * GIB, "attention workspace": 2 * GIB, "activations": 3 * GIB,
         "logits and sampling": 4 * GIB, "CUDA graphs": 5 * GIB}  # fmt: skip


def fixed_of(model=LLAMA, **settings):
    config = EngineConfig(**settings)
    shape = attention_shape(model, torch.bfloat16)
    capacities = step_capacities(config.max_requests, config.max_num_batched_tokens, shape)
    return fixed_bytes(config, model, capacities, 2, model.vocab_size), capacities


def test_the_share_is_of_the_whole_and_what_others_use_counts():
    assert usable_bytes(140 * GIB, 140 * GIB, 0.5) == 70 * GIB
    assert usable_bytes(140 * GIB, 120 * GIB, 0.5) == 50 * GIB  # 20 in use, weights among it
    assert usable_bytes(140 * GIB, 60 * GIB, 0.5) < 0
    assert usable_bytes(140 * GIB, 120 * GIB, 1.0) == 120 * GIB


def test_the_arena_gets_what_the_rest_leaves():
    """140 GiB, 120 free: 112 may be used, of which 15 are for other things: 97 for the arena."""
    config = EngineConfig(gpu_memory_utilization=1 - 8 / 140)
    plan = plan_memory(config, 140 * GIB, 120 * GIB, FIXED, TOKEN_BYTES)
    assert TOKEN_BYTES == 2**17 and abs(plan.capacity_tokens - 97 * 2**13) <= 1
    assert plan.usable_bytes >= sum(FIXED.values()) + plan.capacity_tokens * TOKEN_BYTES
    lines = plan.table().splitlines()
    for name, gib in (("of", 140), ("others)", 20), ("activations", 3), ("tokens", 97)):
        assert any(re.search(rf"{re.escape(name)} +{gib}\.00 GiB$", line) for line in lines), lines
    asked = dataclasses.replace(config, capacity_tokens=1000)
    assert plan_memory(asked, 140 * GIB, 120 * GIB, FIXED, TOKEN_BYTES).capacity_tokens == 1000


def test_what_does_not_fit_says_what_to_lower():
    config = EngineConfig(capacity_tokens=10**6)
    fits = (int(0.9 * 80 * GIB) - 15 * GIB) // TOKEN_BYTES
    with pytest.raises(Unavailable, match=f"capacity_tokens=1000000, got {fits} tokens.*{fits} or"):
        plan_memory(config, 80 * GIB, 80 * GIB, FIXED, TOKEN_BYTES)
    exact = dataclasses.replace(config, capacity_tokens=fits)
    assert plan_memory(exact, 80 * GIB, 80 * GIB, FIXED, TOKEN_BYTES).capacity_tokens == fits
    config = EngineConfig(max_num_batched_tokens=512)
    least = 15 * GIB + 514 * TOKEN_BYTES  # a step's tokens, a page and the padding slot
    config = dataclasses.replace(config, gpu_memory_utilization=1.0)
    assert plan_memory(config, least, least, FIXED, TOKEN_BYTES).capacity_tokens == 514
    with pytest.raises(Unavailable) as caught:
        plan_memory(config, least, least - 1, FIXED, TOKEN_BYTES)
    text = str(caught.value)
    order = [text.index(f"{LOWER[name]} ({gib}.00 GiB)") for name, gib in
             (("CUDA graphs", 5), ("activations", 3), ("request table", 1))]  # fmt: skip
    assert order == sorted(order) and "gpu_memory_utilization=1" in text and "513 tokens" in text


def test_fixed_bytes_by_numbers():
    fixed, capacities = fixed_of(max_requests=256, max_num_batched_tokens=8192, max_seq_len=4096)
    assert set(fixed) == set(LOWER)
    assert fixed["request table"] == 257 * 4096 * 4 + 8192 * 48
    row = 2 * (5 * 4096 + 3 * 14336)
    assert fixed["activations"] == 8192 * row
    logits = 256 * 128256 * 4
    assert fixed["logits and sampling"] == 3.5 * logits + 128 * 128256 * 80
    assert fixed["CUDA graphs"] == 8 * logits + 256 * row + 512 * 2**20
    partials = capacities.max_partials * (4096 + 32) * 4
    assert partials < fixed["attention workspace"] - 8192 * 4096 * 2 < partials + 2 * 2**20
    narrow = dataclasses.replace(LLAMA, intermediate_size=512)  # q, k and v are the widest
    fixed, _ = fixed_of(narrow, max_num_batched_tokens=8192)
    assert fixed["activations"] == 8192 * 2 * (5 * 4096 + 3 * (32 + 2 * 8) * 128)
    assert memory_plan.SAMPLED_ROWS == device_sampling.SLICE_ROWS


def test_every_item_becomes_smaller_by_the_settings_that_its_advice_names():
    large = {"max_requests": 256, "max_num_batched_tokens": 8192, "max_seq_len": 4096}
    small = {"max_requests": 64, "max_num_batched_tokens": 1024, "max_seq_len": 1024}
    before, _ = fixed_of(**large)
    for item, advice in LOWER.items():
        for name in advice.split(" or "):
            after, _ = fixed_of(**large | {name: small[name]})
            assert after[item] < before[item], (item, name)


def test_the_plans_buffers_are_within_the_workspace():
    shape = attention_shape(LLAMA, torch.bfloat16)
    capacities = step_capacities(16, 64, shape)
    buffers = PlanBuffers(shape, capacities, torch.device("cpu"), 1)
    counted = sum(torch.Size(capacities.resolve(f.shape)).numel() for f in PLAN_FIELDS)
    assert sum(x.numel() for x in buffers.plan.values()) <= counted + 2 * capacities.max_rows


def test_settings(monkeypatch):
    for share in (0.0, -0.1, 1.01, float("nan")):
        with pytest.raises(InvalidArgument, match="gpu_memory_utilization.*0, 1"):
            EngineConfig(gpu_memory_utilization=share)
    with pytest.raises(InvalidArgument, match="gpu_memory_utilization: expected 0.9, or a GPU"):
        EngineConfig(gpu_memory_utilization=0.8, device="cpu")
    for capacity in (1, 2**31):
        with pytest.raises(InvalidArgument, match=f"capacity_tokens.*got {capacity}"):
            EngineConfig(capacity_tokens=capacity)
    with pytest.raises(InvalidArgument, match="capacity_tokens.*None"):
        _ = EngineConfig().arena_tokens
    assert resolve_device(EngineConfig(device="cpu")).arena_tokens == CPU_CAPACITY_TOKENS
    assert resolve_device(EngineConfig(device="cpu", capacity_tokens=99)).arena_tokens == 99
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device(EngineConfig(device="cuda")).capacity_tokens is None


def test_an_executor_plans_its_arenas_and_tells_the_engine(monkeypatch, caplog):
    """With a GPU's numbers, on a device without memory."""
    model = dataclasses.replace(LLAMA, num_layers=2, vocab_size=1000)
    config = EngineConfig(dtype="bfloat16", max_seq_len=1024, max_requests=16)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * GIB, 10 * GIB))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    planner = object.__new__(DeviceExecutorOfTest)
    planner.config, planner.device = config, torch.device("cuda")
    shape = attention_shape(model, torch.bfloat16)
    planner.capacities = step_capacities(16, 512, shape)
    with caplog.at_level("INFO", device_executor.__name__):
        capacity = planner._plan_memory(model, 2)
    fixed = fixed_bytes(config, model, planner.capacities, 2, 1000)
    assert capacity == (7 * GIB - sum(fixed.values())) // model.kv_bytes_per_token(2)
    assert f"KV arena, {capacity} tokens" in caplog.text and "7.00" not in caplog.text
    planned = dataclasses.replace(config, capacity_tokens=capacity)
    executor = DeviceExecutorOfTest(planned, model, Sampler(16, 1000), "meta")
    assert executor.k_arena.shape[1] == capacity
    assert _with_capacity(config, executor) == planned


def test_what_an_engines_context_holds_is_not_counted_again(monkeypatch):
    """It is made before the plan, so that its activations and workspace are not free any more."""
    model = dataclasses.replace(LLAMA, num_layers=2, vocab_size=1000)
    config = EngineConfig(dtype="bfloat16", max_seq_len=1024, max_requests=16)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * GIB, 10 * GIB))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    planner = object.__new__(TensorRTExecutor)
    planner.config, planner.device = config, torch.device("cuda")
    shape = attention_shape(model, torch.bfloat16)
    planner.capacities = step_capacities(16, 512, shape)
    without = fixed_bytes(config, model, planner.capacities, 2, 1000)
    fixed = fixed_bytes(config, model, planner.capacities, 2, 1000, has_context=True)
    logits_bytes = 16 * 1000 * 4
    plan_bytes = 4 * sum(
        math.prod(planner.capacities.resolve(f.shape)) for f in PLAN_FIELDS if f.where == "device"
    )
    assert fixed == without | {
        "activations": 0,
        "attention workspace": plan_bytes,
        "CUDA graphs": 8 * logits_bytes + 512 * 2**20,
    }
    capacity = planner._plan_memory(model, 2)
    assert capacity == (7 * GIB - sum(fixed.values())) // model.kv_bytes_per_token(2)


class DeviceExecutorOfTest(DeviceExecutor):
    def _forward(self, rows, num_rows, sample_rows):
        raise AssertionError("not run here")
