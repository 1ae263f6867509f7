"""Requests, refusals and answers over real gRPC and HTTP, with the fake engine."""

from __future__ import annotations

import json
import re
import time

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from tests.serving.grpc_stream import Stream, ask, tensors
from tests.serving.http_text import post, read_metrics, read_text, wait_until


def refuse(server, code: str, *words: str, **values) -> None:
    """The request is refused with the code and the words, and the server answers afterwards."""
    defaults = {"text_input": b"a b c", "max_tokens": 2}
    given = {k: v for k, v in {**defaults, **values}.items() if v is not None}
    answer = ask(server.address.grpc_url, **given)
    assert answer.errors, answer
    for word in (code, *words):
        assert word in answer.errors[0]
    assert ask(server.address.grpc_url, **defaults, exclude_input_in_output=True).text == "a b "


def test_streaming_gives_the_words_in_order_and_an_empty_final(server):
    text = b"one two three step_ms=20"
    answer = ask(server.address.grpc_url, text_input=text, max_tokens=4, stream=True)
    assert answer.text == "one two three step_ms=20 "
    assert len(answer.texts) >= 3
    assert answer.last["finish_reason"][0, 0] == b"length"
    assert answer.last["num_input_tokens"][0, 0] == 4
    assert answer.last["num_output_tokens"][0, 0] == 4


def test_not_streaming_gives_exactly_one_response(server):
    answer = ask(server.address.grpc_url, text_input=b"a b c", max_tokens=3)
    assert answer.texts == ["a b ca b c "]
    assert answer.is_final
    assert answer.last["attention_path"][0, 0] == b"cascade"


def test_input_is_left_out_when_asked(server):
    values = {"text_input": b"a b c", "max_tokens": 3}
    assert ask(server.address.grpc_url, **values, exclude_input_in_output=True).text == "a b c "


def test_stop_words_and_returned_numbers(server):
    answer = ask(
        server.address.grpc_url,
        text_input=b"a b c d",
        max_tokens=9,
        stop_words=[b"c"],
        exclude_input_in_output=True,
        return_log_probs=True,
        return_perf_metrics=True,
        return_num_input_tokens=False,
    )
    assert answer.text == "a b "
    assert answer.last["finish_reason"][0, 0] == b"stop"
    assert answer.last["output_log_probs"].shape == (1, 1, 3)
    assert answer.last["cum_log_probs"][0, 0] == pytest.approx(-1.5)
    assert answer.last["kv_cache_reused_blocks"][0, 0] == 2
    assert answer.last["kv_cache_alloc_total_blocks"][0, 0] == 7
    assert 0 < answer.last["arrival_time_ns"][0, 0] <= answer.last["last_token_time_ns"][0, 0]
    assert "num_input_tokens" not in answer.last


def test_stop_ends_the_live_request_and_is_idempotent(server):
    with Stream(server.address.grpc_url) as stream:
        stream.send("long", text_input=b"a step_ms=10", max_tokens=500, stream=True)
        stream.receive()
        with Stream(server.address.grpc_url) as other:
            assert other.ask("long", text_input=b"", max_tokens=1, stop=True).texts == []
            assert other.ask("other", text_input=b"", max_tokens=1, stop=True).is_final
        answer = stream.wait("long", timeout_s=2)
        assert answer.last["finish_reason"][0, 0] == b"cancelled"


def test_timeout_ms_ends_a_request(server):
    values = {"text_input": b"a step_ms=10", "max_tokens": 500, "timeout_ms": 100}
    answer = ask(server.address.grpc_url, timeout_s=3, **values)
    assert "UNAVAILABLE" in answer.errors[0] and "timeout_ms" in answer.errors[0]


def test_a_failed_request_and_a_failed_step_are_answered(server):
    refuse(server, "INTERNAL", "boom", text_input=b"boom")
    refuse(server, "INTERNAL", "explode", text_input=b"explode")


