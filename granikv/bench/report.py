"""Prints benchmark cases as a table."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from granikv.bench.harness import Case


@contextlib.contextmanager
def show_progress(title: str) -> Iterator[Callable[[str], None]]:
    """A spinner with the time so far, or lines in a log; call the yielded with what runs now."""
    console = Console(stderr=True)
    if not console.is_terminal:
        start = time.monotonic()
        yield lambda text: print(f"{time.monotonic() - start:7.1f} s  {text}", file=sys.stderr)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda text: progress.update(task, description=f"{title}: {text}")


def format_value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, list):
        return "\n".join(map(str, value)) or "none"
    return str(value)


def print_cases(cases: list[Case], title: str, console: Console | None = None) -> None:
    """One row per case and metric: GraniKV, the baseline, and the case's ratio."""
    table = Table(title=title)
    for heading in ("case", "metric", "granikv", "baseline", "ratio"):
        table.add_column(heading, justify="left" if heading in ("case", "metric") else "right")
    for case in cases:
        for index, (name, value) in enumerate(case.metrics.items()):
            table.add_row(
                f"{case.case} vs {case.baseline}" if index == 0 else "",
                name,
                format_value(value),
                format_value(case.baseline_metrics.get(name, "")),
                f"{case.ratio:.3f}" if index == 0 else "",
            )
        table.add_section()
    (console or Console()).print(table)
