"""The group of tensor-parallel ranks: entering it, and what every rank's step does in it.

Tensors travel by torch.distributed: NCCL on GPUs, gloo on CPUs.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from granikv.core import StepPlan
from granikv.errors import Unavailable

if TYPE_CHECKING:
    from granikv.executor.device_executor import DeviceExecutor

    Base = DeviceExecutor
else:
    Base = object

COLLECTIVE_TIMEOUT_S = 300


@dataclasses.dataclass(frozen=True)
class RankSettings:
    """What a rank's process is told. runtime: "module:callable" that makes a TensorRT engine's
    run time; it gets runtime_options. None: the torch executor."""

    rank: int
    tp_size: int
    device: str  # "cuda": GPU number `rank`; "cpu"
    store: str  # file of the rendezvous, in a folder of our own
    engine_config: dict[str, Any]
    folder: str = ""  # of the engines
    runtime: str | None = None
    runtime_options: dict[str, Any] = dataclasses.field(default_factory=dict)


class RankSteps(Base):
    """Mixed into an executor of one rank: logits are gathered, sampled ids come from rank 0."""

    rank: int
    vocab_size: int  # of all ranks

    def gather_logits(self, shard: torch.Tensor) -> torch.Tensor:
        """shard fp32 [S, vocab / ranks] of this rank -> [S, vocab], of use on rank 0 only."""
        if shard.shape[0] == 0:
            return shard.new_empty(0, self.vocab_size)
        parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.gather(shard, parts if self.rank == 0 else None)
        return torch.cat(parts, dim=1)[:, : self.vocab_size]

    def _sample(self, plan: StepPlan, *arguments: Any) -> None:
        try:
            if self.rank == 0:
                super()._sample(plan, *arguments)
        finally:  # the others wait for it, whatever became of the sampling
            dist.broadcast(self.last_sampled, 0)


def all_reduce(x: torch.Tensor) -> torch.Tensor:
    """The sum of x over the ranks, in place."""
    dist.all_reduce(x)
    return x


def share(content: bytes) -> bytes:
    """Rank 0's bytes, on every rank; all give as many."""
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
    dist.broadcast(tensor, 0)
    return tensor.cpu().numpy().tobytes()


def join(settings: RankSettings) -> torch.device:
    """Enter the group of ranks; returns this rank's device. Raises Unavailable."""
    device = torch.device("cpu")
    if settings.device == "cuda":
        device = torch.device("cuda", settings.rank)
        torch.cuda.set_device(device)
    elif "GLOO_SOCKET_IFNAME" not in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # ranks of one machine
    try:
        dist.init_process_group(
            "nccl" if settings.device == "cuda" else "gloo",
            init_method=f"file://{settings.store}",
            rank=settings.rank,
            world_size=settings.tp_size,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        )
    except (RuntimeError, ValueError) as error:
        raise Unavailable(f"rank {settings.rank}: no group of {settings.tp_size} ranks: {error}") from error  # fmt: skip
    return device


def make_store() -> str:
    """A file for the rendezvous in a new folder that only this user can read."""
    return str(Path(tempfile.mkdtemp(prefix="granikv_ranks_")) / "store")
