"""Processes that must not outlive the one that started them.

As a program it is the wrapper of a command that knows nothing of its parent:
`python processes.py PARENT_PID COMMAND...` becomes COMMAND, which the system kills with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from typing import Any

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """SIGKILL for this process when its parent dies, also when it died before this call."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit(f"parent {parent_pid} died while process {os.getpid()} started")


def start_owned(command: list[str], **options: Any) -> subprocess.Popen:
    """Popen of a command that the system kills when this process dies, however it dies.

    The signal comes when the *thread* that started the command ends. So that is a thread of its
    own, which lives as long as the command and not as long as the caller's thread.
    """
    wrapped = [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]
    started: Future[subprocess.Popen] = Future()

    def own() -> None:
        try:
            process = subprocess.Popen(wrapped, **options)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(process)
        with contextlib.suppress(ChildProcessError):  # the caller has waited for it
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    threading.Thread(target=own, daemon=True, name=f"owner of {command[0]}").start()
    return started.result()


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
