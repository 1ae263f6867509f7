"""Two ranks in two processes (gloo), with doubles of the engine: the Torch executor's tokens."""

from __future__ import annotations

import dataclasses
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import make_tiny_hf
from test_tensorrt_executor import LIMITS, config, make_engine
from tiny_engine import run, three_levels, tokens

from granikv.config_check import check_engine
from granikv.engine import Engine
from granikv.engines.build import BuildSettings, build
from granikv.errors import EngineMismatch, InvalidArgument, ModelFileError, Unavailable
from granikv.executor.ranks import RanksExecutor, start_tensorrt
from granikv.executor.torch_executor import TorchExecutor
from granikv.models import find_model, load_model
from granikv.sampling import Sampler
from granikv.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
DOUBLE = "engine_double:from_folder"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    path = make_tiny_hf(folder / "model", "Qwen3ForCausalLM", seed=3)
    out = folder / "out"
    build(BuildSettings(path, out, 2, dtype="float32", builder="none", **LIMITS))
    return path, out


def start(built, monkeypatch, manifest=None, **changes):
    from granikv.engines.manifest import load_manifest

    path, out = built
    places = [str(ROOT), str(Path(__file__).parent)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(places))
    settings = config(
        executor="tensorrt", engine_dir=str(out), plugin=str(out), device="cpu", **{"tp": 2} | changes
    )  # fmt: skip
    manifest = manifest or load_manifest(out)
    sampler = Sampler(settings.max_requests, manifest.model.vocab_size, eos_token_ids=())
    return settings, start_tensorrt(settings, manifest, sampler, DOUBLE)


@pytest.mark.parametrize("async_depth", [0, 1])
def test_tokens_are_the_torch_executors(built, monkeypatch, async_depth):
    settings, executor = start(built, monkeypatch, async_depth=async_depth)
    assert isinstance(executor, RanksExecutor)
    engine = make_engine(executor, settings)
    plain = config(profile="default")
    decoder = load_model(built[0])
    reference = make_engine(
        TorchExecutor(plain, decoder, Sampler(10, decoder.config.vocab_size)), plain
    )
    for _ in range(2):  # cold, then warm: promotions move KV on both ranks
        want, _ = run(reference, three_levels(), max_tokens=5)
        got, _ = run(engine, three_levels(), max_tokens=5)
        assert got == want
    processes = executor.processes.processes
    engine.close()
    reference.close()
    assert [process.returncode for process in processes] == [0, 0]


def test_a_dead_rank_fails_the_step_by_name(built, monkeypatch):
    settings, executor = start(built, monkeypatch)
    engine = make_engine(executor, settings)
    _, process = executor.processes.processes
    process.kill()
    process.wait()
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    engine.add_request("a", tokens(1, 20), params)
    outs = []
    while engine.has_work():
        outs += engine.step()
    assert isinstance(outs[-1].error, Unavailable) and "rank 1" in str(outs[-1].error)
    engine.close()


LEADER = """
import sys, time
from granikv.config import EngineConfig
from granikv.engines.manifest import load_manifest
from granikv.executor.ranks import start_tensorrt
from granikv.sampling import Sampler
from pathlib import Path
out = sys.argv[1]
settings = EngineConfig(
    executor="tensorrt", engine_dir=out, plugin=out, device="cpu", dtype="float32", tp=2,
    capacity_tokens=512, max_requests=4, max_num_batched_tokens=32, max_seq_len=64,
)
sampler = Sampler(4, 97)
executor = start_tensorrt(settings, load_manifest(Path(out)), sampler, "engine_double:from_folder")
print(*[process.pid for process in executor.processes.processes], flush=True)
time.sleep(60)
"""


def test_ranks_die_with_a_killed_leader(built):
    places = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    environ = os.environ | {"PYTHONPATH": places}
    command = [sys.executable, "-c", LEADER, str(built[1])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as leader:
        try:
            ranks = [os.pidfd_open(int(pid)) for pid in leader.stdout.readline().split()]
        finally:
            leader.kill()
    assert len(ranks) == 2
    for rank in ranks:
        assert select.select([rank], [], [], 10)[0], "the rank outlived its leader"
        os.close(rank)


def test_a_rank_that_cannot_start_is_reported_at_once(built, monkeypatch):
    monkeypatch.setattr("granikv.executor.rank_processes.sys.executable", "/bin/false")
    begin = time.monotonic()
    with pytest.raises(Unavailable, match="rank 0.*ended with 1"):
        start(built, monkeypatch)
    assert time.monotonic() - begin < 10


def test_misfits_are_refused_before_a_process_starts(built, monkeypatch):
    monkeypatch.setattr("granikv.executor.ranks.RankProcesses", None)
    with pytest.raises(EngineMismatch, match="tp: expected 1, got engines for 2"):
        start(built, monkeypatch, tp=1)
    with pytest.raises(InvalidArgument, match="max_requests.*built for"):
        start(built, monkeypatch, max_requests=13)


@pytest.mark.parametrize(
    "changes,match",
    [
        ({"executor": "onnx"}, "executor"),
        ({"executor": "tensorrt"}, "engine_dir"),
        ({"executor": "tensorrt", "engine_dir": "x"}, "plugin"),
        ({"engine_dir": "x"}, "engine_dir.*executor='tensorrt'"),
    ],
)
def test_settings_that_change_nothing_are_refused(changes, match):
    with pytest.raises(InvalidArgument, match=match):
        config(**changes)


@pytest.mark.timeout(280)
def test_the_embedded_model_answers_as_with_torch(tmp_path, monkeypatch):
    """From settings alone, as a server has them: text in, text out."""
    try:
        find_model(None)
    except ModelFileError as error:
        pytest.skip(str(error))
    out = tmp_path / "out"
    sizes = {"max_tokens": 64, "max_seq_len": 256, "capacity_tokens": 1024, "max_requests": 4}
    build(BuildSettings(None, out, 1, dtype="float32", builder="none", **sizes))
    monkeypatch.setattr("granikv.executor.ranks.RUNTIME", DOUBLE)
    texts = []
    for executor in ({}, {"executor": "tensorrt", "engine_dir": str(out), "plugin": str(out)}):
        settings = config(
            max_requests=4, max_seq_len=256, device="cpu", profile=None, dtype="auto", **executor
        )
        engine = Engine(dataclasses.replace(settings, profile=None if executor else "default"))
        prompt = "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"
        engine.add_request("a", prompt, SamplingParams(max_tokens=9, temperature=0.0))
        text = ""
        while engine.has_work():
            text += "".join(out.text for out in engine.step())
        texts.append(text)
        engine.close()
    assert texts[0] == texts[1] and "4" in texts[0]


def test_engines_of_another_model_are_refused(built, tmp_path):
    """The tokenizer would be another's, too."""
    path, out = built
    other = make_tiny_hf(tmp_path / "other", "Qwen3ForCausalLM", vocab_size=98)
    settings = {"executor": "tensorrt", "engine_dir": str(out), "plugin": "x", "dtype": "auto"}
    with pytest.raises(EngineMismatch, match="vocab_size: expected 98.*got engines with 97"):
        check_engine(config(model=str(other), **settings))
    with pytest.raises(InvalidArgument, match="max_requests.*built for"):
        check_engine(config(model=str(path), max_requests=13, **settings))
    checked, model = check_engine(config(model=str(path), device="cpu", tp=2, **settings))
    assert checked.dtype == "float32" and model.max_position == 160
