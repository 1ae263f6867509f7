"""Runs StepPlans on one GPU with the torch decoder and our kernels."""

from __future__ import annotations

import logging

import torch

from granikv.attention.gpu import GpuAttention
from granikv.config import EngineConfig
from granikv.executor.device_executor import DTYPES, DeviceExecutor, row_bucket
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
