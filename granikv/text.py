"""Text in, text out: tokenizer, chat template and the incremental detokenizer.

Streaming rules: a delta never carries half a character and never a part of a stop string that may
still complete; the deltas joined equal the decode of all ids. When generation ends inside a
character, flush() gives its bytes as U+FFFD, as decode() does (whose byte-fallback kind also
loses whole characters before such a cut; the stream keeps them). Knows nothing of requests.
"""

from __future__ import annotations

import codecs
import datetime
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from granikv.errors import InvalidArgument, ModelFileError, Quantity, Unsupported
from granikv.models.embedded import find_embedded
from granikv.models.gguf_loader import GGUFFile

REPLACEMENT = "\ufffd"
_CONTROL, _USER_DEFINED = 3, 4  # token types of a GGUF file

# How text is split before merges, by tokenizer.ggml.pre (as llama.cpp's llama-vocab.cpp)
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    "llama-bpe": _WORDS + r"\p{N}{1,3}" + _REST,
    "llama3": _WORDS + r"\p{N}{1,3}" + _REST,
    "llama-v3": _WORDS + r"\p{N}{1,3}" + _REST,
    "smaug-bpe": _WORDS + r"\p{N}{1,3}" + _REST,
    "qwen2": _WORDS + r"\p{N}" + _REST,
    "deepseek-r1-qwen": _WORDS + r"\p{N}" + _REST,
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")
_PLAIN = ("gpt-2", "default", "mpt", "olmo", "jais")


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: the character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [x for x in range(256) if x not in printable]
    return {chr(x): x for x in printable} | {chr(256 + i): x for i, x in enumerate(others)}


def _pre_tokenizer(pre: str, path: Path) -> pre_tokenizers.PreTokenizer:
    if pre in _SPLITS:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _SINGLE_DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if pre in _PLAIN:
        return byte_level
    known = ", ".join((*_SPLITS, *_SINGLE_DIGITS, *_PLAIN))
    raise Unsupported(f"{path}: tokenizer.ggml.pre: expected one of {known}, got {pre!r}")


def _raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _compile_template(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_template_error
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)


