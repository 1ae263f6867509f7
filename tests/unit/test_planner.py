"""The planner against its readable twin over random lives of an engine, and bounds on its work.

The executor is null. Apart from the twin, every row's spans are followed to slots and compared
with what the cache says the row's context is: a grouping kept too long would read other slots.
"""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1]))
from reference_planner import reference_plan

from granikv.bench.host import MODEL, NullExecutor, steady_engine
from granikv.cache.manager import CacheManager
from granikv.config import EngineConfig
from granikv.core import (
    Batch,
    ColdItem,
    ExtendSegment,
    HotItem,
    Request,
    RequestRow,
    SpanKind,
)
from granikv.cost_model import CostModel
from granikv.dispatcher import Dispatcher
from granikv.engine import Engine
from granikv.sampling_params import SamplingParams
from granikv.scheduler import MAX_REFUSED


class AnyCost(CostModel):
    """Each backend is the cheapest for some (rows, length)."""

    def __init__(self):
        super().__init__(CostModel.load("default", MODEL).profile, MODEL)

    def hot_us(self, variant, num_rows, kv_len):
        return float((num_rows * 7 + kv_len * (3 if variant == "gemm" else 5)) % 11)

    def merge_us(self, num_rows):
        return 1.0

    def marginal_flat_us(self, num_rows, kv_len):
        return float((num_rows + kv_len) % 9)


def check_context(cache, request_slots, request, spans, visible, first=0):
    """spans (kind, start, length) read what the cache says the tokens [first, visible) are."""
    read = [
        np.arange(start, start + length)
        if kind == SpanKind.RUN
        else request_slots[request.row, start : start + length]
        for kind, start, length in spans
    ]
    stored = [
        np.arange(n.extent, n.extent + len(n)) if n.is_hot else n.slots
        for n in cache.tree.path(request.leaf)
        if n.start < visible
    ]
    context = np.concatenate([*stored, request.tail_slots])[first:visible]
    np.testing.assert_array_equal(np.concatenate(read), context, err_msg=request.request_id)


class CheckedDispatcher(Dispatcher):
    """Compares each plan with the twin's and with the cache's own account of every context."""

    def __init__(self, cost, cache, max_requests, max_seq_len, window=None):
        super().__init__(cost, cache, window=window)
        self.request_slots = np.full((max_requests, max_seq_len), -1, np.int64)
        self.num_reused = self.num_plans = 0

    def plan(self, step_id, batch, moves):
        before = self._spans
        plan = super().plan(step_id, batch, moves)
        self.num_reused += self._spans is before
        self.num_plans += 1
        got_hot = [r.num_hot_tokens for r in batch.requests]
        twin = reference_plan(self.cost, self.cache, step_id, batch, plan.slot_writes, self.window)
        twin.moves = moves
        for field in fields(plan):
            got, want = getattr(plan, field.name), getattr(twin, field.name)
            if isinstance(want, np.ndarray):
                assert got.dtype == np.int32 and got.shape == want.shape, field.name
                np.testing.assert_array_equal(got, want, err_msg=field.name)
            else:
                assert got == want, field.name
        self._check_contexts(plan, batch)
        ends = [*(batch.decode_positions + 1), *(e.start + e.num_tokens for e in batch.extends)]
        hot_ends = [sum(map(len, self.cache.hot_path(r))) for r in batch.requests]
        assert got_hot == [min(x) for x in zip(hot_ends, ends, strict=True)]
        return plan

    def _check_contexts(self, plan, batch):
        writes = plan.slot_writes
        assert len(np.unique(writes[:, :2], axis=0)) == len(writes), "one write per position"
        self.request_slots[writes[:, 0], writes[:, 1]] = writes[:, 2]
        spans = spans_of_partials(plan)
        for row, request in enumerate(batch.decodes):
            named = plan.merge_partials[plan.merge_indptr[row] : plan.merge_indptr[row + 1]]
            position = int(batch.decode_positions[row])
            self._check(request, [spans[p] for p in named], position, position + 1)
        for i, extend in enumerate(batch.extends):
            segments = plan.extend_segments[plan.extend_indptr[i] : plan.extend_indptr[i + 1]]
            columns = [ExtendSegment.KIND, ExtendSegment.START, ExtendSegment.LEN]
            end = extend.start + extend.num_tokens
            self._check(extend.request, segments[:, columns], extend.start, end)
        for request in batch.requests:  # a schedule that had to be repeated takes no slot twice
            tail_len = max(request.num_computed - request.leaf_end, 0)
            assert len(request.tail_slots) == tail_len, request.request_id
        slots = plan.slot_mapping[plan.slot_mapping != self.cache.arena.padding_slot]
        assert len(np.unique(slots)) == len(slots), "one row per slot"

    def _check(self, request, spans, position, visible):
        """position: of the first query."""
        first = 0 if self.window is None else max(0, position + 1 - self.window)
        check_context(self.cache, self.request_slots, request, spans, visible, first)


