"""Runs Triton's perf_analyzer on the decoupled model and reads its profile export.

Its printed latency is that of whole streams, so time to first token and inter-token latency are
taken from the export. The empty FINAL response, the export's last entry of a streamed request,
is dropped. Times are in seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from granikv.errors import InvalidArgument, NotFound, Unavailable
from granikv.processes import start_owned

QUANTILES = (50, 90, 95, 99)
# sonames that the tritonclient wheel's binary needs and the nvidia-pytriton wheel carries
MISSING_LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}
OUTPUTS = re.compile(r"^output \[.*?^\]", re.MULTILINE | re.DOTALL)
ONE_OUTPUT = '{ name: "text_output", data_type: TYPE_STRING, dims: [ -1 ] }'


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


def make_load_test_repository(folder: Path, source: Path) -> Path:
    """A model repository in `folder` like `source`, whose model declares text_output only.

    perf_analyzer 2.51 asks for every declared output and exports, for those that a response
    lacks, uninitialised memory; an FP32 that happens to be NaN ends its JSON writer, which
    leaves an empty file. Nearly every response lacks the outputs that a client must ask for.
    """
    model = folder / "granikv"
    model.mkdir(parents=True, exist_ok=True)
    for version in source.joinpath("granikv").iterdir():
        if version.is_dir() and version.name.isdigit():
            link = model / version.name
            link.unlink(missing_ok=True)
            link.symlink_to(version.resolve())
    text = source.joinpath("granikv", "config.pbtxt").read_text()
    short, count = OUTPUTS.subn(f"output [ {ONE_OUTPUT} ]", text)
    if count != 1:
        raise InvalidArgument(str(source / "granikv/config.pbtxt"), count, "one output [ ] block")
    (model / "config.pbtxt").write_text(short)
    return folder


def write_interval_file(timestamps_s: Sequence[float], path: Path, speed: float = 1.0) -> None:
    """Gaps between arrivals for `intervals`, whole microseconds, one a line; speed 2 halves them.

    The tool repeats the list and wants gaps above 0.
    """
    gaps = np.diff(np.asarray(timestamps_s, float)) / speed * 1e6
    path.write_text("".join(f"{max(1, round(gap))}\n" for gap in gaps) or "1\n")


@dataclass(frozen=True)
class Load:
    """How requests are sent: so many at once, or so many a second (Poisson), or by a file.

    intervals: a file of write_interval_file.
    """

    concurrency: int | None = 4
    request_rate: float | None = None
    intervals: Path | None = None

    @property
    def least_requests(self) -> int:
        """The tool refuses fewer."""
        if self.intervals is not None:
            return 1
        return math.ceil(self.request_rate or self.concurrency or 1)

    def arguments(self) -> list[str]:
        if self.intervals is not None:
            return [f"--request-intervals={self.intervals}"]
        if self.request_rate is not None:
            return [
                f"--request-rate-range={self.request_rate}",
                "--request-distribution=poisson",
            ]
        return [f"--concurrency-range={self.concurrency}"]


def run(
    input_file: Path,
    url: str,
    load: Load,
    *,
    model: str = "granikv",
    request_count: int = 40,
    extra_arguments: Iterable[str] = (),
    timeout_s: float = 600.0,
    attempts: int = 5,
) -> Samples:
    """One measurement against url (host:port of gRPC).

    timeout_s: of one attempt.
    request_count: at least; raised to the concurrency or rate, which is the tool's minimum.
    attempts: how often it may measure until it ends in time with a readable export; unreadable
    ones do not happen when the server was started on make_load_test_repository. Raises Unavailable with the tool's last words.
    """
    arguments = [
        *("-m", model, "-u", url, "-i", "grpc", "--streaming", "--async"),
        f"--input-data={input_file}",
        *load.arguments(),
        f"--request-count={max(request_count, load.least_requests)}",
        *extra_arguments,
    ]
    return _run(find_perf_analyzer(), arguments, timeout_s, attempts)


def _run_group(
    command: list[str], timeout_s: float, **options: Any
) -> subprocess.CompletedProcess[str]:
    """subprocess.run with the output as text. When it does not end, or the wait for it is broken
    off, its whole process group is killed. Raises TimeoutExpired."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with start_owned(command, start_new_session=True, **pipes, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def _run(binary: Path, arguments: list[str], timeout_s: float, attempts: int) -> Samples:
    with tempfile.TemporaryDirectory(prefix="granikv_perf_") as folder:
        link_libraries(Path(folder) / "lib")
        export = Path(folder) / "profile.json"
        command = [str(binary), *arguments, f"--profile-export-file={export}"]
        libraries = [f"{folder}/lib", os.environ.get("LD_LIBRARY_PATH", "")]
        environment = dict(os.environ, LD_LIBRARY_PATH=os.pathsep.join(p for p in libraries if p))
        try:
            done = _run_group(command, timeout_s, env=environment, cwd=folder)
        except subprocess.TimeoutExpired:
            if attempts > 1:  # it hung once in dozens of short runs, for a reason not found
                return _run(binary, arguments, timeout_s, attempts - 1)
            raise Unavailable(f"perf_analyzer did not end within {timeout_s:.0f} s") from None
        if done.returncode or not export.exists():
            text = done.stdout + done.stderr
            error = re.search(r"^Error: .*", text, re.MULTILINE)  # the usage text follows it
            words = error[0] if error else text[-2000:]
            raise Unavailable(f"perf_analyzer ended with code {done.returncode}: {words}")
        try:
            profile = json.loads(export.read_text(errors="replace"))
        except json.JSONDecodeError as error:
            if attempts > 1:
                return _run(binary, arguments, timeout_s, attempts - 1)
            raise Unavailable(f"perf_analyzer's export cannot be read: {error}") from None
        return parse_profile(profile)


