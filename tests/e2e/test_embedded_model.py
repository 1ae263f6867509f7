"""The embedded model through the whole engine on a CPU against transformers on the same GGUF, fp32;
and on a GPU, where there is one, against the CPU.

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
# of a position's logit range: design.md's rule, and what bf16's rounding over 30 layers may turn
NEAR_TIES = {"float32": MAX_RELATIVE_ERROR, "bfloat16": 0.02}
SETTINGS = {
    "capacity_tokens": 8192, "max_seq_len": 2048, "min_extent_tokens": 16, "profile": "default",
    "debug_checks": True,
}  # fmt: skip
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="torch sees no GPU: on a machine with one, with a CUDA build of torch and its triton, run "
    "`python -m pytest -s tests/e2e/test_embedded_model.py`",
)


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


def generate(engine: Engine, prompts: list[list[int]], turn: str) -> list[list[int]]:
    """Greedy token ids of each prompt, all at once; request ids are turn0, turn1, ..."""
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    made: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        made[f"{turn}{i}"] = []
        engine.add_request(f"{turn}{i}", prompt, params)
    while engine.has_work():
        for out in engine.step():
            assert out.error is None, out.error
            made[out.request_id] += out.token_ids
    return list(made.values())


# small models take all four pairs: test_engine_against_transformers.py, test_reused_kv.py
@pytest.mark.parametrize(
    "layout,async_depth", [("asymmetric", 0), ("asymmetric", 1), ("uniform", 1)]
)
def test_logits_and_tokens_equal_transformers(reference, prompts, layout, async_depth):
    config = EngineConfig(device="cpu", prefix_layout=layout, async_depth=async_depth, **SETTINGS)
    engine = Engine(config)
    logits = record_logits(engine)
    for turn in ("cold", "warm"):
        for i, ids in enumerate(generate(engine, prompts, turn)):
            want = reference(tuple(prompts[i]), tuple(ids))
            errors = relative_errors(logits[f"{turn}{i}"], want)
            assert float(errors.max()) < MAX_RELATIVE_ERROR, (turn, i, errors)
            gap = want.amax(-1) - want.gather(1, torch.tensor(ids)[:, None])[:, 0]
            span = want.amax(-1) - want.amin(-1)
            assert bool((gap < MAX_RELATIVE_ERROR * span).all()), (turn, i, gap)
    extents = engine.cache.counters["extents"]
    assert extents >= 2 if layout == "asymmetric" else extents == 0
    assert engine.counters["cached_tokens"] > sum(map(len, prompts))
    engine.close()


@pytest.fixture(scope="module")
def on_cpu(prompts):
    """Token ids and logits [MAX_TOKENS, vocab] of each prompt, by the CPU's executor in fp32."""
    engine = Engine(EngineConfig(device="cpu", **SETTINGS))
    logits = record_logits(engine)
    made = generate(engine, prompts, "r")
    engine.close()
    return [(ids, torch.stack(logits[f"r{i}"])) for i, ids in enumerate(made)]


@needs_gpu
@pytest.mark.timeout(600)  # kernels compile
@pytest.mark.parametrize("dtype", NEAR_TIES)
def test_a_gpus_tokens_are_the_cpus(on_cpu, prompts, dtype):
    """Equal, or at the first that differs a near-tie of the CPU's logits; in fp32 up to there the
    logits agree as well. What follows a difference is another text."""
    engine = Engine(EngineConfig(device="cuda", dtype=dtype, **SETTINGS))
    logits, near_ties = record_logits(engine), []
    for turn in ("cold", "warm"):
        for i, ids in enumerate(generate(engine, prompts, turn)):
            expected, want = on_cpu[i]
            assert len(ids) == MAX_TOKENS
            equal = next((at for at in range(MAX_TOKENS) if ids[at] != expected[at]), MAX_TOKENS)
            compared = min(equal + 1, MAX_TOKENS)
            errors = relative_errors(logits[f"{turn}{i}"][:compared], want[:compared])
            if dtype == "float32":
                assert float(errors.max()) < MAX_RELATIVE_ERROR, (turn, i, errors)
            if equal < MAX_TOKENS:
                row = want[equal]
                gap = float((row[expected[equal]] - row[ids[equal]]) / (row.max() - row.min()))
                near_ties.append((turn, i, equal, round(gap, 5)))
                assert gap < NEAR_TIES[dtype], near_ties
    print(f"\n{dtype} on the GPU: near-ties (turn, prompt, position, gap) {near_ties}")
    assert engine.cache.counters["extents"] >= 2 and engine.counters["failed_steps"] == 0
    engine.close()
