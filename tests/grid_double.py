"""A made-up GPU for the grid: times by arithmetic over the work items, no kernel, no arena."""

from __future__ import annotations

from collections.abc import Iterable

from granikv.attention.splits import SplitPlan
from granikv.bench.grid_points import GridPoint

RUN = {"gpu": "Made-up GPU", "commit": "c0ffee", "probe": {"matmul_tflop_per_s": 700.0}}
PROFILE = {
    "read_gb_per_s": 4000.0,
    "matmul_tflops": 700.0,
    "gemm_tflops": 500.0,
    "cascade_tflops": 250.0,
    "item_us": 1.0,
    "merge_ns": 0.02,
}


class MadeUpGpu:
    """open_point of run_grid; every reading is in `readings` as (layout, quick)."""

    num_sms = 132

    def __init__(
        self,
        bytes_per_us: float = 2e6,
        flop_per_us: float = 300e6,
        launch_us: float = 6.0,
        item_us: float = 0.0,
    ):
        self.bytes_per_us, self.flop_per_us, self.item_us = bytes_per_us, flop_per_us, item_us
        self.launch_us = launch_us
        self.opened: list[int] = []
        self.readings: list[tuple[str, bool]] = []

    def __call__(self, point: GridPoint) -> MadeUpGpu:
        self.point = point
        self.opened.append(point.index)
        return self

    def steady(
        self, split: SplitPlan, tokens_read: int, quick: bool = False
    ) -> tuple[float, float]:
        self.readings.append((split.layout.name, quick))
        shape, hot = self.point.shape, split.hot_items.astype(float)
        per_token = shape.kv_bytes_per_token * shape.num_kv_heads
        flop = 4 * float(hot[:, 1] @ hot[:, 3]) * shape.num_qo_heads * shape.head_dim
        us = max(tokens_read * per_token / self.bytes_per_us, flop / self.flop_per_us)
        return self.launch_us + us + self.item_us * len(set(split.hot_items[:, 0].tolist())), 1e-3

    def baselines(self) -> Iterable[tuple[str, dict]]:
        yield "uniform-paging", {"steady_us": 1e6}
