"""The stub's side of the engine process when the engine hangs. No Triton."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from granikv.serving import engine_client, wire
from granikv.serving.engine_client import EngineClient
from granikv.serving.settings import ServingSettings
from tests.serving.conftest import FAKE_ENV
from tests.serving.http_text import wait_until


@pytest.fixture
def start_client(tmp_path, monkeypatch):
    """start_client(step_limit_s, silence_s) -> (client, outputs, reasons of deaths)"""
    monkeypatch.setenv("PYTHONPATH", FAKE_ENV["PYTHONPATH"])
    clients = []

    def start(step_limit_s: float, silence_s: float) -> tuple[EngineClient, list, list]:
        monkeypatch.setattr(engine_client, "SILENCE_S", silence_s)
        settings = ServingSettings(
            engine_config={},
            engine_class=FAKE_ENV["GRANIKV_ENGINE_CLASS"],
            python=sys.executable,
            run_dir=str(tmp_path),
            step_limit_s=step_limit_s,
        )
        outputs: list[wire.Output] = []
        reasons: list[str] = []
        client = EngineClient(settings, outputs.extend, lambda stats: None, reasons.append)
        clients.append(client)
        return client, outputs, reasons

    yield start
    for client in clients:
        client.close()


def test_an_engine_that_sends_no_heartbeat_is_hung(start_client):
    client, _, reasons = start_client(step_limit_s=0.5, silence_s=2.5)
    os.kill(client.process.pid, signal.SIGSTOP)
    stopped = time.monotonic()
    assert wait_until(lambda: bool(reasons), 15)
    assert time.monotonic() - stopped > 1.5
    assert "no sign of life" in reasons[0] and client.dead_reason == reasons[0]
    assert client.process.wait(5) == -signal.SIGKILL


def test_an_engine_in_a_long_step_is_not(start_client):
    client, outputs, reasons = start_client(step_limit_s=60.0, silence_s=-57.0)
    client.send(wire.Add("busy", "a step_ms=5000", {"max_tokens": 1}))
    assert wait_until(lambda: bool(outputs), 15)
    assert outputs[0].finished and not reasons


def test_a_step_over_its_limit_is_hung(start_client):
    client, _, reasons = start_client(step_limit_s=0.5, silence_s=60.0)
    client.send(wire.Add("busy", "a step_ms=30000", {"max_tokens": 1}))
    assert wait_until(lambda: bool(reasons), 10)
    assert "a step ran for over 0.5 s" in reasons[0]
