"""Logits and tokens of the whole engine against Hugging Face transformers in fp32, on tiny random models.

Cold, warm, shared at one to three levels, leaders and followers, cancels, preemption, chunks.
Conservation of slots is checked after every step (debug_checks) and at the end of each test.
"""

from __future__ import annotations

import pytest
from tiny_engine import (
    ARCHS,
    Made,
    add,
    assert_matched,
    check_clean,
    make_engine,
    run,
    three_levels,
    tokens,
)

from granikv.bench.fixed_dispatch import FixedDispatcher
from granikv.core import FinishReason
from granikv.errors import AlreadyExists, Unsupported
from granikv.sampling_params import SamplingParams
from granikv.serving.engine_process import to_wire
from granikv.serving.request_inputs import Row
from granikv.serving.response_outputs import response_arrays


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("async_depth", [0, 1])
@pytest.mark.parametrize("chunk", [16, 512])
def test_shared_at_three_levels(models, arch, async_depth, chunk):
    prompts = three_levels()
    engine = make_engine(models, arch, async_depth=async_depth, max_num_batched_tokens=chunk)
    for _ in range(2):  # cold, then warm
        made, _ = run(engine, prompts)
        for prompt, got in zip(prompts, made, strict=True):
            assert_matched(models, arch, prompt, got)
    assert engine.cache.counters["extents"] >= 2
    assert engine.counters["cached_tokens"] > sum(map(len, prompts)) / 2
    engine.close()


@pytest.mark.parametrize("layout", ["asymmetric", "uniform"])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("capacity,async_depth", [(4096, 1), (200, 0), (200, 1)])
def test_layouts_and_caching_agree(models, layout, caching, capacity, async_depth):
    prompts = three_levels()
    sizes = {"capacity_tokens": capacity, "async_depth": async_depth}  # 200: evictions
    engine = make_engine(models, prefix_layout=layout, enable_prefix_caching=caching, **sizes)
    made, _ = run(engine, prompts)
    for prompt, got in zip(prompts, made, strict=True):
        assert_matched(models, ARCHS[0], prompt, got)
    if not caching or layout == "uniform":
        assert engine.cache.counters["extents"] == 0
    engine.close()


@pytest.mark.parametrize("layout,reused", [("asymmetric", 63), ("uniform", 48)])
def test_c02_whole_prompt_cached_recomputes_the_last_token(models, layout, reused):
    prompt = tokens(20, 64)
    engine = make_engine(models, prefix_layout=layout)
    made = [run(engine, [prompt], max_tokens=3)[0][0] for _ in range(3)]
    assert made[0] == made[1] == made[2]
    assert_matched(models, ARCHS[0], prompt, made[0])
    assert engine.counters["cached_tokens"] == 2 * reused
    engine.close()


