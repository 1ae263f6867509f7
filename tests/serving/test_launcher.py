"""The launcher's own end, its folder, and what it says when a server cannot start."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from granikv.errors import InvalidArgument, Unavailable
from granikv.serving.launcher import free_ports, main
from granikv.serving.run_dir import LOCK, RunDir, noted_prefix
from granikv.serving.server_check import read_parameters
from granikv.serving.settings import read_settings
from granikv.serving.tritonserver import (
    ServerAddress,
    find_model_repository,
    find_tritonserver,
    last_errors,
    server_command,
    server_environment,
)
from tests.helpers import make_tiny_hf
from tests.serving.conftest import FAKE_ENV, ROOT, needs_triton, start_server
from tests.serving.http_text import post, wait_until
from tests.serving.test_shutdown import launcher, read_ready, shm_files

PORTS = ("http", "grpc", "metrics")
ENGINES = "tests.serving.fake_engine"


def processes_of(run_dir: Path) -> dict[int, str]:
    """pid -> command line of server, stub and engine: each names the folder in its arguments."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(run_dir) in text and str(os.getpid()) != path.parent.name:
            found[int(path.parent.name)] = text
    return found


def shm_prefix(run_dir: Path) -> str:
    try:
        return json.loads((run_dir / LOCK).read_text())["shm_prefix"]
    except (OSError, ValueError):
        return ""


def kill_and_expect_nothing_left(process: subprocess.Popen, run_dir: Path) -> None:
    prefix = shm_prefix(run_dir)
    assert prefix and processes_of(run_dir)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert wait_until(lambda: not processes_of(run_dir), 30), processes_of(run_dir)
    assert wait_until(lambda: not shm_files(prefix), 5)
    assert wait_until(lambda: [path.name for path in run_dir.iterdir()] == [LOCK], 5)


def expect_nothing_after_the_next_launcher(run_dir: Path, prefix: str) -> None:
    """For a launcher that died with, or before, those who would have removed its files."""
    assert wait_until(lambda: not processes_of(run_dir), 30), processes_of(run_dir)
    RunDir(run_dir).close()
    assert not shm_files(prefix) and [path.name for path in run_dir.iterdir()] == [LOCK]


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("GRANIKV_RUN_DIR", str(tmp_path / "run"))
    yield tmp_path / "run"
    for pid in processes_of(tmp_path / "run"):
        os.kill(pid, signal.SIGKILL)


@needs_triton
def test_a_killed_launcher_takes_server_stub_and_engine_along(tmp_path, run_dir):
    process = launcher(f"--log={tmp_path / 'server.log'}")
    ready = read_ready(process)
    pids = {int(ready[name]) for name in ("server", "stub", "engine")}
    assert pids <= set(processes_of(run_dir))
    kill_and_expect_nothing_left(process, run_dir)


@needs_triton
@pytest.mark.parametrize("other", ["server", "engine"])
def test_the_rest_ends_when_another_process_is_killed_with_the_launcher(tmp_path, run_dir, other):
    """One of the two that wait for the launcher is dead, or stuck without its server."""
    process = launcher(f"--log={tmp_path / 'server.log'}")
    ready = read_ready(process)
    process.send_signal(signal.SIGSTOP)  # it does not see the other's death first
    os.kill(int(ready[other]), signal.SIGKILL)
    kill_and_expect_nothing_left(process, run_dir)


@needs_triton
def test_a_killed_launcher_takes_a_restarted_server_along(tmp_path, run_dir):
    process = launcher(f"--log={tmp_path / 'server.log'}")
    os.kill(int(read_ready(process)["engine"]), signal.SIGKILL)
    read_ready(process)
    kill_and_expect_nothing_left(process, run_dir)


