"""Extends whose rows decode: every row's spans are its context, in position order, over random lives.

Few rows behind a long HOT prefix join the prefix's group on a GPU; see Dispatcher._spread.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_planner import MODEL, OPERATIONS, NullExecutor, check_context, live, spans_of_partials

from granikv.attention.plan_buffers import attention_shape
from granikv.attention.plan_cutter import PlanCutter
from granikv.attention.variants import LAYOUTS
from granikv.config import EngineConfig
from granikv.core import Choice, Count, ExtendSegment
from granikv.dispatcher import Dispatcher
from granikv.engine import Engine
from granikv.gpu_cost_model import GpuCostModel
from granikv.sampling_params import SamplingParams

COST = GpuCostModel.load("default", MODEL, 2, "none")
CUTTER = PlanCutter(attention_shape(MODEL, torch.bfloat16), 132, 4096)
SHARING = replace(CUTTER, hot_layout=LAYOUTS["mid"])  # else steps so short are read flat


class SpreadDispatcher(Dispatcher):
    """Spreads whatever can be spread, and checks each plan against the cache."""

    def __init__(self, cache, max_requests, max_seq_len, cutter):
        super().__init__(COST, cache, cutter)
        self.request_slots = np.full((max_requests, max_seq_len), -1, np.int64)
        self.num_spread = self.num_kept = 0

    def _pays_spread(self, extend, hot_end):
        return 0 < hot_end <= extend.start + 1

    def plan(self, step_id, batch, moves):
        plan = super().plan(step_id, batch, moves)
        num_decode = int(plan.counts[Count.NUM_DECODE_ROWS])
        self.num_spread += num_decode - len(batch.decodes)
        self.num_kept += int(plan.counts[Count.NUM_EXTEND_REQUESTS])
        assert int(plan.counts[Count.NUM_ROWS]) == batch.num_rows == len(plan.row_token)
        writes = plan.slot_writes
        self.request_slots[writes[:, 0], writes[:, 1]] = writes[:, 2]
        of_row = {int(request.row): request for request in batch.requests}
        spans = spans_of_partials(plan)
        for row in range(num_decode):
            named = plan.merge_partials[plan.merge_indptr[row] : plan.merge_indptr[row + 1]]
            request = of_row[int(plan.row_request[row])]
            self._check(request, [spans[p] for p in named], int(plan.row_position[row]) + 1)
        for i in range(int(plan.counts[Count.NUM_EXTEND_REQUESTS])):
            first, last = plan.qo_indptr[i], plan.qo_indptr[i + 1] - 1
            segments = plan.extend_segments[plan.extend_indptr[i] : plan.extend_indptr[i + 1]]
            columns = [ExtendSegment.KIND, ExtendSegment.START, ExtendSegment.LEN]
            request = of_row[int(plan.row_request[first])]
            self._check(request, segments[:, columns], int(plan.row_position[last]) + 1)
        self._check_rows(plan, batch)
        return plan

    def _check_rows(self, plan, batch):
        """Tokens, slots and samples are the rows' own, in whatever order the rows are."""
        rows = {(int(r), int(p)): i for i, (r, p) in enumerate(zip(plan.row_request, plan.row_position, strict=True))}  # fmt: skip
        assert len(rows) == batch.num_rows, "a row of each position"
        sampled = set()
        for request, position in zip(batch.decodes, batch.decode_positions.tolist(), strict=True):
            sampled.add(rows[int(request.row), position])
        for extend in batch.extends:
            for index, slot in enumerate(extend.slots.tolist()):
                assert (
                    plan.slot_mapping[rows[int(extend.request.row), extend.start + index]] == slot
                )
            if extend.samples:
                last = extend.start + extend.num_tokens - 1
                sampled.add(rows[int(extend.request.row), last])
        assert sampled == set(plan.sample_rows.tolist())
        for row, request in zip(plan.sample_rows, plan.sample_requests, strict=True):
            assert plan.row_request[row] == request.row

    def _check(self, request, spans, visible):
        check_context(self.cache, self.request_slots, request, spans, visible)


