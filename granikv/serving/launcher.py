"""Starts Triton, proves it with an inference, supervises it: `python -m granikv.serving.launcher`.

Triton neither notices nor reports a killed Python stub, and its open streams would wait for ever.
So the launcher watches server, stub and engine by pidfd; when one dies it kills the server (its
clients see UNAVAILABLE at once), removes what is left, and starts again. SIGTERM drains and exits 0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

from granikv.env import read as read_variable
from granikv.errors import GraniKVError, InvalidArgument, ModelFileError, Unavailable
from granikv.metrics import PROBE_PREFIX
from granikv.serving.run_dir import LINKS, RunDir, remove_shared_memory
from granikv.serving.server_check import PROBE, check_server
from granikv.serving.settings import default_python, parse_assignments
from granikv.serving.signals import sigterm_unwinds
from granikv.serving.tritonserver import (
    ServerAddress,
    check_ports,
    find_model_repository,
    find_tritonserver,
    last_errors,
    server_command,
    server_environment,
)

EXIT_TIMEOUT_S = 10
CLEAN_EXIT_S = 4.0  # an idle Triton 2.51 takes 2.1 to 2.8 s
DRAIN_TIMEOUT_S = 30.0  # longer than the model's drain_s and a step
ANSWER_S = 0.2  # for the stub to send what the engine's last batch gave
MODEL = "granikv"


def _signal_pid(pid: int | None, number: int) -> None:
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def is_running(pid: int) -> bool:
    """False for a dead process, also when nobody has waited for it yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


