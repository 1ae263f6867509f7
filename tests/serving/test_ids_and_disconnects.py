"""Ids, cancelled calls and closed connections over real gRPC, with the fake engine."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import time
import uuid

import pytest

from tests.serving.grpc_stream import Stream, ask
from tests.serving.http_text import read_metrics, wait_until

LONG = {"text_input": b"a b c step_ms=10", "max_tokens": 500, "end_id": -1}
QUICK = {"text_input": b"a b c", "max_tokens": 3, "exclude_input_in_output": True}


def metric(server, name: str) -> float:
    return read_metrics(server.address.metrics_url).get(name, 0.0)


def is_idle(server) -> bool:
    """Nothing is left in the adapter's maps or in the engine."""
    series = read_metrics(server.address.metrics_url)
    names = ("serving_live_calls", "serving_live_rows", "active_requests")
    return all(series.get(f"nv_granikv_{name}", 0.0) == 0.0 for name in names)


def test_c35_second_request_with_a_live_id_is_refused(server):
    time.sleep(0.5)  # metrics are written 5 times a second: what other tests made is in
    made = metric(server, "nv_granikv_generated_tokens")
    with Stream(server.address.grpc_url) as first, Stream(server.address.grpc_url) as second:
        text = b"a b c step_ms=20"
        first.send("same", text_input=text, max_tokens=30, stream=True)
        first.receive()
        answer = second.ask("same", **QUICK)
        assert "ALREADY_EXISTS" in answer.errors[0] and "same" in answer.errors[0]
        answer = first.wait("same")
        assert answer.text.split() == [("a", "b", "c", "step_ms=20")[i % 4] for i in range(30)]
        del first.answers["same"]
        assert first.ask("same", **QUICK).text == "a b c "
    assert wait_until(lambda: metric(server, "nv_granikv_generated_tokens") == made + 30 + 3)
    time.sleep(0.5)  # gauges of the time after the requests
    series = read_metrics(server.address.metrics_url)
    assert not {name: value for name, value in series.items() if value < 0}
    assert series["nv_granikv_serving_live_calls"] == series["nv_granikv_serving_live_rows"] == 0


@pytest.mark.parametrize("end", ["stop", "cancel"])
def test_c35_the_first_can_be_ended_after_the_refusal(server, end):
    assert wait_until(lambda: is_idle(server))
    aborted = metric(server, "nv_granikv_aborted")
    with Stream(server.address.grpc_url) as first, Stream(server.address.grpc_url) as second:
        first.send("same", **LONG, stream=True)
        first.receive()
        assert "ALREADY_EXISTS" in second.ask("same", **QUICK).errors[0]
        if end == "stop":
            assert second.ask("same", text_input=b"", max_tokens=1, stop=True).texts == []
            answer = first.wait("same")
            assert answer.last["finish_reason"][0, 0] == b"cancelled"
            assert int(answer.last["num_output_tokens"][0, 0]) < LONG["max_tokens"]
        else:
            first.close(cancel=True)
        assert wait_until(lambda: metric(server, "nv_granikv_aborted") == aborted + 1, 3)
    assert wait_until(lambda: is_idle(server))
    assert ask(server.address.grpc_url, **QUICK).text == "a b c "


def test_c37_ten_streams_with_500_ids_answer_each_once(server):
    def worker(_: int) -> int:
        ids = [str(uuid.uuid4()) for _ in range(50)]
        with Stream(server.address.grpc_url) as stream:
            for request_id in ids:
                stream.send(request_id, **QUICK)
            for request_id in ids:
                assert stream.wait(request_id).texts == ["a b c "]
            assert set(stream.answers) == set(ids)
        return len(ids)

    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        assert sum(pool.map(worker, range(10))) == 500
    assert wait_until(lambda: is_idle(server))


def test_c38_fifty_closes_after_two_tokens(server):
    for number in range(50):
        stream = Stream(server.address.grpc_url)
        stream.send(f"closed-{number}", **LONG, stream=True)
        stream.receive()
        stream.receive()
        stream.close(cancel=True)
    assert ask(server.address.grpc_url, **QUICK).text == "a b c "
    assert wait_until(lambda: is_idle(server))
    assert server.num_starts == 1


