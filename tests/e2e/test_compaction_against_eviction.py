"""KV that moves gives the same tokens: tiny model, torch executor, with and without compaction."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_engine import EVERYONE, GROUP_A, GROUP_B, Made, assert_matched, check_clean, make_engine
from tiny_engine import tokens as random_tokens

from granikv.cache.spans_in_use import SpanInUse
from granikv.core import FinishReason
from granikv.sampling_params import SamplingParams

ARCH = "LlamaForCausalLM"
SIZES = {"capacity_tokens": 400, "max_requests": 12, "min_extent_tokens": 16}


def fragmenting_load():
    """(prompts, lengths of their outputs): prefixes in turns, suffixes and outputs all different."""
    heads = [
        EVERYONE, EVERYONE + GROUP_A, GROUP_B + GROUP_A,
        *(random_tokens(5 + i, length) for i, length in enumerate((60, 110, 40, 90))),
    ]  # fmt: skip
    generator = np.random.default_rng(12)
    picks = generator.integers(0, len(heads), 50)
    prompts = [
        heads[pick] + random_tokens(700 + i, int(generator.integers(1, 30)))
        for i, pick in enumerate(picks)
    ]
    return prompts, generator.integers(2, 40, len(prompts)).tolist()


def serve(engine, prompts, lengths, prefix, after_step=lambda: None):
    """Answers by request id, with their reasons; a new request before every step."""
    queue = [(f"{prefix}{i}", *pair) for i, pair in enumerate(zip(prompts, lengths, strict=True))]
    made, reasons = {name: Made() for name, _, _ in queue}, {}
    step = 0
    while queue or engine.has_work():
        assert step < 2000, "no progress"
        if queue:
            name, prompt, length = queue.pop(0)
            params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
            engine.add_request(name, prompt, params)
        for out in engine.step():
            made[out.request_id] += out.token_ids
            if out.finished:
                reasons[out.request_id] = out.finish_reason
        after_step()
        step += 1
    check_clean(engine)
    for name, ids in made.items():
        ids.logits = engine.recorded_logits.get(name, [])
    return made, reasons


def is_compacting(plan):
    return any(move.reason == "compaction" for move in plan.moves)


@pytest.mark.parametrize("async_depth", [0, 1])
def test_tokens_are_those_without_compaction(models, async_depth):
    prompts, lengths = fragmenting_load()
    made = {}
    for budget in (8192, 0):
        engine = make_engine(models, async_depth=async_depth, max_move_tokens=budget, **SIZES)
        made[budget], _ = serve(engine, prompts, lengths, "a")
        compacted = engine.cache.counters["compacted_tokens"]
        assert (compacted > 0) == (budget > 0), engine.cache.counters
        engine.close()
    assert made[8192] == made[0]
    for i in range(0, len(prompts), 6):
        assert_matched(models, ARCH, prompts[i], made[8192][f"a{i}"])


@pytest.mark.parametrize("async_depth", [0, 1])
def test_a_step_that_fails_while_it_moves_kv_leaves_no_garbage(models, monkeypatch, async_depth):
    engine = make_engine(models, async_depth=async_depth, **SIZES)
    failed, forward = [], engine.executor._step

    def fail_when_compacting(plan):
        if len(failed) < 2 and is_compacting(plan):
            failed.append(plan.step_id)
            for move in plan.moves:
                target = slice(move.dst_start, move.dst_start + move.length)
                engine.executor.k_arena[:, target] = engine.executor.v_arena[:, target] = 1e3
            raise RuntimeError("injected")
        return forward(plan)

    monkeypatch.setattr(engine.executor, "_step", fail_when_compacting)
    prompts, lengths = fragmenting_load()
    _, reasons = serve(engine, prompts, lengths, "a")
    assert len(failed) == 2 == engine.counters["failed_steps"]
    assert set(reasons.values()) == {FinishReason.ERROR, FinishReason.LENGTH}
    made, reasons = serve(engine, prompts, lengths, "b")  # finds what the failures have left
    assert set(reasons.values()) == {FinishReason.LENGTH}
    for i in range(0, len(prompts), 3):
        assert_matched(models, ARCH, prompts[i], made[f"b{i}"])
    engine.close()


@pytest.mark.parametrize("async_depth", [0, 1])
def test_cancels_while_their_kv_moves(models, monkeypatch, async_depth):
    engine = make_engine(models, async_depth=async_depth, **SIZES)
    moving, cancelled = [], []
    replace = SpanInUse.replace

    def replacing(span, *arguments):
        moving.extend(r.request_id for r in span.readers)
        return replace(span, *arguments)

    def cancel():
        while moving:
            name = moving.pop()
            if len(cancelled) < 2 and engine.abort(name):
                cancelled.append(name)

    monkeypatch.setattr(SpanInUse, "replace", replacing)
    prompts, lengths = fragmenting_load()
    made, reasons = serve(engine, prompts, lengths, "a", cancel)
    assert len(cancelled) == 2
    made_again, _ = serve(engine, prompts, lengths, "b")  # reads what the cancelled ones left
    for i in range(0, len(prompts), 3):
        assert_matched(models, ARCH, prompts[i], made_again[f"b{i}"])
        if reasons[f"a{i}"] is not FinishReason.CANCELLED:
            assert_matched(models, ARCH, prompts[i], made[f"a{i}"])
    engine.close()
