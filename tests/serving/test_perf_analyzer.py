"""perf_analyzer against the real server, and the reading of its export."""

from __future__ import annotations

import json

import pytest

from granikv.errors import NotFound
from granikv.serving.perf_analyzer import find_perf_analyzer, parse_profile, run, write_input_file


def test_parse_profile_drops_the_empty_final_response():
    requests = [
        {"timestamp": 0, "response_timestamps": [10**9, 2 * 10**9, 4 * 10**9, 5 * 10**9]},
        {"timestamp": 10**9, "response_timestamps": [3 * 10**9, 4 * 10**9]},
    ]
    report = parse_profile({"experiments": [{"requests": requests}]})
    assert report["num_requests"] == 2
    assert report["num_responses"] == 4
    assert report["ttft_s"]["mean"] == pytest.approx(1.5)
    assert report["itl_s"]["mean"] == pytest.approx(1.5)
    assert report["elapsed_s"] == pytest.approx(4.0)


def test_write_input_file(tmp_path):
    path = tmp_path / "in.json"
    write_input_file([{"text_input": "a", "max_tokens": 3, "timestamp": 5}], path)
    expected = {"stream": [True], "text_input": ["a"], "max_tokens": [3], "timestamp": 5}
    assert json.loads(path.read_text()) == {"data": [expected]}


def test_perf_analyzer_measures_streams(server, tmp_path):
    try:
        find_perf_analyzer()
    except NotFound as error:
        pytest.skip(str(error))
    path = tmp_path / "in.json"
    text = "the quick brown fox step_ms=10"
    write_input_file([{"text_input": text, "max_tokens": n} for n in (4, 8)], path)
    report = run(path, server.address.grpc_url, concurrency=2, request_count=12, timeout_s=60)
    assert report["num_requests"] >= 12
    assert 0.009 < report["itl_s"]["p50"] < 0.05
    assert report["ttft_s"]["p50"] < report["latency_s"]["p50"]
    assert report["responses_per_s"] > report["requests_per_s"]