class Disconnect:
    """Measures how long a request runs on without its client, in steps of 50 ms.

    Not the one step of the contract, which counts from the engine's abort: before that the cancel
    goes through Triton, and the adapter asks for it every 20 ms. On an idle machine 1 step in all; the
    bound leaves room for a busy one.
    """

    STEP_S, MOST_STEPS = 0.05, 8
    TEXT = "a b c step_ms=50"

    def __init__(self, server):
        self.server = server
        assert wait_until(lambda: is_idle(server))
        time.sleep(0.5)  # metrics are written 5 times a second
        self.aborted, self.made = self.read()
        self.sent = time.monotonic()

    def read(self) -> tuple[float, float]:
        names = ("nv_granikv_aborted", "nv_granikv_generated_tokens")
        return metric(self.server, names[0]), metric(self.server, names[1])

    def expect_a_quick_end(self, closed: float) -> None:
        """closed: when the client went; a step makes one token."""
        assert wait_until(lambda: self.read()[0] == self.aborted + 1, 3)
        time.sleep(0.5)
        made = self.read()[1] - self.made
        assert made - (closed - self.sent) / self.STEP_S < self.MOST_STEPS
        time.sleep(0.3)
        assert self.read() == (self.aborted + 1, self.made + made)


@pytest.mark.parametrize("streaming", [True, False])
def test_c40_generation_stops_after_a_disconnect(server, streaming):
    disconnect = Disconnect(server)
    stream = Stream(server.address.grpc_url)
    values = {"text_input": disconnect.TEXT.encode(), "max_tokens": 200, "end_id": -1}
    stream.send("gone", **values, stream=streaming)
    if streaming:
        for _ in range(3):
            stream.receive()
    else:
        time.sleep(0.2)
    closed = time.monotonic()
    stream.close(cancel=True)
    disconnect.expect_a_quick_end(closed)


def test_c40_generation_stops_after_an_http_hang_up(server):
    """Of a streamed answer: Triton notices a hang-up when it writes, so never without a stream."""
    disconnect = Disconnect(server)
    address = server.address
    connection = http.client.HTTPConnection(address.host, address.http_port, timeout=5)
    body = {"text_input": disconnect.TEXT, "max_tokens": 200, "stream": True}
    connection.request("POST", "/v2/models/granikv/generate_stream", json.dumps(body))
    response = connection.getresponse()
    assert response.readline().startswith(b"data:")
    closed = time.monotonic()
    response.close()
    connection.close()
    disconnect.expect_a_quick_end(closed)


def test_c41_cancel_with_log_probs(server):
    aborted = metric(server, "nv_granikv_aborted")
    stream = Stream(server.address.grpc_url)
    stream.send("logs", **LONG, stream=True, return_log_probs=True)
    for _ in range(4):
        _, answer = stream.receive()
        assert answer.last["output_log_probs"].shape == (1, 1, 1)
    stream.close(cancel=True)
    _, error = stream.arrivals.queue[-1]
    assert error.status() == "StatusCode.CANCELLED"
    assert wait_until(lambda: metric(server, "nv_granikv_aborted") == aborted + 1)
    assert wait_until(lambda: is_idle(server))
    assert ask(server.address.grpc_url, **QUICK).text == "a b c "
    assert server.num_starts == 1


def test_c43_cancelled_ids_leave_nothing_behind(server):
    """Scaled down: 1000 pairs of a request and its stop."""
    with Stream(server.address.grpc_url) as stream:
        for block in range(20):
            ids = [f"c43-{block}-{n}" for n in range(50)]
            for request_id in ids:
                stream.send(request_id, **LONG)
            time.sleep(0.01)
            for request_id in ids:
                stream.send(request_id, text_input=b"", max_tokens=1, stop=True)
            finals = 0
            while finals < 2 * len(ids):
                request_id, answer = stream.receive()
                finals += answer.is_final
                answer.is_final = False
    assert wait_until(lambda: is_idle(server))


def test_a_cancelled_id_can_be_used_again(server):
    for _ in range(5):
        stream = Stream(server.address.grpc_url)
        stream.send("again", **LONG, stream=True)
        stream.receive()
        stream.close(cancel=True)
        time.sleep(0.2)
    with Stream(server.address.grpc_url) as stream:
        assert stream.ask("again", **QUICK).text == "a b c "
