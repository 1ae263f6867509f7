"""The engine: requests in, text out, one step at a time.

With async_depth 1 step n+1 is scheduled, planned and launched before step n is committed; its
input ids are read from n's sampled ids where the executor keeps them.
It knows nothing of Triton, processes or sockets.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from granikv import plan_log
from granikv.assembly import build_dispatcher, build_executor
from granikv.cache.manager import CacheManager
from granikv.config import EngineConfig
from granikv.core import (
    Batch,
    FinishReason,
    Request,
    RequestOutput,
    Status,
    StepOutput,
    StepPlan,
)
from granikv.errors import AlreadyExists, InvalidArgument, Quantity, Unavailable, Unsupported
from granikv.metrics import ENGINE_COUNTERS, PROBE_PREFIX, Histogram, Stats
from granikv.sampling_params import SamplingParams
from granikv.scheduler import DrainNeeded, Scheduler
from granikv.text import Detokenizer, Tokenizer


@dataclass
class _Launched:
    batch: Batch
    plan: StepPlan
    handle: Future[StepOutput]


class Engine:
    """One model on one device.

    `executor`, `tokenizer`: given by tests and by callers that already hold them; see
    granikv.executor.base for what an executor does.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        executor: Any = None,
        tokenizer: Tokenizer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.clock = clock
        self.tokenizer = tokenizer
        if executor is None:
            config, executor, self.tokenizer = build_executor(config, tokenizer)
        self.config = config
        self.executor = executor
        self.model_config = executor.decoder.config
        self._kv_token_bytes = self.model_config.kv_bytes_per_token(config.kv_element_bytes)
        self.max_seq_len = min(
            config.max_seq_len or self.model_config.max_position, self.model_config.max_position
        )
        self.eos_token_ids = frozenset(self.model_config.eos_token_ids) | frozenset(
            self.tokenizer.eos_token_ids if self.tokenizer is not None else ()
        )
        self.cache = CacheManager(config)
        self.scheduler = Scheduler(config, self.cache)
        self.dispatcher = build_dispatcher(config, self.executor, self.cache)
        self.requests: dict[str, Request] = {}
        self._detokenizers: dict[str, Detokenizer] = {}
        self._outputs: list[RequestOutput] = []
        self._launched: _Launched | None = None
        self._next_step = 0
        self._token_gaps = Histogram("inter_token_latency_seconds")
        self._log_plan = plan_log.enabled()
        self.counters: dict[str, float] = dict.fromkeys(ENGINE_COUNTERS, 0.0)

    # --- requests -----------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int] | np.ndarray,
        params: SamplingParams,
        *,
        adapter: str = "",
        salt: str = "",
        prefix_id: str = "",
        shared_prefix_len: int = 0,
        priority: int = 0,
    ) -> None:
        """Queue a request. Raises InvalidArgument, AlreadyExists, Unsupported or Unavailable."""
        if request_id in self.requests:
            raise AlreadyExists(request_id)
        if adapter:
            raise Unsupported(f"adapter={adapter!r}: adapters are not served")
        if len(self.requests) >= self.config.max_queued_requests:
            raise Unavailable(
                f"queue: expected fewer than {self.config.max_queued_requests} live requests"
            )
        tokens = self._encode(prompt)
        self._check_lengths(tokens, params)
        self._check_ids(params)
        if not 0 <= shared_prefix_len <= len(tokens):
            raise InvalidArgument(
                "shared_prefix_len", shared_prefix_len, f"0 to the prompt's {len(tokens)} tokens"
            )
        request = Request(
            request_id,
            tokens,
            params,
            namespace=(str(self.config.model or ""), adapter, salt, self.config.kv_dtype),
            arrival_time=self.clock(),
            priority=priority,
            prefix_id=prefix_id,
            shared_prefix_len=shared_prefix_len,
        )
        self.requests[request_id] = request
        if self.tokenizer is not None:
            self._detokenizers[request_id] = Detokenizer(
                self.tokenizer, params.stop, params.include_stop_str_in_output
            )
        self.scheduler.add(request, self.clock())
        self._count_request(request, requests=1, prompt_tokens=request.prompt_len)

    def _encode(self, prompt: str | Sequence[int] | np.ndarray) -> np.ndarray:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidArgument("prompt", prompt[:40], "token ids: there is no tokenizer")
            self.tokenizer.check_size(prompt, self.max_prompt_len)
            tokens = self.tokenizer.encode(prompt)
        else:
            tokens = np.asarray(prompt)
            vocab = self.model_config.vocab_size
            if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
                raise InvalidArgument("prompt", tokens.shape, "a flat list of token ids")
            if tokens.size and (tokens.min() < 0 or tokens.max() >= vocab):
                bad = int(tokens[(tokens < 0) | (tokens >= vocab)][0])
                raise InvalidArgument("prompt token id", bad, f"0 to {vocab - 1}")
        if len(tokens) == 0:
            raise InvalidArgument("prompt", "", "at least one token")
        return np.asarray(tokens, dtype=np.int32)

    @property
    def max_prompt_len(self) -> int:
        """Tokens that a prompt stays below."""
        return min(self.max_seq_len, self.cache.max_request_tokens)

    def _check_ids(self, params: SamplingParams) -> None:
        vocab = self.model_config.vocab_size
        ids = [("stop_token_ids", i) for i in params.stop_token_ids]
        ids += [("bad_words_ids", i) for word in params.bad_words_ids for i in word]
        for name, i in ids:
            if not 0 <= i < vocab:
                raise InvalidArgument(name, i, f"token ids from 0 to {vocab - 1}")
        if any(not word for word in params.bad_words_ids):
            raise InvalidArgument("bad_words_ids", (), "non-empty token sequences")

    def _check_lengths(self, tokens: np.ndarray, params: SamplingParams) -> None:
        limit = self.max_prompt_len
        if len(tokens) >= limit:
            found = Quantity(f"{len(tokens)} tokens")
            raise InvalidArgument("prompt", found, f"fewer than {limit} tokens (the context)")
        if len(tokens) + params.max_tokens > limit:
            raise InvalidArgument(
                "max_tokens",
                params.max_tokens,
                f"at most {limit - len(tokens)}: {len(tokens)} prompt tokens and the context "
                f"limit of {limit}",
            )

    def abort(self, request_id: str) -> bool:
        """Cancel; its slots return with the step in flight. False if no such live request."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._finish(request, FinishReason.CANCELLED)
        return True

    def has_work(self) -> bool:
        return bool(self.requests or self._outputs or self._launched)

    # --- steps --------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait for the step in flight; its outputs, or its error, come with the next `step`."""
        if self._launched is not None:
            with contextlib.suppress(Exception):
                self.executor.wait(self._launched.handle)

    def step(self) -> list[RequestOutput]:
        """One step: schedule, plan, launch the next; wait for and commit the one before."""
        previous, self._launched = self._launched, None
        try:
            current = self._launch(in_flight=previous is not None)
        except DrainNeeded:
            self._commit(previous)
            current = self._launch(in_flight=False)
            previous = None
        if self.config.async_depth == 0:
            self._commit(current)
        else:
            self._commit(previous)
            self._launched = current
        if self.config.debug_checks:
            self.cache.check_conservation(list(self.scheduler.running))
        outputs, self._outputs = self._outputs, []
        return outputs

    def _launch(self, in_flight: bool) -> _Launched | None:
        batch = self.scheduler.schedule(self.clock(), in_flight=in_flight)
        if not batch.num_rows:
            return None
        plan = self.dispatcher.plan(self._next_step, batch, self.cache.plan_moves())
        self._next_step += 1
        self.cache.step_launched(plan.step_id)
        self._count(plan)
        return _Launched(batch, plan, self.executor.launch(plan))

    def _count(self, plan: StepPlan) -> None:
        self.counters["steps"] += 1
        self.counters["kv_bytes_read"] += plan.kv_tokens_read * self._kv_token_bytes
        self.counters["kv_bytes_flat"] += plan.kv_tokens_flat * self._kv_token_bytes
        self.counters["predicted_us"] += plan.predicted_us
        self.counters[f"steps_{plan.regime}"] += 1
        for choice in plan.choices:
            self.counters[f"groups_{choice.variant}"] += 1
        if self._log_plan:
            plan_log.write(plan)

    def _count_request(self, request: Request, **increments: float) -> None:
        if not request.request_id.startswith(PROBE_PREFIX):
            for name, value in increments.items():
                self.counters[name] += value
        elif request.finish_reason is not None:  # its tokens were counted with their step's
            self.counters["generated_tokens"] -= len(request.output_token_ids)

    def _commit(self, launched: _Launched | None) -> None:
        if launched is None:
            return
        try:
            output = self.executor.wait(launched.handle)
        except Exception as error:  # a failed step fails its requests, nothing else
            self._fail(launched, error)
            return
        self.counters["step_us"] += output.elapsed_s * 1e6
        self.counters["kernels_compiled_after_start"] += output.num_compilations
        self.cache.step_completed(launched.plan.step_id)
        batch = launched.batch
        for request, position in zip(batch.decodes, batch.decode_positions.tolist(), strict=True):
            if request.status is Status.RUNNING:
                self.cache.publish(request, position + 1)
        for extend in batch.extends:
            if extend.request.status is Status.RUNNING:
                self.cache.publish(extend.request, extend.start + extend.num_tokens)
        now, num_outputs = self.clock(), len(self._outputs)
        for i, (request, token) in enumerate(
            zip(launched.plan.sample_requests, output.token_ids.tolist(), strict=True)
        ):
            if request.status is Status.RUNNING:
                self._append_token(request, token, output, i, now)
        self.counters["generated_tokens"] += len(self._outputs) - num_outputs

    def _fail(self, launched: _Launched, error: Exception) -> None:
        self.counters["failed_steps"] += 1
        self.cache.step_completed(launched.plan.step_id)
        hit = set(launched.batch.requests)
        if launched.plan.moves:
            hit.update(self.scheduler.running)
        for request in hit:
            if request.status is not Status.FINISHED:
                request.error = error
                self._finish(request, FinishReason.ERROR)
        self.cache.forget_moves(launched.plan.step_id)

    def _append_token(
        self, request: Request, token: int, output: StepOutput, i: int, now: float
    ) -> None:
        request.output_token_ids.append(token)
        if request.first_token_time is None:
            request.first_token_time = now
            self._count_request(request, cached_tokens=request.num_cached_tokens)
        elif request.last_token_time is not None:
            self._token_gaps.observe(now - request.last_token_time)
        request.last_token_time = now
        if request.num_recomputed_tokens:
            self._count_request(request, recomputed_tokens=request.num_recomputed_tokens)
            request.num_recomputed_tokens = 0
        made, params = len(request.output_token_ids), request.params
        is_end = token in self.eos_token_ids and not params.ignore_eos
        is_end = (is_end or token in params.stop_token_ids) and made >= params.min_tokens
        out = self._new_output(request, [token])
        if output.logprobs is not None and params.logprobs is not None:
            out.logprobs = [float(output.logprobs[i])]
            request.cum_logprob += out.logprobs[0]
            out.cum_logprob = request.cum_logprob
            if output.top_ids is not None and output.top_logprobs is not None:
                k = params.logprobs
                ids, values = output.top_ids[i][:k].tolist(), output.top_logprobs[i][:k].tolist()
                out.top_logprobs = [dict(zip(ids, values, strict=True))]
        stopped = False
        detokenizer = self._detokenizers.get(request.request_id)
        if detokenizer is not None and not is_end:
            out.text, stopped = detokenizer.push([token], may_stop=made >= params.min_tokens)
        self._outputs.append(out)
        if is_end or stopped:
            self._finish(request, FinishReason.STOP, out)
        elif made >= params.max_tokens:
            self._finish(request, FinishReason.LENGTH, out)

    @staticmethod
    def _new_output(request: Request, token_ids: list[int]) -> RequestOutput:
        return RequestOutput(
            request_id=request.request_id,
            token_ids=token_ids,
            cum_logprob=request.cum_logprob,
            num_prompt_tokens=request.prompt_len,
            num_output_tokens=len(request.output_token_ids),
            num_cached_tokens=request.num_cached_tokens,
            num_hot_tokens=request.num_hot_tokens,
            attention_path=request.attention_path,
            arrival_time=request.arrival_time,
            first_scheduled_time=request.first_scheduled_time,
            first_token_time=request.first_token_time,
            last_token_time=request.last_token_time,
        )

    def _finish(
        self, request: Request, reason: FinishReason, out: RequestOutput | None = None
    ) -> None:
        if out is None:
            out = self._new_output(request, [])
            self._outputs.append(out)
        detokenizer = self._detokenizers.pop(request.request_id, None)
        if detokenizer is not None:
            out.text += detokenizer.flush()
        out.finished, out.finish_reason, out.error = True, reason, request.error
        request.finish_reason = reason
        self._count_request(request, **{f'finished{{reason="{reason}"}}': 1})
        self.scheduler.remove(request)
        request.status = Status.FINISHED
        del self.requests[request.request_id]

    def failure(self) -> Exception | None:
        """Why no step can run any more (a rank of the executor died); None while all is well."""
        find = getattr(self.executor, "failure", None)
        return find() if find is not None else None

    # --- state --------------------------------------------------------------------------------

    def metrics(self) -> Stats:
        """Counters since the start and gauges of now; lengths in tokens, times in their names."""
        running = list(self.scheduler.running)
        usage = self.cache.usage(running)
        free = usage["free"]
        return Stats(
            counters={
                **self.counters,
                **self.cache.counters,
                **self._token_gaps.counters(),
                "preemptions": self.scheduler.num_preemptions,
            },
            gauges={
                "active_requests": len(self.requests),
                "running_requests": len(running),
                "waiting_requests": len(self.scheduler.waiting),
                "prefill_requests": sum(not r.num_scheduled_output for r in running),
                "max_requests": self.config.max_requests,
                "capacity_tokens": usage["capacity"],
                "free_tokens": free,
                "used_tokens": usage["capacity"] - free,
                "used_fraction": 1.0 - free / usage["capacity"],
                "tokens_per_block": 1,
                "kv_bytes": usage["capacity"] * self._kv_token_bytes,
                **{f"kv_{key}_tokens": value for key, value in usage.items()},
            },
        )

    def stats(self) -> dict[str, float]:
        """Counters and gauges of `metrics` in one dictionary."""
        return self.metrics().merged()

    def close(self) -> None:
        for request in list(self.requests.values()):
            request.error = Unavailable("the engine is shutting down")
            self._finish(request, FinishReason.CANCELLED)
        if self._launched is not None:
            self._commit(self._launched)
            self._launched = None
        self.executor.close()
