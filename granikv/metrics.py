"""What an engine reports about itself: counters and gauges, told apart where they are made.

Names may carry labels (`finished{reason="stop"}`). Serving exports them as nv_granikv_<name>.
It knows nothing of Triton.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

from granikv.core import FinishReason

# Requests whose id starts so are health checks: no counter of requests or tokens, no histogram
# holds them. Counters of steps do: a step is work whoever asked for it.
PROBE_PREFIX = "granikv-probe"

ENGINE_COUNTERS = (
    # of requests and tokens: without health checks
    "requests", "prompt_tokens", "cached_tokens", "recomputed_tokens", "generated_tokens",
    *(f'finished{{reason="{reason}"}}' for reason in FinishReason),
    # of steps; kv_bytes_flat is what kv_bytes_read would be without sharing; kernels that a step
    # had to compile, or to load: the warm-up of a GPU's start should leave none
    "steps", "failed_steps", "steps_compute", "steps_memory",
    "steps_communication", "predicted_us", "step_us",
    "kv_bytes_read", "kv_bytes_flat", "groups_cascade", "groups_gemm", "groups_flat",
    "kernels_compiled_after_start",
)  # fmt: skip

LATENCY_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


@dataclass
class Stats:
    """counters only grow while the engine lives; gauges are values of now."""

    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)

    def merged(self) -> dict[str, float]:
        return {**self.counters, **self.gauges}


class Histogram:
    """Counts in buckets; an observation costs one bisection, an export one value per bucket."""

    def __init__(self, name: str, bounds: Iterable[float] = LATENCY_BOUNDS_S):
        self.name, self.bounds = name, tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def counters(self) -> dict[str, float]:
        """Prometheus' series of a histogram: cumulative buckets, sum and count."""
        series, total = {}, 0
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            total += count
            series[f'{self.name}_bucket{{le="{bound}"}}'] = float(total)
        return series | {f"{self.name}_sum": self.sum, f"{self.name}_count": float(total)}
