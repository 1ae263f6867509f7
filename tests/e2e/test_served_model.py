"""The embedded model behind a real Triton server, over gRPC: answers, sharing, cancels, limits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))
from grpc_stream import Stream
from helpers import missing_triton
from http_text import post, wait_until

from granikv.chat import Chat, local_answer
from granikv.text import load_tokenizer

pytestmark = pytest.mark.timeout(240)
SEVEN_THINGS = ("a king", "the river", "two cats", "in Paris", "her son", "snow", "nobody")
HANDBOOK = "You belong to a team of agents that answer briefly and in plain words. " * 64


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    if reason := missing_triton():
        pytest.skip(reason)
    from granikv.serving.launcher import running_server

    log = tmp_path_factory.mktemp("triton") / "server.log"
    config = {"capacity_tokens": 16384, "max_seq_len": 4096, "debug_checks": True}
    plan_log = {"GRANIKV_LOG_PLAN": "1"}
    with running_server(config, log_path=log, env=plan_log, start_timeout_s=120.0) as handle:
        yield handle


def metric(server, name):
    with urllib.request.urlopen(server.address.metrics_url) as response:
        text = response.read().decode()
    return sum(float(x.rsplit(" ", 1)[1]) for x in text.splitlines() if x.startswith(name))


def chat(question):
    messages = [{"role": "user", "content": question}]
    return load_tokenizer(None).apply_chat_template(messages, add_generation_prompt=True)


def test_what_is_two_and_two(server):
    with Stream(server.address.grpc_url) as stream:
        answer = stream.ask(
            "q", 60, text_input=chat("What is 2+2?"), max_tokens=20, exclude_input_in_output=True
        )
        assert "4" in answer.text and not answer.errors
        streamed = stream.ask(
            "s", 60, text_input=chat("What is 2+2?"), max_tokens=20, stream=True,
            exclude_input_in_output=True,
        )  # fmt: skip
        assert streamed.text == answer.text and len(streamed.texts) > 1
        assert int(streamed.last["cached_tokens"].item()) > 0


def test_c31_a_hundred_requests_with_a_common_prefix_end_in_time(server):
    start = time.monotonic()
    with Stream(server.address.grpc_url) as stream:
        for i in range(100):
            stream.send(f"a{i}", text_input=f"{HANDBOOK}Task {i}:", max_tokens=2)
        answers = [stream.wait(f"a{i}", 60) for i in range(100)]
    assert all(not a.errors and len(a.outputs) == 1 for a in answers)
    assert time.monotonic() - start < 60
    assert sum(int(a.last["hot_tokens"].item()) > 500 for a in answers) >= 99


def test_c40_cancel_stops_generation_and_frees_the_slots(server):
    series = 'nv_granikv_finished{reason="cancelled"}'
    cancelled = metric(server, series)
    with Stream(server.address.grpc_url) as stream:
        stream.send("long", text_input="Count:", max_tokens=3000, end_id=-1, stream=True)
        while len(stream.answers.get("long", ()) and stream.answers["long"].texts) < 5:
            stream.receive(30)
    deadline = time.monotonic() + 10  # metrics follow the engine by up to a report's interval
    while metric(server, series) == cancelled:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    made = metric(server, "nv_granikv_generated_tokens")
    time.sleep(1.0)
    assert metric(server, "nv_granikv_generated_tokens") == made
    assert metric(server, "nv_granikv_running_requests") == 0


def test_c41_cancel_with_log_probs(server):
    pids, series = dict(server.pids), 'nv_granikv_finished{reason="cancelled"}'
    cancelled, made = metric(server, series), 0
    stream = Stream(server.address.grpc_url)
    values = {"max_tokens": 3000, "end_id": -1, "stream": True, "return_log_probs": True}
    quick = {"max_tokens": 2, "stream": False}
    stream.send("logs", text_input="Count:", **values)
    while made < 4:
        _, answer = stream.receive(30)
        made += answer.last["output_log_probs"].size
    stream.close(cancel=True)
    _, error = stream.arrivals.queue[-1]
    assert error.status() == "StatusCode.CANCELLED"
    assert wait_until(lambda: metric(server, series) == cancelled + 1, 10)
    with Stream(server.address.grpc_url) as stream:
        answer = stream.ask("after", 30, text_input="Count:", **values | quick)
    assert not answer.errors and answer.last["output_log_probs"].shape == (1, 1, 2)
    assert server.pids == pids


@pytest.mark.parametrize("salt,other", [("mine", "yours"), ("mine too", "")])
def test_c08_a_prompt_is_shared_within_its_salt_only(server, salt, other):
    text = f"{salt}: {HANDBOOK[:700]}"
    fields = {"text_input": text, "max_tokens": 1}
    with Stream(server.address.grpc_url) as stream:
        cached = []
        for i, name in enumerate([salt, salt, other, other]):
            origin = {"cache_salt": name} if name else {}
            answer = stream.ask(f"salt{i}", 30, **fields, **origin)
            assert not answer.errors
            cached.append(int(answer.last["cached_tokens"].item()))
    num_tokens = int(answer.last["num_input_tokens"].item())
    assert cached == [0, num_tokens - 1] * 2


def test_c53_an_over_long_text_is_refused_with_both_numbers(server):
    """Of 4096 tokens. Ten times that is not encoded in full, since all others would wait."""
    url = f"{server.address.http_url}/v2/models/granikv/generate"
    assert post(url, {"text_input": "Say it.", "max_tokens": 1}, 60)[0] == 200
    time.sleep(0.5)  # metrics follow the engine by up to a report's interval
    names = ("nv_granikv_requests", "nv_granikv_used_tokens")
    pids, before = dict(server.pids), [metric(server, name) for name in names]
    limit = "INVALID_ARG: text_input: expected fewer than 4096 tokens (the context)"
    given = {" a" * 4096: "got 4096 tokens", " a" * 4097: "got 4097 tokens"}
    given |= {" a" * 40960: "got more than 4096 tokens", "a" * 10**6: "got 1000000 bytes"}
    for text, words in given.items():
        status, answer = post(url, {"text_input": text, "max_tokens": 1})
        assert status >= 400 and limit in answer and words in answer, answer
    with Stream(server.address.grpc_url) as stream:
        (error,) = stream.ask("long", text_input=" a" * 40960, max_tokens=1).errors
    assert limit in error and "got more than 4096 tokens" in error
    time.sleep(0.5)
    assert [metric(server, name) for name in names] == before and all(before)
    assert server.pids == pids


def test_c59_one_bad_length_among_seven_good(server):
    """The texts of the seven are those that each gives alone."""
    fields = {"max_tokens": 4, "exclude_input_in_output": True, "end_id": -1}
    prompts = [f"Once upon a time, {thing}" for thing in SEVEN_THINGS]
    with Stream(server.address.grpc_url) as stream:
        alone = [stream.ask(f"a{i}", 30, text_input=p, **fields) for i, p in enumerate(prompts)]
        for i, prompt in enumerate(prompts):
            stream.send(f"good{i}", text_input=prompt, **fields)
            if i == 3:
                stream.send("bad", text_input="Say it.", max_tokens=5000)
        while sum(answer.is_final for answer in stream.answers.values()) < 14:
            stream.receive(30)
        while "" not in stream.answers:
            stream.receive(10)
        good = [stream.answers[f"good{i}"] for i in range(7)]
        (error,) = stream.answers[""].errors
    assert "INVALID_ARG" in error and "max_tokens" in error and "5000" in error
    for one, other in zip(good, alone, strict=True):
        assert one.is_final and not one.errors and len(one.outputs) == 1
        assert one.text == other.text and int(one.last["num_output_tokens"].item()) == 4
    assert len({one.text for one in good}) == 7, "texts that differ show whose is whose"


BAD = [
    {"text_input": b""}, {"text_input": b"ok \xff"}, {"max_tokens": 0}, {"max_tokens": -1},
    {"temperature": float("nan")}, {"temperature": float("inf")}, {"top_p": 0.0}, {"top_p": 1.5},
    {"top_k": -1}, {"text_input": b" a" * 4096},
]  # fmt: skip


def test_bad_input_beside_a_running_request_leaves_no_trace(server):
    """Slots are accounted for after every step (debug_checks), and as many are used as before."""
    fields = {"text_input": "Once upon a time, a king", "max_tokens": 40, "end_id": -1}
    with Stream(server.address.grpc_url) as stream:
        alone = stream.ask("alone", 60, **fields)
        time.sleep(0.5)  # metrics follow the engine by up to a report's interval
        before = metric(server, "nv_granikv_used_tokens")
        stream.send("good", **fields)
        for values in BAD:
            stream.send("", **({"text_input": "Say it.", "max_tokens": 4} | values))
        answers = stream.answers
        while not {"", "good"} <= answers.keys() or len(answers[""].errors) < len(BAD):
            stream.receive(30)
        while not answers["good"].is_final:
            stream.receive(30)
        good, errors = answers["good"], answers[""].errors
    assert good.text == alone.text and not good.errors
    for name in {name for values in BAD for name in values}:
        refused = [e for e in errors if f"INVALID_ARG: {name}: " in e]
        assert len(refused) == sum(name in values for values in BAD), (name, errors)
    assert wait_until(lambda: metric(server, "nv_granikv_used_tokens") == before)


def test_c58_huge_max_tokens_are_refused_and_nothing_dies(server):
    pids = dict(server.pids)
    url = f"{server.address.http_url}/v2/models/granikv/generate"
    refused = "INVALID_ARG: max_tokens"  # 10**18: of what Triton makes of it in 32 bits
    words = {"2147483647": refused, str(10**18): refused, "1e18": "Unable to parse"}
    words[str(2**63)] = "Unable to parse"
    for number, word in words.items():
        status, text = post(url, b'{"text_input": "Say it.", "max_tokens": %s}' % number.encode())
        assert status >= 400 and word in text, text
    status, text = post(url, {"text_input": "Say it.", "max_tokens": 3}, 60)
    assert status == 200 and json.loads(text)["num_output_tokens"] <= 3
    assert server.pids == pids


def granikv(*arguments, text=None):
    command = [sys.executable, "-m", "granikv.cli", *arguments]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_granikv_chat_answers_lines_of_its_input(server):
    prompt = Chat(load_tokenizer(None), lambda *_: "").prompt
    assert "4" not in chat("What is 2+2?") and "4" not in prompt()
    text = granikv("chat", "--url", server.address.grpc_url, text="What is 2+2?\n")
    assert "4" in text and len(text.splitlines()) == 1


def test_granikv_chat_needs_no_server():
    with local_answer(None) as answer:
        pieces = []
        text = Chat(load_tokenizer(None), answer).ask("What is 2+2?", 32, pieces.append)
    assert "4" in text and "".join(pieces) == text


def test_granikv_inspect_shows_the_running_server(server):
    url = f"127.0.0.1:{server.address.metrics_port}"
    sections = json.loads(granikv("inspect", "--url", url, "--json"))
    assert sections["since the start"]["generated tokens"] > 0
    assert sections["requests"]["at most running"] == 256
    assert float(sections["latency"]["inter-token, mean s"]) > 0
    assert "tritonclient" in granikv("inspect")


def test_the_plan_log_names_choices_and_reasons(server):
    lines = [x for x in server.log_path.read_text().splitlines() if x.startswith("plan: step")]
    assert any("decode rows" in x and "-bound" in x for x in lines)
    assert any(re.search(r"prefix \[\d+, \d+\) x \d+ rows -> \w+: .* us", x) for x in lines)


def test_probes_are_in_no_counter_of_requests(server):
    series = ("nv_granikv_requests", "nv_granikv_finished", "nv_granikv_prompt_tokens")
    before = [metric(server, name) for name in series]
    for _ in range(3):
        server.probe()
    time.sleep(1.0)
    assert [metric(server, name) for name in series] == before


def test_nothing_is_left_behind(server):
    deadline = time.monotonic() + 10
    while metric(server, "nv_granikv_active_requests") and time.monotonic() < deadline:
        time.sleep(0.2)
    assert metric(server, "nv_granikv_active_requests") == 0
    assert metric(server, "nv_granikv_failed_steps") == 0
    assert metric(server, "nv_granikv_kv_retiring_tokens") == 0
    assert metric(server, "nv_granikv_kv_pinned_tokens") == 0
