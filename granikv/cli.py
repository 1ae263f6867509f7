"""The command line: serve, demo, chat, bench, calibrate, inspect. Imports happen per command."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
bench = typer.Typer(no_args_is_help=True, help="Benchmarks; --json FILE keeps the result.")
app.add_typer(bench, name="bench")

JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the result file here.")]
ModelPath = Annotated[
    str | None, typer.Option(help="GGUF file or Hugging Face folder; the embedded model if absent.")
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A field of EngineConfig.")
]


@contextlib.contextmanager
def clear_errors() -> Iterator[None]:
    """Errors of the package and of the user's input end the command with a line, not a trace."""
    from granikv.errors import GraniKVError, InvalidArgument, ModelFileError

    try:
        yield
    except GraniKVError as error:
        print(f"granikv: {error}", file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, InvalidArgument | ModelFileError) else 1) from None


@app.command()
def serve(
    model: ModelPath = None,
    host: str = "127.0.0.1",
    http_port: int = 8000,
    grpc_port: int = 8001,
    metrics_port: int = 8002,
    settings: Settings = None,
) -> None:
    """Run Triton with GraniKV in the foreground."""
    from granikv.serving import launcher

    arguments = ["--host", host, "--http-port", str(http_port), "--grpc-port", str(grpc_port)]
    arguments += ["--metrics-port", str(metrics_port)]
    if model:
        arguments += ["--model", model]
    for setting in settings or []:
        arguments += ["--set", setting]
    raise typer.Exit(launcher.main(arguments))


@app.command()
def demo(
    short: Annotated[bool, typer.Option("--short", help="4 agents, 1 round.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("out/demo"),
) -> None:
    """A multi-agent workload over gRPC: GraniKV against uniform paging."""
    from granikv.demo.main import run_demo

    raise typer.Exit(run_demo(short, out))


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="gRPC address of a running server.")] = "127.0.0.1:8001",
    system: str = "You are a helpful assistant.",
    max_tokens: int = 256,
) -> None:
    """Talk to a running server; an empty line or Ctrl-D ends."""
    from granikv.demo.runner import stream
    from granikv.demo.workload import AGENTS, Conversation

    conversation = Conversation(AGENTS[0], system)
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            return
        if not line.strip():
            return
        conversation.turns.append(("user", line))

        def show(piece: str) -> None:
            print(piece, end="", flush=True)

        response = stream(url, conversation.prompt(), max_tokens, show)
        print()
        if response.error:
            print(response.error, file=sys.stderr)
            raise typer.Exit(1)
        conversation.answer(response.text)


def _finish(cases: list, title: str, json_file: Path | None) -> None:
    from granikv.bench.harness import result_record, write_json
    from granikv.bench.report import print_cases

    print_cases(cases, title)
    if json_file is not None:
        write_json(json_file, result_record(cases))


@bench.command("cache")
def bench_cache(
    trace: Annotated[list[Path], typer.Option(help="Trace file; may be given several times.")],
    capacity_tokens: int = 262144,
    max_running: int = 64,
    max_requests: Annotated[int, typer.Option(help="0: the whole trace.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Replay request traces: token hit rate against LRU pages. No model."""
    from granikv.bench.cache import ReplayConfig, run_cache_bench
    from granikv.bench.workloads import load_trace

    config = ReplayConfig(capacity_tokens=capacity_tokens, max_running=max_running)
    cases = []
    for path in trace:
        cases += run_cache_bench(load_trace(path, max_requests=max_requests), config)
    _finish(cases, "Cache", json_file)


@bench.command("decode")
def bench_decode(
    batch: Annotated[list[int] | None, typer.Option(help="Requests; may be repeated.")] = None,
    prefix_len: int = 1024,
    suffix_len: int = 32,
    max_tokens: int = 16,
    model: ModelPath = None,
    json_file: JsonFile = None,
) -> None:
    """Decode steps end to end: GraniKV's layout against uniform paging."""
    from granikv.bench.decode import run_decode_bench

    cases = run_decode_bench(batch or [8], prefix_len, suffix_len, max_tokens, model)
    _finish(cases, "Decode", json_file)


@bench.command("serve")
def bench_serve(
    agents: Annotated[int, typer.Option(help="Agents of each group.")] = 8,
    groups: Annotated[int, typer.Option(help="Groups; each shares a prefix of its own.")] = 1,
    prefix_len: Annotated[int, typer.Option(help="Tokens that a group shares.")] = 1024,
    suffix_len: Annotated[int, typer.Option(help="Tokens behind them, of each request.")] = 32,
    output_len: Annotated[int, typer.Option(help="Tokens of each answer.")] = 32,
    rounds: Annotated[int, typer.Option(help="Requests of each agent in a measurement.")] = 2,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(help="Requests at once; may be repeated. All agents if no load is given."),
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
    max_requests: Annotated[int, typer.Option(help="Of the trace; 0: all.")] = 0,
    max_prompt_len: Annotated[int, typer.Option(help="Cut the trace's prompts; 0: do not.")] = 0,
    max_output_len: Annotated[int, typer.Option(help="Cut the trace's answers; 0: do not.")] = 0,
    repeats: Annotated[int, typer.Option(help="Measurements of each load and layout.")] = 2,
    model: ModelPath = None,
    settings: Settings = None,
    json_file: JsonFile = None,
) -> None:
    """Load through Triton with perf_analyzer: GraniKV's layout against uniform paging, in turns."""
    from granikv.bench.serve import run_serve_bench
    from granikv.bench.serve_workload import AgentsWorkload, TraceWorkload
    from granikv.bench.workloads import load_trace
    from granikv.serving.perf_analyzer import Load
    from granikv.serving.settings import parse_assignments

    with clear_errors():
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
            engine_config=parse_assignments(settings or []),
            repeats=repeats,
            trace_speed=trace_speed,
        )
        _finish(cases, "Serve", json_file)


@app.command()
def calibrate(
    out: Annotated[Path | None, typer.Option(help="Write the profile here as well.")] = None,
) -> None:
    """Measure read bandwidth and matrix rate of this machine."""
    from granikv.bench.harness import probe, write_json

    record = probe()
    print(json.dumps(record, indent=1))
    if out is not None:
        write_json(out, record)


@app.command()
def inspect(settings: Settings = None) -> None:
    """Print the engine configuration that the settings amount to."""
    from granikv.config import EngineConfig
    from granikv.errors import GraniKVError
    from granikv.serving.settings import parse_assignments

    try:
        config = EngineConfig(**parse_assignments(settings or []))
    except GraniKVError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from None
    print(json.dumps(dataclasses.asdict(config), indent=1, default=str))


if __name__ == "__main__":
    app()
