"""An engine without a model: the test double of the serving protocol.

It answers with the prompt's words in turn, one per step. A prompt may hold orders: `step_ms=N`
(sleep per step), `boom` (the step fails with this request), `split` (a word in two pieces).
"""

from __future__ import annotations

import itertools
import os
import re
import time
from pathlib import Path

from granikv.config import EngineConfig
from granikv.core import FinishReason, RequestOutput
from granikv.errors import AlreadyExists, InvalidArgument, Unavailable
from granikv.metrics import Histogram, Stats
from granikv.sampling_params import SamplingParams

VOCAB_SIZE = 1000


class FakeRequest:
    def __init__(self, request_id: str, prompt: str, params: SamplingParams):
        self.request_id, self.params = request_id, params
        self.words = prompt.split() or ["."]
        self.num_prompt_tokens = len(self.words)
        self.order_ms = int(match[1]) if (match := re.search(r"step_ms=(\d+)", prompt)) else 0
        self.arrival_time = time.monotonic()
        self.scheduled: float | None = None
        self.first: float | None = None
        self.last: float | None = None
        self.num_output = 0
        self.is_aborted = False


class FakeEngine:
    def __init__(self, config: EngineConfig):
        self.config = config
        self.max_seq_len = config.max_seq_len or 1024
        self.requests: dict[str, FakeRequest] = {}
        self.token_gaps = Histogram("inter_token_latency_seconds")
        self.num_output_tokens = self.num_prompt_tokens = self.num_steps = self.num_aborted = 0

    def add_request(
        self, request_id, prompt, params, *, adapter="", salt="", prefix_id="",
        shared_prefix_len=0, priority=0,
    ) -> None:  # fmt: skip
        if request_id in self.requests:
            raise AlreadyExists(request_id)
        if len(self.requests) >= self.config.max_queued_requests:
            limit = self.config.max_queued_requests
            raise Unavailable(f"queue full: {len(self.requests)} of {limit} requests")
        request = FakeRequest(request_id, prompt, params)
        if request.num_prompt_tokens > self.max_seq_len - 1:
            raise InvalidArgument(
                "prompt", request.num_prompt_tokens, f"at most {self.max_seq_len - 1} tokens"
            )
        room = self.max_seq_len - request.num_prompt_tokens
        if params.max_tokens > room:
            raise InvalidArgument("max_tokens", params.max_tokens, f"at most {room}")
        for token in params.stop_token_ids:
            if token >= VOCAB_SIZE:
                raise InvalidArgument("stop_token_ids", token, f"token ids below {VOCAB_SIZE}")
        self.requests[request_id] = request
        self.num_prompt_tokens += request.num_prompt_tokens

    def abort(self, request_id: str) -> bool:
        request = self.requests.get(request_id)
        if request is None:
            return False
        request.is_aborted = True
        return True

    def has_work(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[RequestOutput]:
        self.num_steps += 1
        batch = list(self.requests.values())
        time.sleep(max((r.order_ms for r in batch), default=0) / 1e3)
        outputs = [self._advance(request) for request in batch]
        for output in outputs:
            if output.finished:
                del self.requests[output.request_id]
        return outputs

    def _advance(self, request: FakeRequest) -> RequestOutput:
        now = time.monotonic()
        output = RequestOutput(
            request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_output,
            num_cached_tokens=request.num_prompt_tokens // 2,
            num_hot_tokens=request.num_prompt_tokens // 4,
            attention_path="cascade",
            arrival_time=request.arrival_time,
        )
        if request.is_aborted:
            self.num_aborted += 1
            output.finished, output.finish_reason = True, FinishReason.CANCELLED
            return output
        if "boom" in request.words:
            output.finished, output.error = True, RuntimeError("boom")
            output.finish_reason = FinishReason.ERROR
            return output
        if "explode" in request.words:
            raise RuntimeError("explode")
        words = itertools.islice(itertools.cycle(request.words), request.num_output, None)
        word = next(words)
        request.num_output += 1
        if request.last is not None:
            self.token_gaps.observe(now - request.last)
        request.last = now
        self.num_output_tokens += 1
        request.first = request.first or now
        request.scheduled = request.scheduled or now
        output.text, output.token_ids = word + " ", [len(word)]
        output.num_output_tokens = request.num_output
        output.first_token_time, output.last_token_time = request.first, now
        output.first_scheduled_time = request.scheduled
        output.cum_logprob = -0.5 * request.num_output
        if request.params.logprobs is not None:
            output.logprobs = [-0.5]
        if word in request.params.stop:
            output.text, output.finished, output.finish_reason = "", True, FinishReason.STOP
        if request.num_output >= request.params.max_tokens and not output.finished:
            output.finished, output.finish_reason = True, FinishReason.LENGTH
        return output

    def metrics(self) -> Stats:
        return Stats(
            counters={
                "prompt_tokens": self.num_prompt_tokens,
                "generated_tokens": self.num_output_tokens,
                "aborted": self.num_aborted,
                "steps": self.num_steps,
                'groups{path="cascade"}': self.num_steps,
                **self.token_gaps.counters(),
            },
            gauges={
                "active_requests": len(self.requests),
                "running_requests": len(self.requests),
                "waiting_requests": 0,
                "max_requests": self.config.max_requests,
                "capacity_tokens": self.config.capacity_tokens or 65536,
            },
        )

    def close(self) -> None:
        self.requests.clear()
        if path := os.environ.get("FAKE_ENGINE_CLOSED"):
            Path(path).touch()


class SlowEngine(FakeEngine):
    """Is loading for longer than any test waits."""

    def __init__(self, config: EngineConfig):
        time.sleep(600)


class BrokenEngine(FakeEngine):
    def __init__(self, config: EngineConfig):
        raise InvalidArgument("weights", "made up", "weights that can be loaded")


class LateEngine(FakeEngine):
    """Loads until the run folder has a file `go`."""

    def __init__(self, config: EngineConfig):
        while not Path(os.environ["GRANIKV_RUN_DIR"], "go").exists():
            time.sleep(0.05)
        super().__init__(config)
