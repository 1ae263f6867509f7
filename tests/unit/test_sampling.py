"""The sampler: distribution, reproducibility, penalties and filters against slow references."""

import math

import numpy as np
import pytest
import torch

from granikv.errors import InvalidArgument
from granikv.philox import philox4x32, seed_of_text, uniform
from granikv.sampling import Sampler
from granikv.sampling_ops import argmax_in_pieces
from granikv.sampling_params import SamplingParams

VOCAB = 50


def logits_of(num_rows, seed=0, vocab=VOCAB):
    return 2 * torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed))


def draws(params, logits, num_draws, prompt=(), output=()):
    """Tokens of num_draws output positions with one row of logits."""
    sampler = Sampler(1, logits.shape[-1])
    sampler.set_request(0, params, list(prompt), list(output))
    state = sampler._states[0]
    x = state_logits(sampler, state, logits).expand(num_draws, -1)
    return sampler._ids(x, [state] * num_draws, range(num_draws))


def state_logits(sampler, state, logits):
    return sampler._edit(logits.clone()[None], [state], [len(state.tail)])


def reference_probs(logits, params, prompt=(), output=()):
    """Slow float64 reference, token by token."""
    x = logits.double().tolist()
    for token in range(len(x)):
        if token in prompt or token in output:
            r = params.repetition_penalty
            x[token] = x[token] / r if x[token] > 0 else x[token] * r
        x[token] -= params.frequency_penalty * list(output).count(token)
        x[token] -= params.presence_penalty * (token in output)
    best = max(x)
    p = [math.exp((v - best) / params.temperature) for v in x]
    p = [v if v >= params.min_p else 0.0 for v in p]
    order = sorted(range(len(p)), key=lambda i: -p[i])
    if params.top_k:
        order = order[: params.top_k]
    total, mass, kept = sum(p[i] for i in order), 0.0, []
    for i in order:
        kept.append(i)
        mass += p[i]
        if mass >= params.top_p * total:
            break
    kept = [i for i in kept if p[i] > 0]
    total = sum(p[i] for i in kept)
    return np.array([p[i] / total if i in kept else 0.0 for i in range(len(p))])


def test_philox_known_answers():
    """Vectors of the Random123 library, kat_vectors."""
    ones = 0xFFFFFFFF
    got = philox4x32(
        np.array(
            [[0] * 4, [ones] * 4, [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]], np.uint32
        ),
        np.array([[0] * 2, [ones] * 2, [0xA4093822, 0x299F31D0]], np.uint32),
    )
    assert got.tolist() == [
        [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ]
    u = uniform([7] * 20000, range(20000))
    assert u.min() >= 0 and u.max() < 1 and abs(u.mean() - 0.5) < 0.01


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 12, "top_p": 0.8, "min_p": 0.05, "temperature": 1.7},
        {"repetition_penalty": 1.6, "presence_penalty": 0.5, "frequency_penalty": 0.7},
        {
            "repetition_penalty": 0.5,
            "presence_penalty": -1.0,
            "frequency_penalty": -0.3,
            "top_k": 9,
        },
    ],
)
def test_distribution(settings):
    params = SamplingParams(seed=11, **settings)
    logits, prompt, output = logits_of(1)[0], [1, 2, 3, 3], [3, 4, 5, 5, 5]
    expected = reference_probs(logits, params, prompt, output)
    num_draws = 20000
    counts = np.bincount(draws(params, logits, num_draws, prompt, output), minlength=VOCAB)
    assert not counts[expected == 0].any()
    sigma = np.sqrt(num_draws * expected * (1 - expected)) + 1
    assert (np.abs(counts - num_draws * expected) < 5 * sigma).all()


def run(sampler, rows, positions, logits):
    return sampler.sample(logits, rows, positions).token_ids.tolist()


MIXED = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1),
    SamplingParams(seed=1, top_k=7),
    SamplingParams(seed=2**64 - 1, top_p=0.9, min_p=0.01),
    SamplingParams(frequency_penalty=1.0, temperature=0.7),
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
    SamplingParams(bad_words_ids=((3,), (4, 5)), min_tokens=3),
]


