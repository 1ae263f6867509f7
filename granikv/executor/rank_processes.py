"""The processes of an engine's ranks: started, watched, told what to run, ended.

The engine's process takes part in no collective. It only waits for reports, and so notices a rank
that ended (pidfd) or was stopped (its state), wherever the others wait for that rank; then it kills
them all. A rank that is slow is left alone: a prefill or a first compilation takes its time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import time
from typing import Any

from granikv.errors import GraniKVError, Unavailable
from granikv.executor.group import RANK_ENVIRONMENT, RankSettings
from granikv.executor.rank_channel import RankChannel
from granikv.processes import process_state, start_owned

RANK_MODULE = "granikv.executor.rank_main"
STOPPED_S = 1.5  # a rank that is stopped for so long is stuck: the others wait for it
WATCH_S = 0.5  # between two looks at the ranks' states
GATHER_S = 0.3  # a rank's end takes others with it; who was first shows within this
STOP_TIMEOUT_S = 10
KILL_TIMEOUT_S = 1.0
HEAD = struct.Struct("<Q")  # bytes of a report


@dataclasses.dataclass(frozen=True)
class Report:
    rank: int
    kind: str  # "joined", "ready", "output", "profile" or "error"
    content: Any = None


class RankProcesses:
    """settings: of any rank, without descriptors. `failure`: why there are no ranks any more."""

    def __init__(self, settings: RankSettings):
        self.failure: Exception | None = None
        self.processes: list[subprocess.Popen] = []
        self._channel = RankChannel.create(settings.tp_size)
        self._poller = select.poll()
        self._rank_of: dict[int, int] = {}  # by descriptor of a pipe or a process
        self._pipes: list[int] = []
        self._received = [bytearray() for _ in range(settings.tp_size)]
        self._stopped_since: dict[int, float] = {}
        self._watch_due = 0.0
        self._is_open = True
        store = os.memfd_create("granikv_rendezvous")
        try:
            for rank in range(settings.tp_size):
                self._start(settings, rank, store)
        except BaseException:
            self.kill()
            raise
        finally:
            os.close(store)  # the ranks have it

    def _start(self, settings: RankSettings, rank: int, store: int) -> None:
        pipe, reports = os.pipe()
        channel = self._channel
        inherited = (store, channel.memory, *channel.wakes, reports)
        own = dataclasses.replace(
            settings, rank=rank, store=store, memory=channel.memory, wakes=tuple(channel.wakes),
            reports=reports,
        )  # fmt: skip
        try:
            process = start_owned(
                [sys.executable, "-m", RANK_MODULE, json.dumps(dataclasses.asdict(own))],
                stdin=subprocess.DEVNULL,
                pass_fds=inherited,
                env=os.environ | RANK_ENVIRONMENT,
                start_new_session=True,  # Ctrl-C is the engine's, which ends the ranks in order
            )
        finally:
            os.close(reports)
        self.processes.append(process)
        self._pipes.append(pipe)
        for descriptor in (pipe, os.pidfd_open(process.pid)):
            self._rank_of[descriptor] = rank
            self._poller.register(descriptor, select.POLLIN)

    # --- messages

    def send(self, message: tuple) -> None:
        """To every rank. Raises what `receive` raises."""
        if self.failure is not None:
            raise self.failure
        content = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._channel.send(content, self._wait_for_room)

    def _wait_for_room(self) -> None:
        self._watch()
        time.sleep(1e-3)

    def receive(self, timeout_s: float) -> list[Report]:
        """Reports that came within timeout_s; none when none did.

        Raises the error a rank reported, or Unavailable when one ended, is stopped, or differs.
        """
        if self.failure is not None:
            raise self.failure
        ready = [descriptor for descriptor, _ in self._poller.poll(timeout_s * 1e3)]
        reports = [report for pipe in ready if pipe in self._pipes for report in self._read(pipe)]
        is_wrong = any(report.kind == "error" for report in reports)
        if is_wrong or any(descriptor not in self._pipes for descriptor in ready):
            self._find_cause(reports)
        self._watch()
        try:
            self._channel.compare()
        except Unavailable as error:
            self.fail(error)
        return reports

    def _read(self, pipe: int) -> list[Report]:
        """What a rank has sent so far; a part of a report stays for the next time."""
        content = os.read(pipe, 2**20)
        if not content:
            self._poller.unregister(pipe)
            return []
        rank, reports = self._rank_of[pipe], []
        buffer = self._received[rank]
        buffer += content
        while len(buffer) >= HEAD.size:
            end = HEAD.size + HEAD.unpack_from(buffer)[0]
            if len(buffer) < end:
                break
            reports.append(Report(rank, *pickle.loads(buffer[HEAD.size : end])))
            del buffer[:end]
        return reports

    # --- watch

    def _watch(self) -> None:
        now = time.monotonic()
        if now < self._watch_due:
            return
        self._watch_due = now + WATCH_S
        for rank, process in enumerate(self.processes):
            state = process_state(process.pid)
            if state in ("", "Z"):
                self._find_cause([])
            if state != "T":
                self._stopped_since.pop(rank, None)
            elif now - self._stopped_since.setdefault(rank, now) >= STOPPED_S:
                expected = (
                    f"rank {rank} (process {process.pid}): expected it to run, it has been stopped"
                )
                self.fail(Unavailable(f"{expected} for {STOPPED_S} s; restart the engine"))

    def _find_cause(self, reports: list[Report]) -> None:
        """Fails with a rank's end by a signal, else with the first error or end that was seen.

        SIGABRT is as an error: a rank that lost another one may raise it.
        """
        found = self._errors(reports)
        deadline = time.monotonic() + GATHER_S
        while (left_s := deadline - time.monotonic()) > 0:
            ready = [descriptor for descriptor, _ in self._poller.poll(left_s * 1e3)]
            for pipe in ready:
                if pipe in self._pipes:
                    found += self._errors(self._read(pipe))
            time.sleep(0.01)  # a dead process stays ready
        found += self._errors([])
        for rank, process in enumerate(self.processes):
            if (process.returncode or 0) < 0 and process.returncode != -signal.SIGABRT:
                self.fail(_ended(rank, process.returncode))
        self.fail(found[0])

    def _errors(self, reports: list[Report]) -> list[Exception]:
        """Those reported, then those of ranks that have ended."""
        errors = [report.content for report in reports if report.kind == "error"]
        codes = [process.poll() for process in self.processes]
        return errors + [_ended(rank, code) for rank, code in enumerate(codes) if code is not None]

    def fail(self, error: Exception) -> None:
        """Kills what is left, and raises the error."""
        if self.failure is None:
            self.failure = error
        self.kill()
        raise self.failure

    # --- end

    def close(self) -> None:
        """The ranks finish what they have and leave. Late ones are killed."""
        if self.failure is None:
            with contextlib.suppress(GraniKVError):
                self.send(("stop",))
            deadline = time.monotonic() + STOP_TIMEOUT_S
            for process in self.processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.1, deadline - time.monotonic()))
            self.failure = Unavailable("ranks: the engine is closed")
        self.kill()

    def kill(self) -> None:
        """SIGKILL to all of them, also to stopped ones; nothing of them is left."""
        for process in self.processes:
            process.kill()
        deadline = time.monotonic() + KILL_TIMEOUT_S
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in a driver
                process.wait(max(0.0, deadline - time.monotonic()))
        if self._is_open:
            self._is_open = False
            self._channel.close()
            for descriptor in self._rank_of:
                os.close(descriptor)


def _ended(rank: int, code: int) -> Unavailable:
    how = f"with {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
    return Unavailable(
        f"rank {rank}: expected a running process, it ended {how}; its own output says why; "
        "restart the engine"
    )


def write_report(pipe: int, kind: str, content: Any = None) -> None:
    """In a rank: to the engine's process."""
    body = pickle.dumps((kind, content), protocol=pickle.HIGHEST_PROTOCOL)
    view = memoryview(HEAD.pack(len(body)) + body)
    while view:
        view = view[os.write(pipe, view) :]