@pytest.mark.parametrize("layout", ["asymmetric", "always shared", "uniform"])
@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_c04_lengths_around_an_extents_end(models, length, layout):
    """16: the least extent and the uniform layout's page. Prompt log-probs are not offered.

    The dispatcher reads so short extents flat; `always shared` makes HOT items of them.
    """
    always, layout = layout == "always shared", layout.replace("always shared", "asymmetric")
    prompt = tokens(22, length)
    prompts = [prompt, prompt + tokens(23, 5), prompt]
    engine = make_engine(models, prefix_layout=layout)
    if always:
        engine.dispatcher = FixedDispatcher(engine, "cascade")
    page = 1 if layout == "asymmetric" else 16
    for warm in (False, True):
        before = engine.counters["cached_tokens"]
        made, _ = run(engine, prompts)
        for one, got in zip(prompts, made, strict=True):
            assert_matched(models, ARCHS[0], one, got)
        if warm:
            reusable = [(len(one) - 1) // page * page for one in prompts]
            assert engine.counters["cached_tokens"] - before >= sum(reusable)
    assert (engine.counters["groups_cascade"] > 0) == (always and length >= 16)
    engine.close()


@pytest.mark.parametrize("always_shared", [False, True])
def test_c32_a_strict_prefix_and_twins_inside_the_shared_prefix(models, always_shared):
    prompt = tokens(25, 64)
    prompts = [prompt, prompt, prompt[:40], prompt + tokens(26, 3)]
    engine = make_engine(models)
    if always_shared:
        engine.dispatcher = FixedDispatcher(engine, "cascade")
    for _ in range(2):
        made, _ = run(engine, prompts)
        for one, got in zip(prompts, made, strict=True):
            assert_matched(models, ARCHS[0], one, got)
    assert always_shared == (engine.counters["groups_cascade"] > 0)
    engine.close()


@pytest.mark.parametrize("gap", [1, 2])
def test_arrivals_some_steps_apart_join_a_growing_extent(models, gap):
    prompts = three_levels()
    engine = make_engine(models, max_num_batched_tokens=16)
    made, _ = run(engine, prompts, gap=gap)
    for prompt, got in zip(prompts, made, strict=True):
        assert_matched(models, ARCHS[0], prompt, got)
    engine.close()


@pytest.mark.parametrize("step", [1, 2, 3, 4])
@pytest.mark.parametrize("async_depth", [0, 1])
def test_leader_cancelled_in_mid_prefill(models, step, async_depth):
    prefix = tokens(27, 100)
    prompts = [prefix + tokens(200 + i, 6) for i in range(4)]
    engine = make_engine(models, max_num_batched_tokens=16, async_depth=async_depth)
    made, reasons = run(engine, prompts, cancel=("r0", step))
    assert reasons["r0"] is FinishReason.CANCELLED
    for prompt, got in list(zip(prompts, made, strict=True))[1:]:
        assert_matched(models, ARCHS[0], prompt, got)
    engine.close()


def test_batch_of_33_ragged(models):
    prefix = tokens(28, 30)
    prompts = [prefix[: i % 3 * 15] + tokens(300 + i, 1 + 3 * i) for i in range(33)]
    engine = make_engine(models)
    made, _ = run(engine, prompts, max_tokens=5)
    for prompt, got in zip(prompts, made, strict=True):
        assert_matched(models, ARCHS[0], prompt, got)
    engine.close()


@pytest.mark.parametrize("async_depth", [0, 1])
@pytest.mark.parametrize(
    "lengths,chunk", [([30] * 6, 64), ([20, 20, 90], 8)], ids=["decoding", "before_a_token"]
)
def test_c73_preemption_is_not_counted_as_a_hit(models, lengths, chunk, async_depth):
    """Nor told to the client, although a request that comes back finds some of its own KV."""
    prompts = [tokens(400 + i, n) for i, n in enumerate(lengths)]
    sizes = {"capacity_tokens": 150, "max_num_batched_tokens": chunk}
    engine = make_engine(models, **sizes, async_depth=async_depth)
    schedule, num_rows = engine.scheduler.schedule, []
    preempt, made_before = engine.scheduler._preempt, []
    step, finals = engine.step, []

    def counting(*args, **kwargs):
        batch = schedule(*args, **kwargs)
        num_rows.append(batch.num_rows)
        return batch

    def noting(request):
        made_before.append(len(request.output_token_ids))
        preempt(request)

    def keeping():
        outputs = step()
        finals.extend(out for out in outputs if out.finished)
        return outputs

    engine.scheduler.schedule, engine.scheduler._preempt = counting, noting
    engine.step = keeping
    made, _ = run(engine, prompts, max_tokens=40)
    assert made_before and (min(made_before) == 0) == (chunk < min(lengths))
    assert engine.counters["cached_tokens"] == 0
    assert [out.num_cached_tokens for out in finals] == [0] * len(prompts)
    for out in finals:
        arrays = response_arrays(to_wire(out), Row("", {}, returns={"perf_metrics": True}), 0, True)
        assert arrays["cached_tokens"] == arrays["kv_cache_reused_blocks"] == 0
    # the last token is never an input
    again = sum(num_rows) - sum(lengths) - len(prompts) * (40 - 1)
    assert engine.counters["recomputed_tokens"] == again > 0
    for prompt, got in zip(prompts, made, strict=True):
        assert_matched(models, ARCHS[0], prompt, got)
    engine.close()


def test_promotion_of_a_prefix_that_turns_out_shared(models):
    prefix = tokens(29, 60)
    engine = make_engine(models)
    run(engine, [prefix + tokens(30, 4)])
    prompts = [prefix + tokens(31 + i, 4) for i in range(3)]
    made, _ = run(engine, prompts)
    for prompt, got in zip(prompts, made, strict=True):
        assert_matched(models, ARCHS[0], prompt, got)
    assert engine.cache.counters["promotions"] >= 1
    engine.close()


@pytest.mark.parametrize("chunk", [64, 512])
def test_c50_a_large_request_starts_within_a_bounded_wait(models, chunk):
    """Small ones keep passing a request that does not fit, but at most 32 of them."""
    sizes = {"capacity_tokens": 130, "max_seq_len": 128, "max_num_batched_tokens": chunk}
    engine = make_engine(models, **sizes)
    add(engine, "first", tokens(500, 20), max_tokens=12)
    add(engine, "large", tokens(34, 110), max_tokens=4)
    for i in range(80):  # lengths differ, so that some always run
        add(engine, f"small{i}", tokens(501 + i, 6), max_tokens=4 + i % 3 * 4)
    started, ended = [], []
    while engine.has_work():
        for out in engine.step():
            started += [out.request_id] * (out.num_output_tokens == 1)
            ended += [out.request_id] * (out.finish_reason is FinishReason.LENGTH)
    assert len(ended) == 82
    overtakers = started.index("large") - 1
    assert 16 <= overtakers <= 32, started
    assert ended.index("large") >= 12, ended
    check_clean(engine)
    engine.close()


def test_c50_one_step_admits_no_more_than_may_pass(models):
    engine = make_engine(models, capacity_tokens=300, max_num_batched_tokens=512)
    add(engine, "first", [60, *tokens(600, 119)], max_tokens=4)  # no first token is shared
    add(engine, "large", [61, *tokens(601, 199)], max_tokens=4)
    for i in range(38):
        add(engine, f"small{i}", [3 + i, 4], max_tokens=2)
    engine.step()
    assert len(engine.scheduler.running) == 1 + 32
    while engine.has_work():
        engine.step()
    check_clean(engine)
    engine.close()


class UnseenName(str):
    """An adapter's name that passes the refusal: the engine's key keeps it apart all the same."""

    def __bool__(self):
        return False


@pytest.mark.parametrize("order", [[0, 1, 2], [1, 2, 0], [2, 0, 1]])
def test_c08_salt_and_adapter_are_apart(models, order):
    engine = make_engine(models)
    prompt = tokens(35, 40)
    with pytest.raises(Unsupported, match="adapter='X'"):
        engine.add_request("refused", prompt, SamplingParams(), adapter="X")
    origins = [{"adapter": UnseenName("X")}, {"salt": "X"}, {}]
    for expected in (0, 39):  # cold, then each finds its own
        for i in order:
            before = engine.counters["cached_tokens"]
            add(engine, f"s{i}", prompt, max_tokens=2, **origins[i])
            while engine.has_work():
                engine.step()
            assert engine.counters["cached_tokens"] - before == expected, origins[i]
    check_clean(engine)
    engine.close()


def test_c43_c79_submit_and_cancel_leaves_nothing(models):
    """300 pairs with a model; tests/unit/test_cancels.py has 10,000 without one."""
    engine = make_engine(models)
    params = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True)
    for i in range(300):
        engine.add_request(f"c{i}", tokens(700 + i % 7, 20), params)
        if i % 3 == 0:
            engine.step()
        assert engine.abort(f"c{i}")
    while engine.has_work():
        engine.step()
    assert not engine.abort("c1")
    check_clean(engine)
    engine.close()


