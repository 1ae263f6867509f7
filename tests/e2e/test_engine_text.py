"""The engine with a tokenizer: stop strings, characters of several tokens, ends in mid-character.

The model is tiny and random; its sampler is told each prompt's tokens (with a vocabulary of single
bytes and a few pieces, so that a text has many splits). All else is the real engine.
"""

from __future__ import annotations

import dataclasses

import pytest
import tokenizers
from tiny_engine import ARCHS, check_clean
from tokenizers import decoders, models, pre_tokenizers

from granikv.config import EngineConfig
from granikv.core import FinishReason
from granikv.engine import Engine
from granikv.executor.torch_executor import TorchExecutor
from granikv.sampling import Sampler
from granikv.sampling_params import SamplingParams
from granikv.text import Tokenizer

END = "<end>"
PIECES = ["quick", "Sort(", "ht)", ")\n", "\n ", "\n\n", " \n", "\nb", "quickSort(right)", "ab"]
CHARACTERS = "héllo 漢字 😀🏽"  # of 1, 2, 3 and 4 bytes, a token each; the last two are one emoji


@pytest.fixture(scope="module")
def tokenizer():
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocab = {char: i for i, char in enumerate(sorted(byte_level.alphabet()))}
    for piece in PIECES:
        ((token, _),) = byte_level.pre_tokenize_str(piece)
        vocab[token] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer, backend.decoder = byte_level, decoders.ByteLevel()
    backend.add_special_tokens([END])
    return Tokenizer(backend, eos_token_ids=(backend.token_to_id(END),))


@pytest.fixture(scope="module")
def decoder(models, tokenizer):
    """The tiny Llama, its logits widened to the tokenizer's vocabulary."""
    inner = models[ARCHS[0]][0]
    config = dataclasses.replace(inner.config, vocab_size=tokenizer.vocab_size)

    class Widened:
        def __init__(self):
            self.config, self.rotary, self.rope_in_attend = config, inner.rotary, False

        def forward(self, token_ids, positions, attend, sample_rows):
            inner.rope_in_attend = self.rope_in_attend
            few = token_ids % inner.config.vocab_size
            logits = inner.forward(few, positions, attend, sample_rows)
            return logits.repeat(1, 4)[:, : config.vocab_size]

    return Widened()


class ScriptedSampler(Sampler):
    """Makes the tokens of the script that a request's first prompt token names, then `fill`."""

    def __init__(self, max_requests, vocab_size, scripts, fill):
        super().__init__(max_requests, vocab_size)
        self.scripts, self.fill, self._script_of_row = scripts, fill, {}

    def set_request(self, row, params, prompt_ids, output_ids=(), seed_text=""):
        super().set_request(row, params, prompt_ids, output_ids, seed_text)
        self._script_of_row[row] = self.scripts[int(prompt_ids[0])]

    def sample(self, logits, rows, output_positions):
        for i, (row, position) in enumerate(zip(rows, output_positions, strict=True)):
            script = self._script_of_row[row]
            logits[i, script[position] if position < len(script) else self.fill] = 1e9
        return super().sample(logits, rows, output_positions)


def ids_of(tokenizer, split):
    """Ids of the pieces of a text; a piece that is no token counts as its bytes."""
    ids = []
    for piece in split:
        ((token, _),) = tokenizer.backend.pre_tokenizer.pre_tokenize_str(piece)
        one = tokenizer.backend.token_to_id(token)
        ids += [one] if one is not None else tokenizer.encode(piece).tolist()
    return ids


class Answer:
    def __init__(self):
        self.deltas, self.token_ids, self.finish_reason = [], [], None

    @property
    def text(self):
        return "".join(self.deltas)


def answers(decoder, tokenizer, scripts, params, async_depth=1):
    """One request per script; `params` are one for all or one each. Checks that nothing leaks."""
    config = EngineConfig(
        capacity_tokens=2048, max_requests=40, debug_checks=True, async_depth=async_depth,
        min_extent_tokens=16, profile="default",
    )  # fmt: skip
    sampler = ScriptedSampler(config.max_requests, tokenizer.vocab_size, scripts, fill=5)
    executor = TorchExecutor(config, decoder, sampler)
    engine = Engine(config, executor=executor, tokenizer=tokenizer)
    params = [params] * len(scripts) if isinstance(params, SamplingParams) else params
    made = [Answer() for _ in scripts]
    for i, one in enumerate(params):
        engine.add_request(str(i), [i, 7, 7], one)
    while engine.has_work():
        for out in engine.step():
            answer = made[int(out.request_id)]
            assert answer.finish_reason is None, "an output behind the last"
            assert out.error is None
            answer.deltas.append(out.text)
            answer.token_ids += out.token_ids
            answer.finish_reason = out.finish_reason
    check_clean(engine)
    engine.close()
    return made


def greedy(max_tokens, **fields):
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **fields)