def test_missing_tensors(server):
    url = f"{server.address.http_url}/v2/models/granikv/generate"
    assert post(url, {"text_input": "a"})[0] == 400
    assert post(url, {"max_tokens": 3})[0] == 400
    required = "expected a value: this input is required, got None"
    optional = {"stream": False, "seed": 1}
    refuse(server, "INVALID_ARG", f"max_tokens: {required}", max_tokens=None, **optional)
    refuse(server, "INVALID_ARG", f"text_input: {required}", text_input=None, **optional)


def test_nan_temperature(server):
    refuse(server, "INVALID_ARG", "temperature", temperature=float("nan"))
    refuse(server, "INVALID_ARG", "top_p", top_p=float("nan"))


def test_an_empty_prompt(server):
    refuse(server, "INVALID_ARG", "text_input", text_input=b"")


def test_invalid_utf8(server):
    refuse(server, "INVALID_ARG", "text_input", "UTF-8", text_input=b"ok \xff\xfe")
    refuse(server, "INVALID_ARG", "stop_words", "UTF-8", stop_words=[b"\xff"])


@pytest.mark.parametrize(
    "values",
    [
        {"beam_width": 2},
        {"num_return_sequences": 2},
        {"guided_decoding_guide": b"{}"},
        {"embedding_bias_words": [b"x"]},
        {"lora_task_id": 3},
        {"retention_decode_priority": 5},
        {"bad_words": [b"x"]},
    ],
    ids=lambda values: next(iter(values)),
)
def test_inputs_not_served_are_refused_by_name(server, values):
    refuse(server, "UNSUPPORTED", next(iter(values)), **values)


@pytest.mark.parametrize("name", ["beam_width", "num_return_sequences"])
@pytest.mark.parametrize("value", [0, -1])
def test_fewer_than_one_sequence_is_refused(server, name, value):
    refuse(server, "INVALID_ARG", f"{name}: expected 1", f"got {value}", **{name: value})


def test_an_end_id_out_of_range_is_refused_by_name(server):
    for value in (1000, 2**31 - 1):
        refuse(server, "INVALID_ARG", "end_id", f"got {value}", "below 1000", end_id=value)
    for value in (-2, -(2**31)):
        refuse(server, "INVALID_ARG", "end_id", f"got {value}", "-1 for none", end_id=value)
    text = {"text_input": b"a b", "max_tokens": 1, "exclude_input_in_output": True}
    assert ask(server.address.grpc_url, end_id=-1, **text).text == "a "
    assert ask(server.address.grpc_url, end_id=999, **text).text == "a "


def test_inputs_not_served_pass_when_they_change_nothing(server):
    values = {"beam_width": 1, "num_return_sequences": 1, "guided_decoding_guide": b""}
    values |= {"lora_task_id": 0, "embedding_bias_words": [b""], "pad_id": 2}
    assert ask(server.address.grpc_url, text_input=b"a", max_tokens=1, **values).texts == ["aa "]


def test_c53_prompt_longer_than_the_maximum(server):
    exact = b"w " * 511
    values = {"max_tokens": 1, "exclude_input_in_output": True}
    assert ask(server.address.grpc_url, text_input=exact, **values).text == "w "
    refuse(server, "INVALID_ARG", "text_input", "512", "511", text_input=b"w " * 512)
    refuse(server, "INVALID_ARG", "text_input", "5120", "511", text_input=b"w " * 5120)


def test_c55_empty_row_in_a_batch(server):
    with Stream(server.address.grpc_url) as stream:
        stream.send(
            "batch",
            text_input=[[b"a b"], [b""], [b"c d"]],
            max_tokens=[[2], [2], [2]],
            exclude_input_in_output=[[True]] * 3,
        )
        while "batch" not in stream.answers or not stream.answers["batch"].is_final:
            stream.receive()
        answer = stream.answers["batch"]
        rows = {int(o["batch_index"][0, 0]): o["text_output"][0, 0] for o in answer.outputs}
        assert rows == {0: b"a b ", 2: b"c d "}
        assert len(stream.answers[""].errors) == 1
        assert "text_input" in stream.answers[""].errors[0]


