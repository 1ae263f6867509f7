"""Processes that compile kernels end with the one that started them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from granikv.processes import process_state

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60


def children(pid: int) -> list[int]:
    """Of all its threads, without those that have ended."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return [child for child in found if process_state(child) not in ("", "Z")]


def test_a_killed_compile_leaves_no_worker(tmp_path):
    command = [
        sys.executable,
        "-m",
        "trtllm_plugin.aot",
        "--models",
        "llama-3.1-8b",
        "--arch",
        "90",
    ]
    command += ["--tp", "1", "--elements", "bf16", "--jobs", "2"]
    folders = ["--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]
    with open(tmp_path / "log", "w") as log:
        compile_all = subprocess.Popen(
            [*command, *folders], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
        )
    workers: list[int] = []
    try:
        deadline = time.monotonic() + LIMIT_S
        # a kernel is there, so both workers have begun; the third child tracks their semaphores
        while len(workers) < 3 or not list((tmp_path / "cache").glob("*/*.cubin")):
            assert compile_all.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, "no kernel was compiled"
            time.sleep(0.05)
            workers = children(compile_all.pid)
        compile_all.send_signal(signal.SIGKILL)
        compile_all.wait(20)
        deadline = time.monotonic() + 10
        while alive := [pid for pid in workers if process_state(pid) not in ("", "Z")]:
            assert time.monotonic() < deadline, f"processes {alive} outlived the compile"
            time.sleep(0.05)
    finally:
        for pid in (compile_all.pid, *workers):
            subprocess.run(["kill", "-9", str(pid)], stderr=subprocess.DEVNULL)