@needs_triton
@pytest.mark.parametrize("seen", ["server", "engine"])
def test_a_launcher_killed_during_the_start_leaves_nothing(tmp_path, run_dir, seen):
    engine = f"--engine-class={ENGINES}:SlowEngine"
    process = launcher(engine, f"--log={tmp_path / 'server.log'}")
    words = {"server": "model-repository", "engine": "engine_process"}[seen]
    assert wait_until(lambda: any(words in c for c in processes_of(run_dir).values()), 30)
    assert wait_until(lambda: shm_prefix(run_dir), 5)  # the launcher may be writing it
    prefix = shm_prefix(run_dir)
    process.kill()
    process.wait()
    expect_nothing_after_the_next_launcher(run_dir, prefix)


@needs_triton
def test_a_server_without_a_launcher_lives_alone(tmp_path, run_dir):
    """As in an image that runs tritonserver itself; a lock file that lies there is no launcher."""
    run_dir.mkdir()
    (run_dir / LOCK).write_text("{}")
    address = ServerAddress("127.0.0.1", *free_ports(3))
    installation = find_tritonserver(tmp_path / "home")
    command = server_command(installation, find_model_repository(), address, "granikv_alone_", 5)
    with (tmp_path / "server.log").open("wb") as log:
        environment = server_environment(FAKE_ENV)
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        url = f"{address.http_url}/v2/models/granikv/generate"
        assert wait_until(lambda: is_answered(url), 30)
        assert (run_dir / "stub.pid").exists() and server.poll() is None
    finally:
        server.terminate()
        assert server.wait(30) == 0


@needs_triton
def test_nothing_runs_on_when_launcher_and_stub_are_killed_at_once(tmp_path, run_dir):
    """Nobody is left to remove files: the folder's next launcher does it."""
    process = launcher(f"--log={tmp_path / 'server.log'}")
    ready = read_ready(process)
    prefix = shm_prefix(run_dir)
    assert shm_files(prefix)
    process.send_signal(signal.SIGSTOP)  # it does not see the stub's death first
    os.kill(int(ready["stub"]), signal.SIGKILL)
    process.kill()
    process.wait()
    expect_nothing_after_the_next_launcher(run_dir, prefix)


def is_answered(url: str) -> bool:
    try:
        return post(url, {"text_input": "a b", "max_tokens": 1})[0] == 200
    except OSError:
        return False


@needs_triton
def test_the_next_launcher_starts_while_the_killed_ones_server_still_ends(tmp_path, run_dir):
    ports = [f"--{name}-port={port}" for name, port in zip(PORTS, free_ports(3), strict=True)]
    first = launcher(f"--log={tmp_path / 'first.log'}", *ports)
    before = read_ready(first)
    first.kill()
    second = launcher(f"--log={tmp_path / 'second.log'}", *ports)
    after = read_ready(second)
    assert after["http"] == before["http"] and after["server"] != before["server"]
    second.send_signal(signal.SIGTERM)
    assert second.wait(30) == 0


# --- GRANIKV_RUN_DIR


@needs_triton
def test_the_folder_that_the_user_names_is_used_and_kept(tmp_path, run_dir):
    run_dir.mkdir()
    (run_dir / "theirs").write_text("kept")
    with start_server(tmp_path / "server.log", supervised=False) as server:
        assert int((run_dir / "engine.pid").read_text()) == server.pids["engine"]
        assert int((run_dir / "stub.pid").read_text()) == server.pids["stub"]
    assert sorted(path.name for path in run_dir.iterdir()) == [LOCK, "theirs"]


def test_a_temporary_folder_goes_with_its_launcher():
    folder = RunDir()
    assert folder.lock_path.exists()
    folder.close()
    assert not folder.path.exists()


def test_temporary_folders_of_killed_launchers_go_at_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    memory = Path("/dev/shm/granikv_1_0123abcd_region")
    memory.write_text("")
    killed = {
        "granikv_early": "",
        "granikv_late": json.dumps({"shm_prefix": "granikv_1_0123abcd_"}),
    }
    for name, note in killed.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / LOCK).write_text(note)
    (tmp_path / "granikv_other").mkdir()  # no launcher's
    living = RunDir()
    RunDir().close()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"granikv_other", living.path.name} and not memory.exists()
    living.close()


