"""The command line: serve, demo, chat, bench, calibrate, inspect. Imports happen per command."""

from __future__ import annotations

import dataclasses
import json
import sys
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
    agents: int = 8,
    rounds: int = 1,
    model: ModelPath = None,
    json_file: JsonFile = None,
) -> None:
    """The agents' workload through Triton, GraniKV's layout against uniform paging."""
    from rich.console import Console

    from granikv.bench.harness import Case
    from granikv.demo.report import summarize
    from granikv.demo.runner import LAYOUTS, run_layout
    from granikv.demo.workload import AGENTS, MAX_ROUNDS

    if not 1 <= agents <= len(AGENTS) or not 1 <= rounds <= MAX_ROUNDS:
        raise typer.BadParameter(f"agents in 1..{len(AGENTS)}, rounds in 1..{MAX_ROUNDS}")
    console, folder = Console(), Path("out/bench")
    runs = [run_layout(name, agents, rounds, console, folder, model) for name in LAYOUTS]
    failed = [r for run in runs for r in run.responses if r.error]
    if failed:
        print(f"{len(failed)} failed, first: {failed[0].error}", file=sys.stderr)
        raise typer.Exit(1)
    ours, other = (summarize(run) for run in runs)
    params = {"model": model or "embedded", "tp": 1, "batch": agents, "rounds": rounds}
    ratio = (ours["tokens_per_s"] or 0.0) / (other["tokens_per_s"] or 1.0)
    _finish([Case("agents", params, ours, "uniform-paging", ratio, other)], "Serve", json_file)


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
