"""Prints benchmark cases as a table."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from granikv.bench.harness import Case


def format_value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
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