def test_memory_of_a_killed_launcher_goes_at_any_later_start(tmp_path):
    """Also when its folder is one that no later launcher is given. A living one's stays."""
    code = "import sys\nfrom granikv.serving.run_dir import *\n"
    code += "folder = RunDir(Path(sys.argv[1]))\nfolder.claim_memory(sys.argv[2])\n"
    code += "(SHM / f'{sys.argv[2]}region').touch()\nprint(flush=True)\ntime.sleep(60)"
    prefix = f"granikv_{os.getpid()}_{os.urandom(4).hex()}_"
    command = [sys.executable, "-c", code, str(tmp_path), prefix]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        RunDir().close()
        left = sorted(path.name for path in Path("/dev/shm").glob(f"{prefix}*"))
        process.kill()
    assert left == [f"{prefix}lock", f"{prefix}region"]
    RunDir().close()
    assert not list(Path("/dev/shm").glob(f"{prefix}*"))


def test_a_note_names_only_files_of_ours(tmp_path):
    for note in ("", "[]", "{}", '{"shm_prefix": ""}', '{"shm_prefix": "x"}', '{"shm_prefix": 3}'):
        (tmp_path / LOCK).write_text(note)
        assert noted_prefix(tmp_path / LOCK) == ""


def test_a_folder_has_one_launcher(tmp_path, monkeypatch):
    monkeypatch.setattr("granikv.serving.run_dir.CLAIM_TIMEOUT_S", 0.2)
    first = RunDir(tmp_path)
    with pytest.raises(InvalidArgument, match="GRANIKV_RUN_DIR: .*no other launcher"):
        RunDir(tmp_path)
    first.close()
    RunDir(tmp_path).close()


def test_what_a_killed_launcher_left_is_taken_over(tmp_path):
    for name in (LOCK, "stub.pid", "e17.in"):
        (tmp_path / name).write_text("1")
    folder = RunDir(tmp_path)
    assert folder.read_pid("stub") is None and not (tmp_path / "e17.in").exists()
    folder.close()


def test_unusable_folders_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("x" * 100)):
        with pytest.raises(InvalidArgument, match="GRANIKV_RUN_DIR"):
            RunDir(path)


# --- starts that fail


@needs_triton
def test_an_engine_that_cannot_start_is_quoted(tmp_path, monkeypatch):
    reason = "weights: expected weights that can be loaded"
    monkeypatch.setitem(FAKE_ENV, "GRANIKV_ENGINE_CLASS", f"{ENGINES}:BrokenEngine")
    log = tmp_path / "server.log"
    with pytest.raises(Unavailable, match=f"while starting: .*{reason}.*; see .*server.log"):
        start_server(log).__enter__()


@needs_triton
def test_a_server_that_refuses_the_probe_is_not_asked_for_ever(tmp_path):
    with pytest.raises(InvalidArgument, match="probe: .*text_input"):
        start_server(tmp_path / "log", engine_config={"max_seq_len": 1}).__enter__()


@needs_triton
def test_a_model_that_triton_cannot_load_is_quoted_from_the_log(tmp_path):
    model = tmp_path / "models" / "granikv"
    shutil.copytree(find_model_repository() / "granikv", model)
    (model / "1" / "model.py").write_text("raise RuntimeError('a broken model file')\n")
    with pytest.raises(Unavailable, match="while starting: .*a broken model file"):
        start_server(tmp_path / "log", model_repository=tmp_path / "models").__enter__()


def test_a_model_without_weights_or_tokenizer_is_refused_before_a_server_starts(
    tmp_path, monkeypatch, capsys
):
    model = make_tiny_hf(tmp_path / "model")
    assert not list(model.glob("tokenizer*"))
    expect_refusal(monkeypatch, capsys, [f"--model={model}"], "tokenizer", str(model))
    (model / "model.safetensors").unlink()
    expect_refusal(monkeypatch, capsys, [f"--model={model}"], "*.safetensors", str(model))
    random = [f"--model={model}", "--set=random_weights=true"]
    expect_refusal(monkeypatch, capsys, random, "random_weights", code=1)