@pytest.mark.parametrize("vocab", [VOCAB, 3001])
def test_token_does_not_depend_on_the_batch(vocab):
    logits = logits_of(len(MIXED), 3, vocab)
    together = Sampler(16, vocab, eos_token_ids=(2,))
    for i, params in enumerate(MIXED):
        together.set_request(i, params, [1, 4], [], f"r{i}")
    got = run(together, range(len(MIXED)), [0] * len(MIXED), logits)
    order = [5, 2, 0, 6, 3, 1, 4]
    shuffled = Sampler(16, vocab, eos_token_ids=(2,))
    for place, i in enumerate(order):
        shuffled.set_request(15 - place, MIXED[i], [1, 4], [], f"r{i}")
    rows = [15 - place for place in range(len(order))]
    assert run(shuffled, rows, [0] * len(order), logits[order]) == [got[i] for i in order]
    for i, params in enumerate(MIXED):
        alone = Sampler(1, vocab, eos_token_ids=(2,))
        alone.set_request(0, params, [1, 4], [], f"r{i}")
        assert run(alone, [0], [0], logits[i : i + 1]) == [got[i]]


@pytest.mark.parametrize("params", MIXED)
def test_preemption_changes_nothing(params):
    steps = logits_of(8, 5)
    whole = Sampler(4, VOCAB, eos_token_ids=(2,))
    whole.set_request(0, params, [4, 9], [], "id")
    expected = [run(whole, [0], [i], steps[i : i + 1])[0] for i in range(8)]
    first = Sampler(4, VOCAB, eos_token_ids=(2,))
    first.set_request(1, params, [4, 9], [], "id")
    got = [run(first, [1], [i], steps[i : i + 1])[0] for i in range(4)]
    first.clear_request(1)
    first.set_request(3, params, np.array([4, 9], np.int32), got, "id")
    got += [run(first, [3], [i], steps[i : i + 1])[0] for i in range(4, 8)]
    assert got == expected


def test_seeds():
    assert seed_of_text("a") == seed_of_text("a") == 15270482384145340437
    assert len({seed_of_text("a"), seed_of_text("b"), seed_of_text("a", 1)}) == 3
    flat = torch.zeros(1, 10000)

    def first(**kwargs):
        sampler = Sampler(1, 10000, seed_default=kwargs.pop("default", 0))
        text = kwargs.pop("text", "")
        sampler.set_request(0, SamplingParams(**kwargs), [], [], text)
        return [run(sampler, [0], [i], flat)[0] for i in range(3)]

    assert first(seed=5) == first(seed=5, text="other")
    assert first(text="a") == first(text="a")
    values = [first(seed=5), first(seed=6), first(text="a"), first(text="b")]
    values.append(first(text="a", default=1))
    assert len({tuple(x) for x in values}) == 5 and len(set(values[0])) == 3


def test_penalties_follow_the_output():
    """Greedy with penalties, stepwise, against the slow reference."""
    params = SamplingParams(
        temperature=0.0, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3
    )
    sampler, output, logits = Sampler(2, VOCAB), [], logits_of(1, 9)
    before = logits.clone()
    sampler.set_request(0, params, [7, 8], [])
    warm = SamplingParams(
        temperature=1.0, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3
    )
    for step in range(20):
        expected = int(reference_probs(logits[0], warm, [7, 8], output).argmax())
        assert run(sampler, [0], [step], logits) == [expected]
        output.append(expected)
    assert torch.equal(logits, before) and len(set(output)) > 3


def test_greedy_needs_no_penalty_state():
    sampler = Sampler(1, VOCAB)
    sampler.set_request(0, SamplingParams(temperature=0.0), [1], [])
    logits = logits_of(1)
    assert run(sampler, [0], [0], logits) == logits.argmax(-1).tolist()
    assert sampler._states[0].output_counts is None


def test_min_tokens_mask_eos_and_stop_ids():
    logits = torch.zeros(1, VOCAB)
    logits[0, [2, 6, 7]] = torch.tensor([9.0, 8.0, 7.0])
    sampler = Sampler(1, VOCAB, eos_token_ids=(2,))
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(6,))
    sampler.set_request(0, params, [1], [])
    assert [run(sampler, [0], [i], logits)[0] for i in range(4)] == [7, 7, 2, 2]


def test_bad_words():
    logits = torch.zeros(1, VOCAB)
    logits[0, [5, 6, 7]] = torch.tensor([9.0, 8.0, 7.0])
    sampler = Sampler(1, VOCAB)
    params = SamplingParams(temperature=0.0, bad_words_ids=((5, 5), (4, 5, 6)))
    sampler.set_request(0, params, [3, 4], [])
    # 5; after "4 5" neither 6 nor a second 5; then 5 again, and not 5 after it
    assert [run(sampler, [0], [i], logits)[0] for i in range(4)] == [5, 7, 5, 6]
    with pytest.raises(InvalidArgument, match="bad_words_ids"):
        sampler.set_request(0, SamplingParams(bad_words_ids=((VOCAB,),)), [], [])
    with pytest.raises(InvalidArgument, match="stop_token_ids"):
        sampler.set_request(0, SamplingParams(stop_token_ids=(-1,)), [], [])


