"""Sums over the ranks: by NCCL, or by torch's kernels over peer access; by gloo on a CPU.

one_shot: every rank reads all others' values (one trip, for short messages). two_shot: each sums
its part, then all read the parts. Both add in rank order, and need a buffer that the peers can
read; neither uses multicast. https://docs.pytorch.org/docs/stable/symmetric_memory.html
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from granikv.errors import Unavailable

BUFFER_BYTES = 2**23  # longer messages, of prefills, go by NCCL: they are bound by the links
MEASURED_BYTES = tuple(2**i for i in range(14, 24))
REPEATS = 20  # in one graph
ALIGNMENT = 16  # bytes
PEER_RANKS = (2, 4, 8)  # the kernels add in rank order for these numbers of ranks alone
KERNELS = ("allreduce", "all_reduce")  # in the names of NCCL's and of torch's
PEER_DTYPES = (torch.bfloat16, torch.float32)


class GlooAllReduce:
    """In place; elapsed_s is their time so far."""

    elapsed_s = 0.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        begin = time.perf_counter()
        dist.all_reduce(x)
        self.elapsed_s += time.perf_counter() - begin
        return x


class ReduceTable:
    """Strategy by message size: that of the measured size nearest above, or of the largest.

    times_us: by size in ascending order, then by strategy.
    """

    def __init__(self, sizes_bytes: tuple[int, ...], times_us: dict[str, list[float]]):
        self.sizes_bytes, self.times_us = sizes_bytes, times_us

    def choose(self, num_bytes: int) -> str:
        index = bisect.bisect_left(self.sizes_bytes, num_bytes)
        index = min(index, len(self.sizes_bytes) - 1)
        return min(self.times_us, key=lambda name: self.times_us[name][index])


def choose(strategy: str, table: ReduceTable | None, num_bytes: int, num_ranks: int) -> str:
    """What a message goes by: NCCL where it fits neither the buffer nor equal aligned parts."""
    if num_bytes > BUFFER_BYTES or num_bytes % (ALIGNMENT * num_ranks):
        return "nccl"
    return strategy if table is None else table.choose(num_bytes)


class GpuAllReduce:
    """In place. strategy: one of config.ALL_REDUCES. Every rank makes it together.

    "auto" measures at the start and takes NCCL where there is no peer access. Raises Unavailable
    when a strategy is named that these GPUs, this number of ranks or this dtype cannot take.
    """

    def __init__(self, strategy: str, device: torch.device, dtype: torch.dtype):
        self.strategy = strategy
        self.num_ranks = dist.get_world_size()
        self.group = dist.distributed_c10d._get_default_group().group_name
        self.table: ReduceTable | None = None
        self.buffer: torch.Tensor | None = None
        if strategy == "nccl":
            return
        lacking = missing_for_peers(self.num_ranks, dtype, torch.cuda.can_device_access_peer)
        if lacking and strategy != "auto":
            raise Unavailable(f"all_reduce={strategy!r}: {lacking}; use 'nccl' or 'auto'")
        if lacking:
            self.strategy = "nccl"
            return
        import torch.distributed._symmetric_memory as symmetric_memory

        count = BUFFER_BYTES // dtype.itemsize
        self.buffer = symmetric_memory.empty(count, dtype=dtype, device=device)
        symmetric_memory.rendezvous(self.buffer, self.group)
        if strategy == "auto":
            self.table = self._measure()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self.choose(x.numel() * x.element_size()), x)

    def choose(self, num_bytes: int) -> str:
        """What a message of this size goes by."""
        return choose(self.strategy, self.table, num_bytes, self.num_ranks)

    def run(self, strategy: str, x: torch.Tensor) -> torch.Tensor:
        if strategy == "nccl":
            dist.all_reduce(x)
            return x
        assert self.buffer is not None
        shared = self.buffer[: x.numel()]
        shared.copy_(x.view(-1))
        if strategy == "one_shot":
            shared = torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", self.group)
        else:
            torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", self.group)
        return x.copy_(shared.view_as(x))  # the buffer is the next sum's

    def _measure(self) -> ReduceTable:
        """The slowest rank's times count, so that all ranks choose alike."""
        assert self.buffer is not None
        names = ("nccl", "one_shot", "two_shot")
        times = torch.zeros(len(names), len(MEASURED_BYTES), device=self.buffer.device)
        for column, num_bytes in enumerate(MEASURED_BYTES):
            x = torch.zeros_like(self.buffer[: num_bytes // self.buffer.element_size()])
            for row, name in enumerate(names):
                times[row, column] = _graph_us(partial(self.run, name, x))
        dist.all_reduce(times, dist.ReduceOp.MAX)
        return ReduceTable(MEASURED_BYTES, dict(zip(names, times.tolist(), strict=True)))


def missing_for_peers(
    num_ranks: int, dtype: torch.dtype, can_access: Callable[[int, int], bool]
) -> str:
    """Why the kernels over peer access cannot be taken; "" when they can."""
    if num_ranks not in PEER_RANKS:
        return f"expected {PEER_RANKS} ranks, got {num_ranks}"
    if dtype not in PEER_DTYPES:
        return f"expected one of {PEER_DTYPES}, got {dtype}"
    for first in range(num_ranks):
        for second in range(num_ranks):
            if first != second and not can_access(first, second):
                return f"expected peer access between all GPUs, {first} cannot read {second}"
    return ""


def _graph_us(function: Callable[[], object]) -> float:
    """Microseconds of one call, among REPEATS in a graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        function()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(REPEATS):
            function()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(3):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / (3 * REPEATS)


def all_reduce_s(times_us: list[tuple[str, float]]) -> float:
    """Seconds of the kernels among (name, microseconds) that sum over ranks."""
    ours = [us for name, us in times_us if any(part in name.lower() for part in KERNELS)]
    return sum(ours) / 1e6
