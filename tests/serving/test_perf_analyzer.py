"""perf_analyzer against the real server, and the reading of its export."""

from __future__ import annotations

import json
import time

import pytest

from granikv.errors import NotFound, Unavailable
from granikv.serving.perf_analyzer import (
    Load,
    _run,
    find_perf_analyzer,
    make_load_test_repository,
    parse_profile,
    run,
    write_input_file,
    write_interval_file,
)
from granikv.serving.server_handle import is_running
from granikv.serving.tritonserver import find_model_repository
from tests.serving.conftest import FAKE_ENV, start_server
from tests.serving.http_text import wait_until


def test_parse_profile_drops_the_empty_final_response():
    requests = [
        {"timestamp": 0, "response_timestamps": [10**9, 2 * 10**9, 4 * 10**9, 5 * 10**9]},
        {"timestamp": 10**9, "response_timestamps": [3 * 10**9, 4 * 10**9]},
    ]
    samples = parse_profile({"experiments": [{"requests": requests}]})
    report = (samples + samples).report()
    assert report["num_requests"] == 4
    assert samples.num_responses == 4
    assert report["ttft_mean_s"] == pytest.approx(1.5)
    assert report["itl_mean_s"] == pytest.approx(1.5)
    assert report["elapsed_s"] == pytest.approx(8.0)
    assert report["requests_per_s"] == pytest.approx(0.5)


def test_a_profile_without_answers_is_an_error():
    request = {"timestamp": 0, "response_timestamps": [10**9]}  # FINAL only: an error
    with pytest.raises(Unavailable, match="no answered request"):
        parse_profile({"experiments": [{"requests": [request]}]})


def test_intervals(tmp_path):
    path = tmp_path / "gaps"
    write_interval_file([0.0, 1.0, 1.0, 1.5], path, speed=2.0)
    assert path.read_text().split() == ["500000", "1", "250000"]
    assert Load(intervals=path).arguments() == [f"--request-intervals={path}"]


def test_write_input_file(tmp_path):
    path = tmp_path / "in.json"
    write_input_file([{"text_input": "a", "max_tokens": 3, "timestamp": 5}], path)
    expected = {"stream": [True], "text_input": ["a"], "max_tokens": [3], "timestamp": 5}
    assert json.loads(path.read_text()) == {"data": [expected]}


def test_load_test_repository_declares_one_output(tmp_path):
    repository = make_load_test_repository(tmp_path, find_model_repository())
    text = (repository / "granikv" / "config.pbtxt").read_text()
    assert text.count("text_output") == 1 and "cum_log_probs" not in text
    assert "output_log_probs" not in text and "engine_config" in text and "text_input" in text
    assert (repository / "granikv" / "1" / "model.py").is_file()


@pytest.mark.timeout(60)
def test_a_measurement_that_does_not_end_is_killed_with_its_children(tmp_path):
    """The child keeps the pipes open, so that killing the tool alone would not be enough."""
    pids = tmp_path / "pids"
    tool = tmp_path / "perf_analyzer"
    tool.write_text(f"#!/bin/sh\nsleep 600 &\necho $$ $! >> {pids}\nwait\n")
    tool.chmod(0o755)
    started = time.monotonic()
    with pytest.raises(Unavailable, match="did not end within 1 s"):
        _run(tool, [], timeout_s=1.0, attempts=2)
    assert time.monotonic() - started < 20
    attempts = pids.read_text().splitlines()
    assert len(attempts) == 2
    for pid in map(int, " ".join(attempts).split()):
        assert wait_until(lambda pid=pid: not is_running(pid), 5)


@pytest.mark.timeout(180)
def test_perf_analyzer_measures_streams(tmp_path):
    """Every run's export is readable when the model declares only what each response has."""
    try:
        find_perf_analyzer()
    except NotFound as error:
        pytest.skip(str(error))
    path = tmp_path / "in.json"
    text = "the quick brown fox step_ms=10"
    write_input_file([{"text_input": text, "max_tokens": n} for n in (4, 8)], path)
    repository = make_load_test_repository(tmp_path / "models", find_model_repository())
    with start_server(tmp_path / "log", supervised=False, model_repository=repository) as slim:
        for load in (Load(2), Load(request_rate=50.0)):
            url = slim.address.grpc_url
            samples = run(path, url, load, request_count=12, timeout_s=60, attempts=1)
            report = samples.report()
            assert report["num_requests"] >= 12 and samples.num_unanswered == 0
            assert report["itl_p50_s"] > 0.009
            assert report["ttft_p50_s"] < report["latency_p50_s"]
            assert report["responses_per_s"] > report["requests_per_s"]


@pytest.mark.timeout(240)
def test_bench_serve_measures_both_layouts_in_turns(tmp_path, monkeypatch):
    from rich.console import Console

    from granikv.bench import serve
    from granikv.bench.serve_workload import AgentsWorkload
    from tests.unit.test_bench_serve import WordTokenizer

    try:
        find_perf_analyzer()
    except NotFound as error:
        pytest.skip(str(error))
    for name, value in FAKE_ENV.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(serve, "load_tokenizer", lambda model: WordTokenizer())
    workload = AgentsWorkload((3,), prefix_len=20, suffix_len=4, output_len=5, rounds=1)
    loads = [Load(2), Load(None, request_rate=20.0)]
    console = Console(file=(tmp_path / "console").open("w"))
    cases = serve.run_serve_bench(
        workload, loads, repeats=2, log_folder=tmp_path, console=console, timeout_s=30
    )
    assert [case.params["load"] for case in cases] == ["concurrency 2", "20 requests/s"]
    for case in cases:
        assert case.baseline == "uniform-paging" and case.metrics["same_answers"] == 1.0
        assert case.metrics["num_requests"] >= 6 and case.baseline_metrics["num_requests"] >= 6
        assert case.ratio == case.metrics["tokens_per_s"] / case.baseline_metrics["tokens_per_s"]
        assert case.metrics["itl_p99_s"] >= case.metrics["itl_p50_s"]
    lines = (tmp_path / "console").read_text()
    assert lines.index("asymmetric, run 1") < lines.index("uniform, run 1")
    assert lines.index("uniform, run 2") < lines.index("asymmetric, run 2")
