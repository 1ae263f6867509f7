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
from granikv.processes import limit_stack
from granikv.serving import wire
from granikv.serving.placement import VISIBLE
from granikv.serving.settings import ServingSettings

logger = logging.getLogger(__name__)

STACK_BYTES = 8 << 20  # of the engine's threads, Linux's usual
TURN_MS = 500  # of the socket thread when nothing arrives
SILENCE_S = 5.0  # beyond the step limit: heartbeats come every second, from a thread of their own


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
        limit_stack(STACK_BYTES)  # the server's own is larger: see tritonserver.py
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
            env=os.environ | ({VISIBLE: settings.devices} if settings.devices else {}),
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
        silent_s = 0.0
        while not self._stopping:
            turn_started = time.monotonic()
            ready = dict(poller.poll(TURN_MS))
            if self._wake_fd in ready:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
            self._flush()
            try:
                was_heard = self._receive()
            except Exception:
                was_heard = True
                logger.exception("a report of the engine could not be handled")
            # a turn counts at most twice its time: this process may have been stopped meanwhile
            turn_s = min(time.monotonic() - turn_started, 2e-3 * TURN_MS)
            silent_s = 0.0 if was_heard else silent_s + turn_s
            if self._pidfd in ready and self._closing:
                return
            if self._pidfd in ready:
                self._report_death(f"the engine process {self.process.pid} died")
                return
            if reason := self._why_hung(silent_s):
                self.process.kill()
                self._report_death(reason)
                return

    def _why_hung(self, silent_s: float) -> str:
        """silent_s: since the engine's last report; "" while it is well. A stopped engine, or C code
        that keeps Python's lock, sends no heartbeat, so the last one's word does not do."""
        limit_s = self.settings.step_limit_s
        if self.heartbeat.step_s > limit_s:
            return f"a step ran for over {limit_s} s"
        if silent_s > limit_s + SILENCE_S:
            return f"no sign of life of the engine for over {limit_s + SILENCE_S} s"
        return ""

    def _flush(self) -> None:
        commands = []
        while self._outgoing:
            commands.append(self._outgoing.popleft())
        if commands:
            with contextlib.suppress(zmq.Again):
                self._commands.send(wire.encode(commands), zmq.NOBLOCK)

    def _receive(self) -> bool:
        """True when the engine reported anything."""
        was_heard = False
        gathered: dict[str, wire.Output] = {}
        stats = None
        while True:
            try:
                report = wire.decode_report(self._reports.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
            was_heard = True
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
        return was_heard

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
