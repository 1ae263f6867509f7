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
from granikv.bench.gpu_timing import Effort, baseline_steady_ms
from granikv.bench.grid import floor_us, num_layers_of
from granikv.bench.grid_plan import MAX_PARTIALS
from granikv.bench.grid_points import GridPoint
from granikv.errors import Unavailable, Unsupported

DTYPE = torch.bfloat16
L2_BYTES = 512 * 2**20  # several times the L2: KV of so many bytes leaves it between replays
WORKSPACE_BYTES = 5 * 2**30  # partial states, slot lists, the reference, FlashInfer's own
GRAPH_US, READING_US, FEWEST, MOST = 4e3, 100e3, 3, 40  # of one graph, of all its replays
MANY_TOKENS, FEW_ROWS = 2**21, 64  # of a step from which so many rows are compared


def effort(point: GridPoint, expected_us: float) -> Effort:
    """Few layers and replays of long steps, many of short ones; expected_us: of one layer."""
    most = num_layers_of(point)
    num_layers = min(most, max(1, -int(-GRAPH_US // expected_us)))
    repeats = int(READING_US / (num_layers * expected_us))
    evict = num_layers * point.kv_bytes < L2_BYTES
    return Effort(num_layers, min(MOST, max(FEWEST, repeats)), evict)


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
        self.flat_tokens = int((case.prefix_of_request.astype("int64") + case.suffix_lens).sum())
        self.step = self.bench.load(case, FEW_ROWS if self.flat_tokens > MANY_TOKENS else 512)

    def steady(self, split: SplitPlan, tokens_read: int) -> tuple[float, float]:
        """As PointTimer has it."""
        try:
            got = self.bench.measure(self.step, split, True, self._effort(tokens_read))
        except OutOfResources as error:
            raise Unsupported(f"{split.layout.name}: {error}") from None
        return got["steady_ms"] * 1e3, got["relative_error"]

    def baselines(self) -> Iterable[tuple[str, dict]]:
        """As PointTimer has it; FlashInfer reads the same storage as pages."""
        flat = self.step.flat_split(self.num_sms, MAX_PARTIALS)
        us, error = self.steady(flat, self.flat_tokens)
        yield "uniform-paging", {"steady_us": us, "relative_error": error}
        yield from self._flashinfer()

    def _flashinfer(self) -> Iterator[tuple[str, dict]]:
        point = self.point
        layers = num_layers_of(point)
        others = flashinfer_baselines(point.case, point.shape, DTYPE, layers, self.storage)
        for name, call, extra in others:
            cascade = name == "flashinfer-cascade"
            tokens = point.case.unique_tokens if cascade else self.flat_tokens
            steady_ms, captured = baseline_steady_ms(call, self._effort(tokens))
            yield name, {"steady_us": steady_ms * 1e3, "captured": captured, **extra}

    def _effort(self, tokens_read: int) -> Effort:
        return effort(self.point, 1.3 * floor_us(self.point, tokens_read) + 8)
