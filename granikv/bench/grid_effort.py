"""How long a grid point is measured: layers, replays, and the seconds that this will take."""

from __future__ import annotations

import numpy as np

from granikv.bench.gpu_timing import Effort
from granikv.bench.grid_points import MAX_POINT_BYTES, GridPoint

BANDWIDTH_BYTES_PER_S = 4.25e12  # read and copy rate that one H200 reached; the floor's
MAX_LAYERS = 8  # of the steady graph
L2_BYTES = 512 * 2**20  # several times the L2: KV of so many bytes leaves it between replays
# us of one graph, from which its own launch does not count; of all its replays; their number
FULL = (2e3, 40e3, 20)
QUICK = (600.0, 5e3, 5)  # a first look at one of many candidates
HOPELESS = 1.5  # times the least time of a point: a first look that takes longer ends at once
FEWEST = 3
# estimated, not measured: 8 layers of three launches four times, the graph, the answer's check
HOST_S = 0.02
OTHER_RUNS = 4  # of the graph's layers: the answer's check, eager ones, warm-up
NUM_CANDIDATES = 110  # median of the 240 points that are not hopeless, as the planner cuts them now


def num_layers_of(point: GridPoint) -> int:
    """Layers with KV of their own: as many as fit the memory of the largest point."""
    return min(MAX_LAYERS, max(1, MAX_POINT_BYTES // point.kv_bytes))


def floor_us(point: GridPoint, tokens: int | None = None) -> float:
    """Time to read so many tokens' KV, None: the unique ones."""
    per_token = point.shape.kv_bytes_per_token * point.shape.num_kv_heads
    tokens = point.case.unique_tokens if tokens is None else tokens
    return tokens * per_token / BANDWIDTH_BYTES_PER_S * 1e6


def flat_tokens(point: GridPoint) -> int:
    """Read when no prefix is shared."""
    case = point.case
    return int((case.prefix_of_request.astype(np.int64) + case.suffix_lens).sum())


def expected_us(point: GridPoint, tokens_read: int) -> float:
    """Of a layer that reads so many tokens."""
    return 1.3 * floor_us(point, tokens_read) + 8


def effort(
    point: GridPoint, tokens_read: int, quick: bool = False, least_us: float | None = None
) -> Effort:
    """Few layers and replays of long steps, many of short ones.

    least_us: that a step of this point took so far. The first, checked answer compiles all kernels.
    """
    us = expected_us(point, tokens_read)
    graph_us, total_us, most = QUICK if quick else FULL
    num_layers = min(num_layers_of(point), max(1, int(np.ceil(graph_us / us))))
    repeats = min(most, max(FEWEST, int(total_us / (num_layers * us))))
    evict = num_layers * point.kv_bytes < L2_BYTES
    if not quick:
        return Effort(num_layers, repeats, evict, eager=1, warmup=2)
    give_up_ms = None if least_us is None else HOPELESS * least_us / 1e3
    return Effort(num_layers, repeats, evict, eager=0, warmup=1, give_up_ms=give_up_ms)


def reading_s(point: GridPoint, tokens_read: int, quick: bool = False) -> float:
    """Seconds of one reading."""
    how = effort(point, tokens_read, quick)
    replays = OTHER_RUNS + how.repeats
    return HOST_S + replays * how.num_layers * expected_us(point, tokens_read) * 1e-6


def estimate_s(point: GridPoint, with_baselines: bool, exhaustive: bool) -> float:
    """Seconds of a point on an H200 with kernels compiled: loading, readings.

    Loading is slot lists at 30 ns a token and the reference at 0.5 ms a row; FlashInfer's plan 0.3 s.
    """
    flat, unique = flat_tokens(point), point.case.unique_tokens
    seconds = 0.2 + 30e-9 * (flat + num_layers_of(point) * unique) + 5e-4 * point.case.batch
    seconds += reading_s(point, unique)
    if exhaustive:  # many candidates are slower than the best: twice the time
        seconds += NUM_CANDIDATES * reading_s(point, 2 * unique, quick=True)
        seconds += 12 * reading_s(point, unique)
    if with_baselines:
        seconds += 2 * reading_s(point, flat) + reading_s(point, unique) + 0.3
    return seconds
