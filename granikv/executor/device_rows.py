"""The row inputs of a step on the device: ids, positions, sample rows, slot writes.

One pinned buffer and one copy per step. Two buffers take turns, because the copy of the step
before may still be under way. The device addresses depend on the padded row count alone, so a
CUDA graph captured for a row count serves every later step with it.
"""

from __future__ import annotations

import numpy as np
import torch

from granikv.core import Count, StepPlan

FIELDS = ("token", "request", "position", "sample_row", "write_index", "write_slot")


class DeviceRows:
    """int64 buffers for up to max_rows rows and as many slot writes.

    max_seq_len: width of request_slots; dummy_index: flat index into it that padding may write.
    """

    def __init__(
        self, max_rows: int, max_seq_len: int, dummy_index: int, device: torch.device
    ) -> None:
        self.max_rows, self.max_seq_len, self.dummy_index = max_rows, max_seq_len, dummy_index
        self.on_gpu = device.type == "cuda"
        size = len(FIELDS) * max_rows
        self._device = torch.zeros(size, dtype=torch.int64, device=device)
        self._staging = [
            torch.zeros(size, dtype=torch.int64, pin_memory=self.on_gpu) for _ in range(2)
        ]
        self._copied = [torch.cuda.Event() for _ in range(2)] if self.on_gpu else []
        self._turn = 0

    def views(self, num_rows: int) -> dict[str, torch.Tensor]:
        """Device tensors int64 [num_rows] by field, at fixed addresses for this row count."""
        return {
            name: self._device[i * num_rows : (i + 1) * num_rows] for i, name in enumerate(FIELDS)
        }

    def send(self, plan: StepPlan, num_rows: int) -> dict[str, torch.Tensor]:
        """Copy the plan's rows, padded to num_rows, and up to that many slot writes.

        Padded rows: token 0 at position 0 of request row 0, sampled like the others and dropped.
        """
        turn = self._turn = 1 - self._turn
        if self.on_gpu:
            self._copied[turn].synchronize()
        rows = int(plan.counts[Count.NUM_ROWS])
        samples = int(plan.counts[Count.NUM_SAMPLE_ROWS])
        count = int(plan.counts[Count.NUM_SLOT_WRITES])
        size = len(FIELDS) * num_rows
        host = self._staging[turn].numpy()[:size].reshape(len(FIELDS), num_rows)
        host[:] = 0
        host[0, :rows] = plan.row_token[:rows]
        host[1, :rows] = plan.row_request[:rows]
        host[2, :rows] = plan.row_position[:rows]
        host[3, :samples] = plan.sample_rows[:samples]
        host[4] = self.dummy_index
        if count > rows:
            count = 0  # too many to ride along: the executor has written them
        writes = plan.slot_writes[:count].astype(np.int64)
        host[4, :count] = writes[:, 0] * self.max_seq_len + writes[:, 1]
        host[5, :count] = writes[:, 2]
        self._device[:size].copy_(self._staging[turn][:size], non_blocking=True)
        if self.on_gpu:
            self._copied[turn].record()
        return self.views(num_rows)