class Tokenizer:
    """Encode, decode and chat template of one model."""

    MAX_SHRINK = 3  # of a text's bytes by Unicode's normal forms

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        eos_token_ids: Sequence[int] = (),
        bos_token_id: int | None = None,
        chat_template: str | None = None,
    ):
        self.backend = backend
        self.eos_token_ids = tuple(eos_token_ids)
        self.bos_token_id = bos_token_id
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        self._template_source = chat_template
        self._template: jinja2.Template | None = None
        self._byte_of_char = _byte_of_char()
        self._bytes_of_id: dict[int, bytes] = {}
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(x for x, token in added.items() if token.special)

    def check_size(self, text: str, limit: int) -> None:
        """Raises InvalidArgument for a text of certainly more than `limit` tokens.

        Told without encoding all of it, since no other request goes on meanwhile: by its size, or
        by half more than `limit` tokens in its first part. What follows a part can change only
        its last word's tokens, and of those only as many as fit into a few bytes.
        """
        size, most = len(text.encode(errors="replace")), limit * self._longest_bytes
        if size > most:
            expected = (
                f"fewer than {limit} tokens (the context), which no text over {most} bytes has"
            )
            raise InvalidArgument("prompt", Quantity(f"{size} bytes"), expected)
        part_len = 4 * limit
        while 2 * part_len < len(text):
            if len(self.encode(text[:part_len])) > 1.5 * limit + self._longest_bytes:
                found = Quantity(f"more than {limit} tokens")
                raise InvalidArgument("prompt", found, f"fewer than {limit} tokens (the context)")
            part_len *= 2

    @cached_property
    def _longest_bytes(self) -> int:
        vocab = self.backend.get_vocab(with_added_tokens=True)
        added = {t.content for t in self.backend.get_added_tokens_decoder().values()}
        plain = self.is_byte_level  # a character of such a token is a byte
        longest = max(len(t if plain and t not in added else t.encode()) for t in vocab)
        return longest * (1 if self.backend.normalizer is None else self.MAX_SHRINK)

    @classmethod
    def from_gguf(cls, path: str | Path) -> Tokenizer:
        """Byte-level BPE of a GGUF file. Raises ModelFileError or Unsupported."""
        path = Path(path)
        fields = GGUFFile(path).metadata
        kind = fields.get("tokenizer.ggml.model")
        if kind != "gpt2":
            raise Unsupported(
                f"{path}: tokenizer.ggml.model: expected 'gpt2' (byte-level BPE), got {kind!r}"
            )
        pre = fields.get("tokenizer.ggml.pre", "default")
        tokens, merges = fields.get("tokenizer.ggml.tokens"), fields.get("tokenizer.ggml.merges")
        if tokens is None or merges is None:
            raise ModelFileError(f"{path}: expected tokenizer.ggml.tokens and .merges, missing")
        backend = tokenizers.Tokenizer(
            models.BPE(
                vocab={token: index for index, token in enumerate(tokens)},
                merges=[tuple(merge.split(" ", 1)) for merge in merges],
                ignore_merges=pre in ("llama-bpe", "llama3", "llama-v3", "tekken"),
            )
        )
        if pre == "qwen2":
            backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = _pre_tokenizer(pre, path)
        backend.decoder = decoders.ByteLevel()
        types = fields.get("tokenizer.ggml.token_type", [])
        pairs = list(zip(tokens, types, strict=False))
        backend.add_special_tokens(
            [AddedToken(t, special=True, normalized=False) for t, x in pairs if x == _CONTROL]
        )
        backend.add_tokens(
            [AddedToken(t, normalized=False) for t, x in pairs if x == _USER_DEFINED]
        )
        bos = fields.get("tokenizer.ggml.bos_token_id")
        if fields.get("tokenizer.ggml.add_bos_token") and bos is not None:
            backend.post_processor = processors.TemplateProcessing(
                single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
            )
        ends = [fields.get(f"tokenizer.ggml.{x}_token_id") for x in ("eos", "eot")]
        return cls(
            backend,
            tuple(dict.fromkeys(x for x in ends if x is not None)),
            bos,
            fields.get("tokenizer.chat_template"),
        )

    @classmethod
    def from_hf(cls, folder: str | Path) -> Tokenizer:
        """tokenizer.json of a Hugging Face folder. Raises ModelFileError."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelFileError(f"{path}: expected a tokenizers file, it is missing")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelFileError(f"{path}: expected a whole tokenizers file: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        settings = {}
        for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
            if (folder / name).is_file():
                try:
                    settings[name] = json.loads((folder / name).read_text(encoding="utf-8"))
                except ValueError as error:
                    raise ModelFileError(
                        f"{folder / name}: expected valid JSON: {error}"
                    ) from error
        own = settings.get("tokenizer_config.json", {})

        def id_of(token: Any) -> int | None:
            text = token.get("content") if isinstance(token, dict) else token
            return None if text is None else backend.token_to_id(text)

        ends: list[int | None] = [id_of(own.get("eos_token"))]
        for name in ("generation_config.json", "config.json"):
            eos = settings.get(name, {}).get("eos_token_id")
            ends += eos if isinstance(eos, list) else [eos]
        template = own.get("chat_template")
        if isinstance(template, list):
            template = {x["name"]: x["template"] for x in template}.get("default")
        if (folder / "chat_template.jinja").is_file():
            template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        bos = id_of(own.get("bos_token"))
        if bos is None:
            bos = settings.get("config.json", {}).get("bos_token_id")
        return cls(backend, tuple(dict.fromkeys(x for x in ends if x is not None)), bos, template)

    def encode(self, text: str, add_special_tokens: bool = False) -> np.ndarray:
        """int32 [num_tokens]. Special tokens written in the text (<|im_start|>) become their ids."""
        ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return np.asarray(ids, dtype=np.int32)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD."""
        return self.backend.decode([int(x) for x in ids], skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes that one id stands for in a byte-level vocabulary; unknown ids: none."""
        known = self._bytes_of_id.get(token_id)
        if known is None:
            token = self.backend.id_to_token(token_id) or ""
            if all(char in self._byte_of_char for char in token):
                known = bytes(self._byte_of_char[char] for char in token)
            else:
                known = token.encode()
            self._bytes_of_id[token_id] = known
        return known

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt of a conversation. Raises Unsupported (no template) or InvalidArgument."""
        if self._template is None:
            if not self._template_source:
                raise Unsupported("chat template: this model has none; send a prompt instead")
            self._template = _compile_template(self._template_source)

        def text_of(token_id: int | None) -> str:
            return "" if token_id is None else self.backend.id_to_token(token_id) or ""

        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                bos_token=text_of(self.bos_token_id),
                eos_token=text_of(self.eos_token_ids[0] if self.eos_token_ids else None),
                **({"tools": None} | variables),
            )
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError) as error:
            raise InvalidArgument(
                "messages", error, "messages that the model's chat template accepts"
            ) from error


