"""Launchers that start at the same moment, a disk without space, and what Triton leaves in /tmp."""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from granikv.serving import server_handle
from granikv.serving.launcher import free_ports, main
from granikv.serving.listeners import listened_ports
from granikv.serving.run_dir import LOCK, RunDir, lock_file, noted_env_folder
from granikv.serving.server_handle import ServerHandle
from granikv.serving.tritonserver import ServerAddress
from tests.serving.conftest import FAKE_ENV, ROOT, start_server
from tests.serving.grpc_stream import Stream
from tests.serving.http_text import wait_until
from tests.serving.test_launcher import ENGINES, PORTS, needs_triton, processes_of
from tests.serving.test_shutdown import is_alive, launcher, read_ready

NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

# --- ports


@needs_triton
@pytest.mark.parametrize("shared", [PORTS, ("metrics",)], ids=["all", "metrics"])
def test_another_servers_answer_is_not_taken_for_ours(tmp_path, monkeypatch, shared):
    """The other one takes the ports while this one loads its model."""
    ports = [
        f"--{name}-port={port}" for name, port in zip(shared, free_ports(len(shared)), strict=True)
    ]
    monkeypatch.setenv("GRANIKV_RUN_DIR", str(tmp_path / "late"))
    late = launcher(f"--engine-class={ENGINES}:LateEngine", f"--log={tmp_path / 'log'}", *ports)
    loads = "engine_process"
    assert wait_until(
        lambda: any(loads in text for text in processes_of(tmp_path / "late").values()), 30
    )
    monkeypatch.setenv("GRANIKV_RUN_DIR", str(tmp_path / "first"))
    first = launcher(f"--log={tmp_path / 'first.log'}", *ports)
    try:
        assert "engine" in read_ready(first)
        (tmp_path / "late" / "go").touch()
        assert late.wait(60) == 2
        output, errors = late.communicate()
        assert output == "" and "Traceback" not in errors
        assert f"{shared[-1]}_port: expected a free port" in errors or "http_port" in errors
        assert not processes_of(tmp_path / "late")
    finally:
        first.send_signal(signal.SIGTERM)
        late.kill()
        assert first.wait(30) == 0


def test_ports_on_which_a_process_listens():
    with socket.socket() as listening, socket.socket() as bound, socket.socket() as connected:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        bound.bind(("127.0.0.1", 0))
        connected.connect(listening.getsockname())
        ports = listened_ports(os.getpid())
        assert listening.getsockname()[1] in ports
        assert ports.isdisjoint({bound.getsockname()[1], connected.getsockname()[1]})
        with subprocess.Popen(["sleep", "60"]) as other:
            assert listened_ports(other.pid) == set()
            other.kill()
    assert listened_ports(other.pid) == set()


# --- the run folder


CLAIMS = """
import sys, time
from granikv.serving.run_dir import RunDir
end = time.monotonic() + 4
while time.monotonic() < end:
    folder = RunDir()
    if not folder.lock_path.exists():
        sys.exit("removed under its owner")
    folder.close()
"""


def test_no_launcher_removes_the_folder_of_another_that_starts(tmp_path):
    environment = dict(os.environ, TMPDIR=str(tmp_path))
    command = [sys.executable, "-c", CLAIMS]
    several = [subprocess.Popen(command, cwd=ROOT, env=environment) for _ in range(3)]
    assert [process.wait(60) for process in several] == [0, 0, 0]
    RunDir().close()


def test_a_lock_on_a_removed_file_is_none(tmp_path, monkeypatch):
    """The file goes, or is made anew, between its opening and its locking."""
    flock = server_handle.RunDir.__init__.__globals__["fcntl"].flock
    for replace in (lambda path: None, Path.touch):

        def after_removal(descriptor, operation, replace=replace):
            (tmp_path / LOCK).unlink()
            replace(tmp_path / LOCK)
            flock(descriptor, operation)

        monkeypatch.setattr("fcntl.flock", after_removal)
        with pytest.raises(BlockingIOError, match="was removed"):
            lock_file(tmp_path / LOCK)


