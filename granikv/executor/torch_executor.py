"""Runs StepPlans with torch on the CPU: one worker thread, steps in launch order.

A step: moves, slot writes, token ids, decoder, sampler. Owns the KV arenas, the slot lists and
the last sampled id of every request row, so that a step can follow another that is still running.
It knows neither the scheduler nor the cache.
"""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch

from granikv.attention.cpu import CpuAttention
from granikv.config import EngineConfig, ModelConfig
from granikv.core import Count, StepOutput, StepPlan
from granikv.errors import InvalidArgument
from granikv.executor.step_setup import apply_moves, take_rows
from granikv.models.layers import RotaryTable

log = logging.getLogger(__name__)

MEMORY_SHARE = 0.9  # of the machine's
SLOT_BYTES = 4  # int32


class Decoder(Protocol):
    """A decoder-only model; forward(token_ids [T], positions [T], attend, sample_rows [S])."""

    config: ModelConfig
    rope_in_attend: bool

    @property
    def rotary(self) -> RotaryTable | None:
        """Its angles, so that attend can rotate q and k; None: it always does so itself."""

    def forward(self, token_ids, positions, attend, sample_rows) -> torch.Tensor:
        """Logits fp32 [S, vocab]; attend(layer, q, k, v) is called once per layer, in order."""


class Sampler(Protocol):
    def set_request(self, row, params, prompt_ids, output_ids, seed_text) -> None:
        """Puts a request on a row of the request table."""

    def sample(
        self, logits: torch.Tensor, rows: list[int], output_positions: list[int]
    ) -> StepOutput:
        """One token per row of logits [S, vocab]; rows are request rows."""


class TorchExecutor:
    """Executor of one model on the CPU. Raises InvalidArgument when the arenas do not fit.

    keep_logits: return the logits in StepOutput (tests, debugging).
    """

    def __init__(self, engine_config: EngineConfig, decoder: Decoder, sampler: Sampler):
        if engine_config.dtype not in ("auto", "float32"):
            raise InvalidArgument("dtype", engine_config.dtype, "'float32' on the CPU")
        if engine_config.fp8_kv:
            expected = "'auto' on the CPU: FP8 KV needs a GPU"
            raise InvalidArgument("kv_cache_dtype", engine_config.kv_cache_dtype, expected)
        if engine_config.quantization is not None:
            log.warning(
                "quantization=%s: no FP8 products on this CPU; fp32 products of the FP8 values "
                "give their results, no faster and in no less memory than fp32 weights",
                engine_config.quantization,
            )
        model = decoder.config
        if engine_config.num_threads:
            torch.set_num_threads(engine_config.num_threads)
        self.config, self.decoder, self.sampler = engine_config, decoder, sampler
        self.keep_logits = False
        max_seq_len = engine_config.max_seq_len or model.max_position
        capacity = engine_config.arena_tokens
        check_memory(engine_config, model)
        shape = (model.num_layers, capacity, model.num_kv_heads, model.head_dim)
        # empty, not zeros: the system gives pages when slots are first written
        self.k_arena, self.v_arena = torch.empty(shape), torch.empty(shape)
        self.request_slots = torch.zeros(
            (engine_config.max_requests, max_seq_len), dtype=torch.int32
        )
        self.last_sampled = torch.zeros(engine_config.max_requests, dtype=torch.int64)
        self.prompt_lens = torch.zeros(engine_config.max_requests, dtype=torch.int64)
        self.attention = CpuAttention(model, self.k_arena, self.v_arena, self.request_slots)
        if self.attention.use_native and decoder.rotary is not None:
            self.attention.rope = (decoder.rotary.cos, decoder.rotary.sin)
            decoder.rope_in_attend = True
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="granikv-executor")

    def launch(self, plan: StepPlan) -> Future[StepOutput]:
        """Queue the step. With async_depth 0 it has ended when this returns."""
        handle = self._worker.submit(self._step, plan)
        if self.config.async_depth == 0:
            handle.exception()  # waits; the error itself is raised by wait()
        return handle

    def wait(self, handle: Future[StepOutput]) -> StepOutput:
        return handle.result()

    def close(self) -> None:
        self._worker.shutdown(wait=True)

    @torch.inference_mode()
    def _step(self, plan: StepPlan) -> StepOutput:
        begin = time.perf_counter()
        num_rows = int(plan.counts[Count.NUM_ROWS])
        num_samples = int(plan.counts[Count.NUM_SAMPLE_ROWS])
        take_rows(plan, self.prompt_lens, self.sampler)
        apply_moves(plan, (self.k_arena, self.v_arena))
        writes = torch.from_numpy(plan.slot_writes[: plan.counts[Count.NUM_SLOT_WRITES]]).long()
        self.request_slots[writes[:, 0], writes[:, 1]] = writes[:, 2].int()
        self.attention.prepare(plan)

        request_rows = torch.from_numpy(plan.row_request[:num_rows]).long()
        token_ids = torch.from_numpy(plan.row_token[:num_rows]).long()
        token_ids = torch.where(token_ids < 0, self.last_sampled[request_rows], token_ids)
        positions = torch.from_numpy(plan.row_position[:num_rows]).long()
        sample_rows = torch.from_numpy(plan.sample_rows[:num_samples]).long()
        logits = self._logits(token_ids, positions, sample_rows)

        output = None
        if num_samples:
            output = self._sample(plan, logits, request_rows[sample_rows], positions[sample_rows])
        output = output or StepOutput(token_ids=np.empty(0, np.int32))
        if self.keep_logits:
            output.logits = logits.numpy()
        output.elapsed_s = time.perf_counter() - begin
        return output

    def _logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, sample_rows: torch.Tensor
    ) -> torch.Tensor:
        """fp32 [S, vocab]."""
        return self.decoder.forward(token_ids, positions, self.attention.run, sample_rows)

    def _sample(
        self,
        plan: StepPlan,
        logits: torch.Tensor,
        request_rows: torch.Tensor,
        positions: torch.Tensor,
    ) -> StepOutput:
        """request_rows and positions int64 [S], of the rows of logits."""
        output_positions = positions + 1 - self.prompt_lens[request_rows]
        output = self.sampler.sample(logits, request_rows.tolist(), output_positions.tolist())
        self.last_sampled[request_rows] = torch.from_numpy(output.token_ids).long()
        return output


def check_memory(config: EngineConfig, model: ModelConfig) -> None:
    """KV arena and table of slots, each alone. Raises InvalidArgument naming the field."""
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    slots_bytes = (config.max_seq_len or model.max_position) * SLOT_BYTES
    for name, wanted, item_bytes in (
        ("capacity_tokens", config.arena_tokens, model.kv_bytes_per_token()),
        ("max_requests", config.max_requests, slots_bytes),
    ):
        highest = int(MEMORY_SHARE * total_bytes) // item_bytes
        if wanted > highest:
            expected = f"at most {highest}: {MEMORY_SHARE:.0%} of {total_bytes / 2**30:.1f} GiB"
            raise InvalidArgument(name, wanted, expected)
