"""Fits a GPU's profile to one half of a grid file, and judges it on the other.

First the rates, by the times of shared and of flat steps; then, by the regret of the choices that
a profile makes, the cost of an item (shared or flat) and the SM's matrix rate against its read rate
(the layout). Offline: choices are planned again and looked up among the measured candidates.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from granikv.attention.layout_choice import H200_RATES
from granikv.bench.attention_step import CaseSpans
from granikv.bench.grid import digest, read_results
from granikv.bench.grid_plan import ALL, NONE, Choice, choose, chosen_candidate, model_config
from granikv.bench.grid_points import GridPoint, load_points
from granikv.bench.grid_regret import Regrets, best_candidate, finished
from granikv.calibration import store_profile
from granikv.cost_model import read_profile
from granikv.errors import InvalidArgument
from granikv.gpu_cost_model import PROFILES, GpuCostModel, file_stem, stored_profile_path
from granikv.outputs import check_output_file, check_output_folder

SEED = 20261130
FEWEST_LINES = 16  # measured points from which a half says something
FITTED = ("read_gb_per_s", "gemm_tflops", "cascade_tflops", "item_us", "merge_ns", "step_us")
STEPS = (2.0, 1.4, 1.15, 1.05, 1.02)  # factors that a rate is moved by, in turn
FACTORS = (
    1.0,
    1.15,
    0.87,
    1.3,
    0.77,
    1.5,
    0.67,
    2.0,
    0.5,
    3.0,
    0.33,
)  # nearest first: it wins a tie
STEP_US = 5.0  # where the search starts
FAR = 0.7  # log of the numbers of items, from which a candidate stands for no other cuts
# of mean regret, from which a choice's rate is moved: half a grid is a small sample
LEAST_GAIN = 0.01
UNMEASURED = 0.1  # the regret of a choice that no candidate stands for, in the search


class Line:
    """One measured point, ready to be planned again."""

    def __init__(self, result: dict, point: GridPoint):
        self.result, self.point = result, point
        self.spans = CaseSpans(point.case, point.shape)
        self.num_sms = int(result["num_sms"])
        self.config, self.suffix_tokens = model_config(point), float(point.case.suffix_lens.sum())
        self.groups = Counter((n, size) for n, size in point.groups if n)
        tried = [c for c in result.get("candidates", ()) if "steady_us" in c]
        self.best_us = {
            shared: min((c["steady_us"] for c in tried if c["shared"] == shared), default=None)
            for shared in (ALL, NONE)
        }
        self.tried = [c for c in tried if "hot_items" in c]
        self._measured: dict[tuple, float | None] = {}
        choice = result["choice"]
        if choice["shared"] in self.best_us and self.best_us[choice["shared"]] is None:
            self.best_us[choice["shared"]] = choice["steady_us"]

    def predict_us(self, profile: dict, shared: str) -> float:
        """A layer's attention; shared: ALL or NONE."""
        cost = self.cost(profile)
        us = profile.get("step_us", 0.0) + cost.merge_us(len(self.spans.owner))
        us += cost.read_us(self.suffix_tokens)
        for (n, size), count in self.groups.items():
            if shared == NONE:
                us += count * cost.marginal_flat_us(size, n)
            else:
                hot = min(cost.hot_us(variant, size, n) for variant in ("cascade", "gemm"))
                us += count * (hot + cost.merge_us(size))
        return us

    def cost(self, profile: dict) -> GpuCostModel:
        return GpuCostModel(profile, self.config, self.spans.shape.element_bytes)

    def regret(self, profile: dict) -> float | None:
        """Of the choice that this profile makes; None where that was not measured."""
        us = self.measured_us(choose(self.spans, self.cost(profile), self.num_sms))
        best = best_candidate(self.result)
        return None if us is None or best is None else us / best["steady_us"] - 1

    def measured_us(self, choice: Choice) -> float | None:
        """Of the candidate of that layout and those groups whose items are nearest in number."""
        key = (choice.layout, choice.shared, choice.rates)
        if key not in self._measured:
            self._measured[key] = self._nearest_us(choice)
        return self._measured[key]

    def _nearest_us(self, choice: Choice) -> float | None:
        same = [
            c for c in self.tried if (c["layout"], c["shared"]) == (choice.layout, choice.shared)
        ]
        if not same:
            return None
        cut = chosen_candidate(self.spans, choice, self.num_sms).fields

        def distance(tried: dict) -> float:
            kinds = ("hot_items", "cold_items")
            return sum(abs(float(np.log((tried[k] + 1) / (cut[k] + 1)))) for k in kinds)

        nearest = min(same, key=distance)
        return nearest["steady_us"] if distance(nearest) < FAR else None


@dataclass(frozen=True)
class Judgement:
    """Of a profile on some lines. time_error: mean of |log(predicted / measured)|."""

    time_error: float
    regrets: Regrets | None
    unmeasured: int  # choices that no candidate stands for

    @classmethod
    def of(cls, lines: Sequence[Line], profile: dict) -> Judgement:
        known = {line.point.index: line.regret(profile) for line in lines}
        found = {index: regret for index, regret in known.items() if regret is not None}
        return cls(time_error(lines, profile), Regrets.of(found), len(known) - len(found))


