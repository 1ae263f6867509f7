"""Trace formats, the LRU page baseline and the replay clock."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from granikv.bench.cache import LruPages, ReplayConfig, replay
from granikv.bench.workloads import Trace, TraceRequest, load_trace, shared_prefix_prompts
from granikv.errors import ArenaExhausted, InvalidArgument

FIXTURE = Path(__file__).resolve().parents[1] / "fixtures" / "agents_block512.jsonl"


def tokens(*runs: tuple[int, int]) -> np.ndarray:
    return np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in runs])


def test_fixture_loads_as_mooncake_with_milliseconds():
    trace = load_trace(FIXTURE)
    assert (trace.block_tokens, len(trace.requests)) == (512, 24)
    assert trace.requests[1].timestamp_s == 0.25
    prompt = trace.prompt_token_ids(trace.requests[0])
    assert prompt.dtype == np.int32
    assert len(prompt) == trace.requests[0].input_length
    assert prompt[:3].tolist() == [0, 1, 2]


def test_equal_blocks_are_equal_tokens_and_others_differ():
    trace = load_trace(FIXTURE)
    first, fourth = (trace.prompt_token_ids(trace.requests[i]) for i in (0, 3))
    shared = 6 * 512  # four blocks of everyone, two of the group
    assert np.array_equal(first[:shared], fourth[:shared])
    assert not np.intersect1d(first[shared:], fourth[shared:]).size


def test_block16_with_seconds_and_aiperf_ranges(tmp_path):
    record = {"timestamp": 1.5, "agent": 0, "input_length": 30, "output_length": 2}
    path = tmp_path / "tau.jsonl"
    path.write_text(json.dumps(record | {"hash_ids": [0, 1]}) + "\n")
    trace = load_trace(path)
    assert (trace.block_tokens, trace.requests[0].timestamp_s) == (16, 1.5)
    path = tmp_path / "aiperf.json"
    row = {"input_length": 5 * 512 - 7, "output_length": 9, "ranges": [[0, 2], [7, 8]]}
    path.write_text(json.dumps({"rows": [row]}))
    trace = load_trace(path)
    assert trace.block_tokens == 512
    assert trace.requests[0].block_ids == (0, 1, 2, 7, 8)


def test_bad_traces_name_the_file_and_line(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"timestamp": 0}\n')
    with pytest.raises(InvalidArgument, match="bad.jsonl, line 1"):
        load_trace(path)
    with pytest.raises(InvalidArgument, match="an existing file"):
        load_trace(tmp_path / "absent.jsonl")


def test_pages_match_only_full_pages_and_leave_one_token_to_compute():
    pages = LruPages(capacity_tokens=160)
    assert pages.admit(0, tokens((0, 40)), 1) == 0
    assert pages.admit(1, tokens((0, 40)), 1) == 32  # two full pages
    assert pages.admit(2, tokens((0, 32)), 1) == 16  # the last page would leave nothing to do


def test_pages_are_evicted_least_recently_used_tail_first():
    pages = LruPages(capacity_tokens=96)  # six pages
    pages.admit(0, tokens((0, 47)), 1)  # 3 pages, 2 of them full
    pages.finish(0)
    pages.admit(1, tokens((100, 163)), 1)  # 4 pages, 3 full: exactly the free ones
    pages.finish(1)
    assert pages.num_free + len(pages._evictable) == 6
    pages.admit(2, tokens((200, 231)), 1)  # 2 pages: one free, then the oldest tail
    pages.finish(2)
    assert pages.admit(3, tokens((0, 47)), 1) == 16


def test_pages_conserve_their_number_and_refuse_what_does_not_fit():
    pages = LruPages(capacity_tokens=64)
    assert pages.admit(0, tokens((0, 40)), 8) == 0
    assert pages.admit(1, tokens((50, 90)), 8) is None
    pages.finish(0)
    assert pages.num_free + len(pages._evictable) == 4
    assert pages.admit(1, tokens((50, 90)), 8) == 0


def test_replay_counts_hits_and_waits_in_virtual_time():
    requests = tuple(TraceRequest(float(i), 64, 10, (0, 1, 2, 10 + i)) for i in range(4))
    trace = Trace("t", 16, requests)
    config = ReplayConfig(capacity_tokens=256, max_running=1, token_s=0.5)
    result = replay(trace, LruPages(config.capacity_tokens), config)
    assert (result.admitted, result.rejected, result.peak_running) == (4, 0, 1)
    assert result.hit_tokens == 3 * 48
    assert result.queue_s == 4 + 8 + 12  # each lives 5 s and arrives after 1 s


def test_replay_rejects_what_can_never_fit():
    trace = Trace("t", 16, (TraceRequest(0.0, 16, 300, (0,)),))
    config = ReplayConfig(capacity_tokens=256)
    assert replay(trace, LruPages(256), config).rejected == 1


def test_replay_says_when_an_idle_cache_does_not_fit():
    class Full:
        def admit(self, key, prompt, output_length):
            return None

        def finish(self, key):
            raise AssertionError("nothing was admitted")

    trace = Trace("t", 16, (TraceRequest(0.0, 16, 1, (0,)),))
    with pytest.raises(ArenaExhausted, match="request 0"):
        replay(trace, Full(), ReplayConfig())


def test_cache_bench_finds_at_least_what_pages_find():
    pytest.importorskip("granikv.cache.manager", reason="the cache manager is not in this tree")
    from granikv.bench.cache import run_cache_bench

    (case,) = run_cache_bench(load_trace(FIXTURE), ReplayConfig(capacity_tokens=40000))
    assert case.metrics["admitted"] == case.baseline_metrics["admitted"] == 24
    assert case.ratio >= 1.0


def test_a_cache_that_holds_no_request_is_refused():
    from granikv.bench.cache import run_cache_bench

    requests = (TraceRequest(0.0, 64, 10, (0, 1, 2, 3)), TraceRequest(1.0, 32, 8, (0, 1)))
    trace = Trace("t", 16, requests)
    with pytest.raises(InvalidArgument, match="capacity_tokens: expected at least 41.*got 40"):
        run_cache_bench(trace, ReplayConfig(capacity_tokens=40))
    (case,) = run_cache_bench(trace, ReplayConfig(capacity_tokens=64))
    assert (case.metrics["admitted"], case.metrics["rejected"]) == (1, 1)


def test_our_uniform_layout_finds_what_pages_find():
    from granikv.bench.granikv_cache import ManagedCache

    trace = load_trace(FIXTURE)
    for capacity in (12001, 20001, 40001):
        config = ReplayConfig(capacity_tokens=capacity, max_running=4)
        pages = replay(trace, LruPages(capacity - 1), config)
        ours = replay(trace, ManagedCache(config, "uniform"), config)
        assert (ours.hit_tokens, ours.rejected) == (pages.hit_tokens, pages.rejected), capacity


def test_shared_prefix_prompts_share_within_a_group_only():
    a, b, c = shared_prefix_prompts([2, 1], prefix_len=32, suffix_len=8, vocab_size=49152)
    assert a[:32] == b[:32] != c[:32]
    assert a[32:] != b[32:]
    assert len(a) == 40


def test_a_trace_that_is_no_text_is_refused_by_name(tmp_path):
    path = tmp_path / "noise.jsonl"
    path.write_bytes(bytes(range(256)) * 4)
    with pytest.raises(InvalidArgument, match="noise.jsonl"):
        load_trace(path)
