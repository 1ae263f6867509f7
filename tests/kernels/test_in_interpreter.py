"""Every other test of this folder, in processes whose Triton interprets, as many as there are cores."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
# in processes of their own: each has a time limit
ALONE = ("test_fp8.py", "test_torch_ranks.py", "test_warm_up_state.py", "test_window.py")
PARTS = ("the rest", *ALONE)
LIMIT_S = 900  # four to six times what a quiet machine takes


def interpret(part: str) -> subprocess.CompletedProcess:
    """pytest of a part. Raises subprocess.TimeoutExpired."""
    rest = [FOLDER, *(f"--ignore={FOLDER / name}" for name in ALONE)]
    chosen = [FOLDER / part] if part in ALONE else rest
    return subprocess.run(
        [sys.executable, "-m", "pytest", *map(str, chosen), "-q", "-x", "--no-header"],
        # the interpreter is one thread of Python; more of torch's beside it only wait
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


@pytest.fixture(scope="module")
def runs(request):
    """By part, of those that were asked for: a future of its run."""
    asked = [i.callspec.params["part"] for i in request.session.items if i.path == Path(__file__)]
    pool = ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0))))
    yield {part: pool.submit(interpret, part) for part in asked}
    pool.shutdown(cancel_futures=True)


@pytest.mark.timeout(len(PARTS) * LIMIT_S + 60)
@pytest.mark.parametrize("part", PARTS)
def test_kernels_in_the_interpreter(part, runs):
    run = runs[part].result()
    assert run.returncode == 0, f"{run.stdout[-6000:]}\n{run.stderr[-2000:]}"
    assert " passed" in run.stdout, run.stdout