def test_c56_max_tokens(server):
    refuse(server, "INVALID_ARG", "max_tokens", "got 0", max_tokens=0)
    refuse(server, "INVALID_ARG", "max_tokens", "got -1", max_tokens=-1)
    url = f"{server.address.http_url}/v2/models/granikv/generate"
    status, text = post(url, {"text_input": "a b", "max_tokens": None})
    assert status >= 400 and "Unable to parse" in text
    values = {"text_input": b"a b", "max_tokens": 1, "exclude_input_in_output": True}
    answer = ask(server.address.grpc_url, **values)
    assert answer.text == "a "
    assert answer.last["num_output_tokens"][0, 0] == 1


def test_c58_huge_max_tokens(server):
    """The engines refuse what their context does not hold (the fake as granikv.engine does)."""
    refuse(server, "INVALID_ARG", "max_tokens", "got 2147483647", max_tokens=2**31 - 1)
    url = f"{server.address.http_url}/v2/models/granikv/generate"
    for number in ("1e18", str(2**63)):
        status, text = post(url, b'{"text_input": "a", "max_tokens": %s}' % number.encode())
        assert status >= 400 and "Unable to parse" in text
    assert server.probe()
    assert server.num_starts == 1


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 999999.0},
        {"temperature": -1.0},
        {"temperature": float("inf")},
        {"top_p": -1.0},
        {"top_p": 0.0},
        {"top_p": 1.0001},
        {"repetition_penalty": 0.0},
        {"top_k": -5},
    ],
    ids=str,
)
def test_c61_extreme_sampling_numbers(server, values):
    refuse(server, "INVALID_ARG", next(iter(values)), **values)


def test_c61_seed_beyond_64_bits(server):
    url = f"{server.address.http_url}/v2/models/granikv/generate"
    body = b'{"text_input": "a", "max_tokens": 1, "seed": 18446744073709551616}'
    assert post(url, body)[0] >= 400
    assert server.probe()


def ask_with_shapes(server, text_shape: list[int], max_tokens_shape: list[int], data: bytes):
    """A gRPC stream's answer; `data` is the text input's content, whatever the shape says."""
    text = grpcclient.InferInput("text_input", text_shape, "BYTES")
    text._raw_content = data
    (count,) = tensors(max_tokens=1)
    count.set_shape(max_tokens_shape)
    with Stream(server.address.grpc_url) as stream:
        stream.client.async_stream_infer(
            "granikv", [text, count], request_id="shape", enable_empty_final_response=True
        )
        return stream.wait("shape")


ONE_TEXT = b"\x01\x00\x00\x00a"  # its length, then its bytes
ABSURD_SHAPES = [[-1, 8], [-1, 1], [0], [2**40], [1, 1, 1], [1, 0], [0, 1], [1, 2**40]]
SHAPE_ERRORS = "unexpected shape|batch size|batch-size|byte size|expected 1 string elements"


@pytest.mark.parametrize("for_both", [False, True])
@pytest.mark.parametrize("shape", ABSURD_SHAPES, ids=str)
def test_c65_c67_absurd_shapes(server, shape, for_both):
    """The shape alone is refused: the same bytes in the shape [1, 1] are answered."""
    data = b"" if 0 in shape else ONE_TEXT
    answer = ask_with_shapes(server, shape, shape if for_both else [1, 1], data)
    assert answer.texts == []
    assert re.search(SHAPE_ERRORS, answer.errors[0]), answer
    assert ask_with_shapes(server, [1, 1], [1, 1], ONE_TEXT).texts == ["aa "]
    assert server.num_starts == 1


def test_c65_c67_no_row_with_the_bytes_of_one(server):
    answer = ask_with_shapes(server, [0, 1], [0, 1], ONE_TEXT)
    assert answer.texts == [] and "INVALID_ARG" in answer.errors[0]
    assert "expected a batch of at least 1 row, got none" in answer.errors[0]


