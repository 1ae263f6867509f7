"""The embedded model through the whole engine against transformers on the same GGUF, fp32.

Both get the same token ids: transformers ignores the file's pre-tokenizer (digits are split).
"""

from __future__ import annotations

import functools

import pytest
import torch
from reference_logits import (
    MAX_RELATIVE_ERROR,
    record_logits,
    reference_logits,
    relative_errors,
)

from granikv.config import EngineConfig
from granikv.demo.workload import shared_prefix
from granikv.engine import Engine
from granikv.models.embedded import find_embedded
from granikv.sampling_params import SamplingParams
from granikv.text import load_tokenizer

MAX_TOKENS = 8


@pytest.fixture(scope="module")
def reference():
    from transformers import AutoModelForCausalLM

    path = find_embedded()
    model = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    )
    model.eval()
    return functools.lru_cache(
        lambda prompt, made: reference_logits(model, list(prompt), list(made))
    )


@pytest.fixture(scope="module")
def prompts():
    encode = load_tokenizer(None).encode
    handbook = shared_prefix()[:1500]
    group = "\nYour group keeps the machines of the west wing in order, from pumps to lifts."
    tails = ["\nAgent 17: list 3 tools.", "\nAgent 4: what is 12 * 12?", "\nWho asks?"]
    texts = [handbook + group + tail for tail in tails] + [handbook + tails[0], tails[1], handbook]
    return [encode(text).tolist() for text in texts]


# small models take all four pairs: test_engine_against_transformers.py, test_reused_kv.py
@pytest.mark.parametrize(
    "layout,async_depth", [("asymmetric", 0), ("asymmetric", 1), ("uniform", 1)]
)
def test_logits_and_tokens_equal_transformers(reference, prompts, layout, async_depth):
    engine = Engine(
        EngineConfig(
            prefix_layout=layout,
            async_depth=async_depth,
            capacity_tokens=8192,
            max_seq_len=2048,
            min_extent_tokens=16,
            profile="default",
            debug_checks=True,
        )
    )
    logits = record_logits(engine)
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    for turn in ("cold", "warm"):
        made: dict[str, list[int]] = {}
        for i, prompt in enumerate(prompts):
            made[f"{turn}{i}"] = []
            engine.add_request(f"{turn}{i}", prompt, params)
        while engine.has_work():
            for out in engine.step():
                assert out.error is None
                made[out.request_id] += out.token_ids
        for i, prompt in enumerate(prompts):
            ids = made[f"{turn}{i}"]
            want = reference(tuple(prompt), tuple(ids))
            errors = relative_errors(logits[f"{turn}{i}"], want)
            assert float(errors.max()) < MAX_RELATIVE_ERROR, (turn, i, errors)
            gap = want.amax(-1) - want.gather(1, torch.tensor(ids)[:, None])[:, 0]
            span = want.amax(-1) - want.amin(-1)
            assert bool((gap < MAX_RELATIVE_ERROR * span).all()), (turn, i, gap)
    extents = engine.cache.counters["extents"]
    assert extents >= 2 if layout == "asymmetric" else extents == 0
    assert engine.counters["cached_tokens"] > sum(map(len, prompts))
    engine.close()
