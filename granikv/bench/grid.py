"""Runs the grid of the attention benchmark point by point into a file that a later run continues.

Each point is one JSON line: the planner's choice, its steady time, floor and error; baselines;
with --exhaustive every candidate. What measures is an argument: grid_gpu.py, or a test's double.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

import numpy as np

from granikv.attention.splits import SplitPlan
from granikv.bench.attention_step import CaseSpans
from granikv.bench.grid_effort import estimate_s, floor_us
from granikv.bench.grid_plan import (
    Candidate,
    candidates,
    choose,
    chosen_candidate,
    cost_model,
    pieces_of_longest,
)
from granikv.bench.grid_points import GridPoint
from granikv.errors import InvalidArgument, Unsupported

BASELINES, CANDIDATES = "baselines", "candidates"  # parts of a line that are asked for
FINALISTS, FINAL_ROUNDS, NEAR_BEST = 4, 3, 1.05  # measured again, in turns with the choice
HOPELESS = 4.0  # a flat candidate that reads so many times the floor is not measured

PointError = (ValueError, Unsupported)  # a wrong answer, or a kernel that this GPU cannot hold


class PointTimer(Protocol):
    """Measures one point, whose KV is on the device."""

    num_sms: int

    def steady(
        self, split: SplitPlan, tokens_read: int, quick: bool = False
    ) -> tuple[float, float]:
        """(us of a layer, relative error to the reference); quick: a first look. Raises PointError."""

    def baselines(self) -> Iterable[tuple[str, dict]]:
        """(name, metrics with steady_us) of our flat paging and what is installed."""


def tokens_read(spans: CaseSpans, shared: np.ndarray | None = None) -> int:
    """By a step in which the groups of the mask (None: all) read their prefix once."""
    lens, sizes = spans.prefix_lens.astype(np.int64), spans.sizes
    once = lens if shared is None else np.where(shared, lens, lens * sizes)
    return int(once.sum() + spans.case.suffix_lens.sum())


def digest(point: GridPoint) -> str:
    """A result belongs to the point's numbers, not to its place in the file."""
    return hashlib.sha256(json.dumps(asdict(point)).encode()).hexdigest()[:12]


def measure_point(
    point: GridPoint, timer: PointTimer, profile: dict, parts: set[str]
) -> dict[str, object]:
    """The result line of a point, without the run's own fields; times in us.

    A choice that cannot be measured gives "failed", with the error.
    """
    spans, cost = CaseSpans(point.case, point.shape), cost_model(profile, point)
    choice = choose(spans, cost, timer.num_sms)
    chosen = chosen_candidate(spans, choice, timer.num_sms)
    hot, cold = pieces_of_longest(chosen.split)
    line: dict[str, object] = {
        "point": point.index,
        "digest": digest(point),
        "gqa_group": point.gqa_group,
        "head_dim": point.head_dim,
        "batch": point.case.batch,
        "num_groups": len(point.groups),
        "longest_prefix": int(spans.prefix_lens.max()),
        "mean_suffix": float(point.case.suffix_lens.mean()),
        "floor_us": floor_us(point),
        "num_sms": timer.num_sms,
    }
    fields = chosen.fields | {
        "hot_pieces": hot,
        "cold_pieces": cold,
        "num_partials": chosen.split.num_partials,
        "reason": choice.reason,
        "predicted_us": choice.predicted_us,
    }
    try:
        us, error = timer.steady(chosen.split, tokens_read(spans, choice.mask))
    except PointError as failure:
        return line | {"choice": fields, "failed": str(failure)}
    fields |= {"steady_us": us, "relative_error": error}
    line["choice"] = fields
    if CANDIDATES in parts:
        line[CANDIDATES] = _measure_candidates(spans, timer, chosen, choice.mask, fields)
    if BASELINES in parts:
        line[BASELINES] = dict(timer.baselines())
    return line


