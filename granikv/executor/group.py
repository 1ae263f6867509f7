"""What a rank does with the others: entering the group, gathering logits, sharing sampled ids.

Tensors travel by torch.distributed: NCCL on GPUs, gloo on CPUs. A rank is a process of its own,
so a group is its process's only one.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from granikv.core import StepPlan
from granikv.errors import Unavailable

if TYPE_CHECKING:

    class Base:
        """What any executor has."""

        last_sampled: torch.Tensor
        device: torch.device

        def _sample(self, plan: StepPlan, *arguments: Any) -> Any: ...

else:
    Base = object

COLLECTIVE_TIMEOUT_S = 300

# Of every rank, and of nothing else. Multicast off: it hung where containers hide the fabric
# manager; torch's symmetric memory would use it as well. Ranks of one machine meet on loopback.
RANK_ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}


@dataclasses.dataclass(frozen=True)
class RankSettings:
    """What a rank's process is told. runtime: "module:callable" that makes a TensorRT engine's
    run time; it gets runtime_options. None: the torch executor."""

    rank: int
    tp_size: int
    device: str  # "cuda": GPU number `rank`; "cpu"
    engine_config: dict[str, Any]
    eos_token_ids: tuple[int, ...] = ()
    folder: str = ""  # of the engines
    runtime: str | None = None
    runtime_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    # descriptors that the process inherits
    store: int = -1  # of the rendezvous
    memory: int = -1  # of RankChannel
    wakes: tuple[int, ...] = ()
    reports: int = -1  # pipe to the engine's process


class RankSteps(Base):
    """Mixed into an executor of one rank: logits are gathered, sampled ids come from rank 0."""

    rank: int
    vocab_size: int  # of all ranks
    capture_error_mode = "thread_local"  # NCCL's watchdog asks for events in a thread of its own
    sample_error: Exception | None = None  # the last; after it the ranks are still in step
    note_ids: Callable[[int], None] | None = None  # gets a digest of the ids after every sampling

    def gather_logits(self, shard: torch.Tensor) -> torch.Tensor:
        """shard fp32 [S, vocab / ranks] of this rank -> [S, vocab]; empty on other ranks than 0."""
        if shard.shape[0] == 0:
            return shard.new_empty(0, self.vocab_size)
        if self.rank:
            dist.gather(shard)
            return shard.new_empty(0, self.vocab_size)
        parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.gather(shard, parts)
        return torch.cat(parts, dim=1)[:, : self.vocab_size]

    def _agree(self, capacity_tokens: int) -> int:
        """The smallest of all ranks' capacities: one plan has to serve them all."""
        capacity = torch.tensor([capacity_tokens], device=self.device)
        dist.all_reduce(capacity, dist.ReduceOp.MIN)
        return int(capacity)

    def _sample(self, plan: StepPlan, *arguments: Any) -> Any:
        try:
            return super()._sample(plan, *arguments) if self.rank == 0 else None
        except Exception as error:
            self.sample_error = error
            raise
        finally:  # the others wait for it, whatever became of the sampling
            dist.broadcast(self.last_sampled, 0)
            if self.note_ids is not None:
                self.note_ids(zlib.crc32(self.last_sampled.cpu().numpy().tobytes()))


def share(content: bytes) -> bytes:
    """Rank 0's bytes, on every rank; all give as many."""
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
    dist.broadcast(tensor, 0)
    return tensor.cpu().numpy().tobytes()


def take_device(settings: RankSettings) -> torch.device:
    """This rank's device, made the current one: before anything else of the process uses a GPU."""
    if settings.device != "cuda":
        return torch.device("cpu")
    device = torch.device("cuda", settings.rank)
    torch.cuda.set_device(device)
    return device


def join(settings: RankSettings, device: torch.device) -> None:
    """Enter the group of ranks. Raises Unavailable."""
    on_gpu = device.type == "cuda"
    try:
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            # an anonymous file: private without a port or a key, and gone with its processes
            store=dist.FileStore(f"/proc/self/fd/{settings.store}", settings.tp_size),
            rank=settings.rank,
            world_size=settings.tp_size,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
            device_id=device if on_gpu else None,  # NCCL's communicator is made here, not later
        )
    except (RuntimeError, ValueError) as error:
        raise Unavailable(f"rank {settings.rank}: no group of {settings.tp_size} ranks: {error}") from error  # fmt: skip