def spans_of_partials(plan):
    """(kind, start, length) by partial."""
    spans = {}
    for item in plan.hot_items:
        for row in range(item[HotItem.NUM_ROWS]):
            span = (SpanKind.RUN, item[HotItem.KV_START], item[HotItem.KV_LEN])
            spans[item[HotItem.FIRST_PARTIAL] + row] = span
    for item in plan.cold_items:
        span = (item[ColdItem.KIND], item[ColdItem.START], item[ColdItem.LEN])
        spans[item[ColdItem.FIRST_PARTIAL]] = span
    return spans


def checked_engine(capacity_tokens, async_depth, budget, max_requests, window=None) -> Engine:
    config = EngineConfig(
        capacity_tokens=capacity_tokens,
        max_requests=max_requests,
        max_seq_len=100,
        max_num_batched_tokens=budget,
        min_extent_tokens=4,
        max_move_tokens=20,
        async_depth=async_depth,
        profile="default",
        debug_checks=True,
    )
    engine = Engine(config, executor=NullExecutor())
    engine.dispatcher = CheckedDispatcher(AnyCost(), engine.cache, max_requests, 100, window)
    return engine


def prompt(root_len: int, group: int, group_len: int, rest: list[int]) -> np.ndarray:
    """Prompts of equal root or group share a prefix, of different lengths too."""
    everyone = np.arange(100, 100 + root_len)
    own = np.arange(group * 1000, group * 1000 + group_len)
    return np.concatenate([everyone, own, rest]).astype(np.int32)


PROMPTS = st.builds(
    prompt,
    st.sampled_from([0, 6, 12, 30]),
    st.integers(1, 2),
    st.sampled_from([0, 5, 9, 20]),
    st.lists(st.integers(0, 3), min_size=1, max_size=5),
)
OPERATIONS = st.one_of(
    st.tuples(st.just("add"), PROMPTS, st.integers(1, 25)),
    st.tuples(st.just("add"), PROMPTS, st.integers(1, 25)),
    st.tuples(st.just("abort"), st.integers(0, 100)),
    st.tuples(st.just("step"), st.integers(1, 8)),
    st.tuples(st.just("step"), st.integers(1, 8)),
)


def live(engine: Engine, operations: list[tuple]) -> None:
    """What OPERATIONS draws, then steps until nothing is left."""
    for i, (kind, *arguments) in enumerate(operations):
        if kind == "add":
            params = SamplingParams(max_tokens=arguments[1], ignore_eos=True)
            engine.add_request(f"r{i}", arguments[0], params)
        elif kind == "abort" and engine.requests:
            engine.abort(list(engine.requests)[arguments[0] % len(engine.requests)])
        elif kind == "step":
            for _ in range(arguments[0]):
                engine.step()
    steps = 0
    while engine.has_work():
        engine.step()
        steps += 1
        assert steps < 2000, "the engine makes no progress"
    engine.cache.check_conservation([])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(OPERATIONS, max_size=40),
    st.sampled_from([90, 120, 400]),
    st.sampled_from([0, 1]),
    st.sampled_from([3, 8, 64]),
    st.sampled_from([2, 6]),
    st.sampled_from([None, 1, 7, 20, 45]),
)
def test_plans_equal_the_twins_over_random_lives(
    operations, capacity, depth, budget, max_requests, window
):
    live(checked_engine(capacity, depth, budget, max_requests, window), operations)


