"""The bench commands about latency: one long prompt, many streams, requests at random times."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from granikv.cli_bench import (
    JsonFile,
    RandomWeights,
    both_layouts,
    finish,
    shape_or_model,
)
from granikv.cli_common import ModelPath, Settings, clear_errors


def bench_latency(
    case: Annotated[
        list[str] | None,
        typer.Option(
            help="ttft, itl, streams or idle; may be repeated. Absent: all that run here."
        ),
    ] = None,
    prompt_len: Annotated[int, typer.Option(min=2, help="Tokens of the long prompt.")] = 16384,
    suffix_len: Annotated[int, typer.Option(min=1, help="Of these, its private tokens.")] = 128,
    together: Annotated[
        int, typer.Option(min=2, help="ttft: requests that arrive at once with one prefix.")
    ] = 16,
    batch: Annotated[
        int, typer.Option(min=1, help="itl: requests that decode during the prefill.")
    ] = 32,
    chunk: Annotated[
        list[int] | None,
        typer.Option(min=2, help="itl: rows of a step; may be repeated. Absent: the engine's."),
    ] = None,
    streams: Annotated[int, typer.Option(min=1, help="streams, idle: requests at once.")] = 256,
    steps: Annotated[int, typer.Option(min=2, help="Decode steps of one measurement.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each case.")] = 3,
    random_weights: RandomWeights = None,
    model: ModelPath = None,
    settings: Settings = None,
    json_file: JsonFile = None,
) -> None:
    """First token of a long prompt, tokens beside a prefill, many streams, the GPU's idle share."""
    with clear_errors():
        from granikv.bench.latency import run_latency_bench
        from granikv.bench.latency_session import LatencyConfig
        from granikv.bench.report import show_progress

        config = LatencyConfig(
            prompt_len, suffix_len, together, batch, streams, steps, repeats, tuple(chunk or ())
        )
        model, extra = shape_or_model(random_weights, model, both_layouts(settings))
        with show_progress("latency") as progress:
            cases, probe = run_latency_bench(config, case or (), model, extra, progress)
        finish(cases, "Latency", json_file, probe)


def bench_poisson(
    arrivals: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Arrival list: read if it exists, else made and written there."
        ),
    ] = None,
    num_requests: Annotated[int, typer.Option(min=1, help="Requests of a list made here.")] = 128,
    prefix_len: Annotated[
        list[int] | None,
        typer.Option(min=1, help="A group with so many shared tokens; repeat for more groups."),
    ] = None,
    suffix_len: Annotated[int, typer.Option(min=1, help="Private tokens, on average.")] = 64,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of an answer, on average.")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="Of the list and of its token ids.")] = 0,
    load: Annotated[
        list[float] | None,
        typer.Option(help="Share of saturation; may be repeated. Absent: 0.5, 0.8 and 0.95."),
    ] = None,
    slo_ttft_ms: Annotated[float, typer.Option(help="Goodput: first token within this.")] = 1000.0,
    slo_itl_ms: Annotated[float, typer.Option(help="Goodput: mean gap of tokens.")] = 50.0,
    contender: Annotated[
        list[str] | None,
        typer.Option(
            help="vllm-default or vllm-cascade, beside uniform-paging; may be repeated. Absent: both, "
            "where vLLM is installed and can read the model."
        ),
    ] = None,
    random_weights: RandomWeights = None,
    model: ModelPath = None,
    settings: Settings = None,
    json_file: JsonFile = None,
) -> None:
    """Agents that arrive at random times, at shares of the saturated rate, without Triton."""
    with clear_errors():
        from granikv.bench.arrivals import make_arrivals, read_arrivals, write_arrivals
        from granikv.bench.poisson import PoissonConfig, run_poisson_bench
        from granikv.bench.report import show_progress
        from granikv.bench.vllm_contender import choose_contenders
        from granikv.outputs import check_output_file

        if arrivals is not None and arrivals.is_file():
            requests = read_arrivals(arrivals)
        else:
            prefix_lens = prefix_len or [512, 1024, 2048]
            requests = make_arrivals(num_requests, prefix_lens, suffix_len, output_len, seed)
            if arrivals is not None:
                check_output_file("--arrivals", arrivals)
                write_arrivals(requests, arrivals)
        config = PoissonConfig(tuple(load or PoissonConfig.loads), slo_ttft_ms, slo_itl_ms)
        model, extra = shape_or_model(random_weights, model, both_layouts(settings))
        others = choose_contenders(contender, model)
        with show_progress("poisson") as progress:
            cases = run_poisson_bench(requests, config, model, extra, others, progress)
        finish(cases, "Poisson", json_file)
