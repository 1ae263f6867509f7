"""Every other test of this folder, in a process whose Triton interprets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FP8 = "test_fp8.py"  # in a process of its own: each has a time limit


@pytest.mark.parametrize("part", ["all but FP8", "FP8"])
def test_kernels_in_the_interpreter(part):
    folder = Path(__file__).parent
    chosen = [folder / FP8] if part == "FP8" else [folder, f"--ignore={folder / FP8}"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *map(str, chosen), "-q", "-x", "--no-header"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, f"{run.stdout[-6000:]}\n{run.stderr[-2000:]}"
    assert " passed" in run.stdout, run.stdout
