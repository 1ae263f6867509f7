"""Sampling: from logits to one token per row, reproducible whatever the batch looks like.

A row's random number depends on its seed and its output position alone (Philox), and its token on
its own logits alone, so neither the place in the batch nor a preemption changes the result.

Order: repetition penalty, frequency and presence penalty, min_tokens and bad words, temperature,
then min_p, top_k and top_p. Log probabilities are of the model's unmodified logits. Tokens tied
with the last one kept by top_k or top_p are kept too.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from granikv.core import StepOutput
from granikv.errors import InvalidArgument
from granikv.sampling_params import SamplingParams

_MASK32 = np.uint64(0xFFFFFFFF)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_MIN_TEMPERATURE = 1e-30  # below, float32 would divide by zero; the result is greedy long before
_ARGMAX_PIECES = 64  # at most, and a power of two: a row's pieces are searched side by side
_TOP_P_FIRST_TRY = 1024  # sorted first; nearly always holds top_p of the mass


def philox4x32(counter: np.ndarray, key: np.ndarray, rounds: int = 10) -> np.ndarray:
    """counter uint32 [N, 4], key uint32 [N, 2] -> random uint32 [N, 4].

    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = (key[:, i].astype(np.uint64) for i in range(2))
    for _ in range(rounds):
        low, high = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (high >> np.uint64(32)) ^ c1 ^ k0,
            high & _MASK32,
            (low >> np.uint64(32)) ^ c3 ^ k1,
            low & _MASK32,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK32, (k1 + _WEYL[1]) & _MASK32
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def uniform(seeds: Sequence[int], output_positions: Sequence[int]) -> np.ndarray:
    """float64 [N] in [0, 1), one per (64-bit seed, output position)."""
    seed = np.asarray(seeds, dtype=np.uint64)
    key = np.stack([seed & _MASK32, seed >> np.uint64(32)], axis=1).astype(np.uint32)
    counter = np.zeros((len(seed), 4), dtype=np.uint32)
    counter[:, 0] = np.asarray(output_positions, dtype=np.uint32)
    bits = philox4x32(counter, key).astype(np.uint64)
    return ((bits[:, 0] >> np.uint64(5)) * 67108864.0 + (bits[:, 1] >> np.uint64(6))) / 2.0**53


def seed_of_text(text: str, seed_default: int = 0) -> int:
    """A stable 64-bit seed for a request that gives none."""
    material = f"{seed_default}\0{text}".encode()
    return int.from_bytes(hashlib.blake2b(material, digest_size=8).digest(), "little")


