"""One tensor-parallel rank of the torch executor on a GPU."""

from __future__ import annotations

import torch

from granikv.config import EngineConfig
from granikv.executor.all_reduce import all_reduce_s
from granikv.executor.cuda_executor import CudaExecutor
from granikv.executor.group import RankSteps
from granikv.models import Decoder
from granikv.sampling import Sampler


class GpuRank(RankSteps, CudaExecutor):
    """Of a group that its process has joined; the sums between the ranks are captured in graphs."""

    def __init__(
        self,
        config: EngineConfig,
        decoder: Decoder,
        sampler: Sampler,
        device: torch.device,
        rank: int,
        vocab_size: int,
    ):
        self.rank, self.vocab_size = rank, vocab_size
        super().__init__(config, decoder, sampler, device)
        self.sum_times = getattr(decoder.reduce, "sum_times", None)

    def _forward(
        self, rows: dict[str, torch.Tensor], num_rows: int, sample_rows: torch.Tensor | None
    ) -> torch.Tensor:
        return self.gather_logits(super()._forward(rows, num_rows, sample_rows))

    def profile(self, begin: bool) -> float:
        """Seconds of all-reduce kernels between profile(True) and profile(False)."""
        torch.cuda.synchronize(self.device)
        if begin:
            activities = [torch.profiler.ProfilerActivity.CUDA]
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.start()
            return 0.0
        self._profiler.stop()
        return all_reduce_s(
            [(event.key, event.self_device_time_total) for event in self._profiler.key_averages()]
        )