class ServerHandle:
    """One server at a time, on fixed ports. `start`, `wait_for_death`, `kill`, `stop`.

    env: extra variables for the server; the engine's settings are among them (settings.py).
    """

    def __init__(
        self,
        address: ServerAddress,
        model_repository: Path | None = None,
        engine_config: dict | None = None,
        env: dict[str, str] | None = None,
        log_path: Path | None = None,
        start_timeout_s: float = 900.0,
        run_dir: Path | None = None,
    ):
        self.address = address
        self.model_repository = model_repository or find_model_repository()
        python = read_variable("GRANIKV_PYTHON") or default_python()
        self.env = {"GRANIKV_PYTHON": python, **(env or {})}
        if engine_config:
            fields = read_variable("GRANIKV_ENGINE_CONFIG") | engine_config
            self.env["GRANIKV_ENGINE_CONFIG"] = json.dumps(fields)
        self.run_dir = RunDir(run_dir or read_variable("GRANIKV_RUN_DIR"))
        self.env["GRANIKV_RUN_DIR"] = str(self.run_dir.path)
        self.env["GRANIKV_LAUNCHER_LOCK"] = str(self.run_dir.lock_path)
        self.log_path = log_path
        self.log_start = 0  # bytes that were in the log before this server
        self.start_timeout_s = start_timeout_s
        self.process: subprocess.Popen | None = None
        self.shm_prefix = ""
        self.num_starts = 0
        self.restarted = threading.Event()
        self.stop_requested = threading.Event()

    # --- start

    def start(self) -> None:
        """Returns when a real inference was answered. Raises InvalidArgument or Unavailable."""
        environment = server_environment(self.env)
        if not self.num_starts:
            check_server(self.model_repository, environment, self.log_path)
        check_ports(self.address)
        self.run_dir.clean()
        self.shm_prefix = f"granikv_{os.getpid()}_{uuid.uuid4().hex[:8]}_"
        self.run_dir.note(self.shm_prefix)
        installation = find_tritonserver(self.run_dir.path / LINKS)
        command = server_command(
            installation, self.model_repository, self.address, self.shm_prefix, EXIT_TIMEOUT_S
        )
        log = open(self.log_path, "ab") if self.log_path else None  # noqa: SIM115
        self.log_start = log.tell() if log else 0
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT if log else None,
            start_new_session=True,
        )
        if log:
            log.close()
        try:
            self._wait_until_served()
        except BaseException:
            self.kill()
            raise
        self.num_starts += 1

    def _wait_until_served(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + self.start_timeout_s
        url = f"{self.address.http_url}/v2/health/ready"
        while time.monotonic() < deadline and not self.stop_requested.is_set():
            code = self.process.poll()
            if code is not None:
                raise Unavailable(
                    f"tritonserver ended with code {code} while starting{self._why()}"
                )
            try:
                urllib.request.urlopen(url, timeout=2).close()
                self.probe(max(1.0, deadline - time.monotonic()))
                return
            except (OSError, Unavailable):
                time.sleep(0.05)
        if self.stop_requested.is_set():
            raise Unavailable("stopped while the server started")
        raise Unavailable(f"no answer of the server within {self.start_timeout_s} s{self._why()}")

    def _why(self) -> str:
        """The stub's reason, or the log's last errors, and where the log is."""
        reason = self.run_dir.failure()
        if self.log_path is None:
            return f": {reason}" if reason else ""
        reason = reason or last_errors(self.log_path, self.log_start)
        return f": {reason or 'no error is logged'}; see {self.log_path}"

    def probe(self, timeout_s: float = 30.0) -> str:
        """One inference of one token. Raises Unavailable, InvalidArgument when it is refused."""
        body = {"id": f"{PROBE_PREFIX}-{uuid.uuid4().hex}", "text_input": PROBE, "max_tokens": 1}
        request = urllib.request.Request(
            f"{self.address.http_url}/v2/models/{MODEL}/generate", json.dumps(body).encode()
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return json.load(response)["text_output"]
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            if InvalidArgument.code in text:  # it would be refused for ever
                raise InvalidArgument("probe", PROBE, f"an answer ({text})") from None
            raise Unavailable(f"probe: {text}") from None
        except (OSError, KeyError, ValueError) as error:
            raise Unavailable(f"probe: {error}") from None

    # --- supervision

    @property
    def pids(self) -> dict[str, int]:
        found = {name: self.run_dir.read_pid(name) for name in ("stub", "engine")}
        if self.process is not None:
            found["server"] = self.process.pid
        return {name: pid for name, pid in found.items() if pid}

    def wait_for_death(self) -> str | None:
        """Name of the first process that dies, or None when a stop was asked for."""
        poller = select.poll()
        names: dict[int, str] = {}
        try:
            for name, pid in self.pids.items():
                try:
                    names[os.pidfd_open(pid)] = name
                except ProcessLookupError:
                    return name
            for descriptor in names:
                poller.register(descriptor, select.POLLIN)
            while not self.stop_requested.is_set():
                for descriptor, _ in poller.poll(200):
                    return names[descriptor]
            return None
        finally:
            for descriptor in names:
                os.close(descriptor)

    def kill(self) -> None:
        """SIGKILL to the server and what it started; its shared memory files go too."""
        pids = self.pids
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None
        _signal_pid(pids.get("stub"), signal.SIGKILL)
        _signal_pid(pids.get("engine"), signal.SIGKILL)
        self.run_dir.clean()
        remove_shared_memory(self.shm_prefix)

    def stop(self) -> int:
        """Drain and stop; returns 0, or not when a request may have been lost."""
        self.stop_requested.set()
        if self.process is None:
            self.close()
            return 0
        if not all(is_running(pid) for pid in self.pids.values()):
            self.kill()  # without its stub the server would wait for the whole exit timeout
            self.close()
            return -signal.SIGKILL
        was_drained = self._drain()
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(CLEAN_EXIT_S if was_drained else EXIT_TIMEOUT_S + 10)
        except subprocess.TimeoutExpired:
            code = 0 if was_drained else -signal.SIGKILL
        self.kill()
        self.close()
        return code

    def _drain(self) -> bool:
        """Let the engine finish or refuse what runs; True when every request was answered.

        A gRPC stream that a client holds open, even idle, keeps Triton 2.51 from unloading the
        model: it hangs until its exit timeout and never calls finalize (compare
        triton-inference-server/server issue 8755). After a drain nothing is lost by a kill.
        """
        drained = self.run_dir.path / "engine.drained"
        engine = self.run_dir.read_pid("engine")
        _signal_pid(engine, signal.SIGTERM)
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        while engine and is_running(engine) and time.monotonic() < deadline:
            if drained.exists():
                time.sleep(ANSWER_S)
                return True
            time.sleep(0.02)
        return False

    def close(self) -> None:
        self.run_dir.close()

    def supervise(self, max_restarts: int) -> int:
        """Restart what dies until a stop is asked for. Returns the exit code of the launcher."""
        backoff_s = 0.5
        restarts = 0
        while True:
            started = time.monotonic()
            dead = self.wait_for_death()
            if dead is None:
                return 0
            self.kill()
            print(f"granikv: the {dead} process died; server killed", file=sys.stderr, flush=True)
            if time.monotonic() - started > 60:
                restarts, backoff_s = 0, 0.5
            while not self.stop_requested.is_set():
                if restarts >= max_restarts:
                    return 1
                restarts += 1
                try:
                    self.start()
                    self.restarted.set()
                    print(self.ready_line(), flush=True)
                    break
                except GraniKVError as error:
                    print(f"granikv: restart failed: {error}", file=sys.stderr, flush=True)
                    self.stop_requested.wait(backoff_s)
                    backoff_s = min(2 * backoff_s, 30.0)

    def ready_line(self) -> str:
        pids = " ".join(f"{name}={pid}" for name, pid in sorted(self.pids.items()))
        address = self.address
        return (
            f"READY model={MODEL} http={address.http_url} grpc={address.grpc_url} "
            f"metrics={address.metrics_url} {pids}"
        )


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports that were free a moment ago, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for item in sockets:
            item.bind((host, 0))
        return [item.getsockname()[1] for item in sockets]
    finally:
        for item in sockets:
            item.close()


@contextlib.contextmanager
def running_server(
    engine_config: dict | None = None,
    *,
    address: ServerAddress | None = None,
    supervised: bool = True,
    max_restarts: int = 3,
    **handle_arguments,
) -> Iterator[ServerHandle]:
    """A server on free ports that is ready on entry and stopped on exit.

    supervised: a thread restarts it when one of its processes dies.
    """
    handle = ServerHandle(
        address or ServerAddress("127.0.0.1", *free_ports(3)),
        engine_config=engine_config,
        **handle_arguments,
    )
    with sigterm_unwinds():
        try:
            handle.start()
        except BaseException:
            handle.kill()
            handle.close()
            raise
        thread = None
        if supervised:
            thread = threading.Thread(target=handle.supervise, args=(max_restarts,), daemon=True)
            thread.start()
        try:
            yield handle
        finally:
            handle.stop_requested.set()
            if thread is not None:
                thread.join()
            handle.stop()


def _count(text: str) -> int:
    """For argparse: an integer of at least 0."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected an integer of at least 0, got {text!r}")
    return int(text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="granikv.serving.launcher", description=__doc__)
    parser.add_argument("--model", help="GGUF file or Hugging Face folder; the embedded model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--http-port", type=int, default=8000)
    parser.add_argument("--grpc-port", type=int, default=8001)
    parser.add_argument("--metrics-port", type=int, default=8002)
    parser.add_argument("--model-repository", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--engine-class", help="module:Class of the engine")
    parser.add_argument("--log", type=Path, help="file for the server's output")
    parser.add_argument("--max-restarts", type=_count, default=5)
    parser.add_argument("--no-restart", action="store_true", help="exit 1 when a process dies")
    options = parser.parse_args(arguments)
    try:
        engine_config = parse_assignments(options.set)
        if options.model:
            engine_config["model"] = str(Path(options.model).resolve())
        env = {"GRANIKV_ENGINE_CLASS": options.engine_class} if options.engine_class else {}
        handle = ServerHandle(
            ServerAddress(options.host, options.http_port, options.grpc_port, options.metrics_port),
            options.model_repository,
            engine_config,
            env,
            options.log,
        )
    except GraniKVError as error:
        print(f"granikv: {error}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: handle.stop_requested.set())
    try:
        handle.start()
    except GraniKVError as error:
        handle.close()
        print(f"granikv: {error}", file=sys.stderr)
        is_input = isinstance(error, InvalidArgument | ModelFileError)
        return 0 if handle.stop_requested.is_set() else 2 if is_input else 1
    print(handle.ready_line(), flush=True)
    code = handle.supervise(0 if options.no_restart else options.max_restarts)
    return handle.stop() or code


if __name__ == "__main__":
    sys.exit(main())
