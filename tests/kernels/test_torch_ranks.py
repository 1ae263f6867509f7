"""The torch executor on two ranks (gloo on a CPU, by Triton's interpreter): the same tokens."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import make_tiny_hf
from reference_logits import record_logits
from tiny_engine import run, three_levels

from granikv.config import EngineConfig
from granikv.config_check import check_engine
from granikv.engine import Engine
from granikv.engines.checkpoint import open_checkpoint
from granikv.engines.sharding import Shard
from granikv.errors import InvalidArgument
from granikv.executor import rank_processes, ranks, torch_ranks
from granikv.executor.torch_executor import TorchExecutor
from granikv.models import load_model
from granikv.models.weights import load_hf
from granikv.sampling import Sampler

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() == 1, reason="needs no GPU, or two: run it on either machine"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SUMS = ["nccl", "fused", "two_shot", "auto"] if DEVICE == "cuda" else ["nccl"]  # gloo on a CPU


def settings(**changes) -> EngineConfig:
    values = {
        "capacity_tokens": 1024, "dtype": "float32", "max_requests": 10, "min_extent_tokens": 16,
        "max_num_batched_tokens": 64, "max_seq_len": 128, "debug_checks": True, "profile": "default",
    }  # fmt: skip
    return EngineConfig(**values | changes)


def engine_of(executor, config) -> Engine:
    engine = Engine(config, executor=executor)
    engine.recorded_logits = record_logits(engine)
    return engine


@pytest.mark.timeout(280)
@pytest.mark.parametrize("sums", SUMS)
def test_two_ranks_give_the_tokens_of_one(sums, tmp_path, monkeypatch):
    """As on GPUs, where there are two; tests/unit/test_rank_processes.py has other models and numbers."""
    path = make_tiny_hf(tmp_path / "model", "Qwen2ForCausalLM", seed=3, num_hidden_layers=2)
    config = settings(device=DEVICE, tp=2, model=str(path), all_reduce=sums)
    if DEVICE == "cpu":
        places = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(places))
        monkeypatch.setattr(rank_processes, "RANK_MODULE", "interpreted_rank")
    decoder = load_model(path)
    engine = engine_of(ranks.start_torch(config), config)
    plain = settings()
    sampler = Sampler(plain.max_requests, decoder.config.vocab_size, eos_token_ids=())
    reference = engine_of(TorchExecutor(plain, decoder, sampler), plain)
    try:
        want, _ = run(reference, three_levels()[:4], max_tokens=2, gap=2)
        got, _ = run(engine, three_levels()[:4], max_tokens=2, gap=2)  # promotions move KV on both
        assert got == want and engine.cache.counters["moved_tokens"] > 0
        assert engine.model_config.num_qo_heads * 2 == decoder.config.num_qo_heads
        assert engine.executor.plan_cutter is not None
    finally:
        engine.close()
        reference.close()
    assert [process.returncode for process in engine.executor.processes.processes] == [0, 0]


@pytest.mark.parametrize("arch", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_one_rank_has_the_weights_of_the_whole_model(arch, tmp_path):
    path = make_tiny_hf(tmp_path / "model", arch, seed=3)
    config, want = load_hf(path, torch.float32)
    checkpoint = open_checkpoint(path)
    read = torch_ranks.checkpoint_reader(checkpoint, torch.float32)
    got = torch_ranks.rank_weights(Shard(config), read)
    assert torch.equal(got.embedding, want.embedding) and torch.equal(got.lm_head, want.lm_head)
    assert torch.equal(got.final_norm, want.final_norm)
    for mine, theirs in zip(got.layers, want.layers, strict=True):
        for field in dataclasses.fields(mine):
            a, b = getattr(mine, field.name), getattr(theirs, field.name)
            assert (a is None) == (b is None), field.name
            assert a is None or torch.equal(a, b), field.name


def test_models_without_whole_heads_are_refused(tmp_path):
    path = make_tiny_hf(tmp_path / "model", "LlamaForCausalLM")
    with pytest.raises(InvalidArgument, match="num_qo_heads"):
        check_engine(settings(device="cpu", model=str(path), tp=3))
