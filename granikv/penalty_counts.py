"""What penalties need to know of a request's tokens, on the device: which, and how often.

A row of the vocabulary's length is taken only for a request that uses penalties; the table grows
to as many as there were at once, at most max_rows, and never shrinks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch

from granikv.transfers import to_device

log = logging.getLogger(__name__)

FIRST_ROWS = 8
COUNT_BYTES = 4


class PenaltyCounts:
    """int32 [rows, vocab]: twice the count in the output, plus one where the prompt has the token."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device):
        self.max_rows, self.vocab_size, self.device = max_rows, vocab_size, device
        self.table = torch.empty(0, vocab_size, dtype=torch.int32, device=device)
        self._free: list[int] = []

    def take(self, prompt_ids: np.ndarray, output_ids: Sequence[int] | np.ndarray) -> int:
        """A row for a request with these tokens."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        counts = self.table[row].zero_()
        ids = {
            "prompt": np.asarray(prompt_ids, np.int64),
            "output": np.asarray(output_ids, np.int64),
        }
        sent = to_device(ids, self.device)
        counts.index_fill_(0, sent["prompt"], 1)
        counts.index_add_(0, sent["output"], torch.full_like(sent["output"], 2, dtype=torch.int32))
        return row

    def release(self, row: int) -> None:
        self._free.append(row)

    def _grow(self) -> None:
        old = self.table.shape[0]
        new = min(max(FIRST_ROWS, 2 * old), self.max_rows)
        assert new > old, "one row of counts for each row of requests"
        table = self.table.new_empty(new, self.vocab_size)
        table[:old] = self.table
        self.table = table
        self._free = list(range(new - 1, old - 1, -1))
        row_bytes = self.vocab_size * COUNT_BYTES
        log.info(
            "penalties: counts of %d requests, %.1f MiB; at most %d (max_requests), %.1f MiB",
            new, new * row_bytes / 2**20, self.max_rows, self.max_rows * row_bytes / 2**20,
        )  # fmt: skip

    def of(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [G] -> seen bool [G, vocab], in prompt or output; counts float32, in the output."""
        counts = self.table.index_select(0, rows)
        return counts > 0, (counts >> 1).float()

    def add(self, rows: torch.Tensor, ids: torch.Tensor) -> None:
        """One sampled id int64 [G] for each of the rows int64 [G]."""
        twice = torch.full_like(ids, 2, dtype=torch.int32)
        self.table.view(-1).index_add_(0, rows * self.vocab_size + ids, twice)
