"""The cost model on made-up tables, its cache and its shipped profile; nothing here is timed."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest

from granikv import calibration
from granikv.calibration import measure_cpu_profile
from granikv.config import ModelConfig
from granikv.cost_model import CostModel, Grid
from granikv.errors import InvalidArgument
from granikv.gpu_cost_model import GpuCostModel
from granikv.native import build

MODEL = ModelConfig("llama", 30, 576, 1536, 9, 3, 64, 49152, 8192)
ROWS, HOT, COLD = [1, 4, 16, 64], [64, 256, 1024, 4096], [16, 64, 256]


def profile(cascade_per_row: float = 0.02, gemm_start: float = 60.0, per_token=0.2) -> dict:
    """cascade: 10 + rows * tokens * a; gemm: a start and a smaller slope; cold: per token."""
    return {
        "version": 1,
        "heads": [9, 3, 64],
        "read_gb_per_s": 10.0,
        "gflops": 100.0,
        "rows": ROWS,
        "hot_tokens": HOT,
        "cascade_us": [[10 + r * n * cascade_per_row + 0.05 * n for n in HOT] for r in ROWS],
        "gemm_us": [[gemm_start + r * n * 0.01 + 0.05 * n for n in HOT] for r in ROWS],
        "cold_tokens": COLD,
        "cold_us": [[20 + r * n * per_token for n in COLD] for r in ROWS],
        "merge_us": [20.0, 20.0, 25.0, 40.0],
    }


def choice(model: CostModel, rows: int, kv_len: int) -> str:
    times = {v: model.hot_us(v, rows, kv_len) + model.merge_us(rows) for v in ("cascade", "gemm")}
    times["flat"] = model.marginal_flat_us(rows, kv_len)
    return min(times, key=times.__getitem__)


def test_choice_follows_rows_and_length():
    model = CostModel(profile(), MODEL)
    assert choice(model, 16, 4096) == "gemm"
    assert choice(model, 4, 512) == "cascade"
    assert choice(model, 2, 16) == "flat"


def test_changed_profile_changes_the_choice():
    assert choice(CostModel(profile(gemm_start=1e6), MODEL), 16, 4096) == "cascade"
    assert choice(CostModel(profile(cascade_per_row=0.001), MODEL), 16, 4096) == "cascade"
    assert choice(CostModel(profile(per_token=0.0), MODEL), 4, 200) == "flat"


def test_table_is_exact_at_its_points_and_continues_outside():
    model = CostModel(profile(), MODEL)
    for rows in (1, 16, 64, 10, 128):
        for tokens in (64, 700, 4096, 10000):
            want = 10 + rows * tokens * 0.02 + 0.05 * tokens
            assert model.hot_us("cascade", rows, tokens) == pytest.approx(want)
    assert model.cold_us(4, 400) == pytest.approx(20 + 400 * 0.2)
    assert model.cold_us(0, 0) == 0.0 and model.cold_us(3, 0) == 0.0
    assert Grid([1, 2], [1, 2], [[0, 1], [0, 9]])(0, 0) >= 0
    assert model.merge_us(128) == pytest.approx(80.0)


def test_other_head_geometry_is_scaled():
    wide = ModelConfig("llama", 30, 576, 1536, 18, 6, 64, 49152, 8192)
    assert CostModel(profile(), wide).hot_us("gemm", 4, 256) == pytest.approx(
        2 * CostModel(profile(), MODEL).hot_us("gemm", 4, 256)
    )


def test_label():
    model = CostModel(profile(), MODEL)
    assert model.label(1, 4096, 4096) == "memory"
    assert model.label(512, 4096, 4096) == "compute"


def test_unknown_variant_version_and_file_are_errors(tmp_path):
    with pytest.raises(InvalidArgument, match="cascade"):
        CostModel(profile(), MODEL).hot_us("flat", 1, 1)
    with pytest.raises(InvalidArgument, match="version"):
        CostModel({"version": 0}, MODEL)
    with pytest.raises(InvalidArgument, match="missing.json"):
        CostModel.load(str(tmp_path / "missing.json"), MODEL)


def test_given_and_shipped_profiles(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(profile()))
    assert CostModel.load(str(path), MODEL).hot_us("gemm", 1, 64) == pytest.approx(63.84)
    assert CostModel.load("default", MODEL).hot_us("cascade", 16, 4096) > 0


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[1, 2]", b"\xff\xfe", b"{}", b'{"version": 1}',
        json.dumps(profile() | {"heads": 3}).encode(),
        json.dumps(profile() | {"heads": [0, 0, 0]}).encode(),
        json.dumps(profile() | {"rows": "few"}).encode(),
        json.dumps(profile() | {"merge_us": [1.0]}).encode(),
        json.dumps(profile() | {"gflops": 0}).encode(),
        json.dumps({k: v for k, v in profile().items() if k != "read_gb_per_s"}).encode(),
        json.dumps(profile() | {"cold_us": [[float("nan")] * 3] * 4}).encode(),
    ],
)  # fmt: skip
def test_a_file_that_is_no_profile_is_refused_when_it_is_read(tmp_path, content):
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(InvalidArgument, match=f"profile: .*got '{path}'"):
        CostModel.load(str(path), MODEL)
    with pytest.raises(InvalidArgument, match=f"profile: .*got '{path}'"):
        GpuCostModel.load(str(path), MODEL, 2, "")


def test_the_shipped_profile_of_a_gpu_is_called_default_as_well():
    assert GpuCostModel.load("default", MODEL, 2, "no such GPU").profile["gemm_tflops"] > 0


def test_profile_is_measured_once_and_cached(tmp_path, monkeypatch):
    calls = []

    def fake(model_config, meter):
        calls.append(model_config)
        return profile()

    monkeypatch.setattr(calibration, "machine_load", lambda: (0.0, 2))
    monkeypatch.setattr(calibration.Path, "home", lambda: tmp_path)
    monkeypatch.setattr(calibration, "measure_cpu_profile", fake)
    first = CostModel.load(None, MODEL, 2).profile
    assert CostModel.load(None, MODEL, 2).profile == first and len(calls) == 1
    CostModel.load(None, MODEL, 1)  # another number of threads is another profile
    (cached, *_) = (tmp_path / ".cache" / "granikv").glob("cpu-*.json")
    cached.write_text("{")
    CostModel.load(None, MODEL, 1)
    CostModel.load(None, MODEL, 2)
    assert len(calls) == 3


def test_a_profile_of_a_busy_machine_is_measured_again_later(tmp_path, monkeypatch, caplog):
    calls = []

    def fake(model_config, meter):
        calls.append(model_config)
        return profile() | {"disturbed": len(calls) == 1}

    shipped = CostModel.load("default", MODEL).profile

    monkeypatch.setattr(calibration, "machine_load", lambda: (0.0, 2))
    monkeypatch.setattr(calibration.Path, "home", lambda: tmp_path)
    monkeypatch.setattr(calibration, "measure_cpu_profile", fake)
    assert CostModel.load(None, MODEL, 2).profile == shipped
    assert "granikv calibrate" in caplog.text
    assert CostModel.load(None, MODEL, 2).profile == shipped
    assert len(calls) == 1
    (cached,) = (tmp_path / ".cache" / "granikv").glob("*.json")
    os.utime(cached, (0, 0))
    CostModel.load(None, MODEL, 2)
    os.utime(cached, (0, 0))
    assert CostModel.load(None, MODEL, 2).profile == profile() | {"disturbed": False}
    assert len(calls) == 2, "a quiet machine's profile stays"


def test_a_very_busy_machine_is_not_measured_at_all(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(calibration.Path, "home", lambda: tmp_path)
    monkeypatch.setattr(calibration, "machine_load", lambda: (10.0, 2))
    monkeypatch.setattr(
        calibration, "measure_cpu_profile", lambda *_, **__: pytest.fail("measured")
    )
    shipped = CostModel.load("default", MODEL).profile
    assert CostModel.load(None, MODEL, 2).profile == shipped
    assert "load 10.0 on 2 processors" in caplog.text and not list(tmp_path.rglob("*.json"))


def test_calibrate_stores_what_the_engine_then_loads(tmp_path, monkeypatch):
    from rich.console import Console

    from granikv.bench import calibrate

    made = profile(gemm_start=77.0) | {"device": "x", "num_threads": 2, "torch": "2"}
    made |= {"warnings": [f"warning {i}" for i in range(9)]}
    monkeypatch.setattr(calibration.Path, "home", lambda: tmp_path)
    monkeypatch.setattr(calibration, "measure_cpu_profile", lambda *_, **__: made)
    monkeypatch.setattr(calibrate, "load_config", lambda model: MODEL)
    console = Console(file=(tmp_path / "out").open("w"), width=200)
    path = calibrate.run_calibration(None, 2, console=console)
    assert path == calibration.profile_path(MODEL, 2)
    assert CostModel.load(None, MODEL, 2).profile == made
    other = calibrate.run_calibration(None, 2, tmp_path / "mine.json", console=console)
    assert CostModel.load(str(other), MODEL).profile == made
    console.file.close()
    text = (tmp_path / "out").read_text()
    assert str(path) in text and "--set profile=" in text and "and 4 more" in text


def test_measured_profile_has_every_table():
    small = ModelConfig("llama", 1, 64, 64, 4, 2, 16, 32, 64)
    model = CostModel(measure_cpu_profile(small), small)
    assert choice(model, 4, 512) in ("cascade", "gemm", "flat")
    assert model.profile["read_gb_per_s"] > 0


def test_another_kernel_has_another_profile(monkeypatch):
    loaded = (SimpleNamespace(_name=f"folder/attention-{i}.so") for i in range(2))
    paths = set()
    for library in (*loaded, None):
        monkeypatch.setattr(build, "library", lambda library=library: library)
        paths.add(calibration.profile_path(MODEL, 2))
    assert len(paths) == 3
