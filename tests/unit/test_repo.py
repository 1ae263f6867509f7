"""The repository keeps its own rules: file sizes, executable scripts, no shells of files."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def check_sizes():
    spec = importlib.util.spec_from_file_location(
        "check_sizes", ROOT / "build_scripts" / "check_sizes.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_source_file_is_far_over_its_limit(check_sizes):
    over = [entry for entry in check_sizes.oversized() if entry[1] > entry[2] * 1.1]
    assert over == []


def test_check_sizes_reports_long_files_and_knows_model_py(check_sizes, tmp_path):
    package = tmp_path / "granikv"
    package.mkdir()
    (package / "long.py").write_text("x = 1\n" * 401)
    (package / "short.py").write_text("x = 1\n" * 400)
    stub = tmp_path / "model_repository" / "granikv" / "1"
    stub.mkdir(parents=True)
    (stub / "model.py").write_text("x = 1\n" * 151)
    assert [
        (str(path), lines, limit) for path, lines, limit in check_sizes.oversized(tmp_path)
    ] == [
        ("granikv/long.py", 401, 400),
        ("model_repository/granikv/1/model.py", 151, 150),
    ]


@pytest.mark.parametrize(
    "name", [".ci/run", "build_scripts/find_python.sh", "build_scripts/build_engines.sh"]
)
def test_scripts_are_executable(name):
    assert os.access(ROOT / name, os.X_OK)


def test_makefile_has_the_targets_users_rely_on():
    text = (ROOT / "Makefile").read_text()
    for target in ("demo", "serve", "test", "lint", "typecheck", "clean"):
        assert re.search(rf"^{target}:", text, re.MULTILINE), target


def make(*arguments) -> str:
    done = subprocess.run(
        ["make", "-C", str(ROOT), "--no-print-directory", *arguments],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not shutil.which("make"), reason="make is missing")
def test_make_alone_lists_every_target(tmp_path):
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    listed = re.findall(r"^ *make (\w+) +\S", make(f"VENV={tmp_path / 'venv'}"), re.MULTILINE)
    assert listed == phony[1].split()
    assert not (tmp_path / "venv").exists()


@pytest.mark.skipif(not shutil.which("make"), reason="make is missing")
@pytest.mark.parametrize("target", ["demo", "serve", "setup", "test"])
def test_set_up_says_its_steps_and_installs_what_the_target_needs(tmp_path, target):
    """Only commands of a dry run: nothing is installed."""
    commands = make("--dry-run", f"VENV={tmp_path / 'venv'}", target)
    for step in range(1, 6):
        assert f"setup {step}/5: " in commands
    extras = set(",".join(re.findall(r"-e \"\.\[(.*?)\]\"", commands)).split(","))
    assert {"serve", "bench"} <= extras
    assert ("test" in extras) == ("dev" in extras) == (target == "test")


def test_constraints_are_plain_pins():
    lines = (ROOT / "build_scripts" / "constraints-cpu.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert "numpy==1.26.4" in pins
    for line in pins:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line), line


def test_relative_links_in_the_documents_lead_somewhere():
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_names_of_test_files_are_unique():
    """pytest imports them by name alone, and refuses two of one name."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) > 50
    assert sorted(set(names)) == sorted(names)
