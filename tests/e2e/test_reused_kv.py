"""KV that requests share or find: always its own tokens', complete, and read to its end only."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tiny_engine import ARCHS, Made, add, assert_matched, check_clean, make_engine, run, tokens

from granikv.cache.prefix_tree import PrefixTree
from granikv.core import ColdItem, Count, ExtendSegment, FinishReason

LAYOUTS = ["asymmetric", "uniform"]
LARGE = 1e4  # of a stale K or V: what it does to logits, no tolerance hides


def cached_by(engine, prompts, **settings):
    """(tokens and logits of each prompt, prompt tokens found in the cache by all of them)."""
    before = engine.counters["cached_tokens"]
    made, _ = run(engine, prompts, **settings)
    return made, engine.counters["cached_tokens"] - before


@pytest.mark.parametrize("layout,reused", [("asymmetric", 852), ("uniform", 848)])
def test_c01_cold_and_warm_are_equal(models, layout, reused):
    """The case's sizes: 853 prompt tokens and 64 new ones, four times, and without the cache."""
    prompt, sizes = tokens(21, 853), {"max_seq_len": 1024, "max_num_batched_tokens": 512}
    engine = make_engine(models, prefix_layout=layout, **sizes)
    made, found = zip(*(cached_by(engine, [prompt], max_tokens=64) for _ in range(4)), strict=True)
    assert found == (0, reused, reused, reused)
    engine.close()
    engine = make_engine(models, enable_prefix_caching=False, **sizes)
    without, _ = run(engine, [prompt], max_tokens=64)
    engine.close()
    for (got,) in made:
        assert got == without[0]  # no near-tie is in this prompt's output
    for (got,) in (without, made[0], made[-1]):
        assert len(got) == 64
        assert_matched(models, ARCHS[0], prompt, got)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("async_depth", [0, 1])