def halves(lines: Sequence[Line]) -> tuple[list[Line], list[Line]]:
    """Two random halves, the same for the same points."""
    rng = random.Random(SEED)
    order = sorted(lines, key=lambda line: line.point.index)
    order.sort(key=lambda line: rng.random())
    return order[::2], order[1::2]


def time_error(lines: Iterable[Line], profile: dict) -> float:
    """Mean of |log(predicted / measured)| over the fastest shared and the fastest flat steps."""
    errors = [
        abs(float(np.log(line.predict_us(profile, shared) / us)))
        for line in lines
        for shared, us in line.best_us.items()
        if us is not None
    ]
    return float(np.mean(errors))


def fit_times(lines: Sequence[Line], start: dict) -> dict:
    """The profile with the rates of FITTED moved, one at a time, to the least time_error."""
    best = {"step_us": STEP_US} | start
    error = time_error(lines, best)
    for step in STEPS:
        moved = True
        while moved:
            moved = False
            for name in FITTED:
                for factor in (step, 1 / step):
                    trial = best | {name: best[name] * factor}
                    if (less := time_error(lines, trial)) < error - 1e-6:
                        best, error, moved = trial, less, True
    return best


def fit_choices(lines: Sequence[Line], profile: dict) -> dict:
    """The profile with item_us, and then the SM's rates, where choices cost the least time."""

    def search(base: dict, move: Callable[[float], dict]) -> dict:
        def mean_regret(trial: dict) -> float:
            found = [line.regret(trial) for line in lines]
            return float(np.mean([UNMEASURED if r is None else r for r in found]))

        best = min((base | move(factor) for factor in FACTORS), key=mean_regret)
        nearest = base | move(FACTORS[0])
        return best if mean_regret(best) < mean_regret(nearest) - LEAST_GAIN else nearest

    item_us = profile["item_us"]
    profile = search(profile, lambda factor: {"item_us": item_us * factor})
    read = profile["read_gb_per_s"] / lines[0].num_sms
    usual = H200_RATES.flop_per_us / H200_RATES.bytes_per_us * read / 1e3
    return search(
        profile | {"read_gb_per_s_per_sm": read},
        lambda factor: {"hot_tflops_per_sm": usual * factor},
    )


def fit_profile(results: dict[int, dict], points: Sequence[GridPoint]) -> dict:
    """The profile of the GPU that measured the results; `judged` says how it did on the other half,
    beside the profile that it started from. Raises InvalidArgument for too few results."""
    by_index = {point.index: point for point in points}
    lines = [
        Line(result, by_index[result["point"]])
        for result in finished(results.values())
        if result["point"] in by_index and digest(by_index[result["point"]]) == result["digest"]
    ]
    if len(lines) < FEWEST_LINES:
        expected = f"at least {FEWEST_LINES} measured points of this grid"
        raise InvalidArgument("--grid", f"{len(lines)} points", expected)
    fit, judge = halves(lines)
    start = packaged_profile(lines[0].result["gpu"])
    probes = [line.result["probe"]["matmul_tflop_per_s"] for line in lines]
    fitted = fit_times(fit, start | {"matmul_tflops": float(np.median(probes))})
    if any(line.tried for line in fit):
        fitted = fit_choices([line for line in fit if line.tried], fitted)
    fitted = {name: _rounded(value) for name, value in fitted.items()}
    return fitted | {
        "gpu": lines[0].result["gpu"],
        "fitted_on": sorted(line.point.index for line in fit),
        "commits": sorted({line.result["commit"] for line in lines}),
        "judged": {
            "fitted": asdict(Judgement.of(judge, fitted)),
            "before": asdict(Judgement.of(judge, start)),
        },
    }


def _rounded(value: object) -> object:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def packaged_profile(gpu_name: str) -> dict:
    """Of this GPU, or of any."""
    named = PROFILES / f"{file_stem(gpu_name)}.json"
    return read_profile(named if named.is_file() else PROFILES / "gpu_default.json")


def run_gpu_calibration(grid: Path, output: Path | None, console: Console | None = None) -> Path:
    """Returns where the profile is: `output`, or where an engine on this GPU model looks."""
    console = console or Console()
    if not grid.is_file():
        raise InvalidArgument("--grid", str(grid), "a result file of bench attention --grid")
    if output is not None:
        check_output_file("--output", output)
    profile = fit_profile(read_results(grid), load_points())
    path = output or stored_profile_path(profile["gpu"])
    if output is None:
        check_output_folder("the profile's folder", path.parent)
    store_profile(profile, path)
    for name, judged in profile["judged"].items():
        regrets = judged["regrets"]
        text = f"times off by {100 * judged['time_error']:.0f}%"
        if regrets:
            text += (
                f", regret {100 * regrets['mean']:.1f}% on average, {100 * regrets['p95']:.1f}% p95, "
                f"{100 * regrets['worst']:.1f}% at worst (point {regrets['worst_point']}), "
                f"{judged['unmeasured']} choices not measured"
            )
        console.print(f"{name} profile, on the other half: {text}", soft_wrap=True)
    console.print(f"Hardware profile: {path}", soft_wrap=True)
    return path
