"""`granikv calibrate`: measures the hardware profile, stores it, shows what it says."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from granikv import calibration
from granikv.calibration import Meter
from granikv.cost_model import CostModel
from granikv.models import load_config
from granikv.outputs import check_output_file, check_output_folder

MAX_SHOWN_WARNINGS = 5


def run_calibration(
    model: str | None,
    num_threads: int = 0,
    output: Path | None = None,
    thorough: bool = False,
    console: Console | None = None,
) -> Path:
    """Returns where the profile is: `output`, or where the engine of this model looks.

    Raises ModelFileError for the model, InvalidArgument when the file cannot be written.
    """
    console = console or Console()
    config = load_config(model)
    path = output or calibration.profile_path(config, num_threads)
    if output is not None:
        check_output_file("--output", output)
    else:
        check_output_folder("the cache's folder", path.parent)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with (
        Progress(*columns, console=console, transient=True) as progress,
        calibration.torch_threads(num_threads),
    ):
        bar = progress.add_task("warm-up", total=calibration.NUM_READINGS)

        def show(name: str) -> None:
            progress.update(bar, description=f"{name:<40}", advance=1)

        # warnings are shown with the table
        profile = calibration.measure_cpu_profile(
            config, quick=not thorough, meter=Meter(on_reading=show, warn=lambda text: None)
        )
    CostModel(profile, config)  # it can be read before it replaces another
    calibration.store_profile(profile, path)
    print_profile(profile, console)
    console.print(f"Hardware profile: {path}", soft_wrap=True)
    if output is not None:
        console.print(f"To use it: --set profile={output}", soft_wrap=True)
    return path


def print_profile(profile: dict, console: Console) -> None:
    heads, kv_heads, dim = profile["heads"]
    console.print(
        f"{profile['device']}, {profile['num_threads']} threads, torch {profile['torch']}; "
        f"{heads} query heads, {kv_heads} KV heads of {dim}\n"
        f"read {profile['read_gb_per_s']:.1f} GB/s, matrix product {profile['gflops']:.0f} GFLOP/s"
    )
    tokens = profile["hot_tokens"]
    table = Table(title="Shared prefix, us per layer: cascade / gemm")
    table.add_column("rows", justify="right")
    for n in tokens:
        table.add_column(f"{n} tokens", justify="right")
    for i, rows in enumerate(profile["rows"]):
        pairs = zip(profile["cascade_us"][i], profile["gemm_us"][i], strict=True)
        table.add_row(str(rows), *(f"{a:.0f} / {b:.0f}" for a, b in pairs))
    console.print(table)
    warnings = profile.get("warnings", ())
    for text in warnings[:MAX_SHOWN_WARNINGS]:
        console.print(f"[yellow]warning:[/yellow] {text}", highlight=False)
    if len(warnings) > MAX_SHOWN_WARNINGS:
        console.print(
            f"and {len(warnings) - MAX_SHOWN_WARNINGS} more, in the profile: this machine is too "
            "busy for a good one, repeat when it is quiet"
        )
