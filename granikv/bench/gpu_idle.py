"""How much of a span of time a GPU ran no kernel: the union of kernel intervals in torch.profiler.

    stream 1   |== kernel ==|      |=== kernel ===|
    stream 2          |=== kernel ===|                 |== kernel ==|
    busy       |====================================|  |============|     idle: what is left

Copies and fills do not count as kernels, so that the idle share is never too low. Tracing makes
each kernel of a graph a little later, so that it may be too high.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

COPIES = ("Memcpy", "Memset")  # how the profiler names what is not a kernel


@dataclass(frozen=True)
class KernelTimeline:
    span_us: float  # from the first kernel's start to the last one's end
    busy_us: float  # within it, the time in which at least one kernel ran
    num_kernels: int

    @property
    def idle_share(self) -> float:
        return 1.0 - self.busy_us / self.span_us


def timeline_of(intervals: Iterable[tuple[float, float]]) -> KernelTimeline:
    """intervals: (start, end) of kernels in us, in any order. Raises ValueError without any."""
    ordered = sorted(intervals)
    if not ordered:
        raise ValueError("kernel timeline: expected at least one kernel, got none")
    busy, reached = 0.0, ordered[0][0]
    for start, end in ordered:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return KernelTimeline(reached - ordered[0][0], busy, len(ordered))


def kernel_timeline(function: Callable[[], object]) -> KernelTimeline:
    """The kernels that one call launches, on all streams of the process; needs a CUDA device."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        function()
        torch.cuda.synchronize()
    on_gpu = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    return timeline_of(kernel_intervals(on_gpu))


def kernel_intervals(events: Iterable[Any]) -> list[tuple[float, float]]:
    """(start, end) in us of the kernels among a profiler's GPU events."""
    return [
        (event.time_range.start, event.time_range.end)
        for event in events
        if not event.name.startswith(COPIES) and not event.is_user_annotation
    ]
