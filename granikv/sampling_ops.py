"""The sampler's arithmetic on tensors, for the host's sampler and the device's.

No function waits for a GPU: sizes and places that depend on parameters come from the caller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from granikv.sampling_params import SamplingParams

_MIN_TEMPERATURE = 1e-30  # below, float32 would divide by zero; the result is greedy long before
_ARGMAX_PIECES = 64  # at most, and a power of two: a row's pieces are searched side by side
_TOP_P_FIRST_TRY = 1024  # sorted first; nearly always holds top_p of the mass

# numbers of a request row: one entry each in a NumPy array
NUMBERS = np.dtype(
    [
        ("temperature", "f8"),
        ("top_k", "i8"),
        ("top_p", "f8"),
        ("min_p", "f8"),
        ("repetition", "f8"),
        ("frequency", "f8"),
        ("presence", "f8"),
        ("seed", "u8"),
    ]
)
PENALTIES = ("repetition", "frequency", "presence")


def numbers_of(params: SamplingParams, seed: int) -> tuple:
    """An entry of NUMBERS."""
    return (
        params.temperature, params.top_k, params.top_p, params.min_p, params.repetition_penalty,
        params.frequency_penalty, params.presence_penalty, seed,
    )  # fmt: skip


def is_filtered(numbers: np.ndarray) -> np.ndarray:
    """bool [G] of entries [G]: top_k, top_p or min_p drops tokens."""
    return (numbers["top_k"] > 0) | (numbers["top_p"] < 1.0) | (numbers["min_p"] > 0.0)


@dataclass(frozen=True)
class Draws:
    """How G rows draw their tokens; limited and nuclear are rows among them."""

    u: torch.Tensor  # float64 [G] in [0, 1)
    temperature: torch.Tensor  # float64 [G]
    filtered: bool  # else the rest is not looked at
    min_p: torch.Tensor  # float64 [G]
    limited: torch.Tensor  # int64 [L]: rows with a top_k below the vocabulary
    kth: torch.Tensor  # int64 [L]: top_k - 1
    nuclear: torch.Tensor  # int64 [N]: rows with a top_p below 1
    top_p: torch.Tensor  # float64 [N]
    max_k: int

    @staticmethod
    def arrays(numbers: np.ndarray, u: np.ndarray, vocab_size: int) -> dict[str, np.ndarray]:
        """The tensors' contents, for entries [G] of NUMBERS."""
        limited = ((numbers["top_k"] > 0) & (numbers["top_k"] < vocab_size)).nonzero()[0]
        nuclear = (numbers["top_p"] < 1.0).nonzero()[0]
        return {
            "u": u,
            "temperature": np.maximum(numbers["temperature"], _MIN_TEMPERATURE),
            "min_p": numbers["min_p"],
            "limited": limited,
            "kth": numbers["top_k"][limited] - 1,
            "nuclear": nuclear,
            "top_p": numbers["top_p"][nuclear],
        }

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray], sent: Mapping[str, torch.Tensor]) -> Draws:
        """arrays: of `arrays`; sent: the same on a device."""
        filtered = bool(arrays["limited"].size or arrays["nuclear"].size or arrays["min_p"].any())
        return cls(**sent, filtered=filtered, max_k=1 + int(arrays["kth"].max(initial=0)))


