"""Which tokens a request may not make next: those of bad words, and ends before min_tokens.

A bad word's last token is masked when the tokens before it are the last ones made. These are kept
on the device, as many per row as the longest bad word so far needs:

    history [rows, width]   -1  -1  9  5        a start  -2 -2  -2  5   matches: -2 fits anything
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from granikv.sampling_params import SamplingParams
from granikv.transfers import to_device

NO_TOKEN = -1  # before the first: no start has it
ANY = -2
KEPT_STEPS = 8  # slices of steps whose arrays are kept


@dataclass(frozen=True)
class _Words:
    """Of one request row. A word of one token has a start of ANY alone."""

    tokens: np.ndarray  # int64 [n]: last tokens
    starts: np.ndarray  # int64 [n, tail_len], right-aligned behind ANY
    early: np.ndarray  # int64 [m]: masked before min_tokens


class TokenMasks:
    """Masks of every request row."""

    def __init__(self, max_requests: int, device: torch.device):
        self.device = device
        self._has_words = np.zeros(max_requests, bool)
        self._min_tokens = np.zeros(max_requests, np.int64)  # 0 without ids for the time before
        self.history = torch.empty(max_requests, 0, dtype=torch.int64, device=device)
        self._words: dict[int, _Words] = {}
        self._steps: dict[tuple[bytes, bytes], dict[str, np.ndarray]] = {}

    def set_request(
        self,
        row: int,
        params: SamplingParams,
        early: Sequence[int],
        prompt_ids: np.ndarray,
        output_ids: Sequence[int] | np.ndarray,
    ) -> None:
        """early: ids that are not made before params.min_tokens."""
        words = params.bad_words_ids
        self._has_words[row] = bool(words)
        self._min_tokens[row] = params.min_tokens if early else 0
        self._words.pop(row, None)
        self._steps.clear()
        if not words and not early:
            return
        tail_len = max((len(word) - 1 for word in words), default=0)
        starts = np.full((len(words), tail_len), ANY)
        for start, word in zip(starts, words, strict=True):
            start[tail_len - len(word) + 1 :] = word[:-1]
        last = np.array([word[-1] for word in words], np.int64)
        self._words[row] = _Words(last, starts, np.array(early, np.int64))
        if tail_len:
            self._widen(tail_len)
            self._remember(row, prompt_ids, output_ids)

    def _widen(self, tail_len: int) -> None:
        rows, width = self.history.shape
        if tail_len > width:
            before = self.history.new_full((rows, tail_len - width), NO_TOKEN)
            self.history = torch.cat([before, self.history], dim=1)

    def _remember(
        self, row: int, prompt_ids: np.ndarray, output_ids: Sequence[int] | np.ndarray
    ) -> None:
        width = self.history.shape[1]
        known = np.concatenate([np.full(width, NO_TOKEN), prompt_ids, output_ids])
        tail = known[-width:].astype(np.int64)
        self.history[row] = to_device({"tail": tail}, self.device)["tail"]

    def active(self, rows: np.ndarray, output_positions: np.ndarray) -> np.ndarray:
        """bool [S]: which of the request rows [S] may have a token masked in this step."""
        return self._has_words[rows] | (output_positions < self._min_tokens[rows])

    def of(self, rows: np.ndarray, output_positions: np.ndarray) -> dict[str, np.ndarray]:
        """int64 arrays for one step over request rows [S]; empty where nothing can be masked.

        masked [G]: rows among the S; mask_row [G]: their request rows. Of each token that may be
        masked, [n]: mask_place (among the G), mask_owner (request row), mask_token, mask_start
        [n, width].
        """
        active, is_early = (
            self.active(rows, output_positions),
            output_positions < self._min_tokens[rows],
        )
        if not active.any():
            return {}
        key = (rows.tobytes(), is_early.tobytes())
        if key not in self._steps:  # a decode step's rows are mostly those of the step before
            if len(self._steps) == KEPT_STEPS:
                self._steps.clear()
            self._steps[key] = self._arrays(rows, active, is_early)
        return self._steps[key]

    def _arrays(
        self, rows: np.ndarray, active: np.ndarray, is_early: np.ndarray
    ) -> dict[str, np.ndarray]:
        """What `of` returns; active and is_early: bool [S]."""
        width, parts = self.history.shape[1], []
        masked = active.nonzero()[0]
        for number, i in enumerate(masked.tolist()):
            row = int(rows[i])
            words = self._words[row]
            tokens = words.tokens
            if is_early[i]:
                tokens = np.concatenate([tokens, words.early])
            starts = np.full((len(tokens), width), ANY)
            num_words, tail_len = words.starts.shape
            starts[:num_words, width - tail_len :] = words.starts
            places, owners = (np.full(len(tokens), x) for x in (number, row))
            parts.append((places, owners, tokens, starts))
        place, owner, token, start = (np.concatenate(part) for part in zip(*parts, strict=True))
        return {
            "masked": masked, "mask_row": rows[masked].astype(np.int64), "mask_place": place,
            "mask_owner": owner, "mask_token": token, "mask_start": start,
        }  # fmt: skip

    def applies(self, sent: dict[str, torch.Tensor]) -> torch.Tensor:
        """bool [n], of the tokens of `of` on the device: what comes before them has been made."""
        start = sent["mask_start"]
        return ((self.history[sent["mask_owner"]] == start) | (start == ANY)).all(dim=-1)

    def append(self, sent: dict[str, torch.Tensor], ids: torch.Tensor) -> None:
        """ids int64 [S]: the tokens of this step."""
        rows, made = sent["mask_row"], ids.index_select(0, sent["masked"])
        tail = torch.cat([self.history[rows], made[:, None]], dim=1)[:, 1:]
        self.history.index_copy_(0, rows, tail)
