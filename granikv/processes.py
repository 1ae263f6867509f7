"""Processes that must not outlive the one that started them.

As a program it is the wrapper of a command that knows nothing of its parent:
`python processes.py SIGNAL PARENT_PID STACK_BYTES COMMAND...` becomes COMMAND, which gets the
signal from the system when its parent dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from typing import Any

PR_SET_PDEATHSIG = 1


def process_state(pid: int) -> str:
    """The letter of /proc/PID/stat, such as R, S, T (stopped) or Z; "" when there is none."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def die_with_parent(parent_pid: int, by: int = signal.SIGKILL) -> None:
    """A signal for this process when its parent dies; it ends when that was before this call."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by, 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit(f"parent {parent_pid} died while process {os.getpid()} started")


def limit_stack(wanted_bytes: int) -> int:
    """Sets this process's soft limit of a stack, as far as the hard limit allows; returns it.

    The C library makes the threads' stacks of the programs that this process then becomes or
    starts of that size (of 2 MB without a limit). It is address space; memory is what is used.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    allowed = wanted_bytes if hard == resource.RLIM_INFINITY else min(wanted_bytes, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (allowed, hard))
    return allowed


def start_owned(
    command: list[str],
    death_signal: int = signal.SIGKILL,
    stack_bytes: int = 0,
    **options: Any,
) -> subprocess.Popen:
    """Popen of a command that gets death_signal when this process dies, however it dies.

    The signal comes when the *thread* that started the command ends. So that is a thread of its
    own, which lives as long as the command and not as long as the caller's thread.
    stack_bytes: see limit_stack; 0 leaves the limit as it is.
    """
    who = [str(int(death_signal)), str(os.getpid()), str(stack_bytes)]
    wrapped = [sys.executable, "-I", "-S", __file__, *who, *command]
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
    die_with_parent(int(sys.argv[2]), int(sys.argv[1]))
    if int(sys.argv[3]):
        limit_stack(int(sys.argv[3]))
    os.execvp(sys.argv[4], sys.argv[4:])
