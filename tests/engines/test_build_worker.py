"""The builder's process: it ends with the build that started it, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from granikv.processes import process_state

ROOT = Path(__file__).resolve().parents[2]
# in TensorRT's place: a build that never ends
ENDLESS = """
import os, pathlib, time
pathlib.Path(os.environ["WORKER_PID"]).write_text(str(os.getpid()))
time.sleep(600)
"""
BUILD = "from granikv.engines.builders import choose_builder; choose_builder('tensorrt')"


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGINT])
def test_a_builds_worker_ends_with_it(tmp_path, by):
    (tmp_path / "tensorrt.py").write_text(ENDLESS)
    pid_file = tmp_path / "pid"
    environ = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "WORKER_PID": str(pid_file)}
    build = subprocess.Popen(
        [sys.executable, "-c", BUILD], env=environ, stderr=subprocess.DEVNULL, cwd=tmp_path
    )
    deadline = time.monotonic() + 60
    while not (pid_file.exists() and pid_file.read_text()):
        assert time.monotonic() < deadline and build.poll() is None
        time.sleep(0.05)
    worker = int(pid_file.read_text())
    assert process_state(worker) not in ("", "Z")
    build.send_signal(by)
    build.wait(20)
    deadline = time.monotonic() + 5
    while process_state(worker) not in ("", "Z"):
        if time.monotonic() > deadline:
            os.kill(worker, signal.SIGKILL)
            pytest.fail(f"process {worker} outlived its build")
        time.sleep(0.05)
