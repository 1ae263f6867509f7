"""What every torch executor does with a plan before the forward pass, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from granikv.core import StepPlan
from granikv.transfers import to_device


def take_rows(plan: StepPlan, prompt_lens: Any, sampler: Any) -> None:
    """Sampler state of newly admitted requests, in step order: a row may just have been freed.

    prompt_lens: array or tensor [max_requests], written at the new rows.
    """
    for new in plan.new_requests:
        prompt_lens[new.row] = len(new.prompt_token_ids)
        sampler.set_request(
            new.row, new.params, new.prompt_token_ids, new.output_token_ids, new.request_id
        )


def apply_moves(plan: StepPlan, arenas: Sequence[torch.Tensor]) -> None:
    """Copy slots in every layer, before append: one copy per layer, however many moves.

    arenas: each [num_layers, capacity, Hkv, D]. All sources are read before a destination is
    written; the plan keeps them disjoint.
    """
    if not plan.moves:
        return
    targets = [np.arange(move.dst_start, move.dst_start + move.length) for move in plan.moves]
    sources = np.concatenate([move.src_slots for move in plan.moves]).astype(np.int64)
    sent = to_device({"source": sources, "target": np.concatenate(targets)}, arenas[0].device)
    for arena in arenas:
        if arena.dtype.itemsize == 1:  # bytes: torch does not index FP8
            arena = arena.view(torch.uint8)
        for layer in arena:
            layer.index_copy_(0, sent["target"], layer.index_select(0, sent["source"]))
