"""The stub's side of the engine process: starts it, sends commands, hands out its batches.

Any thread may call `send`; one thread of the client owns the sockets. All reports go to the
callbacks on that thread. When the engine dies or a step hangs, `on_death` is called once with
the reason. It knows nothing of Triton.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import zmq

from granikv.errors import Unavailable
from granikv.metrics import Stats
from granikv.serving import wire
from granikv.serving.settings import ServingSettings

logger = logging.getLogger(__name__)


class EngineClient:
    """on_outputs gets everything that gathered since its last call, one entry per request."""

    def __init__(
        self,
        settings: ServingSettings,
        on_outputs: Callable[[list[wire.Output]], None],
        on_stats: Callable[[Stats], None],
        on_death: Callable[[str], None],
    ):
        self.settings = settings
        self.on_outputs, self.on_stats, self.on_death = on_outputs, on_stats, on_death
        self.heartbeat = wire.Heartbeat(0, 0.0)
        self._outgoing: deque[wire.Command] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = self._closing = False
        self.dead_reason: str | None = None

        run_dir = Path(settings.run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        address = f"ipc://{run_dir}/e{os.getpid()}"
        self._socket_paths = [Path(address.removeprefix("ipc://") + s) for s in (".in", ".out")]
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PUSH)
        self._reports = self._context.socket(zmq.PULL)
        for socket, suffix in ((self._commands, ".in"), (self._reports, ".out")):
            socket.set(zmq.LINGER, 0)
            socket.set_hwm(0)
            socket.bind(address + suffix)
        self.process = subprocess.Popen(
            [
                settings.python,
                "-m",
                "granikv.serving.engine_process",
                f"--socket={address}",
                f"--config={json.dumps(settings.engine_config)}",
                f"--engine-class={settings.engine_class}",
                f"--parent-pid={os.getpid()}",
                f"--pid-file={run_dir / 'engine.pid'}",
                f"--drain-s={settings.drain_s}",
            ],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._pidfd = os.pidfd_open(self.process.pid)
        self._thread = threading.Thread(target=self._run, name="granikv-engine-io", daemon=True)
        try:
            self._wait_ready()
        except BaseException:
            self.process.kill()
            raise
        self._thread.start()

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + self.settings.start_timeout_s
        while time.monotonic() < deadline:
            if self._reports.poll(100):
                report = wire.decode_report(self._reports.recv())
                if isinstance(report, wire.Failed):
                    raise Unavailable(f"the engine did not start: {report.error_text}")
                if isinstance(report, wire.Ready):
                    return
            elif self.process.poll() is not None:
                raise Unavailable(f"the engine process ended with code {self.process.returncode}")
        raise Unavailable(f"the engine was not ready after {self.settings.start_timeout_s} s")

    def send(self, command: wire.Command) -> None:
        """Queue a command; what gathers until the socket thread wakes goes in one message."""
        self._outgoing.append(command)
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._reports, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        poller.register(self._pidfd, zmq.POLLIN)
        while not self._stopping:
            ready = dict(poller.poll(500))
            if self._wake_fd in ready:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
            self._flush()
            try:
                self._receive()
            except Exception:
                logger.exception("a report of the engine could not be handled")
            if self._pidfd in ready and self._closing:
                return
            if self._pidfd in ready:
                self._report_death(f"the engine process {self.process.pid} died")
                return
            if self.heartbeat.step_s > self.settings.step_limit_s:
                self.process.kill()
                self._report_death(f"a step ran for over {self.settings.step_limit_s} s")
                return

    def _flush(self) -> None:
        commands = []
        while self._outgoing:
            commands.append(self._outgoing.popleft())
        if commands:
            with contextlib.suppress(zmq.Again):
                self._commands.send(wire.encode(commands), zmq.NOBLOCK)

    def _receive(self) -> None:
        gathered: dict[str, wire.Output] = {}
        stats = None
        while True:
            try:
                report = wire.decode_report(self._reports.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
            if isinstance(report, wire.Heartbeat):
                self.heartbeat = report
            elif isinstance(report, wire.Batch):
                self.heartbeat = wire.Heartbeat(report.step, 0.0)
                stats = report.stats or stats
                for output in report.outputs:
                    earlier = gathered.get(output.request_id)
                    if earlier is None:
                        gathered[output.request_id] = output
                    elif not earlier.finished:
                        earlier.absorb(output)
        if stats is not None:
            self.on_stats(stats)
        if gathered:
            self.on_outputs(list(gathered.values()))

    def _report_death(self, reason: str) -> None:
        self.dead_reason = reason
        self.on_death(reason)

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the engine process; kill it when it does not end in time."""
        self._closing = True
        self.send(wire.Shutdown())
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._stopping = True
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake_fd, 1)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._context.destroy(linger=0)
            os.close(self._wake_fd)
            os.close(self._pidfd)
        for path in self._socket_paths:
            path.unlink(missing_ok=True)