def test_c35_a_live_id_is_refused_and_the_first_is_unharmed(models):
    engine = make_engine(models)
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    prompt = tokens(36, 20)
    engine.add_request("same", prompt, params)
    with pytest.raises(AlreadyExists, match="same"):
        engine.add_request("same", prompt, params)
    made = Made()
    while engine.has_work():
        made += [t for out in engine.step() for t in out.token_ids]
    made.logits = engine.recorded_logits["same"]
    assert_matched(models, ARCHS[0], prompt, made)
    check_clean(engine)
    engine.close()


@pytest.mark.parametrize("async_depth", [0, 1])
def test_c41_cancel_with_log_probs(models, async_depth):
    engine = make_engine(models, async_depth=async_depth)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=0)
    prompts = {"gone": tokens(50, 20), "stays": tokens(51, 20)}
    made, logprobs = {name: Made() for name in prompts}, {name: [] for name in prompts}
    finals = {}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params)
    is_cancelled = False
    while engine.has_work():
        for out in engine.step():
            made[out.request_id] += out.token_ids
            logprobs[out.request_id] += out.logprobs
            if out.finished:
                finals[out.request_id] = out
        if len(made["gone"]) == 4 and not is_cancelled:
            is_cancelled = engine.abort("gone")
            assert is_cancelled
    reasons = {name: out.finish_reason for name, out in finals.items()}
    assert reasons == {"gone": FinishReason.CANCELLED, "stays": FinishReason.LENGTH}
    for name, count in (("gone", 4), ("stays", 12)):
        assert finals[name].error is None and len(made[name]) == len(logprobs[name]) == count
        assert finals[name].cum_logprob == pytest.approx(sum(logprobs[name]))
    made["stays"].logits = engine.recorded_logits["stays"]
    assert_matched(models, ARCHS[0], prompts["stays"], made["stays"])
    check_clean(engine)
    engine.close()


def test_a_failing_step_fails_its_requests_and_nothing_leaks(models, monkeypatch):
    engine = make_engine(models)
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    prompt = tokens(38, 40)
    engine.add_request("a", prompt, params)
    forward = engine.executor.decoder.forward

    def broken(*args, **kwargs):
        raise RuntimeError("injected")

    monkeypatch.setattr(engine.executor.decoder, "forward", broken)
    outputs = []
    for _ in range(4):
        outputs += engine.step()
    assert [o.finish_reason for o in outputs if o.finished] == [FinishReason.ERROR]
    check_clean(engine)
    monkeypatch.setattr(engine.executor.decoder, "forward", forward)
    made, _ = run(engine, [prompt])
    assert_matched(models, ARCHS[0], prompt, made[0])
    engine.close()