@dataclass
class Samples:
    """What clients saw in one measurement or, added up, in several. Times in seconds."""

    ttft_s: list[float] = field(default_factory=list)  # one per answered request
    itl_s: list[float] = field(default_factory=list)  # gaps between the responses of a request
    latency_s: list[float] = field(default_factory=list)  # to the last response with content
    num_responses: int = 0  # several tokens may share one
    num_tokens_asked: int = 0  # max_tokens of the answered requests
    answers: list[tuple[str, str]] = field(default_factory=list)  # (prompt, text)
    num_unanswered: int = 0
    elapsed_s: float = 0.0  # first request sent to last response

    @property
    def num_requests(self) -> int:
        return len(self.ttft_s)

    def __add__(self, other: Samples) -> Samples:
        return Samples(
            *(getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(Samples))
        )

    def report(self) -> dict[str, float]:
        """Rates, and mean and percentiles as ttft_p50_s, itl_p99_s, latency_mean_s, ..."""
        figures: dict[str, float] = {
            "num_requests": self.num_requests,
            "elapsed_s": self.elapsed_s,
            "requests_per_s": self.num_requests / self.elapsed_s,
            "responses_per_s": self.num_responses / self.elapsed_s,
        }
        for name in ("ttft", "itl", "latency"):
            values = getattr(self, f"{name}_s")
            if values:
                figures[f"{name}_mean_s"] = float(np.mean(values))
                for q, value in zip(QUANTILES, np.percentile(values, QUANTILES), strict=True):
                    figures[f"{name}_p{q}_s"] = float(value)
        return figures


def parse_profile(profile: Mapping, streamed: bool = True) -> Samples:
    """streamed: each request's last response is the empty FINAL one. Raises Unavailable."""
    samples = Samples()
    first_start, last_end = None, None
    for experiment in profile["experiments"]:
        for request in experiment["requests"]:
            start = request["timestamp"]
            times = request["response_timestamps"]
            times = times[:-1] if streamed else times
            if not times:
                samples.num_unanswered += 1
                continue
            inputs = request.get("request_inputs", {})
            pieces = [str(o.get("text_output", "")) for o in request.get("response_outputs", ())]
            samples.answers.append((str(inputs.get("text_input", "")), "".join(pieces)))
            samples.num_tokens_asked += int(inputs.get("max_tokens", 0))
            samples.num_responses += len(times)
            samples.ttft_s.append((times[0] - start) / 1e9)
            samples.latency_s.append((times[-1] - start) / 1e9)
            samples.itl_s += [(b - a) / 1e9 for a, b in zip(times, times[1:], strict=False)]
            first_start = start if first_start is None else min(first_start, start)
            last_end = times[-1] if last_end is None else max(last_end, times[-1])
    if first_start is None or last_end is None:
        raise Unavailable("the profile export holds no answered request")
    samples.elapsed_s = (last_end - first_start) / 1e9
    return samples
