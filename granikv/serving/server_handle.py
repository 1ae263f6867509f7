"""One Triton server with its stub and engine process: start, proof by an inference, death, stop.

Triton neither notices nor reports a killed Python stub, and its open streams would wait for ever.
So server, stub and engine are watched by pidfd; when one dies the server is killed (its clients
see UNAVAILABLE at once), what is left is removed, and it is started again.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path

from granikv.env import read as read_variable
from granikv.errors import GraniKVError, InvalidArgument, ModelFileError, Unavailable
from granikv.metrics import PROBE_PREFIX
from granikv.processes import process_state, start_owned
from granikv.serving.env_folder import find_env_folder, remove_env_folder
from granikv.serving.listeners import listened_ports
from granikv.serving.run_dir import LINKS, RunDir, remove_shared_memory
from granikv.serving.server_check import PROBE, check_server, read_parameters
from granikv.serving.settings import ServingSettings, default_python
from granikv.serving.tritonserver import (
    STACK_BYTES,
    ServerAddress,
    check_ports,
    check_stack,
    find_model_repository,
    find_tritonserver,
    last_errors,
    server_command,
    server_environment,
)

EXIT_TIMEOUT_S = 10
CLEAN_EXIT_S = 4.0  # an idle Triton 2.51 takes 2.1 to 2.8 s
STEP_PATIENCE_S = 20.0  # for the step that runs when the engine's drain_s are over
NUM_PROCESSES = 3  # server, stub, engine
LOST = 1  # exit code when requests may be lost
ANSWER_S = 0.2  # for the stub to send what the engine's last batch gave
EARLY_DEATH_S = 10.0  # after a start; a request that ends the server comes later as a rule
MODEL = "granikv"


def _signal_pid(pid: int | None, number: int) -> None:
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def is_running(pid: int) -> bool:
    """False for a dead process, also when nobody has waited for it yet."""
    return process_state(pid) not in ("", "Z")


def is_input(error: GraniKVError) -> bool:
    """Nothing that another try would change."""
    return isinstance(error, InvalidArgument | ModelFileError)


def _patience_s(failures: int) -> float:
    """Before the next try, after so many in a row: 0.5 s, twice as long each time, at most 30."""
    return min(0.25 * 2 ** min(failures, 7), 30.0)


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
        self.env_folder: Path | None = None  # see env_folder.py
        self.num_starts = 0
        self.restarted = threading.Event()
        self.stop_requested = threading.Event()

    # --- start

    def start(self) -> None:
        """Returns when a real inference was answered. Raises InvalidArgument or Unavailable."""
        try:
            self._start()
        except OSError as error:  # a full disk
            raise Unavailable(f"the server cannot be started: {error}") from error

    def _start(self) -> None:
        environment = server_environment(self.env)
        check_ports(self.address)  # the quick check first
        if not self.num_starts:
            check_server(self.model_repository, environment, self.log_path)
            check_stack()
        self.run_dir.clean()
        self.shm_prefix = f"granikv_{os.getpid()}_{uuid.uuid4().hex[:8]}_"
        self.run_dir.note(self.shm_prefix)
        self.run_dir.claim_memory(self.shm_prefix)
        self.env_folder = None
        installation = find_tritonserver(self.run_dir.path / LINKS)
        command = server_command(
            installation, self.model_repository, self.address, self.shm_prefix, EXIT_TIMEOUT_S
        )
        log = open(self.log_path, "ab") if self.log_path else None  # noqa: SIM115
        self.log_start = log.tell() if log else 0
        self.process = start_owned(
            command,
            signal.SIGTERM,  # stub and engine have the time to kill it: see run_dir.py
            STACK_BYTES,
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
            self._find_env_folder()
            self._check_process()
            if self._has_ports():
                with contextlib.suppress(OSError, Unavailable):
                    urllib.request.urlopen(url, timeout=2).close()
                    self.probe(max(1.0, deadline - time.monotonic()))
                    if self._has_ports() and len(self.pids) == NUM_PROCESSES:
                        return
            time.sleep(0.05)
        if self.stop_requested.is_set():
            raise Unavailable("stopped while the server started")
        raise Unavailable(f"no answer of the server within {self.start_timeout_s} s{self._why()}")

    def _check_process(self) -> None:
        """Raises Unavailable when the server ended, ModelFileError when that was for a value in
        config.pbtxt, InvalidArgument for a port: another server took it while ours loaded."""
        assert self.process is not None
        code = self.process.poll()
        if code is None:
            return
        reason, error_code = self.run_dir.failure()
        if not reason:
            check_ports(self.address)
        if error_code == InvalidArgument.code:
            raise ModelFileError(f"{self.model_repository / MODEL / 'config.pbtxt'}{self._why()}")
        raise Unavailable(f"tritonserver ended with code {code} while starting{self._why()}")

    def _has_ports(self) -> bool:
        """It is our server that listens on all of its ports, not another one."""
        assert self.process is not None
        ports = listened_ports(self.process.pid)
        is_known = ports is None or ports >= set(self.address.ports.values())
        return is_known and self.process.poll() is None

    def _find_env_folder(self) -> None:
        stub = self.run_dir.read_pid("stub")
        if self.process is not None and self.env_folder is None and stub:
            self.env_folder = find_env_folder(self.process.pid, stub)
            self.run_dir.note(self.shm_prefix, self.env_folder)

    def _why(self) -> str:
        """The stub's reason, or the log's last errors, and where the log is."""
        reason, _ = self.run_dir.failure()
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
        """Name of the first process that dies, or None when a stop was asked for.

        The server's when others are dead as well: it takes them along, and never the reverse."""
        poller = select.poll()
        names: dict[int, str] = {}
        dead: set[str] = set()
        try:
            for name, pid in self.pids.items():
                try:
                    names[os.pidfd_open(pid)] = name
                except ProcessLookupError:
                    dead.add(name)
            for descriptor in names:
                poller.register(descriptor, select.POLLIN)
            while not self.stop_requested.is_set():
                dead.update(names[descriptor] for descriptor, _ in poller.poll(0 if dead else 200))
                if dead:
                    return "server" if "server" in dead else dead.pop()
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
        remove_env_folder(self.env_folder)

    def stop(self) -> int:
        """Drain and stop; returns 0, or 1 when a request may have been lost."""
        self.stop_requested.set()
        problem = "" if self.process is None else self._stop_process(self.process)
        self.close()
        if problem:
            print(f"granikv: {problem}; server killed", file=sys.stderr, flush=True)
        return LOST if problem else 0

    def _stop_process(self, process: subprocess.Popen) -> str:
        """What went wrong; "" when all was answered."""
        problem, code = "", 0
        if not all(is_running(pid) for pid in self.pids.values()):
            problem = "a process had died"  # the server would wait for its whole exit timeout
        elif not self._drain():
            problem = "the engine died, or did not finish in time"
        else:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(CLEAN_EXIT_S)
        self.kill()
        return problem or (f"tritonserver ended with code {code}" if code else "")

    def _drain(self) -> bool:
        """Let the engine finish or refuse what runs; True when every request was answered.

        A gRPC stream that a client holds open, even idle, keeps Triton 2.51 from unloading the
        model: it hangs until its exit timeout and never calls finalize (compare
        triton-inference-server/server issue 8755). After a drain nothing is lost by a kill.
        """
        drained = self.run_dir.path / "engine.drained"
        engine = self.run_dir.read_pid("engine")
        _signal_pid(engine, signal.SIGTERM)
        drain_s = float(
            read_parameters(self.model_repository).get("drain_s", ServingSettings.drain_s)
        )
        deadline = time.monotonic() + drain_s + STEP_PATIENCE_S
        while engine and is_running(engine) and time.monotonic() < deadline:
            if drained.exists():
                time.sleep(ANSWER_S)
                return True
            time.sleep(0.02)
        return False

    def close(self) -> None:
        self.run_dir.close()

    def supervise(self, max_restarts: int) -> int:
        """Restart what dies until a stop is asked for. Returns the exit code of the launcher: 0; 1
        when no restart is left; 2 when what kept it from starting again is like a taken port.

        A served server that dies costs no restart, since a client can end Triton 2.51 with one
        request: six of them would end the service. One that dies again and again right after its
        start waits longer each time."""
        restarts = early_deaths = 0
        while True:
            started = time.monotonic()
            dead = self.wait_for_death()
            if dead is None:
                return 0
            self.kill()
            lived_s = time.monotonic() - started
            early_deaths = early_deaths + 1 if lived_s < EARLY_DEATH_S else 0
            if lived_s > 60 or dead == "server":
                restarts = 0
            then = "starting again" if restarts < max_restarts else "no restart is left"
            text = f"granikv: the {dead} process died; server killed, {then}"
            print(text, file=sys.stderr, flush=True)
            if early_deaths > 1:  # the first may be chance
                self.stop_requested.wait(_patience_s(early_deaths))
            restarts, code = self._restart(restarts, max_restarts)
            if self.process is None:
                return code

    def _restart(self, restarts: int, max_restarts: int) -> tuple[int, int]:
        """Restarts so far, and the exit code if no server runs: that of the last failure."""
        code = LOST if restarts >= max_restarts else 0
        while restarts < max_restarts and not self.stop_requested.is_set():
            restarts += 1
            try:
                self.start()
                self.restarted.set()
                print(self.ready_line(), flush=True)
                return restarts, 0
            except GraniKVError as error:
                if self.stop_requested.is_set():
                    return restarts, code
                code = 2 if is_input(error) else LOST
                print(f"granikv: restart failed: {error}", file=sys.stderr, flush=True)
                self.stop_requested.wait(_patience_s(restarts))
        return restarts, code

    def ready_line(self) -> str:
        pids = " ".join(f"{name}={pid}" for name, pid in sorted(self.pids.items()))
        address = self.address
        return (
            f"READY model={MODEL} http={address.http_url} grpc={address.grpc_url} "
            f"metrics={address.metrics_url} {pids}"
        )
