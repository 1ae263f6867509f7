"""The bench commands: workloads and options in, table and result file out."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from granikv.cli_common import ModelPath, Settings, clear_errors

bench = typer.Typer(
    no_args_is_help=True,
    help="Benchmarks; --json FILE keeps the result.",
    pretty_exceptions_enable=False,
)


def _writable(path: Path | None) -> Path | None:
    from granikv.outputs import check_output_file

    with clear_errors():
        if path is not None:
            check_output_file("--json", path)
    return path


JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        callback=_writable,
        help="Write the result file here, in a folder that exists.",
    ),
]

RandomWeights = Annotated[
    str | None,
    typer.Option(metavar="CONFIG", help="Folder with a config.json, or llama-3.1-8b, ..."),
]


@contextlib.contextmanager
def _in_this_build(name: str) -> Iterator[None]:
    """A benchmark whose module is not there is an error with a name."""
    from granikv.errors import Unsupported

    try:
        yield
    except ImportError as error:
        raise Unsupported(f"bench {name}: not in this build ({error})") from None


def both_layouts(settings: list[str] | None) -> dict:
    """Fields of --set for a benchmark that chooses the layouts itself."""
    from granikv.errors import InvalidArgument
    from granikv.serving.settings import parse_assignments

    fields = parse_assignments(settings or [])
    if "prefix_layout" in fields:
        got = fields["prefix_layout"]
        raise InvalidArgument("--set prefix_layout", got, "no value: both layouts are measured")
    return fields


def shape_or_model(
    random_weights: str | None, model: str | None, fields: dict
) -> tuple[str | None, dict]:
    """(model, fields of EngineConfig) for --random-weights and --model. Raises InvalidArgument."""
    if random_weights is None:
        return model, fields
    from granikv.bench.shapes import find_shape

    return str(find_shape(random_weights)), fields | {"random_weights": True}


def finish(cases: list, title: str, json_file: Path | None, probe: dict | None = None) -> None:
    """Prints the cases and writes them. probe: of the run itself; None: the harness's is taken."""
    from granikv.bench.harness import result_record, write_json
    from granikv.bench.report import print_cases

    print_cases(cases, title)
    if json_file is not None:
        record = result_record(cases, with_probe=probe is None)
        write_json(json_file, record if probe is None else record | {"probe": probe})


