"""Prompts for the load test through Triton: texts whose token counts are known.

Texts are words that the model's tokenizer reads as one token each. A description (groups of
agents that share a prefix) or a trace (equal block ids are equal text) becomes requests of fixed
output length. It knows nothing of servers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from granikv.bench.workloads import Trace
from granikv.errors import InvalidArgument, Unsupported
from granikv.text import Tokenizer

WORD = re.compile(r" [a-z]{3,10}")
MIN_WORDS = 256


class TextMaker:
    """Random texts of exact length in tokens of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, max_words: int = 4096):
        self._num_extra = len(tokenizer.encode(""))  # a begin token, where the model has one
        self._words: list[str] = []
        for token in range(tokenizer.vocab_size):
            word = tokenizer.decode([token])
            if WORD.fullmatch(word) and len(tokenizer.encode(word)) == 1 + self._num_extra:
                self._words.append(word)
                if len(self._words) == max_words:
                    break
        if len(self._words) < MIN_WORDS:
            raise Unsupported(
                f"tokenizer: expected {MIN_WORDS} words of one token, found {len(self._words)}"
            )

    def words(self, num_tokens: int, seed: Sequence[int]) -> list[str]:
        """Words of one token each, the same for the same arguments."""
        rng = np.random.default_rng(list(seed))
        indices = rng.integers(0, len(self._words), max(0, num_tokens))
        return [self._words[i] for i in indices]

    def text(self, num_tokens: int, seed: Sequence[int]) -> str:
        """num_tokens tokens when it stands behind other text."""
        return "".join(self.words(num_tokens, seed))

    def start(self, num_tokens: int, seed: Sequence[int]) -> str:
        """Like text, for the start of a prompt: a begin token counts."""
        return self.text(num_tokens - self._num_extra, seed)


@dataclass(frozen=True)
class Entry:
    text: str
    prompt_len: int  # tokens
    output_len: int  # tokens

    def inputs(self) -> dict:
        """Tensors of the request; no token ends the answer early."""
        return {
            "text_input": self.text,
            "max_tokens": self.output_len,
            "end_id": -1,
            "exclude_input_in_output": True,
        }


@dataclass(frozen=True)
class AgentsWorkload:
    """Groups of agents; each group shares a prefix, each request has a suffix of its own."""

    group_sizes: tuple[int, ...] = (8,)
    prefix_len: int = 1024  # tokens
    suffix_len: int = 32
    output_len: int = 32
    rounds: int = 2  # requests of each agent in one measurement
    name: str = "shared-prefix"

    def __post_init__(self) -> None:
        if not self.group_sizes or min(self.group_sizes) < 1:
            raise InvalidArgument("group_sizes", self.group_sizes, "at least one agent per group")
        for name, lowest in (
            ("prefix_len", 2),
            ("suffix_len", 1),
            ("output_len", 2),
            ("rounds", 1),
        ):
            if getattr(self, name) < lowest:
                raise InvalidArgument(name, getattr(self, name), f"at least {lowest}")

    @property
    def params(self) -> dict:
        return {
            "group_sizes": list(self.group_sizes),
            "prefix_len": self.prefix_len,
            "suffix_len": self.suffix_len,
            "output_len": self.output_len,
            "rounds": self.rounds,
        }

    def warmup(self, maker: TextMaker) -> list[Entry]:
        """Two requests per group, which make its prefix a shared one."""
        return [
            self._entry(maker, group, (2, group, i), output_len=2)
            for group in range(len(self.group_sizes))
            for i in range(2)
        ]

    def entries(self, maker: TextMaker, run: int) -> list[Entry]:
        """Groups take turns. Suffixes differ from one run to the next, prefixes do not."""
        agents = [
            (agent, group)
            for agent in range(max(self.group_sizes))
            for group, size in enumerate(self.group_sizes)
            if agent < size
        ]
        return [
            self._entry(maker, group, (1, run, r, agent, group), self.output_len)
            for r in range(self.rounds)
            for agent, group in agents
        ]

    def _entry(self, maker: TextMaker, group: int, seed: Sequence[int], output_len: int) -> Entry:
        text = maker.start(self.prefix_len, (0, group)) + maker.text(self.suffix_len, seed)
        return Entry(text, self.prefix_len + self.suffix_len, output_len)


@dataclass(frozen=True)
class TraceWorkload:
    """A request trace; longer prompts and outputs are cut, so that the shared heads stay.

    max_prompt_len, max_output_len: tokens, 0 keeps all.
    """

    trace: Trace
    max_prompt_len: int = 0
    max_output_len: int = 0

    @property
    def name(self) -> str:
        return self.trace.name

    @property
    def timestamps_s(self) -> tuple[float, ...]:
        return tuple(request.timestamp_s for request in self.trace.requests)

    @property
    def params(self) -> dict:
        return {
            "requests": len(self.trace.requests),
            "block_tokens": self.trace.block_tokens,
            "max_prompt_len": self.max_prompt_len,
            "max_output_len": self.max_output_len,
        }

    def warmup(self, maker: TextMaker) -> list[Entry]:
        """Nothing of the trace: its cache starts cold."""
        return [Entry(maker.start(64, (2, i)), 64, 2) for i in range(2)]

    def entries(self, maker: TextMaker, run: int) -> list[Entry]:
        """Texts differ from one run to the next, so each run starts without stored prefixes."""
        size = self.trace.block_tokens
        entries = []
        for request in self.trace.requests:
            length = min(request.input_length, self.max_prompt_len or request.input_length)
            output_len = min(request.output_length, self.max_output_len or request.output_length)
            words: list[str] = []
            for index, start in enumerate(range(0, length, size)):
                is_named = index < len(request.block_ids)
                seed = (3, run, request.block_ids[index]) if is_named else (4, run, request.index)
                words += maker.words(size, seed)[: length - start]  # a cut block is a head
            entries.append(Entry("".join(words), length, max(1, output_len)))
        return entries
