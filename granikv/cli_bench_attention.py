"""`granikv bench attention`: the cases, or with --grid the 240 fixed points in parts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from granikv.cli_bench import JsonFile
from granikv.cli_common import clear_errors

if TYPE_CHECKING:
    from granikv.bench.grid_points import GridPoint


def bench_attention(
    case: Annotated[
        list[str] | None, typer.Option(help="Only the case of this name; may be repeated.")
    ] = None,
    baselines: Annotated[bool, typer.Option(help="Measure other libraries as well.")] = True,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="fp8: FP8 KV, against the same with KV in bfloat16.")
    ] = "auto",
    grid: Annotated[
        bool,
        typer.Option(
            "--grid", help="The 240 fixed points, into --json; what is there is not repeated."
        ),
    ] = False,
    points: Annotated[
        str | None, typer.Option(metavar="A:B", help="With --grid: points A to B - 1 only.")
    ] = None,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="With --grid: all layouts and splits; regret.")
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(min=1, help="With --grid: begin no point that would end later than this."),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="With --grid: the planner's profile; this GPU's if absent."
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Measure nothing: report the grid file --json, draw it."),
    ] = None,
    commit: Annotated[
        str, typer.Option(help="The clean commit that is measured; asked of git if absent.")
    ] = "",
    json_file: JsonFile = None,
) -> None:
    """Attention kernels on a GPU, against uniform paging and other libraries."""
    with clear_errors():
        _check_options(
            case, kv_cache_dtype, grid, points, exhaustive, seconds, profile, plot, json_file
        )
        if plot is not None:
            assert json_file is not None
            _plot(json_file, plot)
            return
        if grid:
            assert json_file is not None
            from granikv.bench.grid_points import load_points, slice_points

            chosen = slice_points(load_points(), points)
            _grid(chosen, json_file, baselines, exhaustive, seconds, profile, commit)
            return
        _cases(case, baselines, kv_cache_dtype, commit, json_file)


def _check_options(
    case: list[str] | None,
    kv_cache_dtype: str,
    grid: bool,
    points: str | None,
    exhaustive: bool,
    seconds: float | None,
    profile: str | None,
    plot: Path | None,
    json_file: Path | None,
) -> None:
    """Raises InvalidArgument for an option that would change nothing."""
    from granikv.errors import InvalidArgument
    from granikv.outputs import check_output_file

    of_grid = {
        "--points": points,
        "--exhaustive": exhaustive or None,
        "--seconds": seconds,
        "--profile": profile,
    }
    for name, value in of_grid.items():
        if value is not None and (not grid or plot is not None):
            raise InvalidArgument(name, value, "only when --grid measures")
    if (grid or plot is not None) and json_file is None:
        raise InvalidArgument("--json", None, "the grid's result file")
    if (grid or plot is not None) and (case or kv_cache_dtype != "auto"):
        got = case or kv_cache_dtype
        raise InvalidArgument("--case, --kv-cache-dtype", got, "nothing beside --grid or --plot")
    if plot is not None:
        check_output_file("--plot", plot)


def _cases(
    case: list[str] | None,
    baselines: bool,
    kv_cache_dtype: str,
    commit: str,
    json_file: Path | None,
) -> None:
    import torch

    from granikv.bench.harness import result_record, write_json
    from granikv.bench.report import print_cases
    from granikv.config import EngineConfig
    from granikv.errors import Unavailable

    if not torch.cuda.is_available():
        raise Unavailable("bench attention: no CUDA device here, and it measures GPU kernels")
    from granikv.bench.attention import choose_cases, run_attention_bench

    fp8_kv = EngineConfig(kv_cache_dtype=kv_cache_dtype).fp8_kv
    entries, probe = run_attention_bench(
        choose_cases(case or ()), baselines, lambda text: print(text, flush=True), fp8_kv
    )
    print_cases(entries, "Attention")
    if json_file is not None:
        record = result_record(entries, with_probe=False) | {"probe": probe}
        write_json(json_file, record | ({"commit": commit} if commit else {}))


def _grid(
    points: list[GridPoint],
    json_file: Path,
    baselines: bool,
    exhaustive: bool,
    seconds: float | None,
    profile_file: str | None,
    commit: str,
) -> None:
    import time

    start = time.monotonic()  # imports and the probe count
    import torch

    from granikv.errors import Unavailable

    if not torch.cuda.is_available():
        raise Unavailable(
            "bench attention --grid: no CUDA device here, and it measures GPU kernels"
        )
    from granikv.bench.gpu_timing import gpu_probe
    from granikv.bench.grid import BASELINES, CANDIDATES, read_results, run_grid
    from granikv.bench.grid_gpu import GpuGrid
    from granikv.bench.grid_plan import model_config
    from granikv.bench.grid_regret import print_report
    from granikv.bench.harness import result_record
    from granikv.gpu_cost_model import GpuCostModel

    name = torch.cuda.get_device_name()
    profile = GpuCostModel.load(profile_file, model_config(points[0]), 2, name).profile
    record = result_record([], with_probe=False)
    run_fields = {key: record[key] for key in ("driver", "commit", "date", "command")}
    run_fields |= {"gpu": name, "probe": gpu_probe(), "profile": profile.get("gpu", "")}
    run_fields |= {"commit": commit} if commit else {}
    parts = ({BASELINES} if baselines else set()) | ({CANDIDATES} if exhaustive else set())
    device = GpuGrid(points)
    if seconds is not None:
        seconds -= time.monotonic() - start
    left = run_grid(
        points, json_file, device, profile, run_fields, parts, seconds,
        lambda text: print(f"{time.monotonic() - start:7.1f} s  {text}", flush=True),
    )  # fmt: skip
    results = read_results(json_file)
    print_report(results)
    if left:
        print(f"{left} points left: the same command goes on with them")
    if any("failed" in results[point.index] for point in points if point.index in results):
        raise typer.Exit(1)


def _plot(json_file: Path, picture: Path) -> None:
    from granikv.bench.grid import read_results
    from granikv.bench.grid_plot import plot_grid
    from granikv.bench.grid_regret import print_report

    results = read_results(json_file)
    plot_grid(results, picture)
    print_report(results)