@bench.command("cache")
def bench_cache(
    trace: Annotated[
        list[Path],
        typer.Option(metavar="FILE", help="Request trace (.jsonl or .json); may be repeated."),
    ],
    capacity_tokens: Annotated[int, typer.Option(min=32, help="Size of both caches.")] = 262144,
    max_running: Annotated[int, typer.Option(min=1, help="Requests that live at once.")] = 64,
    max_requests: Annotated[int, typer.Option(min=0, help="0: the whole trace.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Replay request traces: token hit rate against LRU pages. No model."""
    with clear_errors():
        from granikv.bench.cache import ReplayConfig, check_capacity, run_cache_bench
        from granikv.bench.workloads import load_trace

        config = ReplayConfig(capacity_tokens=capacity_tokens, max_running=max_running)
        traces = [load_trace(path, max_requests=max_requests) for path in trace]
        for loaded in traces:
            check_capacity(loaded, config)
        cases = [case for loaded in traces for case in run_cache_bench(loaded, config)]
        finish(cases, "Cache", json_file)


@bench.command("decode")
def bench_decode(
    batch: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Requests in a step; may be repeated. Absent: the standard cases."
        ),
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(help="Of the standard cases only those with this name; may be repeated."),
    ] = None,
    prefix_len: Annotated[int, typer.Option(min=0, help="With --batch: tokens all share.")] = 1024,
    suffix_len: Annotated[int, typer.Option(min=1, help="With --batch: private tokens.")] = 64,
    steps: Annotated[
        int,
        typer.Option(
            min=2,
            help="Decode steps of one measurement; standard cases of few requests take up to four times as many.",
        ),
    ] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements per contender, in turns.")] = 7,
    transformers: Annotated[bool, typer.Option(help="Measure transformers as well.")] = True,
    contender: Annotated[
        list[str] | None,
        typer.Option(
            help="flat-extents, no-dispatcher, vllm-default or vllm-cascade, beside uniform-paging; may "
            "be repeated. Absent: vLLM's two, where it is installed and can read the model."
        ),
    ] = None,
    plot: Annotated[
        bool,
        typer.Option(help="Beside --json, the same name with .png: where the gain comes from."),
    ] = False,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks, a GPU each.")] = 1,
    random_weights: RandomWeights = None,
    model: ModelPath = None,
    settings: Settings = None,
    json_file: JsonFile = None,
) -> None:
    """Decode steps: GraniKV, uniform paging and transformers in turns, a process for each rank.

    A shape's name (qwen32b, ...) as the model means random weights.
    """
    with clear_errors():
        from granikv.bench.decode import (
            choose_workloads,
            gpu_workloads,
            run_decode_bench,
            shared,
            standard_workloads,
        )
        from granikv.bench.decode_plot import check_waterfall, plot_waterfall
        from granikv.bench.report import show_progress
        from granikv.bench.shapes import is_shape
        from granikv.bench.vllm_contender import choose_contenders

        if model is not None and random_weights is None and is_shape(model):
            random_weights = model
        workloads = gpu_workloads(tp) if random_weights else standard_workloads()
        workloads = choose_workloads(workloads, case or [])
        if batch:
            workloads = [shared(size, prefix_len, suffix_len) for size in batch]
        transformers = transformers and not random_weights
        model, extra = shape_or_model(random_weights, model, both_layouts(settings))
        others = choose_contenders(contender, model)
        if plot:
            check_waterfall(others, json_file)
        if tp > 1:
            extra["tp"] = tp
        with show_progress("decode") as progress:
            cases = run_decode_bench(
                workloads, steps, rounds, model, transformers, progress, extra, others
            )
        finish(cases, "Decode", json_file)
        if plot and json_file is not None:
            plot_waterfall(json.loads(json_file.read_text()), json_file.with_suffix(".png"))


@bench.command("host")
def bench_host(
    num_requests: Annotated[int, typer.Option(min=1, help="Requests in every step.")] = 256,
    num_groups: Annotated[int, typer.Option(min=1, help="Groups with a prefix each.")] = 64,
    num_steps: Annotated[int, typer.Option(min=1, help="Steps measured per case.")] = 300,
    json_file: JsonFile = None,
) -> None:
    """Host time of a decode step (schedule, plan, commit), without a model."""
    with clear_errors():
        with _in_this_build("host"):
            from granikv.bench.host import run_host_bench
            from granikv.bench.report import show_progress

        with show_progress("host") as progress:
            cases = run_host_bench(num_requests, num_groups, num_steps=num_steps, progress=progress)
        finish(cases, "Host time of a decode step, us", json_file)


@bench.command("build")
def bench_build(
    plugin: Annotated[
        Path | None, typer.Option(metavar="FILE", help="GraniKV's plugin library.")
    ] = None,
    shape: Annotated[
        str, typer.Option(metavar="CONFIG", help="Folder with a config.json, or llama-3.1-8b, ...")
    ] = "llama-3.1-8b",
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model that is built.")] = 2,
    vocab: Annotated[int, typer.Option(min=16, help="Its vocabulary.")] = 4096,
    tp: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tensor-parallel ranks; may be repeated. 1, 2 and 4 if absent."),
    ] = None,
    builder: Annotated[str, typer.Option(help="tensorrt or rtx.")] = "rtx",
    compute_capability: Annotated[
        list[str] | None,
        typer.Option(help="For rtx without a GPU: like 8.9; may be repeated."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Builds of each kind, in turns.")] = 3,
    json_file: JsonFile = None,
) -> None:
    """Build time of engines per rank, export included, against TensorRT's own for the network."""
    with clear_errors():
        from granikv.bench.build import BuildCase, run_build_bench
        from granikv.bench.report import show_progress
        from granikv.bench.shapes import find_shape
        from granikv.errors import InvalidArgument

        if builder not in ("tensorrt", "rtx"):
            raise InvalidArgument("builder", builder, "tensorrt or rtx: engines are what is timed")
        folder = find_shape(shape)
        chosen = [
            BuildCase(f"{layers}-layers-tp{size}", folder, layers, vocab, size)
            for size in tp or (1, 2, 4)
        ]
        with show_progress("build") as say:
            cases = run_build_bench(
                chosen, plugin, builder, tuple(compute_capability or ()), rounds, say
            )
        finish(cases, "Build, seconds per rank", json_file)


@bench.command("serve")
def bench_serve(
    agents: Annotated[int, typer.Option(min=1, help="Agents of each group.")] = 8,
    groups: Annotated[
        int, typer.Option(min=1, help="Groups; each shares a prefix of its own.")
    ] = 1,
    prefix_len: Annotated[int, typer.Option(min=1, help="Tokens that a group shares.")] = 1024,
    suffix_len: Annotated[
        int, typer.Option(min=1, help="Tokens behind them, of each request.")
    ] = 32,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 32,
    rounds: Annotated[
        int, typer.Option(min=1, help="Requests of each agent in a measurement.")
    ] = 2,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Requests at once; may be repeated. All agents if no load is given."
        ),
    ] = None,
    request_rate: Annotated[
        list[float] | None, typer.Option(help="Requests per second (Poisson); may be repeated.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Request trace that replaces the agents' description.")
    ] = None,
    trace_speed: Annotated[
        float | None, typer.Option(help="Send at the trace's times, so many times as fast.")
    ] = None,
    max_requests: Annotated[int, typer.Option(min=0, help="Of the trace; 0: all.")] = 0,
    max_prompt_len: Annotated[
        int, typer.Option(min=0, help="Cut the trace's prompts; 0: do not.")
    ] = 0,
    max_output_len: Annotated[
        int, typer.Option(min=0, help="Cut the trace's answers; 0: do not.")
    ] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each load and layout.")] = 2,
    model: ModelPath = None,
    settings: Settings = None,
    json_file: JsonFile = None,
) -> None:
    """Load through Triton with perf_analyzer: GraniKV's layout against uniform paging, in turns."""
    with clear_errors():
        from granikv.bench.serve import run_serve_bench
        from granikv.bench.serve_workload import AgentsWorkload, TraceWorkload
        from granikv.bench.workloads import load_trace
        from granikv.serving.perf_analyzer import Load

        workload: AgentsWorkload | TraceWorkload
        if trace is None:
            sizes = (agents,) * groups
            workload = AgentsWorkload(sizes, prefix_len, suffix_len, output_len, rounds)
        else:
            requests = load_trace(trace, max_requests=max_requests)
            workload = TraceWorkload(requests, max_prompt_len, max_output_len)
        loads = [Load(number) for number in concurrency or ()]
        loads += [Load(None, request_rate=rate) for rate in request_rate or ()]
        if not loads and trace_speed is None:
            loads = [Load(agents * groups)]
        cases = run_serve_bench(
            workload,
            loads,
            model=model,
            engine_config=both_layouts(settings),
            repeats=repeats,
            trace_speed=trace_speed,
        )
        finish(cases, "Serve", json_file)
