"""The engine process when a rank of its engine is lost: answers, exit code, nothing left. No Triton."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from granikv.processes import process_state
from granikv.serving import wire
from granikv.serving.engine_client import EngineClient
from granikv.serving.settings import ServingSettings
from tests.helpers import make_tiny_hf
from tests.serving.http_text import wait_until

ROOT = Path(__file__).resolve().parents[2]


def children_of(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return sorted(int(child) for file in found for child in file.read_text().split())


def test_a_lost_rank_ends_the_engine_process(tmp_path, monkeypatch):
    """Stopped, the worse case: the other rank waits for it in a collective, and no process ended."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    model = make_tiny_hf(tmp_path / "model")
    settings = ServingSettings(
        engine_config={
            "model": str(model), "random_weights": True, "device": "cpu", "tp": 2,
            "capacity_tokens": 512, "max_seq_len": 200, "profile": "default",
        },
        python=sys.executable,
        run_dir=str(tmp_path),
    )  # fmt: skip
    outputs: list[wire.Output] = []
    reasons: list[str] = []
    client = EngineClient(settings, outputs.extend, lambda stats: None, reasons.append)
    try:
        client.send(wire.Add("long", [5] * 20, {"max_tokens": 150, "ignore_eos": True}))
        assert wait_until(lambda: bool(outputs), 60)
        ranks = children_of(client.process.pid)
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGSTOP)
        begin = time.monotonic()
        assert client.process.wait(10) == 1
        assert time.monotonic() - begin < 5
        assert wait_until(lambda: bool(reasons) and outputs[-1].finished, 5)
        assert outputs[-1].error_code == "UNAVAILABLE" and "rank 1" in outputs[-1].error_text
        assert [process_state(pid) for pid in ranks] == ["", ""]
    finally:
        client.close()
