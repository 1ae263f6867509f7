"""Runs StepPlans on one device: decode steps as CUDA graphs, all others eagerly.

What the model is (a torch decoder, a TensorRT engine) is the subclass's. A step: moves, slot writes,
input ids, decoder, sampler; then the sampled ids start their way to the host. `launch` returns as
soon as the work is queued. The next step reads the sampled ids on the device, so it can be queued
before they reach the host.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from granikv.attention.plan_buffers import PlanBuffers, attention_shape, step_capacities
from granikv.attention.plan_cutter import PlanCutter
from granikv.attention.rehearsal import Compilation, noting_compilations
from granikv.config import EngineConfig, ModelConfig
from granikv.core import Count, StepOutput, StepPlan
from granikv.device_sampling import Sampled
from granikv.errors import InvalidArgument
from granikv.executor.device_rows import DeviceRows
from granikv.executor.memory_plan import fixed_bytes, plan_memory
from granikv.executor.step_setup import apply_moves, take_rows
from granikv.sampling import Sampler
from granikv.transfers import to_device

log = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
WARMUP_RUNS = 1  # eager runs of a key before it is captured: kernels compile, plans settle


@dataclass
class Handle:
    done: Any  # torch.cuda.Event
    started: Any
    num_samples: int
    sampled: Sampled | None = None  # None: the step has no sample rows
    error: Exception | None = None
    logits: torch.Tensor | None = None
    compilations: list[Compilation] = field(default_factory=list)


@dataclass
class _Graph:
    graph: Any  # torch.cuda.CUDAGraph
    logits: torch.Tensor


@dataclass
class GraphCounts:
    """How decode steps ran, for metrics: replays are the fast path."""

    replays: int = 0
    captures: int = 0
    eager_decodes: int = 0
    keys_seen: dict[tuple, int] = field(default_factory=dict)


class DeviceExecutor(ABC):
    """What executors on one device share; a subclass gives `_forward`.

    model_config: the shape of what runs here; buffers: the plan on the device, `prepare`d once per
    step; limits of the request table and of a step are engine_config's. On a GPU the arenas get
    what memory_plan.py finds. Raises Unavailable when that is too little, InvalidArgument for an
    unknown dtype.
    """

    buffers: PlanBuffers  # set by the subclass, once the arenas exist
    capture_error_mode = "global"
    is_warm = False  # no step should have to compile any more
    has_context = False  # an engine's, made before the memory is planned

    def __init__(
        self,
        engine_config: EngineConfig,
        model_config: ModelConfig,
        sampler: Sampler,
        device: torch.device | str = "cuda",
        use_graphs: bool = True,
    ):
        if engine_config.dtype not in DTYPES:
            raise InvalidArgument("dtype", engine_config.dtype, f"one of {sorted(DTYPES)}")
        self.config, self.device = engine_config, torch.device(device)
        self.sampler = sampler.on(self.device)
        self.on_gpu = self.device.type == "cuda"
        self.use_graphs = use_graphs and self.on_gpu
        self.keep_logits = False
        dtype = DTYPES[engine_config.dtype]
        max_seq_len = engine_config.max_seq_len or model_config.max_position
        rows = engine_config.max_requests
        self.capacities = step_capacities(
            rows,
            engine_config.max_num_batched_tokens,
            attention_shape(model_config, dtype, engine_config.fp8_kv),
        )
        if self.on_gpu:
            capacity = self._plan_memory(model_config, dtype.itemsize)
            self.config = engine_config = replace(engine_config, capacity_tokens=capacity)
        capacity = engine_config.arena_tokens
        shape = (
            model_config.num_layers, capacity, model_config.num_kv_heads, model_config.head_dim
        )  # fmt: skip
        kv_dtype: torch.dtype = getattr(torch, engine_config.kv_dtype)
        self.k_arena = torch.empty(shape, dtype=kv_dtype, device=self.device)
        self.v_arena = torch.empty(shape, dtype=kv_dtype, device=self.device)
        # the last row takes the writes of padding
        self.request_slots = torch.zeros(
            rows + 1, max_seq_len, dtype=torch.int32, device=self.device
        )
        self.last_sampled = torch.zeros(rows + 1, dtype=torch.int64, device=self.device)
        self.prompt_lens = np.zeros(rows, np.int64)
        self.device_name = torch.cuda.get_device_name(self.device) if self.on_gpu else "cpu"
        self._rows = DeviceRows(
            max(engine_config.max_num_batched_tokens, rows),
            max_seq_len,
            rows * max_seq_len,
            self.device,
        )
        self.graph_counts = GraphCounts()
        self._graphs: dict[tuple, _Graph] = {}
        self._pool: Any = None
        self._stream: Any = torch.cuda.Stream(self.device) if self.on_gpu else None

    @cached_property
    def plan_cutter(self) -> PlanCutter:
        """Cuts the planner's work for this device."""
        buffers = self.buffers
        return PlanCutter(buffers.shape, buffers.num_sms, buffers.capacities.max_partials)

    @abstractmethod
    def _forward(
        self, rows: dict[str, torch.Tensor], num_rows: int, sample_rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Slot writes, input ids and the model over num_rows rows of the prepared plan.

        rows: of DeviceRows; sample_rows int64 [S], None: all rows. Returns logits fp32 [S, vocab].
        """

    def _plan_memory(self, model_config: ModelConfig, element_bytes: int) -> int:
        """Tokens of the arenas; the plan goes to the log."""
        torch.cuda.empty_cache()  # what loading used in passing counts as free
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
        config = self.config
        fixed = fixed_bytes(
            config, model_config, self.capacities, element_bytes, model_config.vocab_size,
            self.has_context,
        )  # fmt: skip
        token_bytes = model_config.kv_bytes_per_token(config.kv_element_bytes)
        plan = plan_memory(config, total_bytes, free_bytes, fixed, token_bytes)
        log.info("memory of %s:\n%s", self.device, plan.table())
        return self._agree(plan.capacity_tokens)

    def _agree(self, capacity_tokens: int) -> int:
        """The capacity that all ranks have room for."""
        return capacity_tokens

    # -- the executor's interface --------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Handle:
        """Queue the step; an error of this step is raised by `wait`, never here."""
        num_samples = int(plan.counts[Count.NUM_SAMPLE_ROWS])
        handle = Handle(None, None, num_samples)
        with noting_compilations() as handle.compilations:
            try:
                self._launch(plan, handle)
            except Exception as error:
                handle.error = error
        for made in handle.compilations:
            level = logging.WARNING if self.is_warm else logging.INFO
            log.log(level, "a step waited %.2f s for kernel %s", made.elapsed_s, made.name)
        return handle

    def _launch(self, plan: StepPlan, handle: Handle) -> None:
        if not self.on_gpu:
            self._step(plan, handle)
            return
        with torch.cuda.stream(self._stream):
            handle.started = torch.cuda.Event(enable_timing=True)
            handle.done = torch.cuda.Event(enable_timing=True)
            handle.started.record()
            self._step(plan, handle)
            handle.done.record()

    def wait(self, handle: Handle) -> StepOutput:
        """Output of the step. Raises what the step raised."""
        if handle.error is not None:
            raise handle.error
        elapsed_s = 0.0
        if handle.done is not None:
            handle.done.synchronize()
            elapsed_s = handle.started.elapsed_time(handle.done) / 1e3
        if handle.sampled is None:
            output = StepOutput(np.empty(0, np.int32))
        else:
            output = handle.sampled.output()
        output.elapsed_s, output.num_compilations = elapsed_s, len(handle.compilations)
        if handle.logits is not None:
            output.logits = handle.logits[: handle.num_samples].cpu().numpy()
        return output

    def close(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        self._graphs.clear()

    # -- one step ------------------------------------------------------------------------------

    def _step(self, plan: StepPlan, handle: Handle) -> None:
        take_rows(plan, self.prompt_lens, self.sampler)
        apply_moves(plan, (self.k_arena, self.v_arena))
        if int(plan.counts[Count.NUM_SLOT_WRITES]) > int(plan.counts[Count.NUM_ROWS]):
            self._write_slots(plan)  # admissions bring the slots of whole cached prefixes
        rows, logits = self._run_model(plan)
        if handle.num_samples:
            self._sample(plan, handle, logits, rows)

    def _run_model(self, plan: StepPlan) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """The plan's rows on the device, and logits fp32 [S or more, vocab]."""
        num_rows = int(plan.counts[Count.NUM_ROWS])
        num_samples = int(plan.counts[Count.NUM_SAMPLE_ROWS])
        is_decode = num_rows == int(plan.counts[Count.NUM_DECODE_ROWS]) == num_samples
        bucket = row_bucket(num_rows)
        if is_decode and bucket <= self.config.max_requests:
            rows = self._rows.send(plan, bucket)
            return rows, self._decode(plan, rows, bucket)
        rows = self._rows.send(plan, num_rows)
        self.buffers.prepare(plan)
        return rows, self._forward(rows, num_rows, rows["sample_row"][:num_samples])

    def _write_slots(self, plan: StepPlan) -> None:
        writes = plan.slot_writes[: plan.counts[Count.NUM_SLOT_WRITES]].astype(np.int64)
        index = writes[:, 0] * self.request_slots.shape[1] + writes[:, 1]
        sent = to_device({"index": index, "slot": writes[:, 2]}, self.device)
        self.request_slots.view(-1).index_copy_(0, sent["index"], sent["slot"].int())

    def _decode(self, plan: StepPlan, rows: dict[str, torch.Tensor], bucket: int) -> torch.Tensor:
        """Logits [bucket, vocab] of a step in which every row decodes."""
        self.buffers.prepare(plan, capture=self.use_graphs)
        if not self.use_graphs:
            return self._forward(rows, bucket, None)
        key = (bucket, *self.buffers.graph_key)
        entry = self._graphs.get(key)
        if entry is None:
            seen = self.graph_counts.keys_seen.get(key, 0)
            self.graph_counts.keys_seen[key] = seen + 1
            if seen < WARMUP_RUNS:
                self.graph_counts.eager_decodes += 1
                return self._forward(rows, bucket, None)
            entry = self._graphs[key] = self._capture(rows, bucket)
        entry.graph.replay()
        self.graph_counts.replays += 1
        return entry.logits

    def _capture(self, rows: dict[str, torch.Tensor], bucket: int) -> _Graph:
        begin = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, self._pool, self._stream, capture_error_mode=self.capture_error_mode
        ):
            logits = self._forward(rows, bucket, None)
        self._pool = self._pool or graph.pool()
        self.graph_counts.captures += 1
        log.debug("captured %d rows in %.0f ms", bucket, (time.perf_counter() - begin) * 1e3)
        return _Graph(graph, logits)

    def _input_ids(self, rows: dict[str, torch.Tensor], num_rows: int) -> torch.Tensor:
        """Slot writes that ride along, and the input ids int64 [num_rows]."""
        self.request_slots.view(-1).index_copy_(0, rows["write_index"], rows["write_slot"].int())
        requests, tokens = rows["request"][:num_rows], rows["token"][:num_rows]
        return torch.where(tokens < 0, self.last_sampled[requests], tokens)

    def _sample(
        self,
        plan: StepPlan,
        handle: Handle,
        logits: torch.Tensor,
        rows: dict[str, torch.Tensor],
    ) -> None:
        """The ids on the device, for the next step; and all results on their way to the host."""
        count = handle.num_samples
        logits = logits[:count]
        request_rows = plan.row_request[plan.sample_rows[:count]]
        if self.keep_logits:
            handle.logits = logits.clone()
        made = plan.row_position[plan.sample_rows[:count]] + 1 - self.prompt_lens[request_rows]
        handle.sampled = self.sampler.launch(logits, request_rows, made)
        requests = rows["request"].index_select(0, rows["sample_row"][:count])
        self.last_sampled.index_copy_(0, requests, handle.sampled.ids)


def row_bucket(num_rows: int) -> int:
    """Rows that a decode graph for num_rows has: powers of two to 8, then steps of 8 and 16."""
    if num_rows <= 8:
        return 1 << max(0, num_rows - 1).bit_length()
    step = 8 if num_rows <= 64 else 16
    return -(-num_rows // step) * step


def row_buckets(max_requests: int) -> list[int]:
    """Those of decode steps with at most so many rows that are padded, in ascending order."""
    made = {row_bucket(num_rows) for num_rows in range(1, max_requests + 1)}
    return sorted(bucket for bucket in made if bucket <= max_requests)
