"""What an engine takes and refuses on arrival: the longest of everything works, one more does not."""

from __future__ import annotations

import pytest
from tiny_engine import ARCHS, add, assert_matched, check_clean, make_engine, run, tokens

from granikv.core import FinishReason
from granikv.errors import InvalidArgument
from granikv.sampling_params import SamplingParams

LAYOUTS = ["asymmetric", "uniform"]


def refuse(engine, prompt, max_tokens, *words):
    """The request is refused, its message says all of `words`, and nothing of it is left."""
    before = engine.cache.usage([])
    with pytest.raises(InvalidArgument) as refused:
        add(engine, "refused", prompt, max_tokens)
    for word in words:
        assert word in str(refused.value), refused.value
    assert engine.cache.usage([]) == before and not engine.has_work()
    check_clean(engine)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "limit,sizes", [(256, {}), (127, {"capacity_tokens": 129})], ids=["context", "arena"]
)
def test_c53_the_longest_prompt_works_and_one_more_token_is_refused(models, layout, limit, sizes):
    """Of prompt and output together; the second time its KV is in the full arena."""
    engine = make_engine(models, prefix_layout=layout, **sizes)
    longest = tokens(37, limit - 1)
    for _ in range(2):
        (made,), _ = run(engine, [longest], max_tokens=1)
        assert len(made) == 1
        assert_matched(models, ARCHS[0], longest, made)
        for length in (limit, limit + 1, 10 * limit):
            words = "prompt: ", f"fewer than {limit} tokens", f"got {length} tokens"
            refuse(engine, tokens(38, length), 1, *words)
    refuse(engine, [], 1, "prompt", "at least one token")
    engine.close()


@pytest.mark.parametrize("async_depth", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_c56_max_tokens_are_made_exactly(models, layout, async_depth):
    engine = make_engine(models, prefix_layout=layout, async_depth=async_depth)
    for length in (1, 15, 16, 17, 16):  # around a page's end; the last is in the cache
        prompt = tokens(39, length)
        (made,), reasons = run(engine, [prompt], max_tokens=1)
        assert len(made) == 1 and reasons == {"r0": FinishReason.LENGTH}
        assert_matched(models, ARCHS[0], prompt, made)
    engine.close()


@pytest.mark.parametrize("value", [0, -1, None])
def test_c56_max_tokens_below_one_are_refused(value):
    with pytest.raises(InvalidArgument, match=rf"max_tokens: .*\[1, .*got {value}$"):
        SamplingParams(max_tokens=value)


def test_c58_c59_prompt_and_max_tokens_together_fill_the_context_and_no_more(models):
    engine = make_engine(models)
    prompt = tokens(40, 200)
    (made,), _ = run(engine, [prompt], max_tokens=56)
    assert len(made) == 56
    assert_matched(models, ARCHS[0], prompt, made)
    for more in (57, 2**31 - 1):
        refuse(
            engine, prompt, more, "max_tokens: expected at most 56: 200 prompt tokens",
            "limit of 256", f"got {more}",
        )  # fmt: skip
    engine.close()


def test_c59_a_length_too_many_among_seven_good_requests(models):
    """The case's numbers. Each good one's tokens and logits are those it gives alone."""
    good = [tokens(41 + i, 20 + 3 * i) for i in range(7)]
    alone = []
    for prompt in good:
        engine = make_engine(models, max_seq_len=8192, capacity_tokens=9000)
        alone += run(engine, [prompt])[0]
        engine.close()
    engine = make_engine(models, max_seq_len=8192, capacity_tokens=9000)
    step, seen = engine.step, []

    def step_between_refusals():
        if len(seen) < 4:  # before they run, while they prefill, while they decode
            with pytest.raises(InvalidArgument, match=r"at most 1219: 6973 .* 8192, got 1220$"):
                add(engine, "bad", tokens(48, 6973), 1220)
        outputs = step()
        seen.append({out.request_id for out in outputs})
        return outputs

    engine.step = step_between_refusals
    made, reasons = run(engine, good)
    assert set().union(*seen) == {f"r{i}" for i in range(7)}
    assert set(reasons.values()) == {FinishReason.LENGTH}
    for prompt, got, want in zip(good, made, alone, strict=True):
        assert_matched(models, ARCHS[0], prompt, got)
        assert got == want
    add(engine, "just fits", tokens(48, 6973), 1219)
    assert engine.abort("just fits")
    engine.close()
