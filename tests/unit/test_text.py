"""Tokenizer against transformers; streaming text (C64) and stop strings (C62)."""

import json
import random

import pytest

from granikv.errors import InvalidArgument, ModelFileError, Unsupported
from granikv.models.embedded import find_embedded
from granikv.text import Detokenizer, Tokenizer, load_tokenizer

TEXTS = [
    "",
    "Hello, world! It's 2+2=4, isn't it?",
    "  leading  and   inner spaces \t tabs\n\n\nlines \r\n end  ",
    "digits 0 12 345 6789 3.14159 1,000,000 v2beta10",
    "héllo 漢字 😀🏽 Ελληνικά עברית العربية ไทย e\u0301",
    "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|><|im_start|>x<|endoftext|><|im_end <|im_end|>",
    "def quickSort(right):\n    return [x for x in right if x > 0]\n\n",
    "\u200b\ufeff\x00\x7f½ ² ١٢٣ Ⅷ",
]
EMOJI = "héllo 漢字 😀🏽"


@pytest.fixture(scope="module")
def path():
    try:
        return find_embedded()
    except ModelFileError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def tokenizer(path):
    return Tokenizer.from_gguf(path)


@pytest.fixture(scope="module")
def reference(path):
    """transformers' tokenizer of the file, with the digit split of SmolLM's own tokenizer.json.

    transformers does not know tokenizer.ggml.pre = smollm and would leave the split out.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    loaded.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return loaded


@pytest.fixture(scope="module")
def spaced():
    """A tokenizer with byte fallback and word-start spaces (the SentencePiece kind)."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    vocab = {"<unk>": 0} | {f"<0x{x:02X}>": x + 1 for x in range(256)}
    for piece in ("▁", "▁the", "▁cat", "s", "a", "t", "h", "e", "c", "."):
        vocab[piece] = len(vocab)
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(backend)


def stream(detokenizer, ids, size=1):
    """(deltas, joined text, stopped)."""
    deltas, stopped = [], False
    for start in range(0, len(ids), size):
        delta, stopped = detokenizer.push(ids[start : start + size])
        deltas.append(delta)
        if stopped:
            break
    deltas.append(detokenizer.flush())
    return deltas, "".join(deltas), stopped


@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_transformers(tokenizer, reference, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == "int32"
    assert ids.tolist() == reference.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == reference.decode(
        ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_are_one_id(tokenizer):
    assert tokenizer.encode("<|im_start|>").tolist() == [1]
    assert tokenizer.encode("<|im_end|>").tolist() == [2]
    assert tokenizer.eos_token_ids == (2,) and tokenizer.vocab_size == 49152


def test_chat_template_equals_transformers(tokenizer, reference):
    for messages in (
        [{"role": "user", "content": "Hi"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "{{ 7 * 7 }}"}],
    ):
        for prompt in (True, False):
            assert tokenizer.apply_chat_template(messages, prompt) == reference.apply_chat_template(
                messages, add_generation_prompt=prompt, tokenize=False
            )
    with pytest.raises(InvalidArgument, match="messages"):
        tokenizer.apply_chat_template([{"role": "user"}])


def test_template_is_sandboxed_and_optional(tokenizer, spaced):
    evil = Tokenizer(
        tokenizer.backend, chat_template="{{ ''.__class__.__mro__[1].__subclasses__() }}"
    )
    with pytest.raises(InvalidArgument):
        evil.apply_chat_template([])
    with pytest.raises(Unsupported, match="chat template"):
        spaced.apply_chat_template([])


def test_from_hf_equals_from_gguf(tokenizer, tmp_path):
    with pytest.raises(ModelFileError, match="tokenizer.json"):
        load_tokenizer(tmp_path)
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"eos_token": {"content": "<|im_end|>"}, "chat_template": "{{ eos_token }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    loaded = load_tokenizer(tmp_path)
    assert loaded.eos_token_ids == (2, 0) and loaded.is_byte_level
    assert loaded.apply_chat_template([]) == "<|im_end|>"
    assert all((loaded.encode(x) == tokenizer.encode(x)).all() for x in TEXTS)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(ModelFileError, match="tokenizer.json"):
        load_tokenizer(tmp_path)


# --- streaming --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tokenizer", "spaced"])
@pytest.mark.parametrize("text", [EMOJI, "the cats the 😀. 漢 the", " the  cat ", *TEXTS])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_stream_equals_decode(request, kind, text, size):
    tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode(text)
    deltas, joined, stopped = stream(Detokenizer(tokenizer), ids, size)
    assert joined == tokenizer.decode(ids) and not stopped
    assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("kind", ["tokenizer", "spaced"])
def test_a_cut_inside_a_character_is_flushed_as_replacement(request, kind):
    tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode(EMOJI)
    num_cut_inside = 0
    for end in range(len(ids) + 1):
        deltas, joined, _ = stream(Detokenizer(tokenizer), ids[:end])
        if kind == "tokenizer":
            assert joined == tokenizer.decode(ids[:end])
        assert EMOJI.startswith(joined.rstrip("\ufffd"))
        assert not any("\ufffd" in delta for delta in deltas[:-1])
        num_cut_inside += "\ufffd" in deltas[-1]
    assert num_cut_inside >= 4


def test_random_ids_stream_like_decode(tokenizer):
    rng = random.Random(5)
    for _ in range(200):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(30))]
        _, joined, _ = stream(Detokenizer(tokenizer), ids, rng.randrange(1, 4))
        assert joined == tokenizer.decode(ids)