def calls_of_step(engine: Engine) -> int:
    """Calls, Python's and C's, of one step: its work, without a clock."""
    num_calls = 0

    def count(frame, event, argument):
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    return num_calls


def count_calls(monkeypatch, owner, name) -> list[int]:
    number, method = [0], getattr(owner, name)

    def counted(*args, **kwargs):
        number[0] += 1
        return method(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
    return number


@pytest.mark.parametrize("async_depth", [0, 1])
def test_a_steady_step_lists_no_spans_and_works_the_same_for_any_prefix(monkeypatch, async_depth):
    plans, calls = [], []
    for prefix_len in (1024, 8192):
        engine = steady_engine(32, 8, prefix_len, 256, 16, 60, async_depth)
        for _ in range(3):
            engine.step()
        launched = count_calls(monkeypatch, engine.executor, "launch")
        cache = engine.cache
        counters = [count_calls(monkeypatch, cache, n) for n in ("hot_path", "path", "evict")]
        counters += [count_calls(monkeypatch, cache.tree, n) for n in ("hot_paths", "path")]
        choices = engine.dispatcher._cheapest.cache_info().misses
        for _ in range(10):
            engine.step()
        assert launched == [10] and counters == [[0]] * 5
        assert engine.dispatcher._cheapest.cache_info().misses == choices
        monkeypatch.undo()
        seen = []
        monkeypatch.setattr(engine.executor, "launch", lambda p, seen=seen: seen.append(p) or p)
        calls.append([calls_of_step(engine) for _ in range(3)])
        plans.append(seen[-1])
        engine.close()
    short, long = plans
    assert calls[0] == calls[1], "calls of a step depend on the prefix length"
    assert max(calls[0]) < 40 * 32 + 400
    assert short.counts.tolist() == long.counts.tolist()
    for field in fields(short):
        value = getattr(short, field.name)
        if isinstance(value, np.ndarray):
            assert value.shape == getattr(long, field.name).shape, field.name
    assert long.kv_tokens_read > 2 * short.kv_tokens_read


def test_consecutive_plans_share_what_did_not_change():
    engine = steady_engine(8, 2, 512, 0, 4, 40, 0)
    seen = []
    engine.executor.launch = lambda plan: seen.append(plan) or plan
    for _ in range(2):
        engine.step()
    first, second = seen
    for name in ("row_request", "hot_items", "hot_rows", "merge_indptr", "merge_partials"):
        assert getattr(first, name) is getattr(second, name), name
    assert (second.row_position == first.row_position + 1).all()
    grown = second.cold_items - first.cold_items
    assert (grown[:, ColdItem.LEN] == 1).all() and grown.sum() == len(grown)
    engine.close()


def test_a_new_member_and_a_cancel_change_the_groups():
    engine = steady_engine(8, 2, 512, 0, 4, 60, 0)
    engine.step()
    spans = engine.dispatcher._spans
    leaver, stayer = list(engine.requests)[:2]
    engine.abort(leaver)
    prompt_ids, params = engine.requests[stayer].prompt_token_ids, engine.requests[stayer].params
    engine.step()
    assert engine.dispatcher._spans is not spans
    assert [c.num_rows for c in engine.dispatcher._spans.choices] == [4, 3]
    engine.add_request("new", np.append(prompt_ids[:512], [7, 8]).astype(np.int32), params)
    for _ in range(3):
        engine.step()
    assert [c.num_rows for c in engine.dispatcher._spans.choices] == [5, 3]
    engine.close()


def make_decode_request(cache: CacheManager, row: int, tokens: np.ndarray) -> Request:
    request = Request(f"q{row}", tokens.astype(np.int32), SamplingParams(max_tokens=9))
    cache.register(request, 0.0)
    request.row = RequestRow(row)
    cache.try_admit(request, 0.0)
    return request


def test_a_query_inside_a_node_is_clipped_and_its_spans_are_not_kept():
    """The scheduler makes no such decode row today; the plan is right if one comes."""
    config = EngineConfig(capacity_tokens=200, min_extent_tokens=4)
    cache = CacheManager(config)
    first = Request("first", np.arange(20, dtype=np.int32), SamplingParams(), shared_prefix_len=16)
    cache.register(first, 0.0)
    first.row = RequestRow(0)
    cache.try_admit(first, 0.0)
    cache.allocate(first, 0, 20)
    cache.publish(first, 20)
    second = make_decode_request(cache, 1, np.arange(20))
    cost = AnyCost()
    dispatcher = Dispatcher(cost, cache)
    for step, position in enumerate((7, 8, 8, 7, 15, 16, 15, 19)):
        positions = np.array([19, position], np.int32)
        batch = Batch([first, second], positions, np.array([3, 4], np.int32), 0)
        plan = dispatcher.plan(step, batch, [])
        twin = reference_plan(cost, cache, step, batch, plan.slot_writes)
        for name in ("counts", "hot_items", "cold_items", "merge_indptr", "merge_partials"):
            np.testing.assert_array_equal(getattr(plan, name), getattr(twin, name), err_msg=name)
        assert second.num_hot_tokens == min(position + 1, 16)
    spans, visible = dispatcher._spans, positions + 1
    assert spans.fits(batch.decodes, visible, spans.version)
    for version in ((1, spans.version[1]), (0, spans.version[1] + 1)):
        assert not spans.fits(batch.decodes, visible, version)
    assert not spans.fits(batch.decodes[::-1], visible, spans.version)


def test_decode_on_a_full_arena_evicts_once_for_several_steps(monkeypatch):
    engine = steady_engine(8, 2, 512, 0, 16, 200, 0, full=True)
    while engine.cache.arena.num_free >= 8:
        engine.step()
    engine.step()
    evictions = count_calls(monkeypatch, engine.cache.storage, "_find_victims")
    before, spans = engine.cache.counters["evicted_tokens"], engine.dispatcher._spans
    for _ in range(40):
        engine.step()
    assert engine.cache.counters["evicted_tokens"] - before >= 39 * 8
    assert evictions[0] <= 4, "the tree is walked for victims now and then, not each step"
    assert engine.dispatcher._spans is spans, "what nobody uses was evicted: groups stay"
    assert engine.scheduler.num_preemptions == 0
    engine.close()


def test_a_step_tries_a_bounded_number_of_requests_without_room(monkeypatch):
    config = EngineConfig(capacity_tokens=600, max_requests=64, profile="default")
    engine = Engine(config, executor=NullExecutor())
    for i in range(50):
        tokens = np.arange(500, dtype=np.int32) + 600 * i
        engine.add_request(f"r{i}", tokens, SamplingParams(max_tokens=4, ignore_eos=True))
    engine.step()
    tried = count_calls(monkeypatch, engine.cache, "try_admit")
    engine.step()
    assert tried == [MAX_REFUSED]
    num_finished = 0
    while engine.has_work():
        num_finished += sum(out.finished for out in engine.step())
    assert num_finished == 50
    engine.close()


def test_steps_without_work_keep_nothing():
    """A step that schedules nobody leaves no slot write behind for a plan that never comes."""
    engine = steady_engine(8, 2, 512, 0, 4, 40, 0)
    for request_id in list(engine.requests):
        engine.abort(request_id)
    while engine.has_work():
        engine.step()
    engine.cache.take_slot_writes()
    for _ in range(20):
        assert engine.step() == []
    assert engine.cache.slot_writes == []
