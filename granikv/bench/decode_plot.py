"""Waterfall of a decode result file: a step of uniform paging, what each part saves, and ours.

python -m granikv.bench.decode_plot RESULT.json OUT.png

uniform paging   | pages, each row reads its prefix
- storage        | contiguous prefixes, each row still reads its own: flat-extents
- kernel         | one read for a group, always by the same backend: no-dispatcher
- dispatch       | the choice of a backend and its cuts: GraniKV
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from granikv.errors import InvalidArgument

STAGES = ("uniform-paging", "flat-extents", "no-dispatcher", "granikv")
PARTS = ("storage", "kernel", "dispatch")  # of the gain between two stages
COLORS = {True: "#7a9e7e", False: "#c0504d"}  # saves time; costs time
NEEDED = STAGES[1:3]  # uniform paging and ours are always measured


class Waterfall(NamedTuple):
    title: str
    step_ms: tuple[float, ...]  # of STAGES
    ratio: float  # as the result file has it: of neighbours in time, not of these medians


def check_waterfall(contenders: Sequence[str], json_file: Path | None) -> None:
    """Before anything is measured. Raises InvalidArgument."""
    if json_file is None:
        raise InvalidArgument("--plot", "no --json", "a result file, which it is written beside")
    if not set(NEEDED) <= set(contenders):
        expected = " and ".join(f"--contender {name}" for name in NEEDED)
        raise InvalidArgument("--plot", list(contenders), expected)


def waterfalls(record: dict) -> list[Waterfall]:
    """One per workload whose stages were all measured, in the file's order."""
    found: dict[str, dict[str, float]] = {}
    ratios: dict[str, float] = {}
    for entry in record["cases"]:
        if entry["metrics"].get("contender") != STAGES[-1]:
            continue
        title = f"{entry['case']}, B={entry['params']['batch']}"
        stages = found.setdefault(title, {})
        stages[STAGES[-1]] = entry["metrics"]["step_ms"]
        stages[entry["baseline"]] = entry["baseline_metrics"]["step_ms"]
        if entry["baseline"] == STAGES[0]:
            ratios[title] = entry["ratio"]
    return [
        Waterfall(title, tuple(stages[name] for name in STAGES), ratios[title])
        for title, stages in found.items()
        if set(STAGES) <= set(stages)
    ]


def plot_waterfall(record: dict, path: str | Path) -> None:
    """A panel per workload; needs matplotlib. Raises InvalidArgument without a full workload."""
    from matplotlib.figure import Figure

    panels = waterfalls(record)
    if not panels:
        raise InvalidArgument("result file", len(record["cases"]), f"cases with all of {STAGES}")
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(3.2 * columns, 3.0 * rows + 0.4))
    for index, panel in enumerate(panels):
        axis = figure.add_subplot(rows, columns, index + 1)
        first, last = panel.step_ms[0], panel.step_ms[-1]
        pairs = list(zip(panel.step_ms, panel.step_ms[1:], strict=False))
        heights = [first, *(abs(a - b) for a, b in pairs), last]
        bottoms = [0.0, *(min(pair) for pair in pairs), 0.0]
        colors = ["#b9c4d0", *(COLORS[b <= a] for a, b in pairs), "#2a6fbb"]
        axis.bar(range(5), heights, bottom=bottoms, color=colors)
        labels = [f"{first:.2f}", *(f"{b - a:+.2f}" for a, b in pairs), f"{last:.2f}"]
        for x, (bottom, height, label) in enumerate(zip(bottoms, heights, labels, strict=True)):
            axis.text(x, bottom + height, label, ha="center", va="bottom", fontsize=7)
        names = [STAGES[0].replace("-", "\n"), *PARTS, "GraniKV"]
        axis.set_xticks(range(5), names, fontsize=7)
        axis.set_title(f"{panel.title}: {panel.ratio:.2f}x", fontsize=8)
        axis.set_ylabel("ms per step", fontsize=7)
        axis.tick_params(axis="y", labelsize=7)
        axis.margins(y=0.12)
    figure.suptitle(f"Gain over uniform paging\n{record['gpu']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    result, picture = sys.argv[1:]
    plot_waterfall(json.loads(Path(result).read_text(encoding="utf-8")), picture)


if __name__ == "__main__":
    main()