def test_a_named_folder_is_kept_where_temporary_ones_are(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    named = tmp_path / "granikv_named"
    named.mkdir()
    (named / "theirs").write_text("kept")
    RunDir(named).close()
    RunDir().close()
    assert sorted(path.name for path in named.iterdir()) == [LOCK, "theirs"]


# --- a full disk


def test_a_full_disk_is_one_clear_line(tmp_path):
    """By a limit of 0 bytes for every file; a pipe has none."""
    done = subprocess.run(
        [sys.executable, "-m", "granikv.serving.launcher", "--http-port=1"],
        env=dict(os.environ, **FAKE_ENV, GRANIKV_RUN_DIR=str(tmp_path)), cwd=ROOT, timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "GRANIKV_RUN_DIR" in done.stderr and os.strerror(errno.EFBIG) in done.stderr


def no_space(*_: object) -> None:
    raise NO_SPACE


def test_a_disk_that_fills_up_is_one_clear_line(monkeypatch, capsys):
    ports = [f"--{name}-port={port}" for name, port in zip(PORTS, free_ports(3), strict=True)]
    monkeypatch.setattr("granikv.serving.server_handle.find_tritonserver", no_space)
    assert main([*ports, f"--engine-class={ENGINES}:FakeEngine"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and os.strerror(errno.ENOSPC) in lines[0]


def test_a_restart_without_space_is_tried_again_and_told(monkeypatch, capsys):
    handle = ServerHandle(ServerAddress("127.0.0.1", *free_ports(3)), env=FAKE_ENV)
    monkeypatch.setattr(handle, "wait_for_death", lambda: "engine")
    monkeypatch.setattr(handle.run_dir, "note", no_space)
    assert handle.supervise(2) == 1
    failed = [line for line in capsys.readouterr().err.splitlines() if "restart failed" in line]
    assert len(failed) == 2 and os.strerror(errno.ENOSPC) in failed[0]
    handle.close()


def test_a_server_that_dies_at_once_is_started_ever_more_slowly(monkeypatch):
    handle = ServerHandle(ServerAddress("127.0.0.1", *free_ports(3)), env=FAKE_ENV)
    deaths, waits = iter(["server"] * 5), []
    monkeypatch.setattr(handle, "wait_for_death", lambda: next(deaths, None))
    monkeypatch.setattr(handle, "kill", lambda: None)
    monkeypatch.setattr(handle, "start", lambda: setattr(handle, "process", object()))
    monkeypatch.setattr(handle, "ready_line", lambda: "ready")
    monkeypatch.setattr(handle.stop_requested, "wait", waits.append)
    assert handle.supervise(3) == 0
    assert waits == [1.0, 2.0, 4.0, 8.0]  # none after the first
    handle.process = None
    handle.close()


def test_a_restart_that_finds_its_port_taken_ends_with_2(monkeypatch, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        handle = ServerHandle(ServerAddress("127.0.0.1", *free_ports(2), port), env=FAKE_ENV)
        monkeypatch.setattr(handle, "wait_for_death", lambda: "engine")
        assert handle.supervise(2) == 2
        threading.Timer(1, handle.stop_requested.set).start()
        assert handle.supervise(100) == 2  # a stop does not make it a success
    assert (
        f"metrics_port: expected a free port of 127.0.0.1 (Address already in use), got {port}"
        in (capsys.readouterr().err)
    )
    handle.close()


# --- Triton's folder in /tmp


def env_folder_of(server: ServerHandle) -> Path:
    assert server.env_folder is not None and server.env_folder.is_dir()
    assert noted_env_folder(server.run_dir.lock_path) == server.env_folder
    return server.env_folder


@needs_triton
def test_tritons_folder_goes_with_a_killed_server(tmp_path):
    with start_server(tmp_path / "log", supervised=False) as server:
        folder = env_folder_of(server)
        server.kill()
        assert not folder.exists()


@needs_triton
def test_tritons_folder_goes_when_a_client_holds_a_stream(tmp_path):
    with start_server(tmp_path / "log", supervised=False) as server:
        folder = env_folder_of(server)
        with Stream(server.address.grpc_url) as stream:
            stream.send("one", text_input=b"a", max_tokens=1)
            stream.wait("one", timeout_s=10)
            assert server.stop() == 0
    assert not folder.exists()


@needs_triton
@pytest.mark.parametrize("also", ["", "stub"])
def test_tritons_folder_goes_with_a_killed_launcher(tmp_path, monkeypatch, also):
    monkeypatch.setenv("GRANIKV_RUN_DIR", str(tmp_path / "run"))
    process = launcher(f"--log={tmp_path / 'log'}")
    ready = read_ready(process)
    folder = noted_env_folder(tmp_path / "run" / LOCK)
    assert folder is not None and folder.is_dir()
    process.send_signal(signal.SIGSTOP)
    if also:
        os.kill(int(ready["stub"]), signal.SIGKILL)
    process.kill()
    process.wait()
    assert wait_until(lambda: not processes_of(tmp_path / "run"), 30)
    if also:
        RunDir(tmp_path / "run").close()
    assert wait_until(lambda: not folder.exists(), 5)


# --- a stop while the engine hangs


@needs_triton
def test_a_stop_of_a_hung_engine_ends_with_1(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(server_handle, "STEP_PATIENCE_S", -4.0)  # 1 s with drain_s
    with start_server(tmp_path / "log", supervised=False) as server:
        pids = server.pids
        os.kill(pids["engine"], signal.SIGSTOP)
        started = time.monotonic()
        assert server.stop() == 1
        assert time.monotonic() - started < 5
    # who was killed takes a moment to end
    assert wait_until(lambda: not any(is_alive(pid) for pid in pids.values()), 5)
    assert "did not finish in time" in capsys.readouterr().err