@dataclass
class _State:
    """What sampling keeps of one request row."""

    params: SamplingParams
    seed: int
    masked_early: torch.Tensor | None  # int64 [n]: ids not allowed before min_tokens
    tail: list[int]  # last known tokens, as many as bad words need
    tail_len: int
    seen: torch.Tensor | None = None  # bool [vocab]: in prompt or output
    output_counts: torch.Tensor | None = None  # float32 [vocab]

    @property
    def is_filtered(self) -> bool:
        return self.params.top_k > 0 or self.params.top_p < 1.0 or self.params.min_p > 0.0

    def edits_logits(self, output_position: int) -> bool:
        early = self.masked_early is not None and output_position < self.params.min_tokens
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
        self._check_ids("stop_token_ids", params.stop_token_ids)
        for word in params.bad_words_ids:
            if not word:
                raise InvalidArgument("bad_words_ids", word, "non-empty token sequences")
            self._check_ids("bad_words_ids", word)
        early = None
        if params.min_tokens > 0:
            ids = sorted({*self.eos_token_ids, *params.stop_token_ids})
            early = torch.tensor(ids, dtype=torch.int64) if ids else None
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

    def stays_on_device(self, rows: Iterable[int]) -> bool:
        """Whether `sample_ids` can serve these request rows: nothing about them needs the host.

        Penalties and bad words need the tokens so far, log probabilities go to the host.
        """
        states = [self._states[row] for row in rows]
        return all(
            s is not None
            and s.params.logprobs is None
            and s.masked_early is None
            and not s.params.uses_penalties
            and not s.params.bad_words_ids
            for s in states
        )

    @torch.inference_mode()
    def sample_ids(
        self, logits: torch.Tensor, rows: Sequence[int], output_positions: Sequence[int]
    ) -> torch.Tensor:
        """int64 [S] on the device of logits [S, vocab], equal to `sample`'s, without a wait.

        For rows that `stays_on_device` accepts.
        """
        states = [s for s in (self._states[row] for row in rows) if s is not None]
        return self._ids(logits, states, output_positions)

    def _ids(
        self, logits: torch.Tensor, states: list[_State], output_positions: Sequence[int]
    ) -> torch.Tensor:
        """int64 [S]: one id per row of logits [S, vocab], on their device."""
        greedy = [i for i, s in enumerate(states) if s.params.is_greedy]
        if len(greedy) == len(states):
            return _argmax(logits)
        ids = torch.empty(len(states), dtype=torch.int64, device=logits.device)
        if greedy:
            ids[greedy] = _argmax(logits[greedy])
        for filtered in (False, True):
            group = [
                i
                for i, s in enumerate(states)
                if not s.params.is_greedy and s.is_filtered == filtered
            ]
            if group:
                ids[group] = self._draw(
                    logits[group],
                    [states[i] for i in group],
                    [output_positions[i] for i in group],
                    filtered,
                )
        return ids

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise InvalidArgument(name, token, f"token ids in [0, {self.vocab_size})")

    @torch.inference_mode()
    def sample(
        self, logits: torch.Tensor, rows: Sequence[int], output_positions: Sequence[int]
    ) -> StepOutput:
        """One token per row of logits float32 [S, vocab], which stay unchanged.

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
        tokens = self._ids(work, states, output_positions).cpu().numpy().astype(np.int32)
        for state, token in zip(states, tokens.tolist(), strict=True):
            state.append(token)
        return self._with_logprobs(StepOutput(tokens), logits, states)

    def _edit(
        self, logits: torch.Tensor, states: list[_State], output_positions: list[int]
    ) -> torch.Tensor:
        """logits [G, vocab], a copy -> the same with penalties and masks applied."""
        group = [i for i, s in enumerate(states) if s.params.uses_penalties]
        if group:
            chosen = [states[i] for i in group]

            def column(name: str) -> torch.Tensor:
                values = [[getattr(s.params, name)] for s in chosen]
                return torch.tensor(values, dtype=torch.float32, device=logits.device)

            seen = torch.stack([s.seen for s in chosen if s.seen is not None]).to(logits.device)
            counts = torch.stack([s.output_counts for s in chosen if s.output_counts is not None])
            counts = counts.to(logits.device)
            x, repetition = logits[group], column("repetition_penalty")
            x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
            x = x - column("frequency_penalty") * counts
            logits[group] = x - column("presence_penalty") * (counts > 0)
        for i, (state, position) in enumerate(zip(states, output_positions, strict=True)):
            masked = _bad_tokens(state)
            if state.masked_early is not None and position < state.params.min_tokens:
                masked += state.masked_early.tolist()
            if masked and len(set(masked)) < self.vocab_size:  # all masked: nothing to choose from
                logits[i, masked] = -torch.inf
        return logits

    def _draw(
        self,
        logits: torch.Tensor,
        states: list[_State],
        output_positions: list[int],
        filtered: bool,
    ) -> torch.Tensor:
        """logits [G, vocab] -> random tokens int64 [G], by inverse CDF in vocabulary order."""
        params = [s.params for s in states]
        limit = torch.finfo(torch.float32).max
        x = torch.nan_to_num(logits.float(), nan=-torch.inf, posinf=limit, neginf=-torch.inf)
        best = x.amax(dim=-1, keepdim=True)
        temperatures = [[max(p.temperature, _MIN_TEMPERATURE)] for p in params]
        # the maximum goes first, so that no temperature can make inf - inf
        x = (x - best.clamp(min=-limit)) / torch.tensor(temperatures, device=x.device)
        weights = x.exp()  # [G, vocab], the best token has 1
        if filtered:
            weights = _filter(weights, params)
        cdf = weights.cumsum(dim=-1, dtype=torch.float64)
        u = uniform([s.seed for s in states], output_positions)
        target = torch.from_numpy(u).to(x.device)[:, None] * cdf[:, -1:]
        index = torch.searchsorted(cdf, target, right=True).clamp(max=x.shape[-1] - 1)
        return index[:, 0]

    def _with_logprobs(
        self, output: StepOutput, logits: torch.Tensor, states: list[_State]
    ) -> StepOutput:
        """Adds log probabilities of the unmodified logits for the rows that ask."""
        asked = {
            i: s.params.logprobs for i, s in enumerate(states) if s.params.logprobs is not None
        }
        if not asked:
            return output
        group, width = list(asked), min(max(asked.values()), logits.shape[-1])
        logprobs = torch.log_softmax(logits[group].float(), dim=-1)
        chosen = torch.from_numpy(output.token_ids[group]).long().to(logits.device)
        output.logprobs = np.full(len(states), np.nan, dtype=np.float32)
        output.logprobs[group] = logprobs.gather(1, chosen[:, None])[:, 0].cpu().numpy()
        if width == 0:
            return output
        values, ids = logprobs.topk(width, dim=-1)
        keep = np.arange(width)[None, :] < np.array(list(asked.values()))[:, None]
        output.top_ids = np.full((len(states), width), -1, dtype=np.int32)
        output.top_logprobs = np.full((len(states), width), -np.inf, dtype=np.float32)
        output.top_ids[group] = np.where(keep, ids.cpu().numpy(), -1)
        output.top_logprobs[group] = np.where(keep, values.cpu().numpy(), -np.inf)
        return output


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """int64 [S]: place of the first maximum of each row of logits [S, vocab].

    In two stages on a GPU, where one block per row would read a row alone.
    """
    rows, vocab = logits.shape
    pieces = math.gcd(vocab, _ARGMAX_PIECES) if logits.is_cuda else 1
    return argmax_in_pieces(logits.reshape(rows, pieces, vocab // pieces))


def argmax_in_pieces(logits: torch.Tensor) -> torch.Tensor:
    """int64 [S]: the first maximum of each row of logits [S, pieces, vocab / pieces]."""
    values, index = logits.max(dim=-1)
    piece = values.argmax(dim=-1, keepdim=True)
    return (piece * logits.shape[-1] + index.gather(1, piece))[:, 0]


def _bad_tokens(state: _State) -> list[int]:
    """Tokens that would complete a bad word after the known prompt and output."""
    found = []
    for word in state.params.bad_words_ids:
        start = list(word[:-1])
        if not start or state.tail[-len(start) :] == start:
            found.append(word[-1])
    return found


def _filter(weights: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """weights [G, vocab], best token 1 -> zero where min_p, top_k or top_p drops the token."""
    vocab = weights.shape[-1]
    device = weights.device
    threshold = torch.tensor([[p.min_p] for p in params], device=device, dtype=weights.dtype)
    ks = [min(p.top_k, vocab) or vocab for p in params]
    limited = [i for i, k in enumerate(ks) if k < vocab]
    if limited:
        best = weights[limited].topk(max(ks[i] for i in limited), dim=-1).values
        index = torch.tensor([[ks[i] - 1] for i in limited], device=device)
        threshold[limited] = torch.maximum(threshold[limited], best.gather(1, index))
    weights = torch.where(weights >= threshold, weights, 0.0)
    nuclear = [i for i, p in enumerate(params) if p.top_p < 1.0]
    if nuclear:
        top_p = torch.tensor([[params[i].top_p] for i in nuclear], device=device).double()
        part = weights[nuclear]
        wanted = top_p * part.cumsum(dim=-1, dtype=torch.float64)[:, -1:]
        # on a GPU, asking whether the first try held would wait for the step: sort all at once
        tries = vocab if device.type == "cuda" else min(vocab, _TOP_P_FIRST_TRY)
        best = part.topk(tries, dim=-1).values
        mass = best.cumsum(dim=-1, dtype=torch.float64)
        last = torch.searchsorted(mass, wanted)  # first entry with enough mass
        lowest = best.gather(1, last.clamp(max=best.shape[-1] - 1))
        flat = (last[:, 0] == tries).nonzero()[:, 0].tolist() if tries < vocab else []
        for i in flat:
            ordered = part[i].sort(descending=True).values
            enough = torch.searchsorted(ordered.cumsum(dim=0, dtype=torch.float64), wanted[i])
            lowest[i] = ordered[enough.clamp(max=vocab - 1)]
        weights[nuclear] = torch.where(part >= lowest, part, 0.0)
    return weights
