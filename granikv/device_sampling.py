"""The sampler of a GPU: state and arithmetic are on the device, and a step never waits for it.

What a step needs of the host (parameters, random numbers, places) is known when it is launched
and goes in one copy; what depends on sampled ids (penalty counts, the last tokens before a bad
word) stays on the device. So a step can be launched before the ids of the one before have reached
the host. Its twin with the state on the host is `sampling.Sampler`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from granikv.core import StepOutput
from granikv.errors import InvalidArgument
from granikv.penalty_counts import PenaltyCounts
from granikv.philox import seed_of_text, uniform
from granikv.sampling import check_ids, ids_before_min_tokens, num_logprobs, output_with_logprobs
from granikv.sampling_ops import (
    NUMBERS,
    PENALTIES,
    Draws,
    argmax,
    draw,
    is_filtered,
    mask_tokens,
    numbers_of,
    penalize,
    rows_at,
    with_rows_at,
)
from granikv.sampling_params import SamplingParams
from granikv.token_masks import TokenMasks
from granikv.transfers import to_device, to_host

SLICE_ROWS = 128  # sampled side by side, unless all take the best: bounds the memory of a step
ROW = np.dtype([*NUMBERS.descr, ("taken", "?"), ("num_logprobs", "i8"), ("count_row", "i8")])


@dataclass
class Sampled:
    """A step's result: ids int64 [S] on the device, and all of it on its way to the host."""

    ids: torch.Tensor
    host_ids: torch.Tensor  # int64 [S]
    asked: np.ndarray  # int64 [S]: `num_logprobs` of each row
    host_logprobs: list[torch.Tensor]  # of the rows that ask: chosen [G], values and ids [G, k]

    def output(self) -> StepOutput:
        """Once the stream has done what was queued."""
        tokens = self.host_ids.numpy().astype(np.int32)
        if not self.host_logprobs:
            return StepOutput(tokens)
        return output_with_logprobs(tokens, self.asked, *(x.numpy() for x in self.host_logprobs))


