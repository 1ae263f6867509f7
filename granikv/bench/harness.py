"""What every benchmark shares: the result file, the machine's probe and timing.

A result names what was run where (commit, command, machine) and holds one entry per case and
baseline; `ratio` above 1 means that GraniKV is better.
"""

from __future__ import annotations

import datetime
import json
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Case:
    case: str
    params: dict
    metrics: dict
    baseline: str
    ratio: float
    baseline_metrics: dict = field(default_factory=dict)


def current_commit() -> str:
    """The commit of the working tree, with '-dirty' where it has changes; '' outside git."""
    root = Path(__file__).resolve().parents[2]
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout.strip() if run.returncode == 0 else ""


def machine() -> tuple[str, str]:
    """(device name, driver) of GPU 0, or the processor's name and ''."""
    try:
        run = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "-i", "0"],
            capture_output=True,
            text=True,
            timeout=20,
        )
        if run.returncode == 0 and "," in run.stdout:
            name, driver = run.stdout.strip().rsplit(",", 1)
            return name.strip(), driver.strip()
    except (OSError, subprocess.TimeoutExpired):
        pass
    return f"cpu ({platform.machine()})", ""


def probe() -> dict:
    """Read bandwidth and matrix rate of this machine now; smaller sizes on a CPU."""
    import torch

    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    num_bytes, side = (2**30, 8192) if on_gpu else (2**28, 1024)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    values = torch.ones(num_bytes // 4, device=device)
    left = torch.ones(side, side, device=device, dtype=dtype)
    synchronize = torch.cuda.synchronize if on_gpu else None
    read_s = measure(values.sum, synchronize=synchronize)
    matmul_s = measure(lambda: left @ left, synchronize=synchronize)
    return {
        "read_gb_per_s": num_bytes / read_s / 1e9,
        "read_bytes": num_bytes,
        "matmul_tflop_per_s": 2 * side**3 / matmul_s / 1e12,
        "matmul_side": side,
        "matmul_dtype": str(dtype).removeprefix("torch."),
    }


def measure(
    function: Callable[[], object],
    warmup: int = 2,
    repeats: int = 5,
    synchronize: Callable[[], None] | None = None,
) -> float:
    """Median seconds of one call."""
    times = []
    for index in range(warmup + repeats):
        start = time.perf_counter()
        function()
        if synchronize is not None:
            synchronize()
        if index >= warmup:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def result_record(cases: list[Case], with_probe: bool = True) -> dict:
    """The result file's object."""
    name, driver = machine()
    return {
        "gpu": name,
        "driver": driver,
        "commit": current_commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(x).name if x.startswith("/") else x for x in sys.argv]),
        "probe": probe() if with_probe else {},
        "cases": [asdict(case) for case in cases],
    }


def write_json(path: str | Path, record: dict) -> None:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
