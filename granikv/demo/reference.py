"""The independent reference: transformers' greedy answers, and its verdict on near-ties.

The shared prefix is computed once and its cache copied, so four answers take seconds on a CPU.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from granikv.demo.workload import shared_prefix
from granikv.text import load_tokenizer

NEAR_TIE = 1e-3  # of the logit range


@dataclass(frozen=True)
class Difference:
    """Where two answers part."""

    agent: str
    round_index: int
    got: str
    expected: str
    near_tie: bool
    logit_gap: float | None  # as a share of the reference's logit range


class Reference:
    def __init__(self, gguf_path: Path):
        import torch

        from granikv.bench.transformers_model import load_transformers

        self.torch = torch
        # token ids are the model's input, so both sides get the same ones: transformers ignores
        # the file's pre-tokenizer (`smollm`, which splits digits); tests compare the tokenizers
        self.tokenizer = load_tokenizer(gguf_path)
        self.model: Any = load_transformers(gguf_path)
        self._prefix = self._encode(shared_prefix())
        with torch.inference_mode():
            ids = torch.tensor([self._prefix])
            self._cache = self.model(ids, use_cache=True, logits_to_keep=1).past_key_values

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).tolist()

    def _logits(self, prompt: str, answer_ids: list[int]) -> tuple[Any, Any]:
        """(logits [answer + 1, vocab] behind the prompt, cache)."""
        ids = self._encode(prompt) + answer_ids
        keep = len(answer_ids) + 1
        start, cache = 0, None
        if ids[: len(self._prefix)] == self._prefix:
            start, cache = len(self._prefix), copy.deepcopy(self._cache)
        with self.torch.inference_mode():
            out = self.model(
                self.torch.tensor([ids[start:]]),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=keep,
            )
        return out.logits[0], out.past_key_values

    def greedy(self, prompt: str, max_tokens: int) -> list[int]:
        """Token ids of the greedy answer, without the end token."""
        logits, cache = self._logits(prompt, [])
        ends = self.tokenizer.eos_token_ids
        ids: list[int] = []
        while len(ids) < max_tokens:
            token = int(logits[-1].argmax())
            if token in ends:
                break
            ids.append(token)
            with self.torch.inference_mode():
                out = self.model(
                    self.torch.tensor([[token]]), past_key_values=cache, use_cache=True
                )
            logits, cache = out.logits[0], out.past_key_values
        return ids

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)

    def relative_gap(self, prompt: str, got: str, expected: str) -> float:
        """Logit gap of the first differing tokens, as a share of the logit range there."""
        a, b = self._encode(got), self._encode(expected)
        end = self.tokenizer.eos_token_ids[0]
        a, b = [*a, end], [*b, end]
        at = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
        logits = self._logits(prompt, a[:at])[0][-1]
        span = float(logits.max() - logits.min())
        return abs(float(logits[a[at]] - logits[b[at]])) / span
