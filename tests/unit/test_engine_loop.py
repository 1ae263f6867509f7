"""The engine loop's order of work: new requests keep nobody waiting, and no order is lost."""

from __future__ import annotations

import time

import pytest
import zmq

from granikv.config import EngineConfig
from granikv.serving import engine_process, wire
from granikv.serving.engine_process import EngineLoop
from tests.serving.fake_engine import FakeEngine


class BusyEngine(FakeEngine):
    """Takes 10 ms to look at a request, as the tokenizer does with a long text."""

    def __init__(self):
        super().__init__(EngineConfig())
        self.seen: list[str] = []

    def add_request(self, request_id, *arguments, **options) -> None:
        time.sleep(0.01)
        self.seen.append(request_id)
        super().add_request(request_id, *arguments, **options)

    def abort(self, request_id: str) -> bool:
        self.seen.append(f"-{request_id}")
        return super().abort(request_id)


def add(request_id: str, max_tokens: int = 500) -> wire.Add:
    return wire.Add(request_id, "a b", {"max_tokens": max_tokens})


@pytest.fixture
def loop(tmp_path):
    """A loop that serves "running"; `loop.give(*commands)` sends it one message."""
    address = f"ipc://{tmp_path}/e"
    context = zmq.Context()
    commands, reports = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    commands.bind(address + ".in")
    reports.bind(address + ".out")
    loop = EngineLoop(address, drain_s=5.0)
    loop.engine = BusyEngine()

    def give(*messages) -> None:
        commands.send(wire.encode(list(messages)))
        assert loop.commands.poll(5000)

    loop.give = give
    loop.give(add("running"))
    assert loop.take_commands() == [] and loop.engine.has_work()
    loop.engine.seen.clear()
    yield loop
    loop.context.destroy(linger=0)
    context.destroy(linger=0)


def test_new_requests_are_taken_for_a_short_time_between_steps(loop, monkeypatch):
    names = [f"r{n}" for n in range(40)]
    loop.give(*map(add, names))
    started, turns = time.monotonic(), 0
    while len(loop.engine.seen) < len(names):
        loop.take_commands()
        turns += 1
        assert loop.engine.seen == names[: len(loop.engine.seen)]
    expected = (time.monotonic() - started) / (engine_process.ADMISSION_S + 0.02)
    assert turns >= max(5, 0.5 * expected) and loop.live == {"running", *names}


def test_refused_requests_count_as_much(loop):
    loop.give(*(add(f"r{n}", max_tokens=10**6) for n in range(40)))
    refused = loop.take_commands()
    assert 1 <= len(refused) < 20 and all(o.error_code == "INVALID_ARG" for o in refused)


def test_an_abort_waits_for_its_request_only(loop):
    names = [f"r{n}" for n in range(20)]
    loop.give(*map(add, names), wire.Abort("running"), wire.Abort("r19"), wire.Abort("unknown"))
    loop.take_commands()
    assert loop.engine.seen[:2] == ["-running", "r0"]
    while loop.waiting:
        loop.take_commands()
    assert loop.engine.seen == ["-running", *names, "-r19"]


def test_a_shutdown_waits_for_nothing(loop):
    loop.give(*(add(f"r{n}") for n in range(40)), wire.Shutdown())
    loop.take_commands()
    assert loop.stopping and loop.engine.seen == []


def test_a_drain_answers_what_waits(loop, tmp_path):
    loop.drained_file = tmp_path / "drained"
    loop.give(*(add(f"r{n}") for n in range(40)))
    loop.take_commands()
    waiting = {command.request_id for command in loop.waiting}
    assert waiting
    loop.begin_drain()
    refused = []
    while loop.waiting:
        refused += loop.take_commands()
    assert {o.request_id for o in refused} == waiting
    assert {o.error_code for o in refused} == {"UNAVAILABLE"}
