"""Runs StepPlans on one GPU with the torch decoder and our kernels."""

from __future__ import annotations

import contextlib
import logging
import sys
import time

import torch

from granikv.attention.gpu import GpuAttention
from granikv.attention.rehearsal import Rehearsal, rehearsing
from granikv.config import EngineConfig
from granikv.executor.device_executor import DTYPES, DeviceExecutor, row_bucket, row_buckets
from granikv.executor.warm_up import (
    attention_plans,
    compile_launches,
    decode_plan,
    extend_plan,
    num_compilers,
)
from granikv.models.llama import Decoder
from granikv.sampling import Sampler

__all__ = ["CudaExecutor", "row_bucket"]

log = logging.getLogger(__name__)


class CudaExecutor(DeviceExecutor):
    """Executor of one model on one GPU.

    decoder: on the device, in the engine's dtype. Raises what DeviceExecutor raises.
    """

    def __init__(
        self,
        engine_config: EngineConfig,
        decoder: Decoder,
        sampler: Sampler,
        device: torch.device | str = "cuda",
        use_graphs: bool = True,
    ):
        super().__init__(engine_config, decoder.config, sampler, device, use_graphs)
        self.decoder = decoder
        if engine_config.fp8_kv and decoder.kv_scales is None:
            log.warning(
                "kv_cache_dtype=%s: the checkpoint has no k_scale and v_scale, all are 1.0",
                engine_config.kv_cache_dtype,
            )
        self.attention = GpuAttention(
            decoder.config,
            self.k_arena,
            self.v_arena,
            self.request_slots,
            self.capacities,
            dtype=DTYPES[engine_config.dtype],
            kv_scales=decoder.kv_scales if engine_config.fp8_kv else None,
        )
        self.buffers = self.attention
        rotary = decoder.rotary
        self.attention.rope = (rotary.cos, rotary.sin)
        decoder.rope_in_attend = True

    def _forward(
        self, rows: dict[str, torch.Tensor], num_rows: int, sample_rows: torch.Tensor | None
    ) -> torch.Tensor:
        tokens = self._input_ids(rows, num_rows)
        positions = rows["position"][:num_rows]
        return self.decoder.forward(tokens, positions, self.attention.run, sample_rows)

    def warm_up(self) -> None:
        """Compile all that steps of this model and config can launch; they find nothing changed.

        Of ranks all do it at once: what is rehearsed sums over them, what compiles does not.
        """
        begin = time.perf_counter()
        launches = list(self.rehearse().launches.values())
        rank, num_ranks = getattr(self, "rank", 0), self.config.tp
        # ranks of one machine share Triton's cache on disk, so each begins elsewhere
        first = rank * len(launches) // num_ranks
        compiled = compile_launches(
            launches[first:] + launches[:first],
            num_compilers(num_ranks),
            self._take_device,
            rank == 0 and sys.stderr.isatty(),
        )
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        self.is_warm = True
        log.info("warm-up: %d kernels in %.1f s", compiled, time.perf_counter() - begin)

    @torch.inference_mode()
    def rehearse(self) -> Rehearsal:
        """What steps launch, by their own code. Torch's operators run, on rows that mean nothing."""
        shape, uses_graphs = self.attention.shape, self.use_graphs
        # q, k and v as the decoder passes them
        heads = shape.num_qo_heads + 2 * shape.num_kv_heads
        packed = torch.zeros(
            1, heads, shape.head_dim, dtype=self.attention.dtype, device=self.device
        )
        qkv = packed.split([shape.num_qo_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
        stream = torch.cuda.stream(self._stream) if self.on_gpu else contextlib.nullcontext()
        self.use_graphs = False
        try:
            with rehearsing() as rehearsal, stream:
                for plan in attention_plans(self.capacities):
                    self.attention.prepare(plan)
                    for layer in range(self.k_arena.shape[0]):
                        self.attention.run(layer, *qkv)
                self._run_model(extend_plan(min(2, self.config.max_num_batched_tokens)))
                for bucket in row_buckets(self.config.max_requests):
                    self._run_model(decode_plan(bucket))
        finally:
            self.use_graphs = uses_graphs
        return rehearsal

    def _take_device(self) -> None:
        if self.on_gpu:
            torch.cuda.set_device(self.k_arena.device)
