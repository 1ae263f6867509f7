"""A full arena: what leaves first, what may not leave, and that work goes on."""

from __future__ import annotations

import pytest
from tiny_engine import ARCHS, Made, add, assert_matched, check_clean, make_engine, run, tokens

LAYOUTS = ["asymmetric", "uniform"]
BLOCK = 16


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_nodes", [6, 3, 1])
def test_c47_the_tail_is_evicted_before_the_head(models, layout, num_nodes):
    """The case's numbers: a pool of 8 blocks, a chain of 6, then a request that needs 4.

    The chain is one node, or several of equal age: the last request used all of them.
    """
    engine = make_engine(models, prefix_layout=layout, capacity_tokens=8 * BLOCK + 1)
    chain, step = tokens(32, 6 * BLOCK), 6 * BLOCK // num_nodes
    for end in range(step, len(chain) + 1, step):
        run(engine, [chain[:end]], max_tokens=1)
    stored = [n for n in engine.cache.tree.nodes() if n.allocated]
    assert len(stored) == num_nodes and sum(n.allocated for n in stored) == 6 * BLOCK
    other = [3 + (chain[0] == 3), *tokens(33, 4 * BLOCK - 2)]
    run(engine, [other], max_tokens=1)
    assert engine.cache.counters["evicted_tokens"] <= 2 * BLOCK
    before = engine.counters["cached_tokens"]
    (made,), _ = run(engine, [chain], max_tokens=1)
    assert engine.counters["cached_tokens"] - before == 4 * BLOCK
    assert_matched(models, ARCHS[0], chain, made)
    engine.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("async_depth", [0, 1])
def test_c46_what_a_running_request_reads_is_not_evicted(models, layout, async_depth):
    """A waiting request's cached prefix, used later than what the running ones read, goes first.

    There are no other victims: `slow` and `late` hold the rest of the arena and grow.
    """
    engine = make_engine(
        models, prefix_layout=layout, async_depth=async_depth, capacity_tokens=20 * BLOCK + 1
    )
    wanted = tokens(34, 5 * BLOCK)
    run(engine, [wanted], max_tokens=1)
    engine.recorded_logits.clear()
    prompts = {"slow": tokens(35, 4 * BLOCK), "late": tokens(36, 3 * BLOCK)}
    made = {name: Made() for name in (*prompts, "waits")}
    for name, prompt in prompts.items():
        add(engine, name, prompt, 5 * BLOCK)
    done, num_evicted = set(), 0
    while engine.has_work():
        for out in engine.step():
            made[out.request_id] += out.token_ids
            done.update([out.request_id] * out.finished)
        if "waits" not in prompts and len(made["late"]) == 20:
            prompts["waits"] = wanted + tokens(37, 9 * BLOCK)  # fits when the others have ended
            add(engine, "waits", prompts["waits"], 3)
        if not done:
            num_evicted = engine.cache.counters["evicted_tokens"]
    check_clean(engine)
    assert num_evicted > BLOCK and engine.scheduler.num_preemptions == 0
    for name, prompt in prompts.items():
        made[name].logits = engine.recorded_logits[name]
        assert_matched(models, ARCHS[0], prompt, made[name])
    engine.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_c52_progress_with_a_full_cache(models, layout):
    """A pool of 20 blocks, 18 of them cached; 50 cold prompts that take half the pool each.

    The case's 5 s are steps here: of 64 rows, so a prompt takes three.
    """
    engine = make_engine(models, prefix_layout=layout, capacity_tokens=20 * BLOCK + 1)
    for i in range(6):
        run(engine, [tokens(600 + i, 3 * BLOCK)], max_tokens=1)
    assert engine.cache.usage([])["free"] <= 3 * BLOCK
    prompts = {f"r{i}": tokens(610 + i, 10 * BLOCK - 3) for i in range(50)}
    made = {name: Made() for name in prompts}
    for name, prompt in prompts.items():
        add(engine, name, prompt, 2)
    engine.recorded_logits.clear()
    num_steps = since = 0
    while engine.has_work():
        outputs = engine.step()
        for out in outputs:
            assert out.error is None
            made[out.request_id] += out.token_ids
        since = 0 if any(out.token_ids for out in outputs) else since + 1
        num_steps += 1
        assert since <= 4, f"no token in {since} steps"
    assert num_steps <= 50 * 4
    check_clean(engine)
    for name in ("r0", "r1", "r24", "r49"):
        made[name].logits = engine.recorded_logits[name]
        assert_matched(models, ARCHS[0], prompts[name], made[name])
    assert all(len(ids) == 2 for ids in made.values())
    engine.close()


def test_c31_a_hundred_requests_with_a_common_prefix_end_in_time(models):
    """A prefix of 1000 tokens, a hundred at once: one computes it, the others follow together.

    Bounded in steps: two for the prefix, two for the suffixes, three more tokens, a pipeline's
    two. tests/e2e/test_served_model.py has the case's 60 s.
    """
    prefix = tokens(38, 1000)
    prompts = [prefix + [3 + i % 90, *tokens(800 + i, 1 + i % 7)] for i in range(100)]
    sizes = {"max_requests": 100, "max_seq_len": 1100, "max_num_batched_tokens": 512}
    engine = make_engine(models, **sizes)
    step, num_steps = engine.step, []

    def counted():
        num_steps.append(1)
        assert len(num_steps) <= 12
        return step()

    engine.step = counted
    made, _ = run(engine, prompts, max_tokens=4)
    assert 0 <= engine.counters["cached_tokens"] - 99 * 1000 < 100  # some share a token more
    assert engine.cache.counters["extents"] == 1
    for i in range(0, 100, 9):
        assert_matched(models, ARCHS[0], prompts[i], made[i])
    engine.close()
