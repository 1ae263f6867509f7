"""Picture of a grid file over (prefix x batch): the planner's layouts, and what they lose."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

from granikv.attention.variants import LAYOUTS
from granikv.bench.grid_points import BATCH, PREFIX
from granikv.bench.grid_regret import finished, regret
from granikv.errors import InvalidArgument

TOP_PERCENT = 20.0  # of regret, where the colours end


def log_cell(value: int, limits: tuple[int, int]) -> int:
    """Index of the factor-of-two cell of [low, high]; the last cell holds high."""
    low, high = limits
    last = int(np.log2(high // low)) - 1
    return min(last, max(0, int(np.floor(np.log2(value / low)))))


def cells(lines: list[dict]) -> dict[tuple[int, int], list[dict]]:
    """Lines by (batch cell, prefix cell); a line's prefix is its longest."""
    found: dict[tuple[int, int], list[dict]] = defaultdict(list)
    for line in lines:
        at = log_cell(line["batch"], BATCH), log_cell(line["longest_prefix"], PREFIX)
        found[at].append(line)
    return dict(found)


def grids(lines: list[dict]) -> tuple[np.ndarray, np.ndarray, dict[tuple[int, int], str]]:
    """(index of the layout chosen most often, mean regret in percent, text of a cell), NaN where
    there is no point, or none whose candidates were measured; arrays [batch cells, prefix cells]."""
    shape = (log_cell(BATCH[1], BATCH) + 1, log_cell(PREFIX[1], PREFIX) + 1)
    layout, percent = np.full(shape, np.nan), np.full(shape, np.nan)
    text = {}
    for at, inside in cells(lines).items():
        counts = Counter(line["choice"]["layout"] for line in inside)
        name = counts.most_common(1)[0][0]
        layout[at] = list(LAYOUTS).index(name)
        text[at] = name if len(counts) == 1 else f"{name}+{len(counts) - 1}"
        known = [r for line in inside if (r := regret(line)) is not None]
        if known:
            percent[at] = 100 * float(np.mean(known))
    return layout, percent, text


def plot_grid(results: dict[int, dict], path: Path) -> None:
    """Needs matplotlib. Raises InvalidArgument when no point was measured."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = finished(results.values())
    if not lines:
        raise InvalidArgument("--json", "no measured point", "a grid file with results")
    layout, percent, text = grids(lines)
    figure, (left, right) = plt.subplots(1, 2, figsize=(15, 6.2), sharey=True)
    colors = matplotlib.colormaps["tab20"].resampled(20)
    left.imshow(layout, origin="lower", cmap=colors, vmin=0, vmax=19, aspect="auto", alpha=0.6)
    for (y, x), name in text.items():
        left.text(x, y, name, ha="center", va="center", fontsize=7)
    left.set_title(f"layout chosen most often (+ others), {len(lines)} points")
    shown = right.imshow(
        percent, origin="lower", cmap="YlOrRd", vmin=0, vmax=TOP_PERCENT, aspect="auto"
    )
    for y, x in zip(*np.nonzero(~np.isnan(percent)), strict=True):
        right.text(x, y, f"{percent[y, x]:.1f}", ha="center", va="center", fontsize=7)
    measured = sum(regret(line) is not None for line in lines)
    right.set_title(f"mean regret against all candidates, %, {measured} points")
    figure.colorbar(shown, ax=right, extend="max")
    for axis in (left, right):
        axis.set_xticks(
            range(layout.shape[1]), [f"{PREFIX[0] << x}" for x in range(layout.shape[1])]
        )
        axis.set_xlabel("longest shared prefix, tokens, from")
    left.set_yticks(range(layout.shape[0]), [f"{BATCH[0] << y}" for y in range(layout.shape[0])])
    left.set_ylabel("requests, from")
    figure.suptitle(f"{lines[0]['gpu']}: decode attention over the grid")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
