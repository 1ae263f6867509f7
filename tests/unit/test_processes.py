"""Processes end with their parent, and not with the thread that asked for them."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from granikv.processes import start_owned

ROOT = Path(__file__).resolve().parents[2]
PARENT = """
import time
from granikv.processes import start_owned
print(start_owned(["/bin/sleep", "60"]).pid, flush=True)
time.sleep(60)
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_alive(pid)


def test_a_command_is_killed_with_its_parent():
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    pid = int(parent.stdout.readline())
    assert is_alive(pid)
    parent.kill()
    parent.wait()
    assert ends_within(pid, 5)


def test_a_command_outlives_the_thread_that_asked_for_it():
    started = []
    thread = threading.Thread(target=lambda: started.append(start_owned(["/bin/sleep", "60"])))
    thread.start()
    thread.join()
    (process,) = started
    try:
        time.sleep(0.5)
        assert process.poll() is None
        assert Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n"
    finally:
        os.kill(process.pid, signal.SIGKILL)
    assert process.wait(5) == -signal.SIGKILL


def test_codes_and_errors_reach_the_caller(tmp_path):
    assert start_owned(["/bin/sh", "-c", "exit 7"]).wait(10) == 7
    with pytest.raises(FileNotFoundError):
        start_owned(["/bin/true"], cwd=tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("hard", "expected"),
    [(resource.RLIM_INFINITY, "65536 unlimited"), (32 << 20, "32768 32768")],
)
def test_a_command_gets_its_stack_as_far_as_the_hard_limit_allows(hard, expected):
    """Also instead of an unlimited one, for which the C library's threads have 2 MB."""
    shell = ["/bin/sh", "-c", "echo $(ulimit -s) $(ulimit -Hs)"]
    script = f"from granikv.processes import start_owned\nstart_owned({shell}, 9, 64 << 20).wait()"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_STACK, (hard, hard)),
    )  # fmt: skip
    assert done.stdout.split() == expected.split()