def engine_of(
    capacity: int, depth: int, budget: int, max_requests: int, cutter: PlanCutter = SHARING
) -> Engine:
    config = EngineConfig(
        capacity_tokens=capacity, max_requests=max_requests, max_seq_len=100, profile="default",
        max_num_batched_tokens=budget, min_extent_tokens=4, max_move_tokens=20, async_depth=depth,
        debug_checks=True,
    )  # fmt: skip
    engine = Engine(config, executor=NullExecutor())
    engine.dispatcher = SpreadDispatcher(engine.cache, max_requests, 100, cutter)
    return engine


@settings(max_examples=60, deadline=None)
@given(
    st.lists(OPERATIONS, max_size=40),
    st.sampled_from([90, 400]),
    st.sampled_from([0, 1]),
    st.sampled_from([3, 8, 64]),
    st.sampled_from([2, 6]),
    st.sampled_from([CUTTER, SHARING]),
)
def test_every_row_reads_its_context(operations, capacity, depth, budget, max_requests, cutter):
    live(engine_of(capacity, depth, budget, max_requests, cutter), operations)


@pytest.mark.parametrize("cutter", [CUTTER, SHARING], ids=["flat", "shared"])
def test_a_step_that_is_read_flat_says_so(cutter):
    engine, plans = engine_of(400, 0, 64, 6, cutter), []
    plan = engine.dispatcher.plan
    engine.dispatcher._cheapest = lambda *group: Choice(*group, "cascade", "as wanted", 0.0)
    engine.dispatcher.plan = lambda *step: plans.append(plan(*step)) or plans[-1]
    requests = [np.array([*range(40), 100 + i, 7], np.int32) for i in range(3)]
    for index, prompt in enumerate(requests):
        engine.add_request(f"r{index}", prompt, SamplingParams(max_tokens=9, ignore_eos=True))
        for _ in range(2):
            outputs = engine.step()
    last = plans[-1]
    read, paths = last.kv_tokens_read, {output.attention_path for output in outputs}
    variants = {choice.variant for choice in last.choices}
    assert last.choices and int(last.counts[Count.NUM_DECODE_ROWS]) > 1
    if cutter is CUTTER:
        assert (read, last.layout) == (last.kv_tokens_flat, "flat") and "flat" in paths
        assert variants == {"flat"} and "does not pay" in last.choices[0].reason
    else:
        assert read < last.kv_tokens_flat and last.layout == "mid" and "flat" not in variants


def test_what_follows_a_shared_prefix_is_spread_and_a_prefix_is_not():
    engine = engine_of(400, 1, 64, 6)
    shared = np.arange(40, dtype=np.int32)
    for i in range(3):
        prompt = np.concatenate([shared, [100 + i, 7, 8]]).astype(np.int32)
        engine.add_request(f"r{i}", prompt, SamplingParams(max_tokens=3, ignore_eos=True))
        for _ in range(3):
            engine.step()
    # the first's 43 rows are one extend; each other's 3 rows behind the prefix decode
    assert (engine.dispatcher.num_spread, engine.dispatcher.num_kept) == (6, 1)


@pytest.mark.parametrize(
    ("rows", "start", "hot_end", "want"),
    [
        (128, 16256, 16256, True),  # a turn behind a long prefix
        (16, 4100, 4096, True),
        (1, 4095, 4096, True),  # a whole prompt was cached: its last token again
        (128, 16256, 0, False),  # nothing HOT
        (128, 16000, 16256, False),  # rows within the prefix
        (1024, 16256, 16256, False),  # enough tiles to fill the GPU, and states for thousands
        (128, 40000, 64, False),  # most of what they read is their own
    ],
)
def test_only_few_rows_behind_a_long_prefix_are_spread(rows, start, hot_end, want):
    dispatcher = Dispatcher(COST, SimpleNamespace(), CUTTER)
    extend = SimpleNamespace(num_tokens=rows, start=start)
    assert dispatcher._pays_spread(extend, hot_end) == want


def test_without_a_gpus_cutter_nothing_is_spread():
    engine = engine_of(400, 0, 64, 6)
    engine.dispatcher.cutter = None
    batch = SimpleNamespace(extends=[SimpleNamespace()])
    assert engine.dispatcher._spread(batch) == ([], batch.extends)
