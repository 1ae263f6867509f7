"""Picture of an attention result file: times over the floor, GraniKV and the baselines.

    python -m granikv.bench.attention_plot RESULT.json [MORE.json ...] OUT.png

A later file's cases replace those of an earlier one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

LABELS = {
    "uniform-paging": "our flat paging",
    "flashinfer-flat": "FlashInfer flat",
    "flashinfer-cascade": "FlashInfer grouped cascade",
}
COLORS = {"granikv": "#2a6fbb", "uniform-paging": "#b9c4d0", "flashinfer-flat": "#e0a458"}


def plot_attention(records: list[dict], path: str | Path) -> None:
    """One group of bars per case, do_bench time over the floor, logarithmic; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases: dict[str, dict[str, dict]] = {}
    for record in records:
        names = {entry["case"] for entry in record["cases"]}
        cases = {name: bars for name, bars in cases.items() if name not in names}
        for entry in record["cases"]:
            bars = cases.setdefault(entry["case"], {"granikv": entry["metrics"]})
            if entry["baseline"] in LABELS:
                bars[entry["baseline"]] = entry["baseline_metrics"]
    labels = {"granikv": "GraniKV", **LABELS}
    figure, axis = plt.subplots(figsize=(11, 4.8))
    for index, (name, label) in enumerate(labels.items()):
        at, heights = [], []
        for x, bars in enumerate(cases.values()):
            if name in bars:
                at.append(x + (index - 1.5) * 0.2)
                heights.append(bars[name]["do_bench_ms"] / bars["granikv"]["floor_ms"])
        drawn = axis.bar(at, heights, 0.2, label=label, color=COLORS.get(name, "#7a9e7e"))
        axis.bar_label(drawn, fmt="%.1f", fontsize=7)
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_yscale("log")
    axis.set_ylabel("time / time to read the unique KV once")
    axis.set_xticks(range(len(cases)), list(cases), rotation=25, ha="right", fontsize=8)
    first = records[0]
    axis.set_title(
        f"Decode attention of one layer, one call with a cold L2\n{first['gpu']}, 32 query heads, "
        f"8 KV heads, head size 128, bf16",
        fontsize=10,
    )
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    *results, picture = sys.argv[1:]
    plot_attention([json.loads(Path(name).read_text()) for name in results], picture)


if __name__ == "__main__":
    main()
