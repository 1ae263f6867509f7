"""What a user may ask of sampling, with the names that vLLM and TensorRT-LLM users know.

Every field is validated on construction, so that a bad request fails before it reaches the engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from granikv.errors import InvalidArgument, Unsupported

INT32_MAX = 2**31 - 1


def _require_finite(name: str, value: float, lowest: float, highest: float, text: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidArgument(name, value, "a number")
    if not math.isfinite(value) or not lowest <= value <= highest:
        raise InvalidArgument(name, value, text)


def _require_int(name: str, value: int, lowest: int, highest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        raise InvalidArgument(name, value, f"an integer in [{lowest}, {highest}]")


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request.

    max_tokens: generated tokens, at least 1. min_tokens: no stop before this many.
    temperature: 0 is greedy. top_k: 0 is off. top_p in (0, 1]. min_p in [0, 1].
    repetition_penalty > 0 (1 is off) counts prompt and output; presence_penalty and
    frequency_penalty in [-2, 2] count output only (OpenAI's definition).
    seed: None draws one from the request id. logprobs: None, or 0 to 20 alternatives per
    generated token (0: the chosen token only).
    stop: strings, matched on text. stop_token_ids: ids. bad_words_ids: token sequences never made.

    Raises InvalidArgument with the field, the value and the limit.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        _require_int("max_tokens", self.max_tokens, 1, INT32_MAX)
        _require_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        _require_finite("temperature", self.temperature, 0.0, 100.0, "a finite number in [0, 100]")
        _require_int("top_k", self.top_k, 0, INT32_MAX)
        _require_finite("top_p", self.top_p, 0.0, 1.0, "a number in (0, 1]")
        if self.top_p == 0.0:
            raise InvalidArgument("top_p", self.top_p, "a number in (0, 1]")
        _require_finite("min_p", self.min_p, 0.0, 1.0, "a number in [0, 1]")
        _require_finite(
            "repetition_penalty", self.repetition_penalty, 1e-3, 1e3, "a number in [0.001, 1000]"
        )
        for name in ("presence_penalty", "frequency_penalty"):
            _require_finite(name, getattr(self, name), -2.0, 2.0, "a number in [-2, 2]")
        if self.seed is not None:
            _require_int("seed", self.seed, 0, 2**64 - 1)
        if self.n != 1:
            raise Unsupported(f"n={self.n!r}: one sequence per request is served; send n requests")
        if self.logprobs is not None:
            _require_int("logprobs", self.logprobs, 0, 20)
        for word in self.stop:
            if not isinstance(word, str) or not word:
                raise InvalidArgument("stop", word, "non-empty strings")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def uses_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )
