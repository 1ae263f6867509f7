"""What a grid file says: the regret of the planner's choices, losses, and which layout wins where.

Regret: the choice's time over that of the fastest candidate, minus 1. Loss: the choice's time over
the fastest baseline's, where it is above max(3%, 1.5 us). A region is a class of batch and of
the longest prefix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

PREFIX_EDGES, BATCH_EDGES = (1024, 8192), (8, 64)  # the last of the lower classes
LOSS_SHARE, LOSS_US = 0.03, 1.5


@dataclass(frozen=True)
class Regrets:
    """Of some points: shares, 0.03 is 3% slower than the best."""

    count: int
    mean: float
    p95: float
    worst: float
    worst_point: int

    @classmethod
    def of(cls, regret_of_point: dict[int, float]) -> Regrets | None:
        """None without points."""
        if not regret_of_point:
            return None
        values = np.array(list(regret_of_point.values()))
        worst = max(regret_of_point, key=regret_of_point.__getitem__)
        p95 = float(np.percentile(values, 95))
        return cls(len(values), float(values.mean()), p95, float(values.max()), worst)


def best_candidate(line: dict) -> dict | None:
    """The fastest that was measured; None where the candidates were not."""
    times = [c for c in line.get("candidates", ()) if "steady_us" in c]
    return min(times, key=lambda c: c["steady_us"], default=None)


def regret(line: dict) -> float | None:
    """None where the candidates were not measured."""
    best = best_candidate(line)
    return None if best is None else line["choice"]["steady_us"] / best["steady_us"] - 1


def loss_us(line: dict) -> float:
    """What the choice takes longer than the fastest baseline, above the allowance; else 0."""
    others = line.get("baselines", {}).values()
    times = [b["steady_us"] for b in others if "steady_us" in b]
    if not times:
        return 0.0
    more = line["choice"]["steady_us"] - min(times)
    return more if more > max(LOSS_SHARE * min(times), LOSS_US) else 0.0


def region(line: dict) -> str:
    """Like "batch 9..64, prefix to 1024"."""
    return f"batch {_class(line['batch'], BATCH_EDGES)}, prefix {_class(line['longest_prefix'], PREFIX_EDGES)}"


def _class(value: int, edges: tuple[int, ...]) -> str:
    low = 1
    for edge in edges:
        if value <= edge:
            return f"{low}..{edge}"
        low = edge + 1
    return f"{low}.."


def heads(line: dict) -> str:
    return f"GQA {line['gqa_group']}, head size {line['head_dim']}"


def finished(lines: Iterable[dict]) -> list[dict]:
    """Those whose choice has a time."""
    return [line for line in lines if "failed" not in line]


def print_report(results: dict[int, dict], console: Console | None = None) -> None:
    """Regret overall, by region and by heads, winners, losses and failures."""
    console = console or Console()
    lines = finished(results.values())
    failed = [line for line in results.values() if "failed" in line]
    commits = sorted({line.get("commit", "") for line in lines})
    console.print(f"{len(lines)} points measured, of commits {', '.join(commits) or 'none'}")
    for line in failed:
        console.print(f"[red]point {line['point']} failed:[/red] {line['failed']}", highlight=False)
    with_baselines = [line for line in lines if line.get("baselines")]
    losses = {line["point"]: loss_us(line) for line in with_baselines if loss_us(line)}
    if with_baselines:
        console.print(
            f"slower than the best baseline by over max(3%, 1.5 us): {len(losses)} of "
            f"{len(with_baselines)} points {sorted(losses)}"
        )
    judged = [line for line in lines if regret(line) is not None]
    if not judged:
        return
    table = Table(title="Regret of the choice against all candidates")
    for heading in ("points", "count", "mean", "p95", "worst", "at point", "fastest layouts"):
        table.add_column(heading, justify="left" if heading == "points" else "right")
    kinds = [("all", judged)]
    for name in (region, heads):
        for key in sorted({name(line) for line in judged}):
            kinds.append((key, [line for line in judged if name(line) == key]))
    for title, chosen in kinds:
        found = Regrets.of({line["point"]: regret(line) or 0.0 for line in chosen})
        assert found is not None
        wins = Counter(best["layout"] for line in chosen if (best := best_candidate(line)))
        table.add_row(
            title,
            str(found.count),
            *(f"{100 * x:.1f}%" for x in (found.mean, found.p95, found.worst)),
            str(found.worst_point),
            ", ".join(f"{name} {count}" for name, count in wins.most_common(3)),
        )
    console.print(table)
