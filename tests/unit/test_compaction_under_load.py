"""Compaction under load: nothing reads what it should not, and no reuse is lost to fragments."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers_shadow import Load

from granikv.bench.cache import LruPages, ReplayConfig, replay
from granikv.bench.granikv_cache import ManagedCache
from granikv.bench.workloads import Trace, TraceRequest
from granikv.cache.compaction import Compactor
from granikv.cache.storage import NodeStorage


def replay_turns(trace, config):
    cache = ManagedCache(config)
    return replay(trace, cache, config).hit_tokens, cache.manager.counters


def test_reuse_on_a_fragmented_arena_is_that_of_pages(monkeypatch):
    """Turns of agents with growing histories: promotions find no free run in a full cache."""
    generator = np.random.default_rng(0)
    histories = [list(range(100 * i, 100 * i + 6)) for i in range(12)]
    requests, block = [], 10_000
    for turn in range(200):
        history = histories[int(generator.integers(12))]
        history += range(block, block + int(generator.integers(1, 4)))
        block += 10
        requests.append(TraceRequest(turn * 0.5, 16 * len(history), 40, tuple(history)))
        if len(history) > 40:
            del history[6:]
    trace = Trace("turns", 16, tuple(requests))
    config = ReplayConfig(capacity_tokens=6001, max_running=4, min_extent_tokens=64)
    pages = replay(trace, LruPages(config.capacity_tokens - 1), config)
    moving, counters = replay_turns(trace, config)
    assert counters["compacted_tokens"] > 0

    choose = Compactor._evict_what_does_not_fit
    monkeypatch.setattr(
        Compactor, "_evict_what_does_not_fit", lambda self, *window: choose(self, *window[:3], 0)
    )
    evicting, others = replay_turns(trace, config)
    assert moving >= pages.hit_tokens and moving > evicting
    assert counters["moved_tokens"] < others["moved_tokens"], "what was evicted is promoted again"


def fragmenting_script(generator):
    """Few prefixes and many suffixes, with outputs of very different lengths, and cancels."""
    heads = [[4 + i * k % 23 for i in range(int(generator.integers(20, 70)))] for k in range(1, 6)]
    script = []
    for _ in range(60):
        head = heads[int(generator.zipf(1.4)) % 5]
        cut = len(head) if generator.random() < 0.8 else int(generator.integers(1, len(head)))
        tail = generator.integers(3, 6, int(generator.integers(1, 30))).tolist()
        script.append((head[:cut] + tail, int(generator.choice([2, 10, 40])), "", "", 0, 0))
        script.append(int(generator.integers(1, 6)))
        if generator.random() < 0.1:
            script.append(-int(generator.integers(1, 6)))
    return script


def count_calls(monkeypatch, owner, name, seen):
    original = getattr(owner, name)

    def counted(self, *arguments):
        seen[name] += 1
        return original(self, *arguments)

    monkeypatch.setattr(owner, name, counted)


@pytest.mark.parametrize("async_depth", [0, 1])
def test_every_span_holds_the_right_tokens_while_kv_moves(monkeypatch, async_depth):
    """Conservation and contents after each step; outputs are those of each sequence alone."""
    seen = Counter()
    for owner, name in ((Compactor, "_replace"), (Compactor, "_move_out"), (NodeStorage, "demote")):
        count_calls(monkeypatch, owner, name, seen)
    for seed in range(16):
        generator = np.random.default_rng(seed)
        sizes = {
            "capacity_tokens": int(generator.choice([260, 300, 400])),
            "max_num_batched_tokens": int(generator.choice([24, 64])),
            "max_move_tokens": int(generator.choice([40, 8192])),
            "min_extent_tokens": 8, "max_requests": 8, "max_seq_len": 160,
        }  # fmt: skip
        failing = frozenset(generator.integers(10, 150, 3).tolist()) if seed % 2 else frozenset()
        late = seed % 4 > 1
        load = Load(
            sizes, layout="asymmetric", async_depth=async_depth, is_late=late, failing=failing
        )
        load.run(fragmenting_script(generator))
        seen.update({k: v for k, v in load.engine.stats().items() if v})
    for name in ("_replace", "_move_out", "compacted_tokens", "failed_steps", "preemptions"):
        assert seen[name] > 0, (name, seen)
