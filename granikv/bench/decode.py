"""Decode steps end to end through `LLM`: the same prompts under both layouts of the KV cache.

A step's time is the difference of a long and a one-token generation over cached prompts, so that
prefill and scheduling of the first token do not count.
"""

from __future__ import annotations

import time

from granikv.bench.harness import Case
from granikv.bench.workloads import shared_prefix_prompts
from granikv.errors import InvalidArgument


def run_decode_bench(
    batches: list[int], prefix_len: int, suffix_len: int, max_tokens: int, model: str | None = None
) -> list[Case]:
    """One case per batch size. Lengths in tokens; max_tokens is the length of a generation."""
    if max_tokens < 2:
        raise InvalidArgument("max_tokens", max_tokens, "at least 2")
    cases = []
    for batch in batches:
        ours = _measure("asymmetric", batch, prefix_len, suffix_len, max_tokens, model)
        other = _measure("uniform", batch, prefix_len, suffix_len, max_tokens, model)
        same = ours.pop("token_ids") == other.pop("token_ids")
        ours["same_tokens"] = other["same_tokens"] = same
        params = {
            "model": model or "embedded",
            "tp": 1,
            "batch": batch,
            "prefix_len": prefix_len,
            "suffix_len": suffix_len,
            "group_sizes": [batch],
        }
        ratio = other["step_ms"] / ours["step_ms"]
        cases.append(Case("shared-prefix", params, ours, "uniform-paging", ratio, other))
    return cases


def _measure(
    layout: str, batch: int, prefix_len: int, suffix_len: int, max_tokens: int, model: str | None
) -> dict:
    from granikv import LLM, SamplingParams

    llm = LLM(model=model, prefix_layout=layout)
    prompts = shared_prefix_prompts([batch], prefix_len, suffix_len, vocab_size=32000)

    def generate(count: int) -> tuple[float, list]:
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        start = time.perf_counter()
        outputs = llm.generate(prompts, params)
        return time.perf_counter() - start, [list(o.outputs[0].token_ids) for o in outputs]

    generate(max_tokens)  # fills the cache
    one_s = min(generate(1)[0] for _ in range(2))
    many_s, token_ids = min((generate(max_tokens) for _ in range(2)), key=lambda run: run[0])
    step_s = max(many_s - one_s, 1e-9) / (max_tokens - 1)
    return {"step_ms": step_s * 1e3, "tokens_per_s": batch / step_s, "token_ids": token_ids}
