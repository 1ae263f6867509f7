"""The demo's verdict and its files: table, report.json, report.html, plots."""

from __future__ import annotations

import base64
import html
import statistics
from pathlib import Path

from rich.console import Console
from rich.table import Table

from granikv.bench.harness import current_commit, machine, write_json
from granikv.demo.reference import Difference
from granikv.demo.runner import RunResult

ROWS = (
    ("tokens_per_s", "output tokens/s"),
    ("ttft_mean_s", "TTFT mean, s"),
    ("ttft_max_s", "TTFT max, s"),
    ("itl_mean_ms", "ITL mean, ms"),
    ("prompt_tokens", "prompt tokens"),
    ("prompt_tokens_reused", "prompt tokens reused"),
    ("prompt_tokens_computed", "prompt tokens computed"),
    ("output_tokens", "output tokens"),
    ("kv_bytes_read", "KV bytes read"),
    ("elapsed_s", "elapsed, s"),
    ("start_s", "server start, s"),
)
NAMES = {"asymmetric": "GraniKV", "uniform": "uniform paging"}


def summarize(run: RunResult) -> dict[str, float | int | None]:
    good = [r for r in run.responses if not r.error]
    gaps = [r.itl_s for r in good if r.itl_s is not None]
    prompt_tokens = sum(r.num_prompt_tokens for r in good)
    reused = sum(r.num_cached_tokens for r in good)
    return {
        "tokens_per_s": run.output_tokens / run.elapsed_s,
        "ttft_mean_s": statistics.fmean(r.ttft_s for r in good) if good else None,
        "ttft_max_s": max((r.ttft_s for r in good), default=None),
        "itl_mean_ms": statistics.fmean(gaps) * 1e3 if gaps else None,
        "prompt_tokens": prompt_tokens,
        "prompt_tokens_reused": reused,
        "prompt_tokens_computed": prompt_tokens - reused,
        "output_tokens": run.output_tokens,
        "kv_bytes_read": run.kv_bytes_read,
        "elapsed_s": run.elapsed_s,
        "start_s": run.start_s,
    }


def show(value: float | int | None) -> str:
    if value is None:
        return "not reported"
    return f"{value:,.0f}" if value >= 1000 or isinstance(value, int) else f"{value:.3g}"


def print_table(runs: list[RunResult], console: Console) -> None:
    table = Table(title="The same workload, two layouts of the KV cache")
    table.add_column("")
    summaries = [summarize(run) for run in runs]
    for run in runs:
        table.add_column(NAMES[run.layout], justify="right")
    for key, label in ROWS:
        table.add_row(label, *(show(summary[key]) for summary in summaries))
    console.print(table)


def write_report(
    folder: Path, runs: list[RunResult], differences: list[Difference], verdict: dict
) -> dict:
    """Writes report.json, report.html, latency.png and totals.png; returns the record."""
    folder.mkdir(parents=True, exist_ok=True)
    name, driver = machine()
    record = {
        "machine": name,
        "driver": driver,
        "commit": current_commit(),
        "verdict": verdict,
        "runs": {
            run.layout: {
                "summary": summarize(run),
                "metrics": run.metrics,
                "responses": [
                    {
                        "agent": r.agent,
                        "round": r.round_index,
                        "text": r.text,
                        "error": r.error,
                        "ttft_s": r.ttft_s if r.piece_times_s else None,
                        "itl_s": r.itl_s,
                        "prompt_tokens": r.num_prompt_tokens,
                        "output_tokens": r.num_output_tokens,
                        "cached_tokens": r.num_cached_tokens,
                    }
                    for r in run.responses
                ],
            }
            for run in runs
        },
        "differences": [vars(difference) for difference in differences],
    }
    write_json(folder / "report.json", record)
    plots = plot(folder, runs)
    (folder / "report.html").write_text(render_html(runs, differences, verdict, plots), "utf-8")
    return record


def plot(folder: Path, runs: list[RunResult]) -> list[Path]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4))
    for run in runs:
        times = sorted(r.ttft_s for r in run.responses if r.piece_times_s)
        shares = [(i + 1) / len(times) for i in range(len(times))]
        axes.step(times, shares, where="post", label=NAMES[run.layout])
    axes.set(xlabel="time to first token, s", ylabel="share of responses", ylim=(0, 1.02))
    axes.legend()
    latency = folder / "latency.png"
    figure.savefig(latency, dpi=120, bbox_inches="tight")
    pyplot.close(figure)

    panels = (
        ("prompt_tokens_computed", "prompt tokens computed"),
        ("kv_bytes_read", "KV bytes read"),
        ("tokens_per_s", "output tokens/s"),
    )
    figure, columns = pyplot.subplots(1, len(panels), figsize=(10, 3.5))
    for column, (key, label) in zip(columns, panels, strict=True):
        values = [summarize(run)[key] or 0 for run in runs]
        column.bar([NAMES[run.layout] for run in runs], values, color=["#2a6f97", "#adb5bd"])
        column.set_title(label)
    totals = folder / "totals.png"
    figure.savefig(totals, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    return [latency, totals]


def render_html(
    runs: list[RunResult], differences: list[Difference], verdict: dict, plots: list[Path]
) -> str:
    """One file without outside references."""
    summaries = [summarize(run) for run in runs]
    heading = "".join(f"<th>{NAMES[run.layout]}</th>" for run in runs)
    rows = "".join(
        f"<tr><td>{label}</td>{''.join(f'<td>{show(s[key])}</td>' for s in summaries)}</tr>"
        for key, label in ROWS
    )
    answers = "".join(
        f"<tr><td>{html.escape(r.agent)}</td><td>{r.round_index + 1}</td>"
        f"<td class=text>{html.escape(r.text or r.error)}</td></tr>"
        for r in runs[0].responses
    )
    listed = "".join(
        f"<li>{html.escape(d.agent)}, round {d.round_index + 1}"
        f" ({'near-tie' if d.near_tie else 'different'}):"
        f" {html.escape(repr(d.got))} / {html.escape(repr(d.expected))}</li>"
        for d in differences
    )
    images = "".join(
        '<img src="data:image/png;base64,'
        f'{base64.b64encode(path.read_bytes()).decode()}" alt="{path.stem}">'
        for path in plots
    )
    facts = "; ".join(f"{html.escape(str(k))}: {html.escape(str(v))}" for k, v in verdict.items())
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>GraniKV demo</title>
<style>body{{font:15px sans-serif;max-width:64em;margin:2em auto;padding:0 1em}}
table{{border-collapse:collapse}}td,th{{padding:.3em .8em;border-bottom:1px solid #ddd;
text-align:right;vertical-align:top}}td:first-child,.text{{text-align:left}}
img{{max-width:100%}}</style>
<h1>GraniKV demo</h1><p>{facts}</p>
<table><tr><th></th>{heading}</tr>{rows}</table>{images}
<h2>Differences</h2><ul>{listed or "<li>none</li>"}</ul>
<h2>Answers</h2><table>{answers}</table></html>
"""
