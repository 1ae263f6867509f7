"""Load test through Triton: perf_analyzer against both layouts of the KV cache, in turns.

One server per layout; both stay up and are measured alternately, so that a machine that becomes
slower meanwhile does not favour one. Latencies are what perf_analyzer exported.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from granikv import env
from granikv.bench.harness import Case
from granikv.bench.serve_workload import AgentsWorkload, Entry, TextMaker, TraceWorkload
from granikv.config import EngineConfig
from granikv.config_check import check_engine, longest_request
from granikv.demo.runner import LAYOUTS, read_counters
from granikv.errors import InvalidArgument, Unavailable
from granikv.outputs import check_output_folder
from granikv.serving import perf_analyzer
from granikv.serving.launcher import ServerHandle, running_server
from granikv.serving.perf_analyzer import Load, Samples
from granikv.serving.tritonserver import find_model_repository
from granikv.text import load_tokenizer

COUNTERS = ("prompt_tokens", "cached_tokens", "generated_tokens", "kv_bytes_read")
METRICS_DELAY_S = 0.5  # the stub publishes counters a moment after the last step
Workload = AgentsWorkload | TraceWorkload


class LayoutRun:
    """All that was measured of one layout under one load."""

    def __init__(self) -> None:
        self.samples = Samples()
        self.counters = dict.fromkeys(COUNTERS, 0.0)

    def add(self, samples: Samples, counters: dict[str, float]) -> None:
        self.samples += samples
        for name in COUNTERS:
            self.counters[name] += counters[name]

    @property
    def tokens_per_s(self) -> float:
        return self.samples.num_tokens_asked / self.samples.elapsed_s

    def metrics(self) -> dict:
        return {"tokens_per_s": self.tokens_per_s, **self.samples.report(), **self.counters}


def run_serve_bench(
    workload: Workload,
    loads: Sequence[Load],
    *,
    model: str | None = None,
    engine_config: dict | None = None,
    repeats: int = 2,
    trace_speed: float | None = None,
    timeout_s: float = 900.0,
    log_folder: Path = Path("out/bench"),
    console: Console | None = None,
) -> list[Case]:
    """One case per load; `ratio` is of tokens/s, against uniform paging.

    trace_speed: adds a load with the trace's own arrival times, so many times as fast.
    timeout_s: for one measurement. Raises InvalidArgument, NotFound (no perf_analyzer or no
    Triton) or Unavailable.
    """
    if repeats < 1:
        raise InvalidArgument("repeats", repeats, "at least 1")
    for load in loads:
        rate = load.request_rate
        if rate is not None and not (math.isfinite(rate) and rate > 0):
            raise InvalidArgument("request_rate", rate, "a finite number above 0")
    usable = trace_speed is None or (math.isfinite(trace_speed) and trace_speed > 0)
    if not usable or (trace_speed is not None and isinstance(workload, AgentsWorkload)):
        raise InvalidArgument("trace_speed", trace_speed, "a number above 0, with a trace")
    console = console or Console()
    settings = {**(engine_config or {}), **({"model": str(Path(model).resolve())} if model else {})}
    limit = _longest_request(settings)
    maker = TextMaker(load_tokenizer(settings.get("model")))
    longest = max(e.prompt_len + e.output_len for e in workload.entries(maker, run=0))
    if longest > limit:
        expected = f"prompts and answers of at most {limit} tokens together"
        raise InvalidArgument(workload.name, f"one of {longest} tokens", expected)
    perf_analyzer.find_perf_analyzer()
    check_output_folder("the logs' folder", log_folder)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="granikv_bench_")))
        repository = perf_analyzer.make_load_test_repository(
            folder / "models", find_model_repository()
        )
        if trace_speed is not None and isinstance(workload, TraceWorkload):
            intervals = folder / "intervals"
            perf_analyzer.write_interval_file(workload.timestamps_s, intervals, trace_speed)
            loads = [*loads, Load(None, intervals=intervals)]
        servers: dict[str, ServerHandle] = {}
        run_dir = env.read("GRANIKV_RUN_DIR")
        for layout in LAYOUTS:
            log_path = log_folder / f"serve-{layout}.log"
            log_path.unlink(missing_ok=True)
            config = settings | {"prefix_layout": layout}
            console.print(f"Starting Triton with prefix_layout={layout} (log: {log_path})")
            servers[layout] = stack.enter_context(
                running_server(
                    config,
                    supervised=False,
                    log_path=log_path,
                    model_repository=repository,
                    run_dir=run_dir and run_dir / layout,  # both live at once
                )
            )
        progress = stack.enter_context(_progress(console))
        bar = progress.add_task("warm-up", total=(len(loads) * repeats + 1) * len(LAYOUTS))

        def measure(layout: str, entries: list[Entry], load: Load) -> tuple[Samples, dict]:
            path = folder / "input.json"
            perf_analyzer.write_input_file((entry.inputs() for entry in entries), path)
            return _measure(servers[layout], path, load, len(entries), timeout_s)

        for layout in LAYOUTS:
            measure(layout, workload.warmup(maker), Load(2))
            progress.advance(bar)
        cases = []
        for i, load in enumerate(loads):
            runs = {layout: LayoutRun() for layout in LAYOUTS}
            for repeat in range(repeats):
                entries = workload.entries(maker, run=i * repeats + repeat)
                for layout in LAYOUTS if repeat % 2 == 0 else reversed(LAYOUTS):
                    progress.update(bar, description=f"{describe(load)}, {layout}")
                    samples, counters = measure(layout, entries, load)
                    runs[layout].add(samples, counters)
                    rate = samples.num_tokens_asked / samples.elapsed_s
                    progress.advance(bar)
                    progress.console.print(
                        f"{describe(load)}, {layout}, run {repeat + 1}: {rate:.1f} tokens/s"
                    )
            cases.append(_case(workload, load, runs, model, repeats))
    return cases


def _longest_request(settings: dict) -> int:
    """Tokens that both servers hold; pages leave the less. Raises what check_engine raises."""
    fields = env.read("GRANIKV_ENGINE_CONFIG") | settings | {"prefix_layout": "uniform"}
    return longest_request(*check_engine(EngineConfig(**fields)))


def describe(load: Load) -> str:
    if load.intervals is not None:
        return "trace's arrival times"
    if load.request_rate is not None:
        return f"{load.request_rate:g} requests/s"
    return f"concurrency {load.concurrency}"


def same_answers(ours: Samples, other: Samples) -> float:
    """Share of the prompts that both layouts answered where the texts are equal."""
    expected = dict(other.answers)
    compared = [text == expected[p] for p, text in ours.answers if p in expected]
    return sum(compared) / len(compared) if compared else 0.0


def _measure(
    server: ServerHandle, input_file: Path, load: Load, count: int, timeout_s: float
) -> tuple[Samples, dict]:
    before = read_counters(server.address.metrics_url)
    samples = perf_analyzer.run(
        input_file,
        server.address.grpc_url,
        load,
        request_count=count,
        timeout_s=timeout_s,
        attempts=2,
    )
    time.sleep(METRICS_DELAY_S)
    after = read_counters(server.address.metrics_url)
    names = {name: f"nv_granikv_{name}" for name in COUNTERS}
    counters = {k: after.get(n, 0.0) - before.get(n, 0.0) for k, n in names.items()}
    if samples.num_unanswered or counters["generated_tokens"] < samples.num_tokens_asked:
        raise Unavailable(
            f"{samples.num_unanswered} requests without an answer; {samples.num_tokens_asked} "
            f"tokens expected, {counters['generated_tokens']:.0f} generated; see the server's log"
        )
    return samples, counters


def _case(
    workload: Workload, load: Load, runs: dict[str, LayoutRun], model: str | None, repeats: int
) -> Case:
    ours, other = (runs[layout] for layout in LAYOUTS)
    params = {
        "model": model or "embedded",
        "tp": 1,
        "batch": load.concurrency,
        "request_rate": load.request_rate,
        "load": describe(load),
        "repeats": repeats,
        **workload.params,
    }
    metrics = ours.metrics() | {"same_answers": same_answers(ours.samples, other.samples)}
    ratio = ours.tokens_per_s / other.tokens_per_s
    return Case(workload.name, params, metrics, "uniform-paging", ratio, other.metrics())


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
