"""Ends of processes: clean stops, kills, restarts, taken ports. Each test has its own server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from granikv.errors import InvalidArgument
from granikv.serving.launcher import ServerHandle, free_ports
from granikv.serving.tritonserver import ServerAddress
from tests.serving.conftest import FAKE_ENV, ROOT, needs_triton, start_server
from tests.serving.grpc_stream import Answer, Stream, ask
from tests.serving.http_text import read_text, wait_until

pytestmark = needs_triton
QUICK = {"text_input": b"a b c", "max_tokens": 3, "exclude_input_in_output": True}


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def is_ready(http_url: str) -> bool:
    try:
        return read_text(f"{http_url}/v2/health/ready") == ""
    except OSError:
        return False


def shm_files(prefix: str) -> list[Path]:
    return list(Path("/dev/shm").glob(f"{prefix}*"))


@pytest.mark.parametrize("victim", ["stub", "engine"])
def test_c71_a_killed_process_fails_streams_fast_and_the_service_returns(tmp_path, victim):
    with start_server(tmp_path / "server.log") as server:
        before = dict(server.pids)
        shm_prefix = server.shm_prefix
        with Stream(server.address.grpc_url) as stream:
            stream.send("cut", text_input=b"a step_ms=20", max_tokens=500, stream=True)
            stream.receive()
            os.kill(before[victim], signal.SIGKILL)
            killed = time.monotonic()
            answer = stream.wait("cut", timeout_s=5)
            assert answer.errors
            assert "UNAVAILABLE" in answer.errors[0]
            assert time.monotonic() - killed < 5
        assert wait_until(lambda: not is_ready(server.address.http_url))
        assert server.restarted.wait(20)
        assert not any(is_alive(pid) for pid in before.values())
        assert shm_files(shm_prefix) == []
        assert server.num_starts == 2
        assert is_ready(server.address.http_url)
        assert ask(server.address.grpc_url, **QUICK).text == "a b c "


def test_requests_that_end_the_server_use_up_no_restarts(tmp_path):
    """Triton 2.51 dies of a division by zero when gRPC asks for the classes of a text output."""
    with start_server(tmp_path / "server.log", max_restarts=1) as server:
        for deaths in (1, 2):
            server.restarted.clear()
            os.kill(server.pids["server"], signal.SIGFPE)
            killed = time.monotonic()
            assert server.restarted.wait(20), f"not after death {deaths}"
            assert time.monotonic() - killed < 10
        assert server.num_starts == 3
        assert ask(server.address.grpc_url, **QUICK).text == "a b c "


def launcher(*arguments: str) -> subprocess.Popen:
    http, grpc, metrics = free_ports(3)
    ports = [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
    return subprocess.Popen(
        [sys.executable, "-m", "granikv.serving.launcher", *ports, *arguments],
        env=dict(os.environ, **FAKE_ENV),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def read_ready(process: subprocess.Popen) -> dict[str, str]:
    line = process.stdout.readline()
    assert line.startswith("READY "), line
    return dict(part.split("=", 1) for part in line.split()[1:])


@pytest.mark.parametrize("held", [True, False])
def test_c70_stop_while_four_streams_run(tmp_path, monkeypatch, held):
    """held: the client keeps its stream open; then Triton 2.51 cannot call finalize (README)."""
    closed = tmp_path / "closed"
    monkeypatch.setenv("FAKE_ENGINE_CLOSED", str(closed))
    process = launcher(f"--log={tmp_path / 'server.log'}")
    ready = read_ready(process)
    with Stream(ready["grpc"]) as stream:
        for n in range(4):
            # one finishes within the grace time, the others would take 25 s
            text, count = (b"a step_ms=50", 500 if n else 20)
            stream.send(f"s{n}", text_input=text, max_tokens=count, stream=True)
        for _ in range(8):
            stream.receive()
        process.send_signal(signal.SIGTERM)
        if held:
            assert process.wait(20) == 0
        errors = stream.answers.setdefault("", Answer()).errors
        while not stream.answers["s0"].is_final or len(errors) < 3:
            stream.receive()
        assert stream.answers["s0"].last["finish_reason"][0, 0] == b"length"
        assert all("UNAVAILABLE" in error for error in errors)
    assert process.wait(20) == 0
    assert held or closed.exists(), "finalize ended the engine process by its own close"
    for name in ("server", "stub", "engine"):
        assert not is_alive(int(ready[name]))


def test_no_restart_exits_with_an_error(tmp_path):
    process = launcher("--no-restart", f"--log={tmp_path / 'server.log'}")
    ready = read_ready(process)
    os.kill(int(ready["engine"]), signal.SIGKILL)
    assert process.wait(10) == 1
    assert "engine process died" in process.stderr.read()
    assert not is_alive(int(ready["server"])) and not is_alive(int(ready["stub"]))


def test_engine_dies_with_its_parent(tmp_path):
    with start_server(tmp_path / "server.log", supervised=False) as server:
        pids = server.pids
        os.kill(pids["stub"], signal.SIGKILL)
        assert wait_until(lambda: not is_alive(pids["engine"]), 2)


def test_a_taken_port_is_a_clear_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        handle = ServerHandle(ServerAddress("127.0.0.1", *free_ports(2), port))
        with pytest.raises(InvalidArgument, match=f"metrics_port.*{port}"):
            handle.start()
        handle.close()


def test_a_taken_port_is_told_before_anything_is_loaded():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        script = (
            "import sys\n"
            "from granikv.serving.launcher import main\n"
            "code = main(sys.argv[1:])\n"
            "print('torch' in sys.modules)\n"
            "sys.exit(code)"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, f"--http-port={port}", "--model=/nowhere"],
            capture_output=True, text=True, cwd=ROOT, timeout=30,
        )  # fmt: skip
    assert done.returncode == 2 and "http_port: expected a free port" in done.stderr
    assert done.stdout == "False\n"