@pytest.mark.parametrize("text", [[], [[]], ["a", "b"]], ids=str)
def test_c65_c67_absurd_shapes_over_http(server, text):
    url = f"{server.address.http_url}/v2/models/granikv/generate"
    status, answer = post(url, {"text_input": text, "max_tokens": 1})
    assert status == 400
    assert "text_input" in answer and re.search(SHAPE_ERRORS, answer)
    status, answer = post(url, {"text_input": ["a"], "max_tokens": [1]})
    assert (status, json.loads(answer)["text_output"]) == (200, "aa ")


def test_c67_an_empty_array_of_an_optional_input_means_none(server):
    empty = np.zeros((1, 0), dtype=object)
    values = {"text_input": b"a", "max_tokens": 1, "stop_words": empty}
    assert ask(server.address.grpc_url, **values).texts == ["aa "]


def test_http_generate(server):
    url = f"{server.address.http_url}/v2/models/granikv/generate"
    status, text = post(url, {"id": "h1", "text_input": "a b", "max_tokens": 2})
    assert status == 200
    assert json.loads(text)["text_output"] == "a ba b "
    status, text = post(url, {"text_input": "a b", "max_tokens": 0})
    assert status == 400
    assert "max_tokens" in text


def test_http_generate_stream(server):
    url = f"{server.address.http_url}/v2/models/granikv/generate_stream"
    body = {"text_input": "a b step_ms=20", "max_tokens": 3, "stream": True}
    status, text = post(url, body)
    pieces = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert status == 200
    assert "".join(piece["text_output"] for piece in pieces) == "a b step_ms=20 "
    assert pieces[-1]["finish_reason"] == "length"


def test_metrics(server):
    ask(server.address.grpc_url, text_input=b"a b", max_tokens=2)
    names = (
        'nv_trt_llm_request_metrics{request_type="active"}',
        'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max"}',
        "nv_granikv_generated_tokens",
        "nv_granikv_time_to_first_token_seconds_count",
        "nv_granikv_queue_time_seconds_count",
        "nv_llm_input_token_len_count",
    )
    url = server.address.metrics_url
    assert wait_until(lambda: all(name in read_metrics(url) for name in names))


def test_metric_kinds_are_those_that_the_engine_declared(server):
    ask(server.address.grpc_url, text_input=b"a b", max_tokens=3)
    url = server.address.metrics_url
    kinds = {
        "nv_granikv_generated_tokens": "counter",
        "nv_granikv_steps": "counter",
        "nv_granikv_groups": "counter",
        "nv_granikv_inter_token_latency_seconds_bucket": "counter",
        "nv_granikv_inter_token_latency_seconds_count": "counter",
        "nv_granikv_time_to_first_token_seconds": "histogram",
        "nv_granikv_active_requests": "gauge",
        "nv_granikv_serving_live_calls": "gauge",
    }
    lines = [f"# TYPE {name} {kind}" for name, kind in kinds.items()]
    assert wait_until(lambda: all(line in read_text(url) for line in lines))


def test_inter_token_latency_counts_every_gap(server):
    name = "nv_granikv_inter_token_latency_seconds"
    url = server.address.metrics_url

    def read():
        series = read_metrics(url)
        found = {k: v for k, v in series.items() if k.startswith(f"{name}_bucket")}
        bounds = {float(k.split('"')[1]): v for k, v in found.items()}
        return series.get(f"{name}_count", 0), [bounds[b] for b in sorted(bounds)]

    time.sleep(0.5)  # what earlier tests left
    before, _ = read()
    ask(server.address.grpc_url, text_input=b"a b step_ms=30", max_tokens=6)
    assert wait_until(lambda: read()[0] == before + 5)
    count, buckets = read()
    assert buckets == sorted(buckets) and buckets[-1] == count
