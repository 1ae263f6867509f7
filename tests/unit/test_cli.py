"""The command line as a newcomer meets it: help, versions, and errors of one line."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from granikv import chat, inspection
from granikv.cli import app
from granikv.cli_common import print_sections
from granikv.errors import InvalidArgument, Unavailable
from granikv.outputs import check_output_file

TRACE = str(Path(__file__).resolve().parents[1] / "fixtures" / "agents_block512.jsonl")
COMMANDS = typer.main.get_command(app)
LEAVES = {
    **{n: c for n, c in COMMANDS.commands.items() if n != "bench"},
    **{f"bench {n}": c for n, c in COMMANDS.commands["bench"].commands.items()},
}


@pytest.fixture(autouse=True)
def ports_are_free(monkeypatch):
    """Also where a server runs on the default ones."""
    monkeypatch.setattr("granikv.serving.server_handle.check_ports", lambda address: None)


def run(*arguments, **kwargs):
    return CliRunner().invoke(app, list(arguments), **kwargs)


def test_the_commands_that_users_rely_on_exist():
    assert {"demo", "serve", "chat", "calibrate", "inspect"} <= set(LEAVES)
    assert {
        f"bench {n}" for n in ("attention", "build", "cache", "decode", "host", "latency", "serve")
    } <= set(LEAVES)


@pytest.mark.parametrize("name", sorted(LEAVES))
def test_every_command_and_option_has_a_help_text(name):
    command = LEAVES[name]
    assert command.help
    for parameter in command.params:
        assert getattr(parameter, "help", None), f"{name}: {parameter.name}"
    assert run(*name.split(), "--help").exit_code == 0


def test_version():
    result = run("--version")
    assert result.exit_code == 0 and result.output.startswith("granikv 0.")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("serve --model /nowhere", 2, "/nowhere"),
        ("serve --set max_requests=0", 2, "max_requests"),
        ("serve --set max_requests=many", 2, "max_requests: expected a value of type int"),
        ("serve --http-port 99999", 2, "65535"),
        ("inspect --set nonsense", 2, "key=value"),
        ("inspect --set no_such=1", 2, "no_such"),
        ("inspect --model /nowhere", 2, "/nowhere"),
        ("inspect --url nonsense", 2, "host:port"),
        ("inspect --url 127.0.0.1:9", 1, "is the server running, and this its metrics port"),
        ("chat --url 127.0.0.1:9 --model /nowhere", 2, "/nowhere"),
        ("calibrate --model /nowhere", 2, "/nowhere"),
        ("bench cache --trace /nowhere", 2, "/nowhere"),
        ("bench decode --steps 1", 2, "steps"),
        ("bench decode --case four-groups", 2, "four-groups-1024-4096"),
        ("bench decode --batch 1 --contender nothing", 2, "vllm-cascade"),
        ("bench decode --batch 1 --contender flat-extents --plot", 2, "--plot"),
        ("bench poisson --load 0", 2, "load: expected shares"),
        ("bench poisson --contender nothing", 2, "vllm-cascade"),
        ("bench poisson --prefix-len 9000", 2, "at most 8192 tokens"),
        ("bench poisson --arrivals {file}", 2, "arrivals: expected a JSON file"),
        ("bench poisson --arrivals {folder}", 2, "--arrivals: expected a file"),
        ("bench latency --case nothing", 2, "'idle'"),
        ("bench latency", 2, "prompt_len and what is decoded: expected at most 8192 tokens"),
        ("bench latency --set prefix_layout=uniform", 2, "both layouts are measured"),
        ("bench latency --random-weights nothing", 2, "llama-3.1-8b"),
        ("bench serve --trace /nowhere", 2, "/nowhere"),
        ("bench serve --request-rate inf", 2, "request_rate"),
        ("bench serve --request-rate nan", 2, "request_rate"),
        ("bench serve --request-rate -1", 2, "request_rate"),
        ("calibrate --num-threads 99999", 2, "num-threads"),
        ("bench decode --batch 1 --set num_threads=99999", 2, "num_threads"),
        ("bench serve --prefix-len 1", 2, "prefix_len"),
        ("bench serve --set dtype=3", 2, "dtype"),
        ("bench serve --set max_seq_len=64", 2, "at most 64 tokens together"),
        ("bench serve --set prefix_layout=uniform", 2, "both layouts are measured"),
        ("bench decode --set prefix_layout=uniform", 2, "both layouts are measured"),
        ("bench decode --batch 1 --set dtype=int3", 2, "dtype"),
        ("bench decode --batch 1 --prefix-len 9000", 2, "at most 8192 tokens"),
        ("bench decode --batch 1 --set capacity_tokens=100", 2, "at most 95 tokens"),
        ("bench build --builder none", 2, "builder: expected tensorrt or rtx"),
        ("bench build --shape nonsense", 2, "llama-3.1-8b"),
        ("bench host --num-groups 9 --num-requests 8", 2, "num_groups"),
        (f"bench cache --trace {TRACE} --capacity-tokens 64", 2, "capacity_tokens"),
        ("inspect --url 127.0.0.1:99999", 2, "port 1 to 65535"),
        ("inspect --url 127.0.0.1:0", 2, "port 1 to 65535"),
        ("chat --url 127.0.0.1:99999", 2, "port 1 to 65535"),
        ("chat --url nonsense", 2, "host:port"),
        ("demo --out {file}", 2, "--out"),
        ("demo --out {file}/below", 2, "--out"),
        ("calibrate --output {folder}", 2, "--output: expected a file, not a folder"),
        ("calibrate --output {folder}/no/profile", 2, "--output: expected a file in a folder"),
        ("serve --log {folder}", 2, "log: expected a file, not a folder"),
    ],
)
def test_bad_input_is_one_clear_error(arguments, code, words, tmp_path):
    (tmp_path / "file").write_text("")
    places = {"file": str(tmp_path / "file"), "folder": str(tmp_path)}
    result = run(*arguments.format(**places).split())
    assert result.exit_code == code and isinstance(result.exception, SystemExit)
    assert words in result.output + result.stderr
    assert "Traceback" not in result.output + result.stderr


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("dtype=int3", ("dtype", "'int3'", "float32")),
        ("dtype=float16", ("dtype", "'float16'", "float32")),
        ("device=tpu", ("device", "'tpu'", "cpu")),
        ("profile=/nowhere", ("profile", "/nowhere")),
        ("profile={file}", ("profile", "{file}", "readable")),
        ("max_seq_len=8193", ("max_seq_len", "8193", "0 to 8192")),
        ("max_seq_len=99999999999999", ("max_seq_len", "99999999999999", "0 to ")),
        ("max_seq_len=-1", ("max_seq_len", "-1", "0 to ")),
        ("capacity_tokens=2000000000", ("capacity_tokens", "2000000000", "at most")),
        ("max_requests=100000", ("max_requests", "100000", "1 to 65536")),
        ("max_num_batched_tokens=2000000000", ("max_num_batched_tokens", "1 to 1048576")),
        ("recency_window_s=NaN", ("recency_window_s", "nan", "seconds")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("command", ["inspect", "serve", "bench decode --batch 1", "bench serve"])
def test_a_bad_setting_is_refused_by_every_command_alike(
    monkeypatch, tmp_path, command, setting, words
):
    def popen(command, *_, **__):
        raise AssertionError(f"started {command}")

    monkeypatch.setattr("subprocess.Popen", popen)
    (tmp_path / "file").write_text("[1, 2]")
    file = str(tmp_path / "file")
    result = run(*command.split(), "--set", setting.format(file=file))
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
    (line,) = result.stderr.splitlines()
    for word in words:
        assert word.format(file=file) in line


def test_a_bad_variable_is_refused_before_a_demo_starts_servers(monkeypatch, tmp_path):
    monkeypatch.setattr("subprocess.Popen", None)
    result = run("demo", "--out", str(tmp_path), env={"GRANIKV_LOG_PLAN": "maybe"})
    assert result.exit_code == 2 and "GRANIKV_LOG_PLAN: expected 0 or 1" in result.stderr


BENCHES = [name for name in sorted(LEAVES) if name.startswith("bench ")]


@pytest.mark.parametrize("name", BENCHES)
def test_a_result_file_that_cannot_be_written_is_refused_at_once(name, tmp_path):
    needed = ["--trace", TRACE] if name == "bench cache" else []
    (tmp_path / "file").write_text("kept")
    for path, words in (
        (tmp_path, "a file, not a folder"),
        (tmp_path / "no" / "out.json", "a file in a folder that exists"),
        (tmp_path / "file" / "out.json", "a file in a folder that exists"),
        ("/proc/out.json", "a file that can be written"),
    ):
        result = run(*name.split(), *needed, "--json", str(path))
        assert result.exit_code == 2 and f"--json: expected {words}" in result.stderr
        assert result.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_checking_a_result_file_changes_nothing(tmp_path):
    (tmp_path / "old").write_text("kept")
    for name in ("old", "new"):
        check_output_file("--json", tmp_path / name)
    assert (tmp_path / "old").read_text() == "kept" and not (tmp_path / "new").exists()


def test_bench_attention_needs_a_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = run("bench", "attention")
    assert result.exit_code == 1 and "no CUDA device" in result.stderr


def test_a_misspelt_variable_is_reported():
    assert "GRANIKV_LOGPLAN" in run("inspect", "--set", "x", env={"GRANIKV_LOGPLAN": "1"}).stderr


# --- chat


class FakeTokenizer:
    def apply_chat_template(self, messages, add_generation_prompt):
        return "|".join(f"{m['role']}:{m['content']}" for m in messages)


def test_chat_keeps_the_conversation_and_forgets_a_failed_turn(capsys):
    prompts = []

    def answer(prompt, max_tokens, on_piece):
        prompts.append(prompt)
        if "boom" in prompt:
            raise Unavailable("no")
        on_piece("yes")
        return "yes"

    talker = chat.Chat(FakeTokenizer(), answer, "Be brief.")
    chat.talk(talker, ["one\n", " \n", "two\n"], 8)
    assert capsys.readouterr().out == "yes\nyes\n"
    assert prompts[-1] == "system:Be brief.|user:one|assistant:yes|user:two"
    with pytest.raises(Unavailable):
        chat.talk(talker, ["boom"], 8)
    assert len(talker.messages) == 5


def test_chat_has_no_system_message_of_its_own():
    assert chat.Chat(FakeTokenizer(), lambda *_: "").messages == []


# --- inspect

SERIES = {
    "nv_granikv_max_requests": 256.0,
    "nv_granikv_running_requests": 2.0,
    "nv_granikv_prompt_tokens": 200.0,
    "nv_granikv_cached_tokens": 150.0,
    "nv_granikv_kv_bytes_read": 10.0,
    "nv_granikv_kv_bytes_flat": 25.0,
    'nv_granikv_finished{reason="stop"}': 3.0,
    'nv_granikv_inter_token_latency_seconds_bucket{le="0.1"}': 98.0,
    'nv_granikv_inter_token_latency_seconds_bucket{le="0.2"}': 100.0,
    'nv_granikv_inter_token_latency_seconds_bucket{le="+Inf"}': 100.0,
    "nv_granikv_inter_token_latency_seconds_sum": 5.0,
    "nv_granikv_inter_token_latency_seconds_count": 100.0,
    'nv_granikv_time_to_first_token_seconds_sum{model="granikv"}': 6.0,
    'nv_granikv_time_to_first_token_seconds_count{model="granikv"}': 3.0,
}


def test_a_running_server_is_described_from_its_series():
    sections = inspection.describe_server(SERIES)
    assert sections["requests"]["running"] == 2 and sections["requests"]["finished"] == "stop 3"
    assert sections["since the start"]["of them found stored"] == "75.0%"
    assert sections["since the start"]["unshared reads would be"] == "2.50 times"
    assert sections["latency"]["inter-token, 99% under s"] == "0.2"
    assert sections["latency"]["time to first token, mean s"] == "2"
    with pytest.raises(Unavailable, match="no GraniKV server"):
        inspection.describe_server({"nv_inference_count": 1.0})


@pytest.mark.parametrize("text", ["h:8002", "http://h:8002", "http://h:8002/metrics"])
def test_metrics_addresses(text):
    assert inspection.metrics_url(text) == "http://h:8002/metrics"


def test_other_metrics_addresses_are_refused():
    for text in ("", "h", "h:x", "ftp://h:1", "http://h:1/v2"):
        with pytest.raises(InvalidArgument):
            inspection.metrics_url(text)


def test_profile_facts(tmp_path):
    path = tmp_path / "profile.json"
    config = SimpleNamespace(profile=str(path), num_threads=0)
    assert "not measured" in inspection.profile_facts(config, None)["state"]
    path.write_text("{")
    assert "unreadable" in inspection.profile_facts(config, None)["state"]
    record = {
        "date": "2020-01-01T00:00:00+00:00", "device": "x", "num_threads": 2, "torch": "2",
        "read_gb_per_s": 1.0, "gflops": 2.0, "warnings": ["a is slow", "b is slow"],
    }  # fmt: skip
    path.write_text(json.dumps(record))
    facts = inspection.profile_facts(config, None)
    assert facts["warnings"] == ["a is slow", "b is slow"] and "days" in facts["age"]


def test_inspect_shows_every_warning_of_a_profile(capsys):
    print_sections({"profile": {"warnings": ["a is slow", "b is slow"]}, "other": {"warnings": []}})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["warnings", "a", "is", "slow"] in lines and ["b", "is", "slow"] in lines
    assert ["warnings", "none"] in lines


def test_build_takes_a_file_or_a_folder():
    (checkpoint,) = [p for p in LEAVES["build"].params if p.name == "checkpoint"]
    assert checkpoint.metavar == "PATH"
