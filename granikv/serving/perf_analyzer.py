"""Runs Triton's perf_analyzer on the decoupled model and reads its profile export.

Its printed latency is that of whole streams, so time to first token and inter-token latency are
taken from the export. The empty FINAL response, the export's last entry of a streamed request,
is dropped. Times are in seconds.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from granikv.errors import NotFound, Unavailable

QUANTILES = (50, 90, 95, 99)
# sonames that the tritonclient wheel's binary needs and the nvidia-pytriton wheel carries
MISSING_LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}


def find_perf_analyzer() -> Path:
    """The environment's binary, else one on PATH. Raises NotFound."""
    beside_python = Path(sys.prefix) / "bin" / "perf_analyzer"
    if beside_python.exists():
        return beside_python
    on_path = shutil.which("perf_analyzer")
    if on_path is None:
        raise NotFound("perf_analyzer: not found; `pip install tritonclient==2.51.0` has it")
    return Path(on_path)


def link_libraries(folder: Path) -> None:
    """Links under the sonames that the binary asks for, where the wheel has the files."""
    folder.mkdir(parents=True, exist_ok=True)
    bundled = Path(sysconfig.get_paths()["platlib"]) / "nvidia_pytriton.libs"
    for soname, pattern in MISSING_LIBRARIES.items():
        for source in sorted(bundled.glob(pattern)):
            link = folder / soname
            link.unlink(missing_ok=True)
            link.symlink_to(source)


def write_input_file(entries: Iterable[Mapping], path: Path) -> None:
    """entries: input name -> value or list of values; text_input and max_tokens are required.

    An entry's `timestamp` (ms) is kept for fixed schedules. A request streams unless it says not.
    """
    rows = []
    for entry in entries:
        row: dict = {}
        for name, value in {"stream": True, **entry}.items():
            is_list = isinstance(value, list | tuple) or name == "timestamp"
            row[name] = value if is_list else [value]
        rows.append(row)
    path.write_text(json.dumps({"data": rows}))


def run(
    input_file: Path,
    url: str,
    *,
    model: str = "granikv",
    concurrency: int = 4,
    request_count: int = 40,
    request_rate: float | None = None,
    extra_arguments: Iterable[str] = (),
    timeout_s: float = 600.0,
    attempts: int = 5,
) -> dict:
    """url: host:port of gRPC. request_rate (per second, Poisson) replaces concurrency.

    Returns what `parse_profile` does, with perf_analyzer's own text as `stdout`. Raises
    Unavailable with the tool's last words when it fails.
    """
    load = [f"--concurrency-range={concurrency}"]
    if request_rate is not None:
        load = [f"--request-rate-range={request_rate}", "--request-distribution=poisson"]
    arguments = [
        *("-m", model, "-u", url, "-i", "grpc", "--streaming", "--async"),
        f"--input-data={input_file}",
        *load,
        f"--request-count={request_count}",
        *extra_arguments,
    ]
    return _run(find_perf_analyzer(), arguments, timeout_s, attempts)


def _run(binary: Path, arguments: list[str], timeout_s: float, attempts: int) -> dict:
    with tempfile.TemporaryDirectory(prefix="granikv_perf_") as folder:
        link_libraries(Path(folder) / "lib")
        export = Path(folder) / "profile.json"
        command = [str(binary), *arguments, f"--profile-export-file={export}"]
        libraries = [f"{folder}/lib", os.environ.get("LD_LIBRARY_PATH", "")]
        environment = dict(os.environ, LD_LIBRARY_PATH=os.pathsep.join(p for p in libraries if p))
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout_s, cwd=folder
        )
        if done.returncode or not export.exists():
            words = (done.stdout + done.stderr)[-2000:]
            raise Unavailable(f"perf_analyzer ended with code {done.returncode}: {words}")
        # 2.51.0 exports uninitialised memory for outputs that a response lacks, and writes an
        # empty file when that reads as NaN: measure again
        try:
            profile = json.loads(export.read_text(errors="replace"))
        except json.JSONDecodeError as error:
            if attempts > 1:
                return _run(binary, arguments, timeout_s, attempts - 1)
            raise Unavailable(f"perf_analyzer's export cannot be read: {error}") from None
        return parse_profile(profile) | {"stdout": done.stdout}


def parse_profile(profile: Mapping, streamed: bool = True) -> dict:
    """Distributions over all requests of an export: ttft_s, itl_s, latency_s and throughput.

    streamed: each request's last response is the empty FINAL one. itl_s counts gaps between
    responses; several tokens may share a response, so tokens are the server's to count.
    """
    ttft, gaps, latency = [], [], []
    num_responses = 0
    first_start, last_end = None, None
    for experiment in profile["experiments"]:
        for request in experiment["requests"]:
            start = request["timestamp"]
            times = request["response_timestamps"]
            if streamed and len(times) > 1:
                times = times[:-1]
            if not times:
                continue
            num_responses += len(times)
            ttft.append((times[0] - start) / 1e9)
            latency.append((times[-1] - start) / 1e9)
            gaps += [(b - a) / 1e9 for a, b in zip(times, times[1:], strict=False)]
            first_start = start if first_start is None else min(first_start, start)
            last_end = times[-1] if last_end is None else max(last_end, times[-1])
    if first_start is None or last_end is None:
        raise Unavailable("the profile export holds no answered request")
    elapsed_s = (last_end - first_start) / 1e9
    return {
        "num_requests": len(ttft),
        "num_responses": num_responses,
        "elapsed_s": elapsed_s,
        "requests_per_s": len(ttft) / elapsed_s,
        "responses_per_s": num_responses / elapsed_s,
        "ttft_s": _summary(ttft),
        "itl_s": _summary(gaps),
        "latency_s": _summary(latency),
    }


def _summary(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    quantiles = np.percentile(values, QUANTILES)
    named = {f"p{q}": float(v) for q, v in zip(QUANTILES, quantiles, strict=True)}
    return {"mean": float(np.mean(values)), **named, "max": float(np.max(values))}
