"""Runs StepPlans through a TensorRT engine: one rank's network, its plan buffers and its arenas.

All addresses are bound once; a step sets the shapes that changed and queues the network. Moves,
slot writes, input ids and sampling are DeviceExecutor's, as for the torch decoder.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from granikv.attention.plan_buffers import PlanBuffers, attention_shape, sm_count
from granikv.config import EngineConfig, ModelConfig
from granikv.engines.io import NETWORK_INPUTS, EngineIO
from granikv.engines.manifest import Manifest
from granikv.engines.runtime import BINDINGS, EngineRuntime
from granikv.engines.sharding import Shard
from granikv.engines.step_inputs import StepInputs
from granikv.errors import InvalidArgument, Unavailable
from granikv.executor.device_executor import DTYPES, DeviceExecutor
from granikv.sampling import Sampler


@dataclass(frozen=True)
class Network:
    """In the place of a decoder: its shape, as the engine and the dispatcher ask for it."""

    config: ModelConfig


class TensorRTExecutor(DeviceExecutor):
    """Executor of one rank's engine in `folder`.

    Buffers are of the sizes that the engine was built for; engine_config may ask for less. Raises
    EngineMismatch or InvalidArgument before anything is allocated, then what DeviceExecutor
    raises. binding: number of the arenas in this process, free again after `close`.
    """

    has_context = True

    def __init__(
        self,
        engine_config: EngineConfig,
        folder: Path,
        manifest: Manifest,
        runtime: EngineRuntime,
        sampler: Sampler,
        device: torch.device | str = "cuda",
        use_graphs: bool = True,
        rank: int = 0,
        tp_size: int = 1,
    ):
        manifest.check(folder, tp_size, runtime.facts(), runtime.file_kind)
        sizes = engine_sizes(engine_config, manifest)
        # first: the plan of the arenas counts what is free
        runtime.load(manifest.file(folder, rank, runtime.file_kind), manifest.io)
        self.rank = rank
        shard = Shard(manifest.model, tp_size, rank)
        own = replace(shard.rank_config, max_position=manifest.limits.max_seq_len)
        super().__init__(sizes, own, sampler, device, use_graphs)
        self.decoder = Network(own)
        self.runtime = runtime
        shape = attention_shape(own, DTYPES[sizes.dtype])
        self.buffers = PlanBuffers(shape, self.capacities, self.device, sm_count(self.device))
        self.buffers.gluon = True  # in the plugin, where its library and this GPU have them
        io = EngineIO(manifest.limits, own, self.capacities, shard.vocab_shard)
        self.logits = torch.zeros(
            manifest.limits.max_requests, shard.vocab_shard, device=self.device
        )
        self._row_zero = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._shapes: dict[str, tuple[int, ...]] = {}
        with ExitStack() as undo:
            self.binding = BINDINGS.take()
            undo.callback(BINDINGS.release, self.binding)
            runtime.bind_arenas(self.binding, self.k_arena, self.v_arena, own)
            undo.callback(runtime.unbind_arenas, self.binding)
            self.inputs = StepInputs(io, self.buffers, self.request_slots, self.binding)
            for spec in NETWORK_INPUTS:
                self._bind(spec.name, self.inputs.tensors[spec.name])
            self._bind("logits", self.logits)
            self._undo = undo.pop_all()  # what `close` does, once

    def _bind(self, name: str, tensor: torch.Tensor) -> None:
        if not self.runtime.set_tensor_address(name, tensor.data_ptr()):
            raise Unavailable(f"engine: expected a tensor {name}, found none; build it again")

    def _forward(
        self, rows: dict[str, torch.Tensor], num_rows: int, sample_rows: torch.Tensor | None
    ) -> torch.Tensor:
        num_samples = num_rows if sample_rows is None else sample_rows.shape[0]
        if num_samples == 0:
            sample_rows = self._row_zero  # the network has at least one; its logits are dropped
        self.inputs.set_rows(self._input_ids(rows, num_rows), sample_rows)
        for name, shape in self.inputs.shapes(num_rows, max(1, num_samples)).items():
            if self._shapes.get(name) != shape:
                if not self.runtime.set_input_shape(name, shape):
                    raise Unavailable(f"engine: {name}: the shape {shape} was refused")
                self._shapes[name] = shape
        stream = torch.cuda.current_stream(self.device).cuda_stream if self.on_gpu else 0
        if not self.runtime.execute_async_v3(stream):
            raise Unavailable("engine: TensorRT did not take the step; its log says why")
        return self._whole_logits(num_samples)

    def _whole_logits(self, num_samples: int) -> torch.Tensor:
        """fp32 [num_samples, vocab] of all ranks."""
        return self.logits[:num_samples, : self.decoder.config.vocab_size]

    def _capture(self, rows: dict[str, torch.Tensor], bucket: int) -> Any:
        self._forward(rows, bucket, None)  # TensorRT settles new shapes outside of a capture
        return super()._capture(rows, bucket)

    def close(self) -> None:
        super().close()
        self._undo.close()


def engine_sizes(config: EngineConfig, manifest: Manifest) -> EngineConfig:
    """config with the sizes of the engine. Raises InvalidArgument for one above them."""
    limits = manifest.limits
    for name, limit in (
        ("max_requests", limits.max_requests),
        ("max_num_batched_tokens", limits.max_tokens),
        ("max_seq_len", limits.max_seq_len),
        ("capacity_tokens", limits.capacity_tokens),
    ):
        if (getattr(config, name) or 0) > limit:
            raise InvalidArgument(
                name, getattr(config, name), f"at most {limit}, what the engine is built for"
            )
    if config.dtype not in ("auto", manifest.dtype):
        raise InvalidArgument("dtype", config.dtype, f"'auto' or the engine's {manifest.dtype!r}")
    return replace(
        config,
        max_requests=limits.max_requests,
        max_num_batched_tokens=limits.max_tokens,
        max_seq_len=limits.max_seq_len,
        capacity_tokens=config.capacity_tokens or limits.capacity_tokens,
        dtype=manifest.dtype,
    )
