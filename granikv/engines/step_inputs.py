"""One rank's network inputs in fixed device buffers: addresses never change, shapes per step do.

It fills nothing itself but the ids and sample rows; PlanBuffers packs the plan, the executor
writes request_slots.
"""

from __future__ import annotations

import torch

from granikv.attention.plan_buffers import PlanBuffers
from granikv.attention.variants import LAYOUTS
from granikv.engines.io import LAUNCH_DIMS, NETWORK_INPUTS, EngineIO
from granikv.errors import InvalidArgument

_LAYOUT_INDEX = {name: index for index, name in enumerate(LAYOUTS)}


class StepInputs:
    """request_slots int32 [max_requests + 1, max_seq_len]; binding: number of the arenas.

    `tensors`: buffer of every network input, by name, at its largest shape. Raises
    InvalidArgument when a buffer does not have the shape the network was built for.
    """

    def __init__(
        self, io: EngineIO, buffers: PlanBuffers, request_slots: torch.Tensor, binding: int
    ):
        self.io, self.buffers, self.binding = io, buffers, binding
        device = request_slots.device

        def ids(length: int) -> torch.Tensor:
            return torch.zeros(length, dtype=torch.int32, device=device)

        self.token_ids = ids(io.ranges["rows"][2])
        self.sample_rows = ids(io.ranges["samples"][2])
        self.tensors: dict[str, torch.Tensor] = {
            "token_ids": self.token_ids,
            "sample_rows": self.sample_rows,
            "request_slots": request_slots,
            "launch_dims": ids(1),  # an address for a tensor without elements
            **buffers.plan,
        }
        for spec in NETWORK_INPUTS:
            found, expected = tuple(self.tensors[spec.name].shape), io.shape(spec)
            if spec.dims != LAUNCH_DIMS and found != expected:
                raise InvalidArgument(spec.name, found, f"the engine's shape {expected}")
        # inputs whose shape depends on the step, with their dimensions
        self._dynamic = [
            (spec.name, io.dims(spec))
            for spec in NETWORK_INPUTS
            if any(isinstance(dim, str) for dim in io.dims(spec))
        ]

    def set_rows(self, token_ids: torch.Tensor, sample_rows: torch.Tensor | None) -> None:
        """token_ids [T] and sample_rows [S] of any integer dtype; None: all rows."""
        num_rows = token_ids.shape[0]
        self.token_ids[:num_rows].copy_(token_ids)
        if sample_rows is None:
            torch.arange(num_rows, out=self.sample_rows[:num_rows])
        else:
            self.sample_rows[: sample_rows.shape[0]].copy_(sample_rows)

    def shapes(self, num_rows: int, num_samples: int) -> dict[str, tuple[int, ...]]:
        """Shape of every dynamic input for the prepared plan, padded to num_rows rows."""
        buffers = self.buffers
        has_decode = buffers.num_decode_rows > 0 or num_rows > buffers.num_rows
        sizes = {
            "rows": num_rows,
            "samples": num_samples,
            "hot_grid": buffers.hot_grid,
            "cold_grid": buffers.cold_grid,
            "tiles": buffers.num_tiles,
            "layout_index": _LAYOUT_INDEX[buffers.layout.name],
            "row_tiles": buffers.row_tiles,
            "has_runs": int(buffers.has_runs),
            "has_decode": int(has_decode),
            "binding": self.binding,
        }
        for name, size in sizes.items():
            low, _, high = self.io.ranges[name]
            if not low <= size <= high:
                raise InvalidArgument(name, size, f"{low} to {high}, what the engine is built for")
        return {
            name: tuple(dim if isinstance(dim, int) else sizes[dim] for dim in dims)
            for name, dims in self._dynamic
        }
