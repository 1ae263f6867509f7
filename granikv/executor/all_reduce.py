"""Sums over the ranks: by NCCL, or by kernels over peer access; by gloo on a CPU.

two_shot: each rank sums its part of a message, then all read the parts. fused: in the norm that
follows, in decode steps (granikv.models.rank_sums); all else goes by NCCL. Both add in rank order, and
need memory that the peers reach; none uses multicast.
https://docs.pytorch.org/docs/stable/symmetric_memory.html
"""

from __future__ import annotations

import bisect
import os
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from granikv.errors import Unavailable
from granikv.gpu_cost_model import SumTimes
from granikv.models.fused import add_rms_norm

if TYPE_CHECKING:
    from granikv.models.rank_sums import Exchange

BUFFER_BYTES = 2**23  # longer messages, of prefills, go by NCCL: they are bound by the links
MEASURED_BYTES = tuple(2**i for i in range(14, 24))
REPEATS = 20  # in one graph
ALIGNMENT = 16  # bytes
PEER_RANKS = (2, 4, 8)  # the kernels add in rank order for these numbers of ranks alone
MAX_FUSED_ROWS = 256
MEASURED_ROWS = (8, 32, 64, 128, MAX_FUSED_ROWS)
KERNELS = ("allreduce", "all_reduce", "rank_sum")  # in the names of NCCL's, torch's and ours
PEER_DTYPES = (torch.bfloat16, torch.float32)


class GlooAllReduce:
    """In place; elapsed_s is their time so far."""

    elapsed_s = 0.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        begin = time.perf_counter()
        dist.all_reduce(x)
        self.elapsed_s += time.perf_counter() - begin
        return x

    def fuses(self, num_rows: int) -> bool:
        return False

    def add_rms_norm(self, turn: int, *arguments: Any) -> Any:
        raise NotImplementedError("gloo: nothing is fused")


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
    if strategy == "fused" or num_bytes > BUFFER_BYTES or num_bytes % (ALIGNMENT * num_ranks):
        return "nccl"
    return strategy if table is None else table.choose(num_bytes)


