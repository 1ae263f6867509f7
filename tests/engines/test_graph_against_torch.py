"""Exported graphs, run by ONNX Runtime with Python plugins, against the Torch executor in fp32.

The whole engine drives both with the same plans: prefill, decode, HOT prefixes, promotions.
"""

from __future__ import annotations

import numpy as np
import pytest
import standins
import torch
from helpers import dense_attend, make_tiny_hf
from lockstep import LockstepExecutor, SharesWherePossible
from reference_logits import relative_errors
from tiny_engine import ARCHS, run, three_levels, tokens

from granikv.config import EngineConfig
from granikv.engine import Engine
from granikv.engines.checkpoint import open_checkpoint
from granikv.errors import ModelFileError
from granikv.models import find_model, load_model
from granikv.sampling import Sampler

MAX_RELATIVE_ERROR = 1e-4  # max|a - b| / max|b| per position


def make_engine(path, tp_size, folder, padding=0, run_by=None, **settings):
    decoder = load_model(path)
    config = EngineConfig(
        **{
            "capacity_tokens": 1024,
            "max_requests": 12,
            "min_extent_tokens": 16,
            "max_num_batched_tokens": 64,
            "max_seq_len": 160,
            "debug_checks": True,
            "profile": "default",
        }
        | settings
    )
    sampler = Sampler(config.max_requests, decoder.config.vocab_size, eos_token_ids=())
    executor = LockstepExecutor(
        config, decoder, sampler, open_checkpoint(path), tp_size, folder, padding,
        **(run_by or {}),
    )  # fmt: skip
    engine = Engine(config, executor=executor)
    cost = engine.dispatcher.cost
    engine.dispatcher.cost = SharesWherePossible(cost.profile, cost.model)
    engine.recorded_logits = {}
    return engine


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_agents_with_shared_prefixes(tmp_path, arch, tp_size):
    """tp 4: more ranks than KV heads; 97 vocabulary rows divide by neither 2 nor 4."""
    path = make_tiny_hf(tmp_path / "model", arch, seed=3)
    engine = make_engine(path, tp_size, tmp_path)
    for _ in range(2):  # cold, then warm
        run(engine, three_levels(), max_tokens=5)
    seen = engine.executor.seen
    assert max(seen.errors) < MAX_RELATIVE_ERROR
    assert len(seen.errors) == 2 * 7 * 5
    assert min(seen.prefills, seen.decodes, seen.hot) > 2
    engine.close()


def test_tied_embeddings_and_padded_decode_steps(tmp_path):
    path = make_tiny_hf(tmp_path / "model", "Qwen2ForCausalLM", tie_word_embeddings=True)
    for tp_size in (1, 2):
        engine = make_engine(path, tp_size, tmp_path, padding=3)
        run(engine, three_levels()[:4], max_tokens=4)
        assert max(engine.executor.seen.errors) < MAX_RELATIVE_ERROR
        engine.close()


def test_promotion_moves_kv(tmp_path):
    path = make_tiny_hf(tmp_path / "model", seed=5)
    engine = make_engine(path, 1, tmp_path)
    prefix = tokens(29, 60)
    run(engine, [prefix + tokens(30, 4)])
    run(engine, [prefix + tokens(31 + i, 4) for i in range(3)])
    assert engine.executor.seen.moves >= 1
    assert max(engine.executor.seen.errors) < MAX_RELATIVE_ERROR
    engine.close()


@pytest.mark.parametrize("arch", ARCHS)
def test_bf16_graph_errs_no_more_than_torch_in_bf16(tmp_path, arch):
    """Both against fp32, on the same prompts: at most twice the error (onnx's own evaluator)."""
    path = make_tiny_hf(tmp_path / "model", arch, seed=3)
    run_by = {"dtype": "bfloat16", "make_session": standins.evaluator}
    engine = make_engine(path, 1, tmp_path, run_by=run_by)
    for _ in range(2):
        run(engine, three_levels(), max_tokens=4)
    seen = engine.executor.seen
    assert min(seen.prefills, seen.decodes, seen.hot) > 2
    engine.close()
    wide, half = load_model(path), load_model(path, torch.bfloat16)
    allowed = []
    for prompt in three_levels():
        ids, attend = torch.tensor(prompt), dense_attend(wide.config)
        want, got = (m.forward(ids, torch.arange(len(ids)), attend) for m in (wide, half))
        allowed += relative_errors(list(got), want).tolist()
    assert np.mean(seen.errors) < 2 * np.mean(allowed)
    assert max(seen.errors) < 2 * max(allowed), (max(seen.errors), max(allowed))


@pytest.fixture(scope="module")
def embedded():
    try:
        return find_model(None)
    except ModelFileError as error:
        pytest.skip(str(error))


@pytest.mark.timeout(280)
@pytest.mark.parametrize("tp_size", [1, 3])
def test_embedded_model(tmp_path, embedded, tp_size):
    """9 query heads and 3 KV heads: tp 3 has one KV head per rank."""
    settings = {"capacity_tokens": 2048, "max_seq_len": 512, "max_num_batched_tokens": 256}
    engine = make_engine(embedded, tp_size, tmp_path, **settings)
    shared = tokens(1, 64)
    prompts = [[*shared, *tokens(50 + i, 5)] for i in range(3)]
    run(engine, prompts, max_tokens=4)
    run(engine, prompts[:2], max_tokens=3)
    seen = engine.executor.seen
    assert max(seen.errors) < MAX_RELATIVE_ERROR
    assert min(seen.prefills, seen.decodes, seen.hot) > 0
    engine.close()