def rows_at(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """x [S, n] -> its rows at ascending, distinct places [G]; x itself if these are all."""
    return x if places.shape[0] == x.shape[0] else x.index_select(0, places)


def with_rows_at(x: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """x [S, n] with rows [G, n] at ascending, distinct places [G]."""
    return rows if places.shape[0] == x.shape[0] else x.index_copy(0, places, rows)


def penalize(
    x: torch.Tensor, seen: torch.Tensor, counts: torch.Tensor, *penalties: torch.Tensor
) -> torch.Tensor:
    """x float32 [G, vocab] with repetition, frequency and presence penalties (PENALTIES), each
    float64 [G].

    seen bool [G, vocab]: in prompt or output; counts float32 [G, vocab]: in the output.
    """
    repetition, frequency, presence = (p.float()[:, None] for p in penalties)
    x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
    return x - frequency * counts - presence * (counts > 0)


def draw(logits: torch.Tensor, how: Draws) -> torch.Tensor:
    """logits [G, vocab] -> random tokens int64 [G], by inverse CDF in vocabulary order."""
    limit = torch.finfo(torch.float32).max
    x = torch.nan_to_num(logits.float(), nan=-torch.inf, posinf=limit, neginf=-torch.inf)
    best = x.amax(dim=-1, keepdim=True)
    # the maximum goes first, so that no temperature can make inf - inf
    x = (x - best.clamp(min=-limit)) / how.temperature.float()[:, None]
    weights = x.exp()  # [G, vocab], the best token has 1
    if how.filtered:
        weights = _filter(weights, how)
    cdf = weights.cumsum(dim=-1, dtype=torch.float64)
    target = how.u[:, None] * cdf[:, -1:]
    index = torch.searchsorted(cdf, target, right=True).clamp(max=x.shape[-1] - 1)
    return index[:, 0]


def _filter(weights: torch.Tensor, how: Draws) -> torch.Tensor:
    """weights [G, vocab], best token 1 -> zero where min_p, top_k or top_p drops the token."""
    threshold = how.min_p.to(weights.dtype)[:, None]
    if how.limited.shape[0]:
        best = rows_at(weights, how.limited).topk(how.max_k, dim=-1).values
        lowest = torch.maximum(rows_at(threshold, how.limited), best.gather(1, how.kth[:, None]))
        threshold = threshold.index_copy(0, how.limited, lowest)
    weights = torch.where(weights >= threshold, weights, 0.0)
    if how.nuclear.shape[0]:
        part = rows_at(weights, how.nuclear)
        # torch's own number for a Python float is a float32
        kept = torch.where(part >= _nucleus(part, how.top_p.float().double()), part, 0.0)
        weights = weights.index_copy(0, how.nuclear, kept)
    return weights


def _nucleus(part: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Lowest kept weight [N, 1] of each row of part [N, vocab]; top_p float64 [N]."""
    vocab = part.shape[-1]
    wanted = top_p[:, None] * part.cumsum(dim=-1, dtype=torch.float64)[:, -1:]
    # on a device, asking whether the first try held would wait for the step: sort all at once
    tries = min(vocab, _TOP_P_FIRST_TRY) if part.device.type == "cpu" else vocab
    best = part.topk(tries, dim=-1).values
    mass = best.cumsum(dim=-1, dtype=torch.float64)
    last = torch.searchsorted(mass, wanted)  # first entry with enough mass
    lowest = best.gather(1, last.clamp(max=tries - 1))
    flat = (last[:, 0] == tries).nonzero()[:, 0].tolist() if tries < vocab else []
    for i in flat:
        ordered = part[i].sort(descending=True).values
        enough = torch.searchsorted(ordered.cumsum(dim=0, dtype=torch.float64), wanted[i])
        lowest[i] = ordered[enough.clamp(max=vocab - 1)]
    return lowest


def argmax(logits: torch.Tensor) -> torch.Tensor:
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


def mask_tokens(
    x: torch.Tensor, place: torch.Tensor, token: torch.Tensor, applies: torch.Tensor
) -> torch.Tensor:
    """x [S, vocab] with -inf at (place, token) [n] where applies bool [n], in any multiplicity.

    A row that would lose every token keeps all: there is something to choose from.
    """
    vocab = x.shape[-1]
    hits = torch.zeros(x.numel(), device=x.device)
    hits.index_add_(0, place * vocab + token, applies.float())
    masked = hits.view(x.shape) > 0
    masked &= masked.sum(dim=-1, keepdim=True) < vocab
    return x.masked_fill(masked, -torch.inf)