# --- stop strings -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("    quickSort(left)\n    quickSort(right)\n    done", "quickSort(right)"),
        ("first line\n\nsecond", "\n\n"),
        ("one\n two\n\n\nthree", "\n\n"),
        ("say 😀🏽 now", "😀🏽"),
        ("aaab aab", "aab"),
    ],
)
def test_stop_on_text(tokenizer, text, stop, size):
    chars = [tokenizer.encode(char).tolist() for char in text]  # a split no encoder would make
    for ids in (tokenizer.encode(text).tolist(), [x for char in chars for x in char]):
        before = text[: text.index(stop)]
        detokenizer = Detokenizer(tokenizer, (stop,))
        _, joined, stopped = stream(detokenizer, ids, size)
        assert joined == before and stopped and detokenizer.matched_stop == stop
        assert detokenizer.push(ids) == ("", True) and detokenizer.flush() == ""
        _, joined, _ = stream(Detokenizer(tokenizer, (stop,), include_stop=True), ids, size)
        assert joined == before + stop


def test_partial_stop_is_held_back_then_released(tokenizer):
    ids = [x for char in "ab quickSort(rest" for x in tokenizer.encode(char).tolist()]
    detokenizer = Detokenizer(tokenizer, ("quickSort(right)",))
    deltas, joined, stopped = stream(detokenizer, ids)
    assert joined == "ab quickSort(rest" and not stopped
    assert deltas[3:14] == [""] * 11  # "quickSort(r" may still become the stop string
    assert deltas[14] == "quickSort(re"
    _, joined, stopped = stream(Detokenizer(tokenizer, ("rest!",)), ids)
    assert joined == "ab quickSort(rest" and not stopped


def test_first_completed_of_several_stops_wins_for_every_grouping(tokenizer):
    text = "abcdefgh"
    ids = [x for char in text for x in tokenizer.encode(char).tolist()]
    for size in (1, 2, 3, 8):
        detokenizer = Detokenizer(tokenizer, ("bcdefg", "de", "e"))
        _, joined, stopped = stream(detokenizer, ids, size)
        assert (joined, stopped, detokenizer.matched_stop) == ("abc", True, "de")


def test_stop_holds_for_random_texts(tokenizer):
    rng = random.Random(7)
    for _ in range(300):
        text = "".join(rng.choice("ab\n") for _ in range(rng.randrange(1, 20)))
        stops = tuple(
            {"".join(rng.choice("ab\n") for _ in range(rng.randrange(1, 4))) for _ in "12"}
        )
        ids = tokenizer.encode(text).tolist()
        ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
        expected = text[: min(ends)[1]] if ends else text
        _, joined, stopped = stream(Detokenizer(tokenizer, stops), ids, rng.randrange(1, 4))
        assert joined == expected and stopped == bool(ends)


def test_a_text_is_refused_for_its_size_only_when_no_tokens_could_hold_it(tokenizer, spaced):
    decomposed = "\u1112\u1161\u11ab" * 50  # 9 bytes each, 3 in normal form C
    for one in (tokenizer, spaced):
        longest = max(one.backend.get_vocab(), key=len)
        for text in (*TEXTS, decomposed, longest * 20, " " * 3000):
            one.check_size(text, max(1, len(one.encode(text))))


def test_no_text_that_fits_is_refused_by_its_parts(tokenizer, spaced):
    """Long words without a gap, where a part's last word is all of it, and others."""
    rng = random.Random(11)
    pieces = [*"aA7 .\n_", "ab", "abc", "é", "\u1112\u1161\u11ab", "\U0001f600", "=" * 16, " the"]
    for one in (tokenizer, spaced):
        for _ in range(60):
            chosen = rng.sample(pieces, rng.randrange(1, 4))
            text = "".join(rng.choices(chosen, k=rng.randrange(1, 1500)))
            one.check_size(text, max(1, len(one.encode(text))))


@pytest.mark.parametrize("unit", ["a", "7", "hello ", "\U0001f600"])
def test_a_text_of_too_many_tokens_is_encoded_in_part_only(tokenizer, monkeypatch, unit):
    encode, num_chars = Tokenizer.encode, []
    monkeypatch.setattr(
        Tokenizer, "encode", lambda self, text: num_chars.append(len(text)) or encode(self, text)
    )
    text = unit * (165_000 // len(unit.encode()))
    with pytest.raises(InvalidArgument, match="fewer than 2048 .*got more than 2048 tokens$"):
        tokenizer.check_size(text, 2048)
    assert sum(num_chars) <= 7 * 8192


def test_a_huge_text_is_refused_before_it_is_encoded(tokenizer, monkeypatch):
    from granikv.bench.host import NullExecutor
    from granikv.config import EngineConfig, ModelConfig
    from granikv.engine import Engine
    from granikv.sampling_params import SamplingParams

    model = ModelConfig("llama", 2, 64, 64, 4, 2, 16, tokenizer.vocab_size, 4096)
    config = EngineConfig(capacity_tokens=512, max_seq_len=64, profile="default")
    engine = Engine(config, executor=NullExecutor(model), tokenizer=tokenizer)
    monkeypatch.setattr(Tokenizer, "encode", lambda *_: pytest.fail("encoded"))
    with pytest.raises(InvalidArgument, match=r"prompt: .*64 tokens.*, got 1000000 bytes$"):
        engine.add_request("r", "a" * 1_000_000, SamplingParams(max_tokens=1))
    engine.close()
