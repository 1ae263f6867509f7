"""An engine in this process that is driven step by step, with the time at which each token came out.

Times are seconds of time.perf_counter. A token's time is when `step` returned it: what a caller
sees, with the host's part of the step in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from granikv.engine import Engine
from granikv.sampling_params import SamplingParams


@dataclass
class RequestTimes:
    arrival_s: float
    prompt_len: int  # tokens
    token_s: list[float] = field(default_factory=list)  # one per output token
    finished: bool = False

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.token_s[0] - self.arrival_s

    def gaps_s(self, after_s: float = 0.0, until_s: float = float("inf")) -> list[float]:
        """Inter-token latencies that end within (after_s, until_s]."""
        pairs = zip(self.token_s, self.token_s[1:], strict=False)
        return [later - earlier for earlier, later in pairs if after_s < later <= until_s]


class TimedEngine:
    """Requests decode greedily and make exactly the tokens asked for."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.requests: dict[str, RequestTimes] = {}  # since the last `clear`
        self._next_id = 0

    def add(
        self, prompt: Sequence[int] | np.ndarray, max_tokens: int, arrival_s: float | None = None
    ) -> RequestTimes:
        """arrival_s: when the request was due, if that is not now."""
        name = f"timed-{self._next_id}"
        self._next_id += 1
        now = time.perf_counter()
        times = RequestTimes(now if arrival_s is None else arrival_s, len(prompt))
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.engine.add_request(name, prompt, params)
        self.requests[name] = times
        return times

    def step(self) -> None:
        """Raises the error of a request that failed."""
        outputs = self.engine.step()
        now = time.perf_counter()
        for out in outputs:
            if out.error is not None:
                raise out.error
            request = self.requests[out.request_id]
            request.token_s += [now] * len(out.token_ids)
            request.finished = out.finished

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Raises RuntimeError when the requests end before."""
        while not is_done():
            if not self.engine.has_work():
                raise RuntimeError("the requests ended before what was to be measured happened")
            self.step()

    def run_steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()

    def clear(self) -> None:
        """Cancel what is left and forget all; what was computed stays cached."""
        for name, request in self.requests.items():
            if not request.finished:
                self.engine.abort(name)
        while self.engine.has_work():
            self.engine.step()
        self.requests = {}
