"""What is read out of a grid file: regret, losses, a GPU's profile, the picture, the commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from granikv.attention.layout_choice import H200_RATES
from granikv.bench import gpu_calibration, grid_plot, grid_regret
from granikv.bench.gpu_calibration import (
    Line,
    fit_choices,
    fit_profile,
    fit_times,
    halves,
    packaged_profile,
    time_error,
)
from granikv.bench.grid import CANDIDATES, digest, measure_point, read_results, run_grid
from granikv.bench.grid_points import GridPoint, load_points
from granikv.cli import app
from granikv.config import ModelConfig
from granikv.errors import InvalidArgument
from granikv.gpu_cost_model import GpuCostModel, stored_profile_path
from tests.grid_double import PROFILE, RUN, MadeUpGpu

RESULTS = Path(__file__).parents[2] / "docs" / "results"
MODEL = (ModelConfig("llama", 1, 4096, 14336, 32, 8, 128, 128256, 8192), 2)
# few groups: planning is what these tests wait for
POINTS = [p for p in load_points() if len(p.groups) <= 3 and p.case.batch <= 100][::5]


@pytest.fixture(scope="module")
def grid_file(tmp_path_factory):
    """Of a made-up GPU: half the profile's bandwidth, 6 us of launches, sharing nearly for free."""
    path = tmp_path_factory.mktemp("grid") / "grid.jsonl"
    run_grid(POINTS, path, MadeUpGpu(), PROFILE, RUN, {CANDIDATES})
    return path


@pytest.fixture
def results(grid_file):
    return read_results(grid_file)


def line_of(choice_us, *others_us, **fields):
    times = [{"layout": "mid", "steady_us": us} for us in (choice_us, *others_us)]
    line = {"point": 7, "batch": 8, "longest_prefix": 1025, "gqa_group": 4, "head_dim": 128}
    return (
        line | {"choice": {"steady_us": choice_us, "layout": "mid"}, "candidates": times} | fields
    )


def test_regret_and_loss_by_hand():
    assert grid_regret.regret(line_of(11.0, 10.0, 12.0)) == pytest.approx(0.1)
    assert grid_regret.regret(line_of(9.0, 10.0)) == 0
    failed = line_of(11.0) | {"candidates": [{"layout": "mid", "failed": "no"}]}
    assert grid_regret.regret(failed) is None and grid_regret.regret({"choice": {}}) is None
    baselines = {"uniform-paging": {"steady_us": 10.0}, "flashinfer": {"failed": "no"}}
    assert grid_regret.loss_us(line_of(11.4, baselines=baselines)) == 0  # under 1.5 us
    assert grid_regret.loss_us(line_of(11.6, baselines=baselines)) == pytest.approx(1.6)
    baselines = {"uniform-paging": {"steady_us": 100.0}, "other": {"steady_us": 200.0}}
    assert grid_regret.loss_us(line_of(102.9, baselines=baselines)) == 0  # under 3%
    assert grid_regret.loss_us(line_of(104.0, baselines=baselines)) == pytest.approx(4.0)
    assert grid_regret.region(line_of(1.0)) == "batch 1..8, prefix 1025..8192"
    assert grid_regret.region(line_of(1.0, batch=65)) == "batch 65.., prefix 1025..8192"


def test_statistics_of_regrets():
    found = grid_regret.Regrets.of({i: i / 100 for i in range(101)})
    assert (found.count, found.worst, found.worst_point) == (101, 1.0, 100)
    assert found.mean == pytest.approx(0.5) and found.p95 == pytest.approx(0.95)
    assert grid_regret.Regrets.of({}) is None


def test_the_report_names_losses_and_failures():
    console = Console(record=True, width=200)
    baselines = {"uniform-paging": {"steady_us": 10.0}}
    lines = {
        7: line_of(20.0, 16.0, baselines=baselines),
        8: line_of(10.0, point=8, baselines=baselines),
        9: line_of(10.0, point=9) | {"failed": "relative error 0.5"},
    }
    grid_regret.print_report(lines, console)
    text = console.export_text()
    assert "1 of 2 points [7]" in text and "point 9 failed: relative error 0.5" in text
    assert "12.5%" in text and "25.0%" in text  # mean of 25% and 0, without the failed one


def test_halves_are_fixed_disjoint_and_all(results):
    lines = [Line(results[p.index], p) for p in POINTS]
    fit, judge = halves(lines)
    names = [{line.point.index for line in half} for half in (fit, judge)]
    assert not names[0] & names[1] and names[0] | names[1] == {p.index for p in POINTS}
    again = halves(lines[::-1])  # whatever order the file has
    assert [line.point.index for line in again[0]] == [line.point.index for line in fit]


def test_rates_are_found(results):
    lines = halves([Line(results[p.index], p) for p in POINTS])[0]
    start = PROFILE | {"step_us": 1.0}
    fitted = fit_times(lines, start)
    assert time_error(lines, fitted) < 0.15 < time_error(lines, start)
    assert fitted["read_gb_per_s"] == pytest.approx(2000, rel=0.2)
    assert 4 < fitted["step_us"] + fitted["item_us"] < 9


def test_choices_are_fitted_by_what_they_cost():
    """Where an item costs 40 us, sharing a short prefix does not pay."""
    points = [
        GridPoint(i, "corner", 4, 128, ((n, 2),) * 6, 64) for i, n in enumerate((1024, 2048, 65536))
    ]
    gpu, lines = MadeUpGpu(item_us=40.0), []
    for point in points:
        lines.append(Line(measure_point(point, gpu(point), PROFILE, {CANDIDATES}), point))
    before = [line.regret(PROFILE) for line in lines]
    fitted = fit_choices(lines, PROFILE)
    after = [line.regret(fitted) for line in lines]
    assert before[0] > 0.5 and after[0] == 0 and sum(after) < sum(before)
    assert fitted["item_us"] > PROFILE["item_us"]


