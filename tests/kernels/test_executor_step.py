"""The GPU executor under the whole engine, with the kernels: logits and tokens of transformers.

On a GPU with graphs, else by Triton's interpreter.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import make_tiny_hf
from reference_logits import record_logits
from tiny_engine import assert_matched, run, tokens

from granikv.config import EngineConfig
from granikv.core import Count
from granikv.dispatcher import Dispatcher
from granikv.engine import Engine
from granikv.executor.cuda_executor import CudaExecutor, row_bucket
from granikv.models import load_model
from granikv.sampling import Sampler

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


@pytest.fixture(scope="module", params=["LlamaForCausalLM", "Qwen3ForCausalLM"])
def models(request, tmp_path_factory):
    arch = request.param
    folder = make_tiny_hf(tmp_path_factory.mktemp(arch), arch, seed=3)
    reference = getattr(transformers, arch).from_pretrained(str(folder), dtype=torch.float32)
    return {arch: (load_model(folder, device=DEVICE), reference.eval())}


def make_gpu_engine(models, async_depth=1, **settings):
    (decoder, _) = next(iter(models.values()))
    config = EngineConfig(
        capacity_tokens=1024,
        dtype="float32",
        max_requests=8,
        min_extent_tokens=16,
        max_num_batched_tokens=64,
        max_seq_len=128,
        debug_checks=True,
        async_depth=async_depth,
        **settings,
    )
    sampler = Sampler(config.max_requests, decoder.config.vocab_size, eos_token_ids=())
    engine = Engine(config, executor=CudaExecutor(config, decoder, sampler, device=DEVICE))
    engine.recorded_logits = record_logits(engine)
    return engine


@pytest.mark.timeout(280)
@pytest.mark.parametrize("spreads", [False, True], ids=["extends", "spread"])
def test_engine_equals_transformers(models, spreads, monkeypatch):
    """spread: rows behind a shared prefix decode, as they do behind a long one."""
    monkeypatch.setattr(
        Dispatcher,
        "_pays_spread",
        lambda self, extend, hot_end: spreads and 0 < hot_end <= extend.start + 1,
    )
    shared, group = tokens(1, 40), tokens(2, 24)
    prompts = [shared + group + tokens(3, 5), shared + group + tokens(4, 2), shared, tokens(5, 3)]
    engine = make_gpu_engine(models)
    spread, plan = [], engine.dispatcher.plan

    def watched(step_id, batch, moves):
        made = plan(step_id, batch, moves)
        spread.append(int(made.counts[Count.NUM_DECODE_ROWS]) - len(batch.decodes))
        return made

    engine.dispatcher.plan = watched
    for _ in range(2 if ON_GPU else 1):
        made, _ = run(engine, prompts, max_tokens=12 if ON_GPU else 3)
        for prompt, got in zip(prompts, made, strict=True):
            assert_matched(models, next(iter(models)), prompt, got)
    assert engine.cache.counters["extents"] >= 1
    assert (sum(spread) > 0) == spreads
    if ON_GPU:
        counts = engine.executor.graph_counts
        assert counts.replays > counts.eager_decodes
    engine.close()


def test_row_buckets_hold_their_rows():
    for rows in range(1, 300):
        bucket = row_bucket(rows)
        assert rows <= bucket <= max(rows + 15, 2 * rows - 1)
    assert [row_bucket(n) for n in (1, 2, 3, 9, 65)] == [1, 2, 4, 16, 80]
