"""Sliding windows in the kernels: extends mask the lower edge, decode rows get clipped spans.

What no row sees is NaN in the arenas and absurd in request_slots.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from support import DEVICE, DTYPES, ON_GPU, Row, Step, compare
from test_executor_step import make_gpu_engine

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import make_tiny_hf
from tiny_engine import assert_matched, run, tokens

from granikv.bench.fixed_dispatch import FixedDispatcher
from granikv.core import Count
from granikv.models import load_model

EVERYONE, TOOLS = (0, 8, 150), (1, 170, 61)
WINDOWS = [1, 32, 33, 100, 230, 400]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extends_see_the_last_keys(window, dtype):
    """The edge lies in the first or second shared prefix, in the suffix, or within the rows."""
    rows = [
        Row([EVERYONE, TOOLS], 20, num_new=9),
        Row([EVERYONE], 130, num_new=97),  # more than one tile
        Row([], 33, num_new=33),
        Row([EVERYONE], 40, num_new=1),
        Row([EVERYONE, TOOLS], 0, num_new=70),  # rows inside the shared prefix
    ]
    Step(rows, dtype=dtype, window=window).check()


@pytest.mark.parametrize(
    "heads,dim", [((9, 3), 64), ((9, 3), 96), ((5, 1), 64), ((3, 3), 64), ((16, 1), 64)]
)
def test_group_and_head_sizes(heads, dim):
    rows = [Row([EVERYONE], 37, num_new=30), Row([EVERYONE, TOOLS], 5, num_new=3)]
    Step(rows, heads=heads, dim=dim, window=45).check()


def test_decode_rows_beside_extends():
    rows = [
        Row([EVERYONE, TOOLS], 37),
        Row([EVERYONE, TOOLS], 90),
        Row([EVERYONE, TOOLS], 2),
        Row([EVERYONE], 1),
        Row([], 64),
        Row([EVERYONE], 20, num_new=17),
    ]
    Step(rows, window=100).check()
    Step(rows, window=100, padding=3).check(capture=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_scales", [None, (0.5, 0.25)])
def test_half_types_and_fp8(dtype, kv_scales):
    rows = [Row([EVERYONE], 60, num_new=50), Row([EVERYONE, TOOLS], 20)]
    Step(rows, dtype=dtype, window=70, kv_scales=kv_scales).check()


def test_the_twin_is_dense_attention_over_the_last_keys():
    window = 45
    step = Step([Row([EVERYONE], 60, num_new=50)], heads=(2, 1), window=window)
    got = step.twin().view(50, 2, 64)
    arenas = [x[1, :, 0].float() for x in (step.k, step.v)]
    for arena, new in zip(arenas, (step.new_k, step.new_v), strict=True):
        arena[torch.from_numpy(step.plan.slot_mapping).long()] = new[:, 0]
    keys, values = arenas
    for i, position in enumerate(step.plan.row_position):
        seen = torch.from_numpy(step.slots[0][position + 1 - window : position + 1]).long()
        assert len(seen) == window
        weights = (step.q[i] @ keys[seen].T * 64**-0.5).softmax(-1)
        compare(got[i], weights @ values[seen], torch.float32)


@pytest.mark.skipif(ON_GPU, reason="about the test's own traps")
def test_a_key_more_or_less_shows():
    """A window that is off by one gives NaN or another result."""
    step = Step([Row([EVERYONE], 60, num_new=50)], window=45)
    want = step.twin()
    attention = step.attention()
    for window in (44, 46, 0):
        attention.window = window
        got = step.run(attention)
        error = float(np.nan_to_num((got - want).abs().max(), nan=1.0))
        assert error > 1e-3, window


@pytest.mark.timeout(280)
def test_engine_equals_transformers(tmp_path):
    """The GPU executor: the edge lies in the shared prefix at first, later behind it."""
    arch = "MistralForCausalLM"
    folder = make_tiny_hf(tmp_path, arch, seed=3, sliding_window=24, num_hidden_layers=2)
    theirs = transformers.MistralForCausalLM.from_pretrained(
        str(folder), dtype=torch.float32, attn_implementation="eager"
    )
    models = {arch: (load_model(folder, device=DEVICE), theirs.eval())}
    prefix = tokens(1, 40)
    prompts = [prefix + tokens(2 + i, n) for i, n in enumerate((1, 4, 21))] + [tokens(9, 23)]
    engine = make_gpu_engine(models)
    engine.dispatcher = FixedDispatcher(engine, "cascade")
    plans, plan = [], engine.dispatcher.plan
    engine.dispatcher.plan = lambda *args: plans.append(plan(*args)) or plans[-1]
    made, _ = run(engine, prompts, max_tokens=24 if ON_GPU else 5)
    for prompt, got in zip(prompts, made, strict=True):
        assert_matched(models, arch, prompt, got)
    decodes = [p for p in plans if p.counts[Count.NUM_DECODE_ROWS] == len(prompts)]
    assert any(p.counts[Count.NUM_HOT_ITEMS] for p in decodes)
    engine.close()
