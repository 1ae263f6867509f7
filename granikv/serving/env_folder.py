"""The empty folder that Triton's Python backend makes in /tmp for each server.

It honours no TMPDIR, has a random name, and a server that is killed leaves it.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

NAME = re.compile(r"/tmp/python_env_\w{6}")
TICK_S = 1 / os.sysconf("SC_CLK_TCK")  # in which the system says when a process started


def find_env_folder(server_pid: int, stub_pid: int) -> Path | None:
    """The folder of that server: the last one made before its stub was started, which is the next
    thing that the backend does, within milliseconds."""
    try:
        earliest, latest = _start_time(server_pid) - TICK_S, _start_time(stub_pid) + TICK_S
    except OSError:
        return None
    found = {}
    for path in Path("/tmp").glob("python_env_*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.getuid() and earliest <= status.st_ctime <= latest:
                found[status.st_ctime] = path
    return found[max(found)] if found else None


def remove_env_folder(path: Path | None) -> None:
    """Only an empty one: the model has no environment of its own that Triton would unpack there."""
    if path is not None:
        with contextlib.suppress(OSError):
            path.rmdir()


def _start_time(pid: int) -> float:
    """Seconds, as file times are."""
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    ticks = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    return booted + int(ticks) * TICK_S
