"""Every other test of this folder, in a process whose Triton interprets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# in processes of their own: each has a time limit
ALONE = ("test_fp8.py", "test_torch_ranks.py", "test_warm_up_state.py", "test_window.py")


LIMIT_S = 900  # four to six times what a quiet machine takes


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("part", ["the rest", *ALONE])
def test_kernels_in_the_interpreter(part):
    folder = Path(__file__).parent
    rest = [folder, *(f"--ignore={folder / name}" for name in ALONE)]
    chosen = [folder / part] if part in ALONE else rest
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *map(str, chosen), "-q", "-x", "--no-header"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert run.returncode == 0, f"{run.stdout[-6000:]}\n{run.stderr[-2000:]}"
    assert " passed" in run.stdout, run.stdout