def test_c01_later_turns_reuse_the_cached_output_of_earlier_ones(models, layout, async_depth):
    """A conversation: every turn sends all before it. Two users ask at once from turn two on."""
    engine = make_engine(models, prefix_layout=layout, async_depth=async_depth)
    text, page = tokens(22, 21), engine.cache.page_tokens
    for turn in range(4):
        prompts = [text] if turn == 0 else [text, [*text[:-1], 3]]
        made, found = cached_by(engine, prompts, max_tokens=27)
        if turn:  # all but the new question, the last made token, which was never an input
            known = len(text) - 9 - 1
            assert found >= len(prompts) * (known // page * page)
        for prompt, got in zip(prompts, made, strict=True):
            assert_matched(models, ARCHS[0], prompt, got)
        text = [*text, *made[0], *tokens(23 + turn, 9)]
    engine.close()


def test_c05_arrivals_together_compute_the_prefix_once(models):
    prompts = arrivals()
    engine = make_engine(models)
    made, found = cached_by(engine, prompts, max_tokens=4)
    for prompt, got in zip(prompts, made, strict=True):
        assert_matched(models, ARCHS[0], prompt, got)
    assert found == 31 * 128
    assert engine.cache.counters["extents"] == 1
    engine.close()


def arrivals():
    """32 prompts: the same 128 tokens, then different last 8."""
    prefix = tokens(24, 128)
    return [[*prefix, 3 + i, *tokens(100 + i, 7)] for i in range(32)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("async_depth", [0, 1])
@pytest.mark.parametrize("failing", [0, 1])
def test_c05_only_written_kv_is_visible(models, layout, async_depth, failing):
    """A step of the prefix's prefill fails and writes garbage: nobody may find what it took.

    Its leader fails with it. The others, who waited, compute that part anew.
    """
    prompts = arrivals()
    engine = make_engine(models, prefix_layout=layout, async_depth=async_depth)
    forward, executor = engine.executor._step, engine.executor

    def fail_once(plan):
        if plan.step_id != failing:
            return forward(plan)
        for arena in (executor.k_arena, executor.v_arena):
            arena[:, plan.slot_mapping] = LARGE
        raise RuntimeError("injected")

    executor._step = fail_once
    for i, prompt in enumerate(prompts):
        add(engine, f"r{i}", prompt, 4)
    made, failed = {f"r{i}": Made() for i in range(len(prompts))}, set()
    while engine.has_work():
        for out in engine.step():
            made[out.request_id] += out.token_ids
            if out.finish_reason is FinishReason.ERROR:
                failed.add(out.request_id)
    check_clean(engine)
    assert "r0" in failed and len(failed) <= 2
    for i, prompt in enumerate(prompts):
        got = made[f"r{i}"]
        if f"r{i}" not in failed:
            got.logits = engine.recorded_logits[f"r{i}"]
            assert_matched(models, ARCHS[0], prompt, got)
    again, found = cached_by(engine, prompts, max_tokens=1)
    assert found >= 32 * 128
    for prompt, got in zip(prompts, again, strict=True):
        assert_matched(models, ARCHS[0], prompt, got)
    engine.close()


class SameHash:
    """Of a key of the tree's children: equal only to equal ones, with everybody's hash."""

    def __hash__(self):
        return 7


class IntKey(SameHash, int):
    pass


class BytesKey(SameHash, bytes):
    pass


@pytest.mark.parametrize("layout", LAYOUTS)
def test_c07_tokens_decide_a_hit_not_a_hash(models, layout, monkeypatch):
    """The case's build, whose hash is a constant. P and Q: two pages without a common token."""
    key = PrefixTree.key

    def colliding(tree, ids):
        made = key(tree, ids)
        return (IntKey if isinstance(made, int) else BytesKey)(made)

    monkeypatch.setattr(PrefixTree, "key", colliding)
    p, q = ([first + t % 40 for t in tokens(25, 32)] for first in (3, 50))
    assert not set(p) & set(q)
    engine = make_engine(models, prefix_layout=layout)
    whole = 31 if layout == "asymmetric" else 16
    mixed = [(p[:16] + q[16:], 16), (q[:16] + p[16:], 16)]
    for prompt, expected in [(p, 0), (q, 0), *mixed, (p, whole), (q, whole)]:
        (got,), found = cached_by(engine, [prompt])
        assert found == expected
        assert_matched(models, ARCHS[0], prompt, got)
    engine.close()


@pytest.mark.parametrize("stale", [LARGE, math.nan], ids=["large", "NaN"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_c25_lengths_at_a_page_multiple_read_nothing_stale(models, layout, stale):
    """The case's numbers: 40 tokens behind a prompt of 15, pages of 16, a pool full of garbage.

    Attention cuts a span at the row's own position, so a plan that names a key too many reads
    right all the same: the plans are looked at too.
    """
    engine = make_engine(models, prefix_layout=layout, max_num_batched_tokens=512)
    engine.executor.k_arena.fill_(stale)
    engine.executor.v_arena.fill_(stale)
    launch, planned = engine.executor.launch, set()

    def check_lengths(plan):
        num_rows = plan.counts[Count.NUM_DECODE_ROWS]
        lengths = np.zeros(num_rows, np.int32)
        np.add.at(lengths, plan.cold_items[:, ColdItem.ROW], plan.cold_items[:, ColdItem.LEN])
        assert not plan.counts[Count.NUM_HOT_ITEMS]
        assert lengths.tolist() == (plan.row_position[:num_rows] + 1).tolist()
        for i in range(plan.counts[Count.NUM_EXTEND_REQUESTS]):
            parts = slice(plan.extend_indptr[i], plan.extend_indptr[i + 1])
            length = int(plan.extend_segments[parts, ExtendSegment.LEN].sum())
            assert length == plan.row_position[plan.qo_indptr[i + 1] - 1] + 1
        planned.update(lengths.tolist())
        return launch(plan)

    engine.executor.launch = check_lengths
    prompts = [tokens(26, 15), tokens(27, 1), tokens(28, 31)]  # and two that fill pages elsewhere
    made, _ = run(engine, prompts, max_tokens=40)
    assert planned >= {16, 32, 48}
    for prompt, got in zip(prompts, made, strict=True):
        assert_matched(models, ARCHS[0], prompt, got)  # at every length
    engine.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_c26_one_token_twice_gives_the_same_logits_twice(models, layout):
    engine = make_engine(models, prefix_layout=layout)
    made, _ = run(engine, [[5], [5], [5]], max_tokens=18)
    for got in made:
        assert_matched(models, ARCHS[0], [5], got)
        assert got == made[0]
    engine.close()
