"""Logits of the whole engine beside those of a transformers model."""

from __future__ import annotations

import torch

MAX_RELATIVE_ERROR = 1e-3  # max|a - b| / max|b| per position


def record_logits(engine) -> dict[str, list[torch.Tensor]]:
    """Keep the logits [vocab] behind every token that `engine` makes from now on, by request."""
    recorded: dict[str, list[torch.Tensor]] = {}
    engine.executor.keep_logits = True
    append_token = engine._append_token

    def recording(request, token, output, i, now):
        logits = torch.from_numpy(output.logits[i].copy())
        recorded.setdefault(request.request_id, []).append(logits)
        append_token(request, token, output, i, now)

    engine._append_token = recording
    return recorded


def reference_logits(model, prompt: list[int], made: list[int]) -> torch.Tensor:
    """[len(made), vocab]: transformers' logits for every token of `made` behind `prompt`."""
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *made[:-1]]])
        return model(ids, logits_to_keep=len(made)).logits[0].float()


def relative_errors(got: list[torch.Tensor], want: torch.Tensor) -> torch.Tensor:
    """max|a - b| / max|b| per position, [len(got)]."""
    stacked = torch.stack(list(got)).float()
    assert stacked.shape == want.shape, (stacked.shape, want.shape)
    return (stacked - want).abs().amax(-1) / want.abs().amax(-1)
