"""The torch executor on two ranks (gloo on a CPU, by Triton's interpreter): the same tokens."""

from __future__ import annotations

import dataclasses
import json
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
from granikv.executor import torch_ranks
from granikv.executor.torch_executor import TorchExecutor
from granikv.models import load_model
from granikv.models.random_weights import load_random
from granikv.models.weights import load_hf
from granikv.sampling import Sampler

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() == 1, reason="needs no GPU, or two: run it on either machine"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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


def sampler_of(config, vocab_size) -> Sampler:
    return Sampler(config.max_requests, vocab_size, eos_token_ids=())


@pytest.mark.timeout(280)
@pytest.mark.parametrize("arch,random", [("Qwen2ForCausalLM", False), ("Qwen3ForCausalLM", True)])
def test_two_ranks_give_the_tokens_of_one(arch, random, tmp_path):
    path = make_tiny_hf(tmp_path / "model", arch, seed=3)
    config = settings(device=DEVICE, tp=2, model=str(path), random_weights=random)
    decoder = load_random(path) if random else load_model(path)
    vocab_size = decoder.config.vocab_size
    executor = torch_ranks.start_torch(config, sampler_of(config, vocab_size))
    engine = engine_of(executor, config)
    plain = settings()
    reference = engine_of(TorchExecutor(plain, decoder, sampler_of(plain, vocab_size)), plain)
    try:
        for _ in range(2):  # cold, then warm: promotions move KV on both ranks
            want, _ = run(reference, three_levels(), max_tokens=3)
            got, _ = run(engine, three_levels(), max_tokens=3)
            assert got == want
        assert executor.decoder.config.num_qo_heads * 2 == decoder.config.num_qo_heads
    finally:
        engine.close()
        reference.close()
    assert [process.returncode for process in executor._processes.processes] == [0]


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


def test_ranks_without_gpus_or_whole_heads_are_refused(tmp_path):
    path = make_tiny_hf(tmp_path / "model", "LlamaForCausalLM")
    with pytest.raises(InvalidArgument, match="tp.*1 on the CPU"):
        check_engine(settings(device="cpu", model=str(path), tp=2))
    if DEVICE == "cuda":
        raw = json.loads((path / "config.json").read_text())
        with pytest.raises(InvalidArgument, match="num_qo_heads|intermediate_size"):
            check_engine(settings(model=str(path), tp=raw["num_attention_heads"] + 1))
