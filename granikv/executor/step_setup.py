"""What every torch executor does with a plan before the forward pass, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from granikv.core import StepPlan


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
    """Copy scattered slots to a contiguous range, in every layer, before append.

    arenas: each [num_layers, capacity, Hkv, D].
    """
    for move in plan.moves:
        source = torch.from_numpy(np.asarray(move.src_slots, dtype=np.int64)).to(arenas[0].device)
        target = slice(move.dst_start, move.dst_start + move.length)
        for arena in arenas:
            for layer in arena:
                layer[target] = layer[source]
