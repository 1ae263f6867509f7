"""The independent reference: transformers' greedy answers, and its verdict on near-ties.

The shared prefix is computed once and its cache copied, and an answer of the server is checked in
one pass, so four answers take seconds on a CPU.
"""

from __future__ import annotations

import copy
import os
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


def import_torch_with_sleeping_threads() -> None:
    """Imports torch so that its threads sleep, not spin, while they wait for each other.

    On two cores that others use too, spinning made a prefill of 2,100 tokens take 6 to 14 s, not 4.
    Only for this process, not for those that it starts; without effect when torch is there already.
    """
    before = os.environ.get("OMP_WAIT_POLICY")
    os.environ["OMP_WAIT_POLICY"] = "passive"
    try:
        import torch  # noqa: F401
    finally:
        del os.environ["OMP_WAIT_POLICY"]
        if before is not None:
            os.environ["OMP_WAIT_POLICY"] = before


def load_reference(gguf_path: Path) -> Reference:
    from granikv.bench.transformers_model import load_transformers

    # token ids are the model's input, so both sides get the same ones: transformers ignores
    # the file's pre-tokenizer (`smollm`, which splits digits); tests compare the tokenizers
    return Reference(load_transformers(gguf_path), load_tokenizer(gguf_path), shared_prefix())


class Reference:
    """model: of transformers. shared_text: computed once, for prompts that begin with it."""

    def __init__(self, model: Any, tokenizer: Any, shared_text: str):
        import torch

        self.torch, self.model, self.tokenizer = torch, model, tokenizer
        self._prefix = self._encode(shared_text)
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

    def greedy(self, prompt: str, max_tokens: int, draft: str = "") -> list[int]:
        """Token ids of the greedy answer, without the end token.

        draft: a guess of the answer, computed in one pass. Of its tokens those are kept that are
        the model's own choices, up to the first that is not: with any guess the answer is the same.
        """
        guess = self._encode(draft)[:max_tokens]
        logits, cache = self._logits(prompt, guess)
        choices, ends = logits.argmax(-1).tolist(), self.tokenizer.eos_token_ids
        is_kept = [token == choices[i] and token not in ends for i, token in enumerate(guess)]
        kept = [*is_kept, False].index(False)
        if kept < len(guess):
            cache.crop(kept - len(guess))
        ids, token = guess[:kept], choices[kept]
        while len(ids) < max_tokens and token not in ends:
            ids.append(token)
            with self.torch.inference_mode():
                out = self.model(
                    self.torch.tensor([[token]]), past_key_values=cache, use_cache=True
                )
            token, cache = int(out.logits[0, -1].argmax()), out.past_key_values
        return ids

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)

    def relative_gap(self, prompt: str, got: str, expected: str) -> float:
        """Logit gap of the first differing tokens, as a share of the logit range there.

        1 for texts that differ but are the same tokens: something other than the model did it.
        """
        a, b = self._encode(got), self._encode(expected)
        end = self.tokenizer.eos_token_ids[0]
        a, b = [*a, end], [*b, end]
        pairs = enumerate(zip(a, b, strict=False))
        at = next((i for i, (x, y) in pairs if x != y), None)
        if at is None:
            return 1.0
        logits = self._logits(prompt, a[:at])[0][-1]
        span = float(logits.max() - logits.min())
        return abs(float(logits[a[at]] - logits[b[at]])) / span