class DeviceSampler:
    """As `sampling.Sampler`, whose arguments and errors these are; device: that of the logits.

    All calls that belong to one step are queued on one stream, in the order of the steps.
    """

    def __init__(
        self,
        max_requests: int,
        vocab_size: int,
        device: torch.device,
        seed_default: int = 0,
        eos_token_ids: Sequence[int] = (),
    ):
        self.vocab_size, self.device = vocab_size, device
        self.seed_default, self.eos_token_ids = seed_default, tuple(eos_token_ids)
        self._rows = np.zeros(max_requests, ROW)
        self._rows["count_row"] = -1
        self._counts = PenaltyCounts(max_requests, vocab_size, device)
        self._masks = TokenMasks(max_requests, device)

    @torch.inference_mode()
    def set_request(
        self,
        row: int,
        params: SamplingParams,
        prompt_ids: np.ndarray,
        output_ids: Sequence[int] | np.ndarray = (),
        seed_text: str = "",
    ) -> None:
        """Puts a request on a row, with the output it has already (after a preemption)."""
        check_ids(params, self.vocab_size)
        seed = params.seed
        if seed is None:
            seed = seed_of_text(seed_text, self.seed_default)
        if self._rows["count_row"][row] >= 0:
            self._counts.release(int(self._rows["count_row"][row]))
        count_row = self._counts.take(prompt_ids, output_ids) if params.uses_penalties else -1
        self._rows[row] = (*numbers_of(params, seed), True, num_logprobs(params), count_row)
        early = ids_before_min_tokens(params, self.eos_token_ids)
        self._masks.set_request(row, params, early, prompt_ids, output_ids)

    @torch.inference_mode()
    def launch(
        self, logits: torch.Tensor, rows: np.ndarray, output_positions: np.ndarray
    ) -> Sampled:
        """One token per row of logits float32 [S, vocab], which stay unchanged; no wait.

        rows int [S]: request rows, each once. output_positions int [S]: output tokens each request
        has before this one. Raises InvalidArgument for a row without a request.
        """
        chosen = self._rows[rows]
        if not chosen["taken"].all():
            row = int(rows[~chosen["taken"]][0])
            raise InvalidArgument("rows", row, "rows that set_request has filled")
        asked = chosen["num_logprobs"].copy()
        width = min(int(asked.max(initial=0)), self.vocab_size)
        is_plain = (chosen["temperature"] == 0.0) & (asked < 0) & (chosen["count_row"] < 0)
        if (is_plain & ~self._masks.active(rows, output_positions)).all():
            ids, logprobs = argmax(logits), []
        else:
            slices = [slice(i, i + SLICE_ROWS) for i in range(0, len(rows), SLICE_ROWS)]
            made = [
                self._sample(logits[s], rows[s], chosen[s], output_positions[s], width)
                for s in slices
            ]
            ids = torch.cat([ids for ids, _ in made])
            groups = [parts for _, parts in made if parts]
            logprobs = [torch.cat(parts) for parts in zip(*groups, strict=True)]
        return Sampled(ids, to_host(ids), asked, [to_host(x) for x in logprobs])

    def _sample(
        self,
        logits: torch.Tensor,
        rows: np.ndarray,
        chosen: np.ndarray,
        positions: np.ndarray,
        width: int,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Ids int64 [S] of the rows of logits [S, vocab], and what `Sampled` keeps of those that ask."""
        greedy, filtered = chosen["temperature"] == 0.0, is_filtered(chosen)
        groups = [g.nonzero()[0] for g in (~greedy & ~filtered, ~greedy & filtered) if g.any()]
        counted, masks = (chosen["count_row"] >= 0).nonzero()[0], self._masks.of(rows, positions)
        asking = (chosen["num_logprobs"] >= 0).nonzero()[0]
        arrays = {"greedy": greedy.nonzero()[0], "asking": asking, "counted": counted}
        arrays["count_row"] = chosen["count_row"][counted]
        arrays |= {name: chosen[name][counted] for name in PENALTIES} | masks
        draws = []
        for number, group in enumerate(groups):
            u = uniform(chosen["seed"][group], positions[group])
            draws.append(Draws.arrays(chosen[group], u, self.vocab_size))
            arrays[f"group {number}"] = group
            arrays |= {f"{name} {number}": array for name, array in draws[-1].items()}
        sent = to_device(arrays, self.device)

        x = logits
        if counted.size:
            seen, counts = self._counts.of(sent["count_row"])
            part = rows_at(x, sent["counted"])
            part = penalize(part, seen, counts, *(sent[name] for name in PENALTIES))
            x = with_rows_at(x, sent["counted"], part)
        if masks:
            x = self._mask(x, sent)
        ids = torch.zeros(len(rows), dtype=torch.int64, device=self.device)
        if greedy.any():
            ids.index_copy_(0, sent["greedy"], argmax(rows_at(x, sent["greedy"])))
        for number, own in enumerate(draws):
            places = sent[f"group {number}"]
            how = Draws.of(own, {name: sent[f"{name} {number}"] for name in own})
            ids.index_copy_(0, places, draw(rows_at(x, places), how))

        if counted.size:
            self._counts.add(sent["count_row"], ids.index_select(0, sent["counted"]))
        if masks:
            self._masks.append(sent, ids)
        return ids, self._logprobs(logits, ids, sent["asking"], width) if asking.size else []

    def _mask(self, x: torch.Tensor, sent: dict[str, torch.Tensor]) -> torch.Tensor:
        """x [S, vocab] with -inf where the masks of this step apply."""
        part = rows_at(x, sent["masked"])
        part = mask_tokens(part, sent["mask_place"], sent["mask_token"], self._masks.applies(sent))
        return with_rows_at(x, sent["masked"], part)

    def _logprobs(
        self, logits: torch.Tensor, ids: torch.Tensor, asking: torch.Tensor, width: int
    ) -> list[torch.Tensor]:
        """Of the unmodified logits, for rows int64 [G]: chosen [G], best [G, width] and their ids."""
        logprobs = torch.log_softmax(rows_at(logits, asking).float(), dim=-1)
        chosen = logprobs.gather(1, ids.index_select(0, asking)[:, None])[:, 0]
        values, best = logprobs.topk(width, dim=-1)
        return [chosen, values, best]
