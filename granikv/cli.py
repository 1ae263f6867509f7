"""The command line. Imports happen per command, so that --help is quick."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from granikv.cli_bench import bench
from granikv.cli_bench_attention import bench_attention
from granikv.cli_bench_latency import bench_latency, bench_poisson
from granikv.cli_build import build
from granikv.cli_common import ModelPath, Settings, Threads, clear_errors

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="GraniKV: LLM serving for agents that share long prefixes. "
    "Start with `granikv demo --short`, or `granikv serve` and `granikv chat`.",
    pretty_exceptions_enable=False,
)
bench.command("attention")(bench_attention)
bench.command("latency")(bench_latency)
bench.command("poisson")(bench_poisson)
app.add_typer(bench, name="bench")
app.command()(build)
GRPC_DEFAULT = "127.0.0.1:8001"


def _show_version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version

        print(f"granikv {version('granikv')}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    from granikv import env

    for name in env.unknown():
        print(f"granikv: {name} is set, but no such variable is known", file=sys.stderr)


@app.command()
def serve(
    model: ModelPath = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(min=1, max=65535, help="HTTP port.")] = 8000,
    grpc_port: Annotated[int, typer.Option(min=1, max=65535, help="gRPC port.")] = 8001,
    metrics_port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of the Prometheus metrics.")
    ] = 8002,
    tp: Annotated[
        int | None, typer.Option(min=1, help="Tensor-parallel ranks, a GPU each; as --set tp=N.")
    ] = None,
    settings: Settings = None,
    model_repository: Annotated[
        Path | None, typer.Option(help="Triton's model repository; the one beside the package.")
    ] = None,
    log: Annotated[
        Path | None, typer.Option(help="File for the server's output; the terminal if absent.")
    ] = None,
    restart: Annotated[
        bool, typer.Option(help="Restart when a process dies; --no-restart exits 1 instead.")
    ] = True,
    max_restarts: Annotated[
        int,
        typer.Option(
            min=0, help="Within a minute, for deaths of stub and engine and starts that fail."
        ),
    ] = 5,
) -> None:
    """Run Triton with GraniKV in the foreground until Ctrl-C or SIGTERM.

    A line that starts with READY is printed when a first inference was answered.
    """
    with clear_errors():
        from granikv.serving import launcher

        arguments = ["--host", host, "--http-port", str(http_port), "--grpc-port", str(grpc_port)]
        arguments += ["--metrics-port", str(metrics_port)]
        if model:
            arguments += ["--model", model]
        for setting in [*(settings or []), *([] if tp is None else [f"tp={tp}"])]:
            arguments += ["--set", setting]
        if model_repository:
            arguments += ["--model-repository", str(model_repository)]
        if log:
            arguments += ["--log", str(log)]
        if not restart:
            arguments.append("--no-restart")
        arguments += ["--max-restarts", str(max_restarts)]
        code = launcher.main(arguments)
    raise typer.Exit(code)


@app.command()
def demo(
    short: Annotated[bool, typer.Option("--short", help="4 agents, 1 round.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the report: out/demo, or out/demo-short with --short, if absent."
        ),
    ] = None,
) -> None:
    """A multi-agent workload over gRPC: GraniKV against uniform paging, and a report.

    Exit 0 only if every response arrived and the answers of both runs matched.
    """
    with clear_errors():
        from granikv.demo.main import run_demo

        code = run_demo(short, out or Path("out/demo-short" if short else "out/demo"))
    raise typer.Exit(code)


@app.command()
def chat(
    url: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help=f"gRPC address of a server. If absent: {GRPC_DEFAULT} when a server is there, "
            "else the model runs in this process.",
        ),
    ] = None,
    model: ModelPath = None,
    system: Annotated[
        str | None, typer.Option(help="System message; the model's own default if absent.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, tokens.")] = 256,
) -> None:
    """Talk to the model, greedily, in its own chat format.

    In a terminal an empty line or Ctrl-D ends. Otherwise every line of the input is one turn:
    echo "What is 2+2?" | granikv chat
    """
    with clear_errors():
        from granikv.chat import run_chat

        run_chat(url, model, system, max_tokens, GRPC_DEFAULT)


@app.command()
def calibrate(
    model: ModelPath = None,
    num_threads: Threads = 0,
    output: Annotated[
        Path | None,
        typer.Option(help="Write the profile here, for --set profile=FILE, and not to the cache."),
    ] = None,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Five times the repeats of each measurement.")
    ] = False,
    grid: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Fit a GPU's profile instead, to this result file of `bench attention --grid`.",
        ),
    ] = None,
) -> None:
    """Measure this machine and store the hardware profile that the dispatcher plans with.

    It is stored where the engine looks for it: a CPU's per head geometry, thread count and torch
    version, and the engine measures a quick one itself at its first start; a GPU's (--grid) per
    model of GPU, fitted to one half of the points and judged on the other.
    """
    with clear_errors():
        from granikv.bench.calibrate import run_calibration
        from granikv.errors import InvalidArgument

        if grid is not None:
            from granikv.bench.gpu_calibration import run_gpu_calibration

            for name, value in (
                ("--model", model),
                ("--num-threads", num_threads),
                ("--thorough", thorough),
            ):
                if value:
                    raise InvalidArgument(name, value, "nothing beside --grid")
            run_gpu_calibration(grid, output)
            return
        run_calibration(model, num_threads, output, thorough)


@app.command()
def inspect(
    url: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Show a running server: address of its metrics (port 8002)."
        ),
    ] = None,
    model: ModelPath = None,
    settings: Settings = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show model, KV cache, profile, versions and settings; or a running server's state."""
    with clear_errors():
        from granikv import inspection
        from granikv.cli_common import engine_config, print_sections

        if url is not None:
            sections = inspection.describe_server(inspection.read_series(url))
        else:
            sections = inspection.describe(engine_config(settings, model))
        if as_json:
            print(json.dumps(sections, indent=1, default=str))
        else:
            print_sections(sections)
    if "error" in sections.get("model", {}):
        raise typer.Exit(2)


if __name__ == "__main__":
    app()
