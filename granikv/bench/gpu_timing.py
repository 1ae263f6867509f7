"""GPU times from CUDA graph replays: one call with a cold L2, and a layer of a running step.

do_bench_ms: a replay after the L2 was overwritten; the flush leaves dirty lines, which cost some
microseconds. steady_ms: a graph of several layers, each with its own KV, divided by their number;
where those fit the L2, a read of other memory before each replay takes them out of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

FLUSH_BYTES = 256 * 2**20  # several times the L2
UPLOAD_MS = 0.1  # a graph's first replay takes up to so much longer


def capture(function: Callable[[], object], eager: int = 3) -> torch.cuda.CUDAGraph:
    """A graph of one call, after so many eager ones (compilation, buffers)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(eager):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def replay_ms(
    replay: Callable[[], object],
    repeats: int,
    before: Callable[[], object] | None = None,
    warmup: int = 3,
    give_up_ms: float | None = None,
) -> float:
    """Median milliseconds of one replay, by device events; `before` is called before each.

    give_up_ms: a last warm-up that takes longer is the result.
    """
    starts = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
    for _ in range(warmup):
        starts[0].record()
        replay()
        ends[0].record()
    if warmup and give_up_ms is not None:
        torch.cuda.synchronize()
        if (first := starts[0].elapsed_time(ends[0])) > give_up_ms:
            return first
    for start, end in zip(starts, ends, strict=True):
        if before is not None:
            before()
        start.record()
        replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(s.elapsed_time(e) for s, e in zip(starts, ends, strict=True))


def do_bench_ms(function: Callable[[], object], repeats: int = 60) -> float:
    """One call as a graph, the L2 flushed before each replay."""
    graph = capture(function)
    return replay_ms(graph.replay, repeats, _flush_buffer().zero_)


def _flush_buffer() -> torch.Tensor:
    return torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")


def baseline_ms(function: Callable[[], object]) -> float:
    """do_bench_ms, or by events around eager calls for code that cannot be captured."""
    try:
        return do_bench_ms(function)
    except RuntimeError:
        torch.cuda.synchronize()
        return replay_ms(function, 60, _flush_buffer().zero_)


@dataclass(frozen=True)
class Effort:
    """How a steady time is measured: layers of the graph, its replays, and whether what all layers
    read may fit the L2: then a read of other memory (no dirty lines) takes it out before each.

    eager, warmup: of the graph, before the replays that count. give_up_ms: of a layer; a step that
    takes longer has the time of its last warm-up.
    """

    num_layers: int = 8
    repeats: int = 15
    evict: bool = False
    eager: int = 3
    warmup: int = 3
    give_up_ms: float | None = None


def steady_ms(layer: Callable[[int], object], effort: Effort) -> float:
    """Mean of a layer in a graph of several, layer(i) with KV of its own."""
    graph = capture(lambda: [layer(i) for i in range(effort.num_layers)], effort.eager)
    return _per_layer_ms(graph.replay, effort)


def baseline_steady_ms(layer: Callable[[int], object], effort: Effort) -> tuple[float, bool]:
    """steady_ms and True, or by events around eager calls, with False, for code that cannot be
    captured: its launches count."""
    try:
        return steady_ms(layer, effort), True
    except RuntimeError:
        torch.cuda.synchronize()
        return _per_layer_ms(lambda: [layer(i) for i in range(effort.num_layers)], effort), False


def _per_layer_ms(replay: Callable[[], object], effort: Effort) -> float:
    before = _flush_buffer().zero_().max if effort.evict else None
    give_up_ms = None
    if effort.give_up_ms is not None:
        give_up_ms = effort.give_up_ms * effort.num_layers + UPLOAD_MS
    total_ms = replay_ms(replay, effort.repeats, before, effort.warmup, give_up_ms)
    return total_ms / effort.num_layers


def gpu_probe() -> dict:
    """Read bandwidth of 1 GiB and the rate of an 8K bf16 matrix product, now."""
    values = torch.ones(2**28, device="cuda")
    left, right = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    read_ms = replay_ms(values.sum, 20)
    matmul_ms = replay_ms(lambda: left @ right, 20)
    return {
        "read_gb_per_s": 2**30 / read_ms / 1e6,
        "read_bytes": 2**30,
        "matmul_tflop_per_s": 2 * 8192**3 / matmul_ms / 1e9,
        "matmul_side": 8192,
        "matmul_dtype": "bfloat16",
    }
