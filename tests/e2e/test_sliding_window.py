"""Sliding windows: logits and tokens of the whole engine against transformers' eager attention.

position  0        48           80    100
          |-- HOT --|--- HOT ---|- COLD -|
window            |-------24--------|       moves with every row's position
"""

from __future__ import annotations

import pytest
import torch
import transformers
from helpers import make_tiny_hf
from reference_logits import reference_logits, relative_errors
from tiny_engine import EVERYONE, assert_matched, make_engine, run, three_levels, tokens

from granikv import native
from granikv.bench.fixed_dispatch import FixedDispatcher
from granikv.core import Count
from granikv.models import load_model

MISTRAL, QWEN = "MistralForCausalLM", "Qwen2ForCausalLM"
WINDOWS = {
    (MISTRAL, 24): {"sliding_window": 24},
    (MISTRAL, 1): {"sliding_window": 1, "pad_token_id": None},  # whose embedding would be 0
    (MISTRAL, 70): {"sliding_window": 70},  # its edge lies in the first of two shared prefixes
    (QWEN, 24): {"sliding_window": 24, "use_sliding_window": True, "max_window_layers": 0},
}


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    """By (architecture, window): ours and transformers' model.

    torch: one of them again, since the first engine decides who rotates a decoder's queries.
    """
    made = {}
    for (arch, window), settings in WINDOWS.items():
        folder = make_tiny_hf(tmp_path_factory.mktemp(f"{arch}{window}"), arch, seed=3, **settings)
        theirs = getattr(transformers, arch).from_pretrained(
            str(folder), dtype=torch.float32, attn_implementation="eager"
        )
        made[arch, window] = (load_model(folder), theirs.eval())
        assert made[arch, window][0].config.sliding_window == window
        if (arch, window) == (MISTRAL, 24):
            made["torch"] = (load_model(folder), made[arch, window][1])
    return made


def check(models, key, prompts, made):
    for prompt, got in zip(prompts, made, strict=True):
        assert_matched(models, key, prompt, got)


@pytest.mark.parametrize("key", WINDOWS, ids=str)
@pytest.mark.parametrize("async_depth", [0, 1])
@pytest.mark.parametrize("chunk", [16, 512])
def test_cold_warm_and_shared(windowed, key, async_depth, chunk):
    """chunk 512: of a whole prompt, longer than the window; 16: the window crosses chunks."""
    prompts = three_levels()
    engine = make_engine(windowed, key, async_depth=async_depth, max_num_batched_tokens=chunk)
    for _ in range(2):
        made, _ = run(engine, prompts)
        check(windowed, key, prompts, made)
    assert engine.cache.counters["extents"] >= 2
    assert engine.counters["cached_tokens"] > sum(map(len, prompts)) / 2
    engine.close()


def watch_plans(engine):
    """The plans that the engine makes from now on."""
    plans, plan = [], engine.dispatcher.plan
    engine.dispatcher.plan = lambda *args: plans.append(plan(*args)) or plans[-1]
    return plans


@pytest.mark.parametrize("has_native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("variant", ["cascade", "gemm", "flat"])
def test_rows_of_one_group_at_ragged_positions(windowed, variant, has_native, monkeypatch):
    """Each begins elsewhere in the shared prefix; later, none sees it any more."""
    key = (MISTRAL, 24) if has_native else "torch"
    if not has_native:
        monkeypatch.setattr(native, "library", lambda: None)
    prompts = [EVERYONE + tokens(60 + i, n) for i, n in enumerate((1, 2, 2, 5, 9, 14, 30))]
    engine = make_engine(windowed, key, max_num_batched_tokens=128)
    engine.dispatcher = FixedDispatcher(engine, variant)
    plans = watch_plans(engine)
    made, _ = run(engine, prompts, max_tokens=32)
    check(windowed, key, prompts, made)
    hot = [p.hot_items for p in plans if p.counts[Count.NUM_HOT_ITEMS]]
    if variant == "flat":
        assert not hot
    else:
        assert max(items[:, 1].max() for items in hot) > 1, "rows share a read"
        assert any(p.kv_tokens_read < p.kv_tokens_flat for p in plans)
    last = next(p for p in reversed(plans) if p.counts[Count.NUM_DECODE_ROWS] == len(prompts))
    assert last.counts[Count.NUM_COLD_ITEMS] == len(prompts) == last.counts[Count.NUM_PARTIALS]
    assert last.kv_tokens_read == 24 * len(prompts), "the prefix is out of sight"
    engine.close()


@pytest.mark.parametrize("chunk", [8, 512])
def test_decode_moves_over_the_edge_of_the_window(windowed, chunk):
    key = (MISTRAL, 24)
    prompts = [tokens(70 + i, n) for i, n in enumerate((3, 22, 23, 24, 25, 100))]
    engine = make_engine(windowed, key, max_num_batched_tokens=chunk)
    made, _ = run(engine, prompts, max_tokens=40)
    check(windowed, key, prompts, made)
    engine.close()


@pytest.mark.parametrize("key", [(MISTRAL, 24), (MISTRAL, 70)], ids=str)
@pytest.mark.parametrize("layout", ["asymmetric", "uniform"])
def test_preempted_and_evicted(windowed, key, layout):
    prompts = [EVERYONE + tokens(80 + i, n) for i, n in enumerate((20, 30, 40, 9))]
    engine = make_engine(windowed, key, capacity_tokens=160, prefix_layout=layout)
    made, _ = run(engine, prompts, max_tokens=30)
    assert engine.scheduler.num_preemptions > 0
    check(windowed, key, prompts, made)
    engine.close()


def test_newcomers_join_a_group_that_has_moved_on(windowed):
    key = (MISTRAL, 70)
    prompts = [EVERYONE + tokens(90 + i, 2 + 3 * i) for i in range(5)]
    engine = make_engine(windowed, key)
    made, _ = run(engine, prompts, max_tokens=24, gap=5)
    check(windowed, key, prompts, made)
    engine.close()


def test_the_window_matters_to_these_models(windowed):
    """Full attention is far from what the engine gives, so nothing above passes without a window."""
    key = (MISTRAL, 24)
    theirs = windowed[key][1]
    prompt = EVERYONE + tokens(95, 10)
    engine = make_engine(windowed, key)
    (made,), _ = run(engine, [prompt])
    theirs.config.sliding_window = None
    try:
        full = reference_logits(theirs, prompt, made)
    finally:
        theirs.config.sliding_window = 24
    assert float(relative_errors(made.logits, full).min()) > 0.05
    engine.close()