class GpuAllReduce:
    """strategy: one of config.ALL_REDUCES. Every rank makes it together.

    width: of the rows of a decode step, of which there are max_rows at most. "auto" measures at the
    start and takes NCCL where there is no peer access. Raises Unavailable when a strategy is named
    that these GPUs, this number of ranks or this dtype cannot take.
    """

    def __init__(
        self, strategy: str, device: torch.device, dtype: torch.dtype, width: int, max_rows: int
    ):
        self.strategy = strategy
        self.num_ranks = dist.get_world_size()
        self.group = dist.distributed_c10d._get_default_group().group_name
        self.table: ReduceTable | None = None
        self.buffer: torch.Tensor | None = None
        self.exchange: Exchange | None = None
        self.fused_rows = 0  # of the largest decode step that is fused
        self.fused_times_us: dict[int, list[float]] = {}  # by rows: fused, and apart
        lacking = missing_for_peers(self.num_ranks, dtype, torch.cuda.can_device_access_peer)
        if lacking and strategy not in ("auto", "nccl"):
            raise Unavailable(f"all_reduce={strategy!r}: {lacking}; use 'nccl' or 'auto'")
        if lacking or strategy == "nccl":
            self.strategy = "nccl"
            self.table = self._measure(
                torch.zeros(BUFFER_BYTES // dtype.itemsize, dtype=dtype, device=device)
            )
            return
        shape = (BUFFER_BYTES // dtype.itemsize,)
        self.buffer = _shared(shape, dtype, device, self.group)[dist.get_rank()]
        if strategy in ("fused", "auto"):
            self.exchange = self._make_exchange(device, dtype, width, max_rows)
            self.fused_rows = max_rows
        if strategy == "auto":
            self.table = self._measure(self.buffer)
            self.fused_rows = self._measure_fused()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The sum, in place."""
        return self.run(self.choose(x.numel() * x.element_size()), x)

    def choose(self, num_bytes: int) -> str:
        """What a message of this size goes by."""
        return choose(self.strategy, self.table, num_bytes, self.num_ranks)

    def run(self, strategy: str, x: torch.Tensor) -> torch.Tensor:
        """The sum by nccl or two_shot, in place."""
        if strategy == "nccl":
            dist.all_reduce(x)
            return x
        assert self.buffer is not None
        shared = self.buffer[: x.numel()]
        shared.copy_(x.view(-1))
        torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", self.group)
        return x.copy_(shared.view_as(x))  # the buffer is the next sum's

    @property
    def sum_times(self) -> SumTimes | None:
        """Of what a message goes by; where that is fused its norm is in the time."""
        if self.table is None:
            return None
        times = dict(
            zip(
                self.table.sizes_bytes, zip(*self.table.times_us.values(), strict=True), strict=True
            )
        )
        best = {num_bytes: min(each) for num_bytes, each in times.items()}
        if self.exchange is not None:
            row_bytes = self.exchange.own.shape[-1] * self.exchange.own.element_size()
            fused = {
                row_bytes * rows: us
                for rows, (us, _) in self.fused_times_us.items()
                if rows <= self.fused_rows
            }
            best = {n: us for n, us in best.items() if n > max(fused, default=0)} | fused
        sizes = sorted(best)
        return SumTimes(tuple(sizes), tuple(best[size] for size in sizes))

    def fuses(self, num_rows: int) -> bool:
        """Whether add_rms_norm serves so many rows, and was not slower."""
        return 0 < num_rows <= self.fused_rows

    def add_rms_norm(self, turn: int, *arguments: Any) -> tuple[Any, torch.Tensor]:
        """See granikv.models.rank_sums.add_rms_norm."""
        from granikv.models import rank_sums  # needs triton

        assert self.exchange is not None
        return rank_sums.add_rms_norm(self.exchange, turn, *arguments)

    def _make_exchange(
        self, device: torch.device, dtype: torch.dtype, width: int, max_rows: int
    ) -> Exchange:
        from granikv.models.rank_sums import Exchange, exchange_shape

        shape = exchange_shape(self.num_ranks, max_rows, width)
        exchange = Exchange(dist.get_rank(), _shared(shape, dtype, device, self.group))
        dist.barrier()  # nobody stores before all have made theirs
        return exchange

    def _measure(self, like: torch.Tensor) -> ReduceTable:
        """The slowest rank's times count, so that all ranks choose alike."""
        names = ("nccl",) if self.buffer is None else ("nccl", "two_shot")
        times = torch.zeros(len(names), len(MEASURED_BYTES), device=like.device)
        for column, num_bytes in enumerate(MEASURED_BYTES):
            x = torch.zeros_like(like[: num_bytes // like.element_size()])
            for row, name in enumerate(names):
                times[row, column] = _graph_us(partial(self.run, name, x))
        dist.all_reduce(times, dist.ReduceOp.MAX)
        return ReduceTable(MEASURED_BYTES, dict(zip(names, times.tolist(), strict=True)))

    def _measure_fused(self) -> int:
        """Rows up to which the fused sum was faster than the table's choice and a norm."""
        assert self.exchange is not None
        own = self.exchange.own
        _, _, max_rows, width = own.shape
        counts = [count for count in MEASURED_ROWS if count <= max_rows]
        times = torch.zeros(len(counts), 2, device=own.device)
        weight = own.new_ones(width)
        for index, count in enumerate(counts):
            x = weight.new_zeros(count, width)

            def fused(x: torch.Tensor = x) -> None:
                for turn in (0, 1):
                    self.add_rms_norm(turn, x, x, weight, 1.0)

            def apart(x: torch.Tensor = x) -> None:
                for _ in range(2):
                    add_rms_norm(self(x), x, weight, 1.0)

            times[index] = torch.tensor([_graph_us(fused), _graph_us(apart)]) / 2
        dist.all_reduce(times, dist.ReduceOp.MAX)
        wins = [fused_us <= apart_us for fused_us, apart_us in times.tolist()]
        self.fused_times_us = dict(zip(counts, times.tolist(), strict=True))
        return max((counts[i] for i in range(len(counts)) if all(wins[: i + 1])), default=0)


def _shared(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, group: Any
) -> tuple[torch.Tensor, ...]:
    """Memory that all ranks reach: each rank's, as this one sees it."""
    import torch.distributed._symmetric_memory as symmetric_memory

    own = symmetric_memory.empty(shape, dtype=dtype, device=device)
    handle = symmetric_memory.rendezvous(own, group)
    return tuple(
        own if rank == handle.rank else handle.get_buffer(rank, shape, dtype)
        for rank in range(handle.world_size)
    )


def missing_for_peers(
    num_ranks: int, dtype: torch.dtype, can_access: Callable[[int, int], bool]
) -> str:
    """Why the kernels over peer access cannot be taken; "" when they can."""
    if os.environ.get("NCCL_P2P_DISABLE", "0") != "0":
        return "NCCL_P2P_DISABLE asks to leave peer access alone"
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
