"""Tensor-parallel ranks (gloo processes on a CPU): the tokens of one, and what ends of ranks do.

Faults are injected by faulty_rank.py. None may hang, leave a process, a descriptor or a file, or
be blamed on another rank.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import make_tiny_hf
from tiny_engine import run, three_levels, tokens

from granikv.cli import app
from granikv.config import EngineConfig
from granikv.engine import Engine
from granikv.errors import Unavailable
from granikv.executor import rank_processes
from granikv.processes import process_state
from granikv.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Eight query heads over two KV heads: from four ranks on, ranks share a KV head."""
    folder = tmp_path_factory.mktemp("model")
    words = models.WordLevel({"<unk>": 0, "a": 3}, unk_token="<unk>")
    (folder / "tokenizer.json").write_text(Tokenizer(words).to_str())
    return make_tiny_hf(folder, "Qwen2ForCausalLM", seed=3, num_attention_heads=8)


@pytest.fixture
def traces(tmp_path, monkeypatch):
    """Call it: what this process and its ranks have left behind since the test began."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    descriptors = set(os.listdir("/proc/self/fd"))

    def left() -> list[str]:
        own = {f"/proc/self/fd/{name}" for name in set(os.listdir("/proc/self/fd")) - descriptors}
        return [*filter(os.path.exists, own), *map(str, tmp_path.iterdir())]

    return left


def settings(model, **changes) -> EngineConfig:
    values = {
        "model": str(model), "device": "cpu", "tp": 2, "capacity_tokens": 1024, "max_requests": 10,
        "min_extent_tokens": 16, "max_num_batched_tokens": 64, "max_seq_len": 128,
        "debug_checks": True, "random_weights": True, "profile": "default",
    }  # fmt: skip
    return EngineConfig(**values | changes)


def engine_of(model, **changes) -> Engine:
    engine = Engine(settings(model, **changes))
    engine.recorded_logits = {}
    return engine


@pytest.fixture
def faulty(monkeypatch):
    """faulty("1 sum5 SIGKILL"): ranks that are started from now on."""

    def inject(faults: str) -> None:
        places = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(places))
        monkeypatch.setenv("RANK_FAULTS", faults)
        monkeypatch.setattr(rank_processes, "RANK_MODULE", "faulty_rank")
        monkeypatch.setattr(rank_processes, "STOPPED_S", 0.7)

    return inject


def errors_of(engine, num_steps: int = 30) -> tuple[list[Exception], float]:
    """Of three requests, one by one, and the seconds until the last had it."""
    params = SamplingParams(max_tokens=num_steps, temperature=0.0, ignore_eos=True)
    for i in range(3):
        engine.add_request(f"r{i}", tokens(i, 20), params)
    begin = time.monotonic()
    outs = [out for _ in iter(engine.has_work, False) for out in engine.step()]
    return [out.error for out in outs if out.finished], time.monotonic() - begin


def test_four_ranks_give_the_tokens_of_one(model, traces):
    """From files, with logits: KV heads are replicated, extents move on every rank."""
    plain = engine_of(model, tp=1, random_weights=False)
    engine = engine_of(model, tp=4, random_weights=False)
    processes = engine.executor.processes.processes
    assert engine.model_config.num_qo_heads == 2 and engine.model_config.num_kv_heads == 1
    for process in processes:
        environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        assert b"NCCL_NVLS_ENABLE=0" in environment
        assert b"TORCH_SYMM_MEM_DISABLE_MULTICAST=1" in environment
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "granikv_plans" in maps and "/dev/shm/" not in maps, "it would be left by kill -9"
    for gap in (2, 0):  # cold, with promotions that move KV; then warm
        want, _ = run(plain, three_levels(), max_tokens=5, gap=gap)
        got, _ = run(engine, three_levels(), max_tokens=5, gap=gap)
        assert got == want
    assert engine.cache.counters["moved_tokens"] > 0
    plain.close()

    processes[2].kill()  # while nothing runs
    deadline = time.monotonic() + 3
    while engine.executor.failure() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "rank 2" in str(engine.failure()) and "SIGKILL" in str(engine.failure())
    errors, _ = errors_of(engine)
    assert [type(error) for error in errors] == [Unavailable] * 3
    engine.close()
    assert [process_state(process.pid) for process in processes] == [""] * 4
    assert not traces()


@pytest.mark.parametrize(
    "faults,named",
    [("1 import SIGKILL", "rank 1.*SIGKILL"), ("0 join SIGSTOP", "rank 0.*stopped"),
     ("1 load SIGKILL", "rank 1.*SIGKILL")],
)  # fmt: skip
def test_a_rank_lost_at_the_start_is_reported(model, faulty, traces, faults, named):
    faulty(faults)
    begin = time.monotonic()
    with pytest.raises(Unavailable, match=named):
        engine_of(model)
    assert time.monotonic() - begin < 60, "it waited for a time limit"
    assert not traces()


@pytest.mark.parametrize(
    "faults,named",
    [("1 sum5 SIGKILL", "rank 1.*SIGKILL"), ("0 sum9 SIGKILL", "rank 0.*SIGKILL"),
     ("1 sum9 SIGSTOP", "rank 1.*stopped"), ("1 plan4 differ", "one plan in step 3"),
     ("0 sum5 slow, 1 ids4 differ", "one sampled ids in step 3")],
)  # fmt: skip
def test_a_rank_lost_in_a_step_fails_the_requests(model, faulty, traces, faults, named):
    """The others sit in a collective then. A slow rank is none of the lost."""
    faulty(faults)
    engine = engine_of(model)
    processes = engine.executor.processes.processes
    errors, elapsed_s = errors_of(engine)
    assert len(errors) == 3 and elapsed_s < 5
    for error in errors:
        assert isinstance(error, Unavailable)
        assert pytest.raises(Unavailable, engine.executor.processes.receive, 0).match(named)
    assert [process_state(process.pid) for process in processes] == ["", ""]
    engine.close()
    assert not traces()


def test_the_decode_benchmark_runs_on_ranks(model, tmp_path):
    """Two engines, each with ranks of its own, in turns; one command."""
    out = tmp_path / "result.json"
    command = ["bench", "decode", "--random-weights", str(model), "--tp", "2", "--batch", "2"]
    command += ["--prefix-len", "24", "--suffix-len", "4", "--steps", "4", "--rounds", "1"]
    command += ["--set", "profile=default", "--set", "device=cpu", "--json", str(out)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    (case,) = json.loads(out.read_text())["cases"]
    assert case["params"]["tp"] == 2
    for metrics in (case["metrics"], case["baseline_metrics"]):
        assert metrics["same_tokens"] == metrics["answers"] == 2
        assert 0 < metrics["all_reduce_share"] < 1 and metrics["regime"] in ("compute", "memory")
