"""Measures grid points on a GPU: one arena for all points, AttentionBench for each.

Kernels are compiled once per (GQA group, head size) and tile: lengths and rows are run-time values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from triton.runtime.errors import OutOfResources

from granikv.attention.splits import SplitPlan
from granikv.bench.attention import AttentionBench
from granikv.bench.attention_baselines import flashinfer_baselines
from granikv.bench.attention_step import MAX_PARTIALS, MAX_ROWS
from granikv.bench.gpu_timing import baseline_steady_ms
from granikv.bench.grid_effort import effort, flat_tokens, num_layers_of
from granikv.bench.grid_points import GridPoint
from granikv.errors import Unavailable, Unsupported

DTYPE = torch.bfloat16
WORKSPACE_BYTES = 5 * 2**30  # partial states, slot lists, the reference, FlashInfer's own
MANY_TOKENS, FEW_ROWS = 2**21, 64  # of a step from which so many rows are compared


def storage_elements(point: GridPoint) -> int:
    """Of K and V of all layers, the arena's spare slots and FlashInfer's partly filled pages."""
    tokens = point.case.unique_tokens + 4096 + 32 * point.case.batch
    per_token = 2 * point.shape.num_kv_heads * point.shape.head_dim
    return num_layers_of(point) * tokens * per_token


class GpuGrid:
    """open_point of run_grid."""

    def __init__(self, points: Sequence[GridPoint]):
        """Raises Unavailable without a GPU, or where the largest point does not fit its memory."""
        if not torch.cuda.is_available():
            raise Unavailable(
                "bench attention --grid: no CUDA device here, and it measures kernels"
            )
        largest = max(points, key=storage_elements)
        needed = storage_elements(largest) * DTYPE.itemsize + WORKSPACE_BYTES
        free, _ = torch.cuda.mem_get_info()
        if needed > free:
            raise Unavailable(
                f"bench attention --grid: point {largest.index} needs {needed / 2**30:.0f} GiB of GPU "
                f"memory, {free / 2**30:.0f} are free; leave it out with --points"
            )
        self.storage = torch.empty(storage_elements(largest), device="cuda", dtype=DTYPE).normal_()

    def __call__(self, point: GridPoint) -> GpuPoint:
        return GpuPoint(point, self.storage)


class GpuPoint:
    """PointTimer of one point."""

    def __init__(self, point: GridPoint, storage: torch.Tensor):
        self.point, self.storage = point, storage
        self.bench = AttentionBench(
            [point.case], point.shape, DTYPE, num_layers_of(point), self.storage
        )
        self.num_sms = self.bench.num_sms
        case = point.case
        self.flat_tokens = flat_tokens(point)
        self.least_us: float | None = None  # of all readings so far
        self.step = self.bench.load(case, FEW_ROWS if self.flat_tokens > MANY_TOKENS else MAX_ROWS)

    def steady(
        self, split: SplitPlan, tokens_read: int, quick: bool = False
    ) -> tuple[float, float]:
        """As PointTimer has it."""
        how = effort(self.point, tokens_read, quick, self.least_us)
        try:
            got = self.bench.measure(self.step, split, True, how)
        except OutOfResources as error:
            raise Unsupported(f"{split.layout.name}: {error}") from None
        us = got["steady_ms"] * 1e3
        self.least_us = min(us, self.least_us or us)
        return us, got["relative_error"]

    def baselines(self) -> Iterable[tuple[str, dict]]:
        """As PointTimer has it; FlashInfer reads the same storage as pages."""
        flat = self.step.flat_split(self.num_sms, MAX_PARTIALS)
        us, error = self.steady(flat, self.flat_tokens)
        yield "uniform-paging", {"steady_us": us, "relative_error": error}
        try:
            yield from self._flashinfer()
        except (RuntimeError, ValueError) as error:  # heads or lengths that it does not serve
            yield "flashinfer", {"failed": str(error)}

    def _flashinfer(self) -> Iterator[tuple[str, dict]]:
        point = self.point
        layers = num_layers_of(point)
        others = flashinfer_baselines(point.case, point.shape, DTYPE, layers, self.storage)
        for name, call, extra in others:
            cascade = name == "flashinfer-cascade"
            tokens = point.case.unique_tokens if cascade else self.flat_tokens
            steady_ms, captured = baseline_steady_ms(call, effort(point, tokens))
            yield name, {"steady_us": steady_ms * 1e3, "captured": captured, **extra}
