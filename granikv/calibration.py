"""Measures a machine's hardware profile with the calls that CpuAttention makes, and stores it.

A timing can be wrong by orders of magnitude (the first matrix product of a process took up to a
second, a neighbour on the machine takes what it likes), so everything is warmed up, unsteady
readings are repeated, and table values far off their neighbours are measured again.
It knows nothing of how times become choices: cost_model.py does.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from granikv import native
from granikv.attention.cpu import CpuAttention, merge_parts
from granikv.attention.plan_parts import Bucket, make_view
from granikv.config import ModelConfig
from granikv.core import HotVariant
from granikv.outputs import write_atomically

log = logging.getLogger(__name__)

VERSION = 1
ROWS = [1, 4, 16, 64]
HOT_TOKENS = [64, 256, 1024, 4096]
COLD_TOKENS = [16, 64, 256]  # longer COLD runs are mostly read in place
NUM_STARTS = 16  # places in the arena that the calls of one reading take in turns
ARENA_BYTES = 96 * 2**20  # measured spans rotate through it: KV comes from memory, as in a model
NUM_READINGS = 4 * len(ROWS) + 2 * len(ROWS) * len(HOT_TOKENS) + 2  # of the quick profile, for bars

Call = Callable[[], object]


class Meter:
    """Medians of repeated calls that survive a noisy machine. Times in us.

    clock: seconds; tests give a made-up one. on_reading: told the name of what is measured next.
    warn: told each warning, which `warnings` keeps as well.
    """

    WARMUP_CALLS = 2
    MAX_SPREAD = 0.6  # interquartile range over median; a quiet machine stays under 0.2
    MAX_TRIES = 4
    TOLERANCE = 1.6  # a value may exceed what its neighbours allow by this factor,
    SLACK_US = 10.0  # and by this much: short calls are noisy
    MAX_SLOWDOWN = 1.5  # of the reference call after a table

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        on_reading: Callable[[str], None] = lambda name: None,
        warn: Callable[[str], None] = lambda text: log.warning("calibration: %s", text),
    ):
        self.clock, self.on_reading, self.warn = clock, on_reading, warn
        self.warnings: list[str] = []
        self.disturbed = False  # others used the machine: the values are not to be relied on
        self._reference: Call | None = None
        self._reference_us = float("inf")

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        self.warn(text)

    def time_us(self, name: str, call: Call, repeats: int) -> float:
        """Median of `repeats` calls, measured again while they disagree. If they never agree the
        fastest call of all counts: what disturbs a call makes it longer, never shorter."""
        self.on_reading(name)
        for _ in range(self.WARMUP_CALLS):
            call()
        fastest = float("inf")
        for _ in range(self.MAX_TRIES):
            low, median, high = np.percentile(times := self._times_us(call, repeats), (25, 50, 75))
            spread = float((high - low) / max(median, 1e-9))
            if spread <= self.MAX_SPREAD:
                return round(float(median), 1)
            fastest = min(fastest, *times)
        self.disturbed = True
        self._warn(
            f"{name}: {self.MAX_TRIES} measurements of {repeats} calls each stayed unsteady "
            f"(the middle half spreads over {spread:.0%} of the median {median:.0f} us); "
            f"the fastest call counts: {fastest:.0f} us"
        )
        return round(fastest, 1)

    def ratio(self, name: str, call: Call, other: Call, repeats: int) -> float:
        """Time of `other` over that of `call`: the median of pairs made in turns, so that a
        machine that changes its speed, or is busy all along, does not decide between the two."""
        self.on_reading(name)
        for _ in range(self.WARMUP_CALLS):
            call(), other()
        pairs = []
        for _ in range(repeats):
            (first,), (second,) = self._times_us(call, 1), self._times_us(other, 1)
            pairs.append(second / max(first, 1e-3))
        return float(np.median(pairs))

    def check_load(self) -> None:
        """Threads that wait for a processor make every time longer, steadily."""
        load, num_cpus = machine_load()
        if load > 0.5 * num_cpus:
            self.disturbed = True
            self._warn(f"the machine is busy (load {load:.1f} on {num_cpus} processors)")

    def set_reference(self, call: Call) -> None:
        """A call whose time tells whether the machine is as quick as before."""
        self._reference = call
        self._slowdown()

    def _slowdown(self) -> float:
        """The reference's time over the least seen so far; 1 without a reference."""
        if self._reference is None:
            return 1.0
        now_us = float(np.median(self._times_us(self._reference, 9)))
        self._reference_us = min(self._reference_us, now_us)
        return now_us / self._reference_us

    def _times_us(self, call: Call, repeats: int) -> list[float]:
        times = []
        for _ in range(repeats):
            begin = self.clock()
            call()
            times.append((self.clock() - begin) * 1e6)
        return times

    def table(
        self,
        name: str,
        rows: Sequence[int],
        tokens: Sequence[int],
        make_call: Callable[[int, int], Call],
        repeats: int,
    ) -> list[list[float]]:
        """Like one_table, made again when the machine was slower at its end than before; of each
        cell the least counts."""
        best: np.ndarray | None = None
        for tries in range(1, self.MAX_TRIES + 1):
            values = np.array(self.one_table(name, rows, tokens, make_call, repeats))
            best = values if best is None else np.minimum(best, values)
            slowdown = self._slowdown()
            if slowdown <= self.MAX_SLOWDOWN:
                break
            self._warn(
                f"{name}: at the table's end the machine was {slowdown:.1f} times slower than "
                f"before; {'measured again' if tries < self.MAX_TRIES else 'kept'}"
            )
        assert best is not None
        return best.tolist()

    def one_table(
        self,
        name: str,
        rows: Sequence[int],
        tokens: Sequence[int],
        make_call: Callable[[int, int], Call],
        repeats: int,
    ) -> list[list[float]]:
        """Medians [len(rows), len(tokens)]. Outliers are measured again with more calls, of which
        the fastest counts."""

        def measure(i: int, j: int) -> float:
            label = f"{name}, {rows[i]} rows x {tokens[j]} tokens"
            return self.time_us(label, make_call(rows[i], tokens[j]), repeats)

        values = [[measure(i, j) for j in range(len(tokens))] for i in range(len(rows))]
        seen: set[tuple[int, int]] = set()
        while found := [c for c in self.outliers(values, rows, tokens) if c not in seen]:
            for i, j in found:
                seen.add((i, j))
                call = make_call(rows[i], tokens[j])
                again = round(min(self._times_us(call, self.WARMUP_CALLS + 4 * repeats)), 1)
                confirmed = "; confirmed" if again > values[i][j] / self.TOLERANCE else ""
                self._warn(
                    f"{name}, {rows[i]} rows x {tokens[j]} tokens: {values[i][j]:.0f} us is far "
                    f"off its neighbours; measured again: {again:.0f} us{confirmed}"
                )
                values[i][j] = min(values[i][j], again)
        return values

    def outliers(
        self, values: list[list[float]], rows: Sequence[int], tokens: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Cells that are longer than a cell with more work, or than the cell before scaled up by
        the work's growth."""
        cells = []
        for i, j in itertools.product(range(len(rows)), range(len(tokens))):
            limits = []
            if i + 1 < len(rows):
                limits.append(values[i + 1][j])
            if j + 1 < len(tokens):
                limits.append(values[i][j + 1])
            if i > 0:
                limits.append(values[i - 1][j] * rows[i] / rows[i - 1])
            if j > 0:
                limits.append(values[i][j - 1] * tokens[j] / tokens[j - 1])
            if any(values[i][j] > self.TOLERANCE * limit + self.SLACK_US for limit in limits):
                cells.append((i, j))
        return cells


def measure_cpu_profile(
    model_config: ModelConfig, quick: bool = True, meter: Meter | None = None
) -> dict:
    """The profile that CostModel reads; a few seconds when quick, five times that otherwise."""
    meter = meter or Meter()
    meter.check_load()
    heads, dim = model_config.num_kv_heads, model_config.head_dim
    token_bytes = 2 * heads * dim * 4
    longest = 2 * HOT_TOKENS[-1]
    capacity = max(longest, ARENA_BYTES // token_bytes)
    generator = torch.Generator().manual_seed(0)
    arena = torch.randn(2, 1, capacity, heads, dim, generator=generator)
    slots = torch.zeros(1, 1, dtype=torch.int32)
    attention = CpuAttention(model_config, arena[0], arena[1], slots)
    group, repeats = model_config.gqa_group_size, 5 if quick else 25
    k, v = arena[0, 0], arena[1, 0]
    starts = (i * 4099 % (capacity - HOT_TOKENS[-1]) for i in itertools.count())

    def queries(rows: int) -> torch.Tensor:
        return torch.randn(rows, model_config.num_qo_heads, dim, generator=generator)

    def hot(variant: HotVariant) -> Callable[[int, int], Call]:
        def make_call(rows: int, tokens: int) -> Call:
            q, index, seen = queries(rows), np.arange(rows), np.array([tokens])
            views = [
                make_view(index, start, seen, variant, heads, group)
                for start in itertools.islice(starts, NUM_STARTS)
            ]
            calls = itertools.cycle([attention.alone(view, q, k, v) for view in views])
            return lambda: next(calls)()

        return make_call

    def cold(rows: int, tokens: int) -> Call:
        q, count = queries(rows), rows * tokens
        index = torch.randint(0, capacity, (count,), generator=generator, dtype=torch.int32)
        bucket = Bucket(slice(0, rows), index, rows, tokens, torch.zeros(rows, 1, 1, tokens))
        return attention.alone(bucket, q, k, v)

    def merge(rows: int) -> Call:
        o, lse = queries(rows), torch.zeros(rows, model_config.num_qo_heads)
        index = torch.arange(2 * rows).view(2, rows).T.contiguous()
        o, lse = torch.cat([o, o]), torch.cat([lse, lse])
        return lambda: merge_parts(o, lse, index)

    def in_turns(rows: int, tokens: int) -> float:
        """Time of the gemm call over that of the cascade call."""
        cascade = hot(HotVariant.CASCADE)(rows, tokens)
        gemm = hot(HotVariant.GEMM)(rows, tokens)
        return meter.ratio(f"gemm, {rows} rows x {tokens} tokens", cascade, gemm, 2 * repeats - 1)

    flat, square = arena.view(-1), torch.randn(512, 512, generator=generator)
    with torch.inference_mode():
        for call in (  # threads start, libraries load, pages are touched
            flat.sum,
            lambda: square @ square,
            hot(HotVariant.CASCADE)(ROWS[-1], HOT_TOKENS[-1]),
            hot(HotVariant.GEMM)(ROWS[-1], HOT_TOKENS[-1]),
            cold(ROWS[-1], COLD_TOKENS[-1]),
        ):
            for _ in range(3):
                call()
        meter.set_reference(lambda: square @ square)
        read_us = meter.time_us("read", flat.sum, repeats)
        square_us = meter.time_us("matrix product", lambda: square @ square, 4 * repeats)
        cascade = meter.table("cascade", ROWS, HOT_TOKENS, hot(HotVariant.CASCADE), repeats)
        gemm = [
            [
                round(us * in_turns(rows, tokens), 1)
                for us, tokens in zip(line, HOT_TOKENS, strict=True)
            ]
            for line, rows in zip(cascade, ROWS, strict=True)
        ]
        return {
            "version": VERSION,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": cpu_name(),
            "num_threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "kernel": native.kernel_name(),
            "heads": [model_config.num_qo_heads, heads, dim],
            "read_gb_per_s": flat.numel() * 4 / read_us / 1e3,
            "gflops": 2 * 512**3 / square_us / 1e3,
            "rows": ROWS,
            "hot_tokens": HOT_TOKENS,
            "cascade_us": cascade,
            "gemm_us": gemm,
            "cold_tokens": COLD_TOKENS,
            "cold_us": meter.table("cold", ROWS, COLD_TOKENS, cold, repeats),
            "merge_us": [meter.time_us(f"merge, {r} rows", merge(r), 4 * repeats) for r in ROWS],
            "warnings": meter.warnings,
            "disturbed": meter.disturbed,
        }


def machine_load() -> tuple[float, int]:
    """(processes that run or wait, mean of a minute; processors)."""
    return os.getloadavg()[0], len(os.sched_getaffinity(0))


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        return names[0] if names else platform.machine()
    except OSError:
        return platform.processor() or platform.machine()


def profile_path(model_config: ModelConfig, num_threads: int = 0) -> Path:
    """Where the profile of this machine, number of threads (0: torch's), torch, kernel and head
    geometry is kept; it need not exist."""
    m, threads = model_config, num_threads or torch.get_num_threads()
    key = [VERSION, cpu_name(), threads, torch.__version__, native.kernel_name()]
    key += [m.num_qo_heads, m.num_kv_heads, m.head_dim]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    return Path.home() / ".cache" / "granikv" / f"cpu-{digest}.json"


@contextmanager
def torch_threads(num_threads: int):
    """torch with so many threads inside; 0 leaves the number."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads or before)
        yield
    finally:
        torch.set_num_threads(before)


def store_profile(profile: dict, path: Path) -> None:
    """Readers never see half a file. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(profile, indent=1) + "\n").encode())