def _measure_candidates(
    spans: CaseSpans, timer: PointTimer, chosen: Candidate, mask: np.ndarray, choice: dict
) -> list[dict]:
    """Lines of all candidates, the choice first. The fastest and the choice are measured in turns
    again and have the median of those turns: the least of a hundred noisy times is too low."""
    least = tokens_read(spans)
    lines: list[dict] = [chosen.fields | {"steady_us": choice["steady_us"]}]
    measured: list[tuple[dict, SplitPlan, int]] = []
    for candidate in candidates(spans, chosen, mask, timer.num_sms):
        tokens = _tokens_of(spans, candidate, mask)
        if candidate is chosen:
            measured.append((lines[0], chosen.split, tokens))
        elif tokens <= HOPELESS * least or candidate.shared == chosen.shared:
            try:
                us, _ = timer.steady(candidate.split, tokens, quick=True)
                line = candidate.fields | {"steady_us": us}
                measured.append((line, candidate.split, tokens))
            except PointError as failure:
                line = candidate.fields | {"failed": str(failure)}
            lines.append(line)
    measured.sort(key=lambda entry: entry[0]["steady_us"])
    near = NEAR_BEST * measured[0][0]["steady_us"]
    finalists = [e for e in measured[:FINALISTS] if e[0]["steady_us"] <= near]
    if all(line is not lines[0] for line, _, _ in finalists):
        finalists += [entry for entry in measured if entry[0] is lines[0]]
    rounds = [
        [timer.steady(split, tokens)[0] for _, split, tokens in finalists]
        for _ in range(FINAL_ROUNDS)
    ]
    for (line, _, _), times in zip(finalists, zip(*rounds, strict=True), strict=True):
        line |= {"steady_us": float(np.median(times)), "final": True}
    choice["steady_us"] = lines[0]["steady_us"]
    return lines


def _tokens_of(spans: CaseSpans, candidate: Candidate, mask: np.ndarray) -> int:
    shared = {"all": None, "none": np.zeros_like(mask)}.get(candidate.shared, mask)
    return tokens_read(spans, shared)


def run_grid(
    points: Sequence[GridPoint],
    path: Path,
    open_point: Callable[[GridPoint], PointTimer],
    profile: dict,
    run_fields: dict,
    parts: set[str],
    seconds: float | None = None,
    say: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Measures what `path` lacks of the points and appends it; the number of points left.

    run_fields: gpu, driver, commit, date, probe of this run, on every line. seconds: no point is
    begun that would probably end later. Raises InvalidArgument for a file of another GPU.
    """
    start, known = clock(), read_results(path)
    for line in known.values():
        if line["gpu"] != run_fields["gpu"]:
            raise InvalidArgument("--json", str(path), f"results of {run_fields['gpu']}")
    todo = []
    for point in points:
        old = known.get(point.index, {})
        has = {name for name in (BASELINES, CANDIDATES) if name in old}
        if old.get("digest") != digest(point) or "failed" in old or not parts <= has:
            todo.append((point, parts | has))
    say(f"{len(todo)} of {len(points)} points to measure")
    left = 0
    for done, (point, wanted) in enumerate(todo):
        begun = clock()
        expected = estimate_s(point, BASELINES in wanted, CANDIDATES in wanted)
        if seconds is not None and begun - start + expected > seconds:
            say(f"point {point.index} is left out: about {expected:.1f} s, out of time")
            left += 1
            continue
        line = measure_point(point, open_point(point), profile, wanted) | run_fields
        line["seconds"] = clock() - begun
        append_result(path, line)
        say(f"{done + 1}/{len(todo)} {describe(line)}")
    return left


def describe(line: dict) -> str:
    """A result line in words."""
    choice = line["choice"]
    text = f"point {line['point']}: {choice['layout']}, "
    if "failed" in line:
        return text + f"FAILED: {line['failed']}"
    us = choice["steady_us"]
    return text + (
        f"{us:.1f} us ({100 * line['floor_us'] / us:.0f}% of floor, predicted "
        f"{choice['predicted_us']:.1f}), {line['seconds']:.1f} s"
    )


def append_result(path: Path, line: dict) -> None:
    """One line; what a killed run left of a line before it is closed, and ignored when read."""
    with path.open("a+b") as file:
        if file.seek(0, 2) > 0:
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(line).encode() + b"\n")


def read_results(path: Path) -> dict[int, dict]:
    """The last line of each point; {} without a file. Raises InvalidArgument for another file."""
    if not path.is_file():
        return {}
    results = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            if text.startswith('{"point": '):
                continue  # of a run that was killed while it wrote
            line = None
        if not isinstance(line, dict) or "point" not in line or "digest" not in line:
            raise InvalidArgument("--json", str(path), "a result file of the grid")
        results[line["point"]] = line
    return results