def test_parameters_of_the_model_repository():
    parameters = read_parameters(find_model_repository())
    assert parameters["engine_config"] == "{}" and parameters["start_timeout_s"] == "900"
    for name in ("step_limit_s", "drain_s"):
        for value in ("nan", "-1", "soon"):
            with pytest.raises(InvalidArgument, match=f"{name}: .*'{value}'"):
                read_settings(parameters | {name: value}, {"GRANIKV_RUN_DIR": "x"})


def test_last_errors_are_those_of_this_server(tmp_path):
    log = tmp_path / "log"
    log.write_text("E0101 00:00:00 1 old.cc:1] an old error\n")
    start = log.stat().st_size
    assert last_errors(log, start) == ""
    no_gpu = 'E0101 00:00:00 1 server.cc:241] "CudaDriverHelper has not been initialized."\n'
    log.write_text(log.read_text() + no_gpu)
    assert last_errors(log, start) == ""
    log.write_text(log.read_text() + "I0101 fine\nE0101 00:00:01 1 new.cc:1] a new error\n")
    assert last_errors(log, start) == "E0101 00:00:01 1 new.cc:1] a new error"


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"GRANIKV_LOG_PLAN": "maybe"}, ("GRANIKV_LOG_PLAN", "'maybe'", "0 or 1")),
        ({"GRANIKV_MODEL_DIR": "/nowhere"}, ("GRANIKV_MODEL_DIR", "'/nowhere'")),
        ({"GRANIKV_ENGINE_CONFIG": '{"max_requests": 0}'}, ("max_requests", "0", "1 to 65536")),
        ({"GRANIKV_ENGINE_CLASS": "module"}, ("GRANIKV_ENGINE_CLASS", "'module:Class'")),
        ({"GRANIKV_PYTHON": "/nowhere"}, ("GRANIKV_PYTHON", "/nowhere")),
    ],
    ids=lambda value: next(iter(value)),
)
def test_bad_variables_are_refused_before_a_server_starts(monkeypatch, capsys, variables, words):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    expect_refusal(monkeypatch, capsys, [], *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--http-port=70000"], ("http_port", "70000", "1 to 65535")),
        (["--http-port=9000", "--grpc-port=9000"], ("port", "9000", "of its own")),
        (["--host=no.such.host.invalid"], ("host", "no.such.host.invalid")),
        (["--log=/nowhere/log"], ("log", "/nowhere/log")),
        (["--max-restarts=-1"], ("max-restarts", "-1")),
        (["--model-repository=/nowhere"], ("model_repository", "/nowhere")),
        (["--engine-class=nonsense"], ("GRANIKV_ENGINE_CLASS", "nonsense")),
        (["--model=/nowhere"], ("/nowhere",)),
        (["--set=capacity_tokens=2000000000"], ("capacity_tokens", "2000000000", "at most")),
        (["--set=max_seq_len=9000000"], ("max_seq_len", "9000000", "context")),
        (["--set=max_seq_len=1"], ("max_seq_len", "1")),
        (["--set=capacity_tokens=2"], ("capacity_tokens", "2")),
        (["--set=dtype=int3"], ("dtype", "'int3'", "float32")),
        (["--set=profile=/nowhere"], ("profile", "/nowhere")),
    ],
    ids=lambda value: value[0],
)
def test_bad_options_are_refused_before_a_server_starts(monkeypatch, capsys, arguments, words):
    expect_refusal(monkeypatch, capsys, arguments, *words)


def expect_refusal(monkeypatch, capsys, arguments: list[str], *words: str, code: int = 2) -> None:
    """That exit code, one line that holds the words, and no server."""

    def popen(command, *_, **__):
        raise AssertionError(f"started {command}")

    monkeypatch.setattr("subprocess.Popen", popen)
    ports = [f"--{name}-port={port}" for name, port in zip(PORTS, free_ports(3), strict=True)]
    try:
        ended = main(ports + arguments)
    except SystemExit as stopped:  # argparse
        ended = stopped.code
    text = capsys.readouterr().err
    assert ended == code, text
    for word in words:
        assert word in text.splitlines()[-1]