def load_tokenizer(path: str | Path | None = None) -> Tokenizer:
    """Tokenizer of a GGUF file, of a Hugging Face folder, or (None) of the embedded model."""
    path = find_embedded() if path is None else Path(path)
    return Tokenizer.from_hf(path) if path.is_dir() else Tokenizer.from_gguf(path)


class _ByteDecoder:
    """Byte-level vocabularies: every id is bytes, so a push costs its own tokens only."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        tokenizer = self._tokenizer
        special = tokenizer.special_ids
        return self._utf8.decode(
            b"".join(tokenizer.token_bytes(int(x)) for x in ids if int(x) not in special)
        )

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """Other vocabularies: decodes a short window again and gives what is new in it.

    The window opens at the last clean cut, so spaces that depend on a left neighbour stay.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._read = 0  # ids whose text is out; _ids[:_read] is left context only

    def push(self, ids: Iterable[int]) -> str:
        return "".join(self._step(int(x)) for x in ids)

    def _step(self, token_id: int) -> str:
        if token_id in self._tokenizer.special_ids:
            return ""
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        if text.endswith(REPLACEMENT):
            return ""
        return self._take(text)

    def _take(self, text: str) -> str:
        before = self._tokenizer.decode(self._ids[: self._read])
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        return text[len(before) :]

    def flush(self) -> str:
        return self._take(self._tokenizer.decode(self._ids))


class Detokenizer:
    """Text of one request as its tokens come, cut at the first stop string.

    Of several stop strings the one that completes first wins, whatever way ids are grouped into
    pushes. `matched_stop` is that string, or None.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), include_stop: bool = False
    ):
        self._decoder = (_ByteDecoder if tokenizer.is_byte_level else _WindowDecoder)(tokenizer)
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._held = ""  # decoded, and perhaps the start of a stop string
        self.matched_stop: str | None = None

    def push(self, ids: Iterable[int], may_stop: bool = True) -> tuple[str, bool]:
        """(new text, stopped). After a stop, everything more is ignored.

        may_stop: False while a stop string that these ids complete is text like any other.
        """
        if self.matched_stop is not None:
            return "", True
        return self._advance(self._decoder.push(ids), may_stop)

    def flush(self) -> str:
        """What is held back at the end: a partial stop string, incomplete bytes as U+FFFD."""
        if self.matched_stop is not None:
            return ""
        delta, _ = self._advance(self._decoder.flush())
        rest, self._held = self._held, ""
        return delta + ("" if self.matched_stop is not None else rest)

    def _advance(self, text: str, may_stop: bool = True) -> tuple[str, bool]:
        if not self._stop:
            return text, False
        text = self._held + text
        self._held = ""
        found = [(text.find(x) + len(x), -len(x), x) for x in self._stop if x in text]
        if found and may_stop:
            end, negative_len, self.matched_stop = min(found)
            return text[: end if self._include_stop else end + negative_len], True
        keep = max(_held_len(text, x) for x in self._stop)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut], False


def _held_len(text: str, stop: str) -> int:
    """Length of the longest end of text that is a proper start of stop."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
