"""Sampling: from logits to one token per row, reproducible whatever the batch looks like.

A row's random number depends on its seed and its output position alone (Philox), and its token on
its own logits alone, so neither the place in the batch nor a preemption changes the result.

Order: repetition penalty, frequency and presence penalty, min_tokens and bad words, temperature,
then min_p, top_k and top_p. Log probabilities are of the model's unmodified logits. Tokens tied
with the last one kept by top_k or top_p are kept too.

`Sampler` keeps its state on the host: it serves the CPU executor, and is the twin of the one in
device_sampling.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from granikv.core import StepOutput
from granikv.errors import InvalidArgument
from granikv.philox import seed_of_text, uniform
from granikv.sampling_ops import (
    NUMBERS,
    PENALTIES,
    Draws,
    argmax,
    draw,
    is_filtered,
    numbers_of,
    penalize,
)
from granikv.sampling_params import SamplingParams
from granikv.transfers import to_device

if TYPE_CHECKING:
    from granikv.device_sampling import DeviceSampler

CPU = torch.device("cpu")


@dataclass
class _State:
    """What sampling keeps of one request row."""

    params: SamplingParams
    seed: int
    masked_early: list[int]  # ids not allowed before min_tokens
    tail: list[int]  # last known tokens, as many as bad words need
    tail_len: int
    seen: torch.Tensor | None = None  # bool [vocab]: in prompt or output
    output_counts: torch.Tensor | None = None  # float32 [vocab]

    @property
    def numbers(self) -> tuple:
        return numbers_of(self.params, self.seed)

    def edits_logits(self, output_position: int) -> bool:
        early = bool(self.masked_early) and output_position < self.params.min_tokens
        return self.params.uses_penalties or early or bool(self.params.bad_words_ids)

    def append(self, token: int) -> None:
        if self.tail_len:
            self.tail = [*self.tail, token][-self.tail_len :]
        if self.output_counts is not None and self.seen is not None:
            self.output_counts[token] += 1.0
            self.seen[token] = True


class Sampler:
    """Sampling state of every request row, and the step that samples.

    seed_default: part of the seed of requests that give none. eos_token_ids: masked, with the
    request's stop_token_ids, before min_tokens.
    """

    def __init__(
        self,
        max_requests: int,
        vocab_size: int,
        seed_default: int = 0,
        eos_token_ids: Sequence[int] = (),
    ):
        self.vocab_size, self.seed_default = vocab_size, seed_default
        self.eos_token_ids = tuple(eos_token_ids)
        self._states: list[_State | None] = [None] * max_requests

    def on(self, device: torch.device) -> DeviceSampler:
        """One with these settings, without its requests, whose state is on the device."""
        from granikv.device_sampling import DeviceSampler

        return DeviceSampler(
            len(self._states), self.vocab_size, device, self.seed_default, self.eos_token_ids
        )

    def set_request(
        self,
        row: int,
        params: SamplingParams,
        prompt_ids: Sequence[int] | np.ndarray,
        output_ids: Sequence[int] | np.ndarray = (),
        seed_text: str = "",
    ) -> None:
        """Puts a request on a row, with the output it has already (after a preemption).

        seed_text, the request id, gives the seed when params.seed is None.
        Raises InvalidArgument for ids outside the vocabulary or an empty bad word.
        """
        check_ids(params, self.vocab_size)
        early = ids_before_min_tokens(params, self.eos_token_ids)
        tail_len = max((len(word) - 1 for word in params.bad_words_ids), default=0)
        tail: list[int] = []
        if tail_len:
            known = [*prompt_ids[-tail_len:], *output_ids[-tail_len:]]
            tail = [int(x) for x in known[-tail_len:]]
        seed = params.seed
        if seed is None:
            seed = seed_of_text(seed_text, self.seed_default)
        state = _State(params, seed, early, tail, tail_len)
        if params.uses_penalties:
            prompt = torch.from_numpy(np.asarray(prompt_ids, dtype=np.int64))
            output = torch.from_numpy(np.asarray(output_ids, dtype=np.int64))
            counts = torch.bincount(output, minlength=self.vocab_size)[: self.vocab_size]
            state.output_counts = counts.float()
            state.seen = counts > 0
            state.seen[prompt] = True
        self._states[row] = state

    def clear_request(self, row: int) -> None:
        self._states[row] = None

    @torch.inference_mode()
    def sample(
        self, logits: torch.Tensor, rows: Sequence[int], output_positions: Sequence[int]
    ) -> StepOutput:
        """One token per row of logits float32 [S, vocab] on the CPU, which stay unchanged.

        rows [S]: request rows. output_positions [S]: output tokens each request has before this
        one. Log probabilities come back when some row asks: NaN, id -1 and -inf where it did not.
        """
        states = []
        for row in rows:
            state = self._states[row]
            if state is None:
                raise InvalidArgument("rows", row, "rows that set_request has filled")
            states.append(state)
        if not states:
            return StepOutput(np.zeros(0, dtype=np.int32))
        edited = [
            i
            for i, (s, p) in enumerate(zip(states, output_positions, strict=True))
            if s.edits_logits(p)
        ]
        work = logits
        if edited:
            work = logits.clone()
            work[edited] = self._edit(
                logits[edited], [states[i] for i in edited], [output_positions[i] for i in edited]
            )
        tokens = self._ids(work, states, output_positions).numpy().astype(np.int32)
        for state, token in zip(states, tokens.tolist(), strict=True):
            state.append(token)
        return self._with_logprobs(tokens, logits, states)

    def _ids(
        self, logits: torch.Tensor, states: list[_State], output_positions: Sequence[int]
    ) -> torch.Tensor:
        """int64 [S]: one id per row of logits [S, vocab]."""
        numbers = _numbers(states)
        greedy, filtered = numbers["temperature"] == 0.0, is_filtered(numbers)
        if greedy.all():
            return argmax(logits)
        positions = np.asarray(output_positions)
        ids = torch.empty(len(states), dtype=torch.int64)
        if greedy.any():
            ids[greedy] = argmax(logits[greedy])
        for group in (~greedy & ~filtered, ~greedy & filtered):
            if group.any():
                u = uniform(numbers["seed"][group], positions[group])
                arrays = Draws.arrays(numbers[group], u, self.vocab_size)
                ids[group] = draw(logits[group], Draws.of(arrays, to_device(arrays, CPU)))
        return ids

    def _edit(
        self, logits: torch.Tensor, states: list[_State], output_positions: list[int]
    ) -> torch.Tensor:
        """logits [G, vocab], a copy -> the same with penalties and masks applied."""
        group = [i for i, s in enumerate(states) if s.params.uses_penalties]
        if group:
            chosen = [states[i] for i in group]
            seen = torch.stack([s.seen for s in chosen if s.seen is not None])
            counts = torch.stack([s.output_counts for s in chosen if s.output_counts is not None])
            numbers = _numbers(chosen)
            penalties = [torch.from_numpy(numbers[name].copy()) for name in PENALTIES]
            logits[group] = penalize(logits[group], seen, counts, *penalties)
        for i, (state, position) in enumerate(zip(states, output_positions, strict=True)):
            masked = _bad_tokens(state)
            if position < state.params.min_tokens:
                masked += state.masked_early
            if masked and len(set(masked)) < self.vocab_size:  # all masked: nothing to choose from
                logits[i, masked] = -torch.inf
        return logits

    def _with_logprobs(
        self, tokens: np.ndarray, logits: torch.Tensor, states: list[_State]
    ) -> StepOutput:
        """Adds log probabilities of the unmodified logits for the rows that ask."""
        asked = np.array([num_logprobs(s.params) for s in states])
        group = (asked >= 0).nonzero()[0]
        if not group.size:
            return StepOutput(tokens)
        logprobs = torch.log_softmax(logits[group].float(), dim=-1)
        chosen = logprobs.gather(1, torch.from_numpy(tokens[group]).long()[:, None])[:, 0]
        top = logprobs.topk(min(int(asked.max()), logits.shape[-1]), dim=-1)
        return output_with_logprobs(
            tokens, asked, chosen.numpy(), top.values.numpy(), top.indices.numpy()
        )


def num_logprobs(params: SamplingParams) -> int:
    """Alternatives that a request wants log probabilities of; -1: not even of the tokens."""
    return -1 if params.logprobs is None else params.logprobs


def output_with_logprobs(
    tokens: np.ndarray,
    asked: np.ndarray,
    chosen: np.ndarray,
    top_values: np.ndarray,
    top_ids: np.ndarray,
) -> StepOutput:
    """tokens and asked (`num_logprobs`) of S rows; the rest of the G rows that ask, in order.

    chosen float32 [G], of the tokens; top_values float32 and top_ids int64 [G, max(asked)].
    """
    group, width = asked >= 0, top_values.shape[1]
    output = StepOutput(tokens, logprobs=np.full(len(tokens), np.nan, dtype=np.float32))
    assert output.logprobs is not None
    output.logprobs[group] = chosen
    if width:
        keep = np.arange(width)[None, :] < asked[group, None]
        output.top_ids = np.full((len(tokens), width), -1, dtype=np.int32)
        output.top_logprobs = np.full((len(tokens), width), -np.inf, dtype=np.float32)
        output.top_ids[group] = np.where(keep, top_ids, -1)
        output.top_logprobs[group] = np.where(keep, top_values, -np.inf)
    return output


def check_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidArgument for ids outside the vocabulary or an empty bad word."""
    named = [("stop_token_ids", params.stop_token_ids)]
    named += [("bad_words_ids", word) for word in params.bad_words_ids]
    for name, ids in named:
        for token in ids:
            if not 0 <= token < vocab_size:
                raise InvalidArgument(name, token, f"token ids in [0, {vocab_size})")
    if any(not word for word in params.bad_words_ids):
        raise InvalidArgument("bad_words_ids", (), "non-empty token sequences")


def ids_before_min_tokens(params: SamplingParams, eos_token_ids: Iterable[int]) -> list[int]:
    """What may not be sampled before min_tokens; nothing where there is no such time."""
    return sorted({*eos_token_ids, *params.stop_token_ids}) if params.min_tokens > 0 else []


def _numbers(states: Iterable[_State]) -> np.ndarray:
    """Entries of NUMBERS."""
    return np.array([s.numbers for s in states], NUMBERS)


def _bad_tokens(state: _State) -> list[int]:
    """Tokens that would complete a bad word after the known prompt and output."""
    found = []
    for word in state.params.bad_words_ids:
        start = list(word[:-1])
        if not start or state.tail[-len(start) :] == start:
            found.append(word[-1])
    return found