SPLITS = {  # pieces up to the one that completes the stop string, and behind it
    "quickSort(right)": [
        (["a ", "quick", "Sort(", "rig", "ht)"], ["\nb", " c"]),
        ([*"a quickSort(right)"], [*"\nb c"]),
        (["a ", "quickSort(right)"], ["\nb", " c"]),
        (["a ", "quick", "Sort(", "right", ")\n"], ["b c"]),  # its last token holds more
    ],
    "\n\n": [
        (["a", "\n\n"], ["b c"]),
        (["a", "\n", "\n"], ["b c"]),
        (["a", " \n", "\nb"], [" c"]),
        (["a quickSort(right", ")\n", "\n "], [" c"]),
    ],
}


@pytest.mark.parametrize("async_depth", [0, 1])
@pytest.mark.parametrize("stop", SPLITS)
def test_c62_the_engine_stops_on_text_whatever_its_split(decoder, tokenizer, stop, async_depth):
    """Beside them a request without a stop makes the same tokens to its end."""
    kept = [ids_of(tokenizer, to) for to, _ in SPLITS[stop]]
    scripts = [ids_of(tokenizer, [*to, *behind]) for to, behind in SPLITS[stop]]
    texts = ["".join([*to, *behind]) for to, behind in SPLITS[stop]]
    params = [greedy(40, stop=(stop, "never made")) for _ in scripts]
    stopped = answers(decoder, tokenizer, scripts, params, async_depth)
    shown = [dataclasses.replace(p, include_stop_str_in_output=True) for p in params]
    shown = answers(decoder, tokenizer, scripts, shown, async_depth)
    free = answers(decoder, tokenizer, scripts, [greedy(len(s)) for s in scripts], async_depth)
    for i, text in enumerate(texts):
        assert stopped[i].text == text[: text.index(stop)]
        assert shown[i].text == text[: text.index(stop)] + stop
        assert free[i].text == text and free[i].token_ids == scripts[i]
        assert free[i].finish_reason is FinishReason.LENGTH
        for answer in (stopped[i], shown[i]):
            assert answer.finish_reason is FinishReason.STOP
            assert answer.token_ids == kept[i], "tokens behind the stop are dropped"


def test_c62_a_stop_that_never_completes_is_released_at_the_end(decoder, tokenizer):
    script = ids_of(tokenizer, ["a ", "quick", "Sort(", "left"])
    cut = answers(decoder, tokenizer, [script], greedy(4, stop=("quickSort(right)",)))[0]
    assert cut.text == "a quickSort(" and cut.finish_reason is FinishReason.LENGTH
    assert cut.deltas[2] == "" and cut.deltas[3] == "quickSort(", "held back, released at its end"
    (end,) = tokenizer.eos_token_ids
    ended = answers(decoder, tokenizer, [[*script[:3], end]], greedy(40, stop=("quickie",)))[0]
    assert ended.text == "a quick" and ended.finish_reason is FinishReason.STOP


def test_c62_no_stop_string_ends_or_cuts_what_min_tokens_asks_for(decoder, tokenizer):
    script = ids_of(tokenizer, [*"a\n\nb\n", *"c\n\nd"])
    early = answers(decoder, tokenizer, [script], greedy(9, min_tokens=5, stop=("\n\n",)))[0]
    assert early.text == "a\n\nb\nc" and early.token_ids == script[:8]
    assert early.finish_reason is FinishReason.STOP
    exact = answers(decoder, tokenizer, [script], greedy(9, min_tokens=3, stop=("\n\n",)))[0]
    assert exact.text == "a" and exact.token_ids == script[:3]
    late = answers(decoder, tokenizer, [script], greedy(9, min_tokens=9, stop=("\n\n",)))[0]
    assert late.text == "a\n\nb\nc\n\nd" and late.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("stop", [(), ("漢字!", "\U0001f600\U0001f3fe")], ids=["", "stops"])
@pytest.mark.parametrize("async_depth", [0, 1])
def test_c64_no_half_character_is_sent_wherever_max_tokens_cuts(
    decoder, tokenizer, stop, async_depth
):
    """One token a byte. The stop strings nearly match: what they hold back comes at the end."""
    ids = ids_of(tokenizer, [CHARACTERS])
    assert len(ids) == len(CHARACTERS.encode()) == 22
    params = [greedy(n, stop=stop) for n in range(1, len(ids) + 1)]
    num_cut = 0
    for n, answer in enumerate(answers(decoder, tokenizer, [ids] * len(ids), params, async_depth)):
        assert answer.token_ids == ids[: n + 1]
        assert answer.finish_reason is FinishReason.LENGTH
        assert answer.text == tokenizer.decode(ids[: n + 1]), "the text without streaming"
        assert not any("\ufffd" in delta for delta in answer.deltas[:-1])
        assert CHARACTERS.startswith(answer.text.rstrip("\ufffd"))
        num_cut += answer.text.endswith("\ufffd")
    assert num_cut == 22 - len(CHARACTERS)


def test_c64_an_end_token_in_mid_character_is_flushed_too(decoder, tokenizer):
    (end,) = tokenizer.eos_token_ids
    ids = ids_of(tokenizer, ["é漢"])
    answer = answers(decoder, tokenizer, [[*ids[:4], end]], greedy(40))[0]
    assert answer.deltas == ["", "é", "", "", "\ufffd"]
    assert answer.text == tokenizer.decode(answer.token_ids)
    assert answer.finish_reason is FinishReason.STOP
