"""A warmed engine is the one that would have been without: state, tokens and draws, bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import make_tiny_hf
from tiny_engine import tokens

from granikv.config import EngineConfig
from granikv.engine import Engine
from granikv.executor.cuda_executor import CudaExecutor
from granikv.models import load_model
from granikv.sampling import Sampler
from granikv.sampling_params import SamplingParams

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DRAWN = SamplingParams(
    max_tokens=3, temperature=1.0, seed=7, repetition_penalty=1.3, presence_penalty=0.5
)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    folder = make_tiny_hf(tmp_path_factory.mktemp("model"), seed=3, num_hidden_layers=2)
    return load_model(folder, device=DEVICE)


def make_engine(decoder) -> Engine:
    config = EngineConfig(
        capacity_tokens=512, dtype="float32", max_requests=6, min_extent_tokens=16, max_seq_len=128,
        max_num_batched_tokens=64, debug_checks=True,
    )  # fmt: skip
    sampler = Sampler(config.max_requests, decoder.config.vocab_size, eos_token_ids=())
    executor = CudaExecutor(config, decoder, sampler, device=DEVICE)
    for arena in (executor.k_arena, executor.v_arena):
        arena.fill_(0.25)
    return Engine(config, executor=executor)


def state(engine: Engine) -> dict[str, torch.Tensor]:
    """All but padding's own row of the request table."""
    made = engine.executor
    tensors = {
        "k": made.k_arena, "v": made.v_arena, "slots": made.request_slots[:-1],
        "last": made.last_sampled, "o": made.attention.o_partials, "out": made.attention.out,
        "lse": made.attention.lse_partials,
    }  # fmt: skip
    return {name: tensor.clone() for name, tensor in tensors.items()}


def run(engine: Engine, warm_between: bool = False) -> list[list[int]]:
    """Drawn and greedy requests that share a prefix. warm_between: once more, while they decode."""
    made: dict[str, list[int]] = {}
    for index, suffix in enumerate((3, 5, 2)):
        params = DRAWN if index else SamplingParams(max_tokens=3, temperature=0.0)
        made[f"r{index}"] = []
        engine.add_request(f"r{index}", tokens(1, 40) + tokens(index, suffix), params)
    while engine.has_work():
        if warm_between and all(made.values()):
            engine.settle()
            engine.executor.warm_up()
            warm_between = False
        for out in engine.step():
            assert out.error is None, out.error
            made[out.request_id] += out.token_ids
    return list(made.values())


@pytest.mark.timeout(280)
def test_warm_up_leaves_nothing_behind(decoder):
    plain, warmed = make_engine(decoder), make_engine(decoder)
    torch.manual_seed(0)
    random_before, before = torch.get_rng_state(), state(warmed)
    stats = warmed.stats()
    warmed.executor.warm_up()
    assert warmed.executor.is_warm and warmed.stats() == stats
    assert torch.equal(torch.get_rng_state(), random_before)
    after = state(warmed)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert vars(warmed.executor.graph_counts) == vars(plain.executor.graph_counts)
    want = run(plain)
    assert run(warmed, warm_between=True) == want
    mine, theirs = state(warmed), state(plain)
    for name in ("k", "v", "slots", "last"):
        assert torch.equal(mine[name], theirs[name]), name
    assert warmed.stats()["kernels_compiled_after_start"] == 0
    names = ("steps", "generated_tokens", "cached_tokens", "kv_bytes_read", "groups_cascade")
    assert all(warmed.stats()[name] == plain.stats()[name] for name in names)
    for engine in (plain, warmed):
        engine.close()