def test_logprobs_are_of_unmodified_logits():
    logits = logits_of(3, 4)
    sampler = Sampler(3, VOCAB)
    sampler.set_request(0, SamplingParams(seed=1, logprobs=3, temperature=5.0, top_k=2), [], [])
    sampler.set_request(1, SamplingParams(temperature=0.0), [], [])
    sampler.set_request(
        2, SamplingParams(temperature=0.0, logprobs=0, frequency_penalty=2), [], [1]
    )
    out = sampler.sample(logits, [0, 1, 2], [0, 0, 1])
    expected = logits.double().log_softmax(-1)
    for i in (0, 2):
        assert out.logprobs[i] == pytest.approx(expected[i, out.token_ids[i]].item(), abs=1e-5)
    best = expected[0].topk(3)
    assert out.top_ids[0].tolist() == best.indices.tolist()
    np.testing.assert_allclose(out.top_logprobs[0], best.values, atol=1e-5)
    assert np.isnan(out.logprobs[1]) and (out.top_ids[1:] == -1).all()
    assert sampler.sample(logits[1:2], [1], [0]).logprobs is None


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e-8, 100.0])
@pytest.mark.parametrize("scale", [0.0, 1e-8, 1.0, 1e30, math.inf])
@pytest.mark.parametrize("settings", [{}, {"top_k": 2**31 - 1, "top_p": 1e-300, "min_p": 1.0}])
def test_extreme_numbers_give_tokens(temperature, scale, settings):
    logits = logits_of(4, 6)
    logits = torch.where(logits > 3, math.inf, logits) if scale == math.inf else logits * scale
    logits[0, 5] = -math.inf
    sampler = Sampler(4, VOCAB)
    params = SamplingParams(
        temperature=temperature, repetition_penalty=1000.0, frequency_penalty=-2.0, **settings
    )
    for row in range(4):
        sampler.set_request(row, params, [1, 2], [3], str(row))
    for step in range(3):
        tokens = run(sampler, range(4), [step + 1] * 4, logits)
        assert all(0 <= token < VOCAB for token in tokens) and tokens[0] != 5
    if temperature == 5e-324 and scale == 1.0:
        sampler.set_request(0, SamplingParams(temperature=temperature), [], [], "x")
        assert run(sampler, [0], [0], logits[:1]) == logits[:1].argmax(-1).tolist()


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 999999}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_p": -1.0},
     {"top_p": 0.0}, {"top_p": math.nextafter(1.0, 2.0)}, {"top_k": -5}, {"repetition_penalty": 0.0},
     {"seed": 2**64}],
)  # fmt: skip
def test_numbers_out_of_range_are_refused(settings):
    with pytest.raises(InvalidArgument, match=next(iter(settings))):
        SamplingParams(**settings)


def test_masking_everything_leaves_a_token():
    sampler = Sampler(1, 4)
    params = SamplingParams(seed=0, bad_words_ids=((0,), (1,), (2,), (3,)))
    sampler.set_request(0, params, [], [])
    assert 0 <= run(sampler, [0], [0], torch.zeros(1, 4))[0] < 4


def test_rows_must_be_set_and_none_is_fine():
    sampler = Sampler(2, VOCAB)
    with pytest.raises(InvalidArgument, match="rows"):
        sampler.sample(logits_of(1), [1], [0])
    assert len(sampler.sample(torch.zeros(0, VOCAB), [], []).token_ids) == 0


def test_wide_nucleus_takes_the_full_sort():
    """A flat distribution needs more than the first sorted part; the result is the same set."""
    vocab = 5000
    params = SamplingParams(seed=3, top_p=0.9)
    logits = torch.linspace(0, 0.1, vocab)
    got = draws(params, logits, 4000)
    expected = reference_probs(logits, params)
    assert (expected[got] > 0).all() and (expected > 0).sum() > 4000


def test_argmax_in_pieces_is_the_first_maximum():
    """Ties within a piece and across pieces, all equal, -inf, and NaN, which counts as largest."""
    logits = torch.randint(-3, 3, (200, 60), generator=torch.Generator().manual_seed(0)).float()
    logits[0], logits[1] = 0.0, -math.inf
    logits[2, 31] = logits[2, 50] = math.nan
    for pieces in (1, 4, 60):
        got = argmax_in_pieces(logits.view(200, pieces, -1))
        assert torch.equal(got, logits.argmax(-1))