def test_a_profile_is_judged_on_the_other_half(results):
    profile = fit_profile(results, POINTS)
    fit = set(profile["fitted_on"])
    judge = [Line(results[p.index], p) for p in POINTS if p.index not in fit]
    assert len(fit) in (len(POINTS) // 2, len(POINTS) // 2 + 1)
    judged = profile["judged"]
    assert judged["fitted"]["time_error"] == pytest.approx(time_error(judge, profile))
    assert judged["fitted"]["time_error"] < judged["before"]["time_error"]
    counts = judged["fitted"]["regrets"]["count"] + judged["fitted"]["unmeasured"]
    assert counts == len(judge)
    # a changed point in the file no longer counts
    stale = {i: line | {"digest": "0"} for i, line in results.items()}
    with pytest.raises(InvalidArgument, match="got '0 points'"):
        fit_profile(stale, POINTS)
    assert results[POINTS[0].index]["digest"] == digest(POINTS[0])


def test_calibrate_stores_what_an_engine_on_this_gpu_loads(grid_file, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(
        gpu_calibration,
        "fit_times",
        lambda lines, start: {"step_us": 5.0} | start | {"read_gb_per_s": 1999.0},
    )
    before = GpuCostModel.load(None, *MODEL, "Made-up GPU")
    assert before.sm_rates == H200_RATES
    done = CliRunner().invoke(app, ["calibrate", "--grid", str(grid_file)])
    assert done.exit_code == 0 and "fitted profile, on the other half" in done.output, done.output
    assert stored_profile_path("Made-up GPU") == tmp_path / ".cache/granikv/gpu-made-up_gpu.json"
    cost = GpuCostModel.load(None, *MODEL, "Made-up GPU")
    assert cost.profile["read_gb_per_s"] == 1999 and cost.sm_rates != before.sm_rates
    assert GpuCostModel.load(None, *MODEL, "NVIDIA H200").profile["read_gb_per_s"] == 4230
    with pytest.raises(InvalidArgument, match="step_us"):
        GpuCostModel(cost.profile | {"step_us": 0}, *MODEL)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("calibrate --grid /nowhere", "--grid: expected a result file"),
        ("calibrate --grid {file} --thorough", "--thorough: expected nothing beside --grid"),
        ("calibrate --grid {file} --num-threads 2", "--num-threads: expected nothing"),
        ("bench attention --grid", "--json: expected the grid's result file"),
        ("bench attention --points 0:4", "--points: expected only when --grid measures"),
        ("bench attention --grid --json {file} --plot {file}.png --seconds 5", "--seconds"),
        ("bench attention --grid --json {file} --points 900:", "--points: expected some of"),
        ("bench attention --plot {file}.png --json {file} --case flat", "--case"),
    ],
)
def test_options_that_would_change_nothing_are_refused(arguments, words, grid_file):
    before = grid_file.read_text()
    result = CliRunner().invoke(app, arguments.format(file=grid_file).split())
    assert result.exit_code == 2 and words in result.output
    assert grid_file.read_text() == before


def test_the_grid_needs_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    path = tmp_path / "grid.jsonl"
    result = CliRunner().invoke(app, ["bench", "attention", "--grid", "--json", str(path)])
    assert result.exit_code == 1 and "no CUDA device" in result.output and not path.exists()


def test_cells_of_the_map(results):
    assert [grid_plot.log_cell(n, (128, 65536)) for n in (128, 255, 256, 65535, 65536)] == [
        0,
        0,
        1,
        8,
        8,
    ]
    lines = [line_of(11.0, 10.0), line_of(10.0, 10.0), line_of(5.0, batch=512) | {"candidates": []}]
    lines[1]["choice"]["layout"] = "large"
    layout, percent, text = grid_plot.grids(lines)
    assert layout.shape == (9, 9) and text[3, 3] == "mid+1" and text[8, 3] == "mid"
    assert (
        percent[3, 3] == pytest.approx(5.0) and percent[8, 3] != percent[8, 3]
    )  # NaN: not measured


def test_the_picture_is_written(grid_file, tmp_path):
    picture = tmp_path / "grid.png"
    arguments = ["bench", "attention", "--json", str(grid_file), "--plot", str(picture)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0 and "Regret of the choice" in done.output
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000
    empty = tmp_path / "empty.jsonl"
    arguments[3] = str(empty)
    assert "no measured point" in CliRunner().invoke(app, arguments).output
    assert not empty.exists()


def test_lines_are_plain_json(grid_file):
    for text in grid_file.read_text().splitlines():
        line = json.loads(
            text, parse_constant=lambda name: pytest.fail(name)
        )  # no NaN, no Infinity
        assert line["gpu"] == "Made-up GPU" and line["seconds"] >= 0


def test_the_planners_choices_are_those_that_an_h200_measured():
    """And 2.3% slower than the fastest candidate that was measured beside them."""
    results = read_results(RESULTS / "attention-grid-chosen-H200-tp1-2026-12-01.jsonl")
    profile = packaged_profile("NVIDIA H200")
    lines = [Line(results[p.index], p) for p in load_points()]
    known = [r for line in lines if (r := line.regret(profile)) is not None]
    assert len(known) == 240
    assert sum(known) / len(known) < 0.024 and max(known) < 0.17
