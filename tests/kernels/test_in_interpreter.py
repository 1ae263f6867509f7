"""Every other test of this folder, in a process whose Triton interprets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_kernels_in_the_interpreter():
    run = subprocess.run(
        [sys.executable, "-m", "pytest", str(Path(__file__).parent), "-q", "-x", "--no-header"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, f"{run.stdout[-6000:]}\n{run.stderr[-2000:]}"
    assert " passed" in run.stdout, run.stdout
