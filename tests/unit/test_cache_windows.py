"""Extents in a full arena: which slots make room, and what must not move."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from granikv.bench.host import NullExecutor
from granikv.cache.windows import cheapest_window
from granikv.config import EngineConfig, ModelConfig
from granikv.engine import Engine
from granikv.sampling_params import SamplingParams

COSTS = st.lists(st.sampled_from([0.0, 1.0, 1.5, 2.0, float("inf")]), min_size=1, max_size=40)
MODEL = ModelConfig("llama", 2, 64, 64, 4, 2, 16, 32000, 4096)


@settings(max_examples=200, deadline=None)
@given(COSTS, st.integers(1, 45))
def test_cheapest_window_is_the_best_of_all(costs, length):
    sums = [sum(costs[i : i + length]) for i in range(len(costs) - length + 1)]
    got = cheapest_window(np.array(costs), length)
    if not sums or min(sums) == float("inf"):
        assert got is None
    else:
        assert got is not None and sums[got] == pytest.approx(min(sums))


def full_engine(**settings):
    """An engine whose arena is full of what 40 requests left; a late one is still running."""
    config = EngineConfig(
        capacity_tokens=2001, max_seq_len=1200, max_num_batched_tokens=256, profile="default",
        min_extent_tokens=64, debug_checks=True, **settings,
    )  # fmt: skip
    engine = Engine(config, executor=NullExecutor(MODEL))
    generator = np.random.default_rng(0)
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    long = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    for i in range(40):
        if i == 39:
            engine.add_request("running", generator.integers(0, 9000, 90), long)
        engine.add_request(f"old{i}", generator.integers(0, 9000, 60), params)
        while f"old{i}" in engine.requests:
            engine.step()
    assert "running" in engine.requests
    return engine, generator


@pytest.mark.parametrize("async_depth", [0, 1])
def test_a_long_shared_prefix_is_hot_in_a_full_arena(async_depth):
    engine, generator = full_engine(async_depth=async_depth)
    assert all(end - start < 900 for start, end in engine.cache.arena.free_ranges())
    running = engine.requests["running"]
    before = list(running.tail_slots)
    prefix = generator.integers(0, 9000, 900)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    for i in range(3):
        prompt = np.concatenate([prefix, generator.integers(0, 9000, 5)])
        engine.add_request(f"new{i}", prompt, params)
    hot = set()
    while any(f"new{i}" in engine.requests for i in range(3)):
        for out in engine.step():
            assert out.error is None
            if out.request_id.startswith("new"):
                hot.add(out.num_hot_tokens)
    assert engine.cache.counters["extents"] == 1
    assert engine.cache.counters["extent_fallbacks"] == 0
    assert engine.cache.counters["evicted_tokens"] > 0
    assert max(hot) == 900
    assert running.tail_slots[: len(before)] == before, "a running request lost its slots"
    assert engine.scheduler.num_preemptions == 0
    engine.abort("running")
    while engine.has_work():
        engine.step()
    engine.cache.check_conservation([])
