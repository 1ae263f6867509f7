"""An engine on tiny random models, its runs with their logits, and transformers beside it."""

from __future__ import annotations

import numpy as np
import torch
from helpers import TINY_VOCAB
from reference_logits import (
    MAX_RELATIVE_ERROR,
    record_logits,
    reference_logits,
    relative_errors,
)

from granikv.config import EngineConfig
from granikv.core import FinishReason
from granikv.engine import Engine
from granikv.executor.torch_executor import TorchExecutor
from granikv.sampling import Sampler
from granikv.sampling_params import SamplingParams

ARCHS = ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]


def make_engine(models, arch="LlamaForCausalLM", **settings):
    decoder = models[arch][0]
    config = EngineConfig(
        **{
            "capacity_tokens": 4096,
            "max_requests": 40,
            "min_extent_tokens": 16,
            "max_num_batched_tokens": 64,
            "debug_checks": True,
            "max_seq_len": 256,
        }
        | settings
    )
    sampler = Sampler(config.max_requests, decoder.config.vocab_size, eos_token_ids=())
    engine = Engine(config, executor=TorchExecutor(config, decoder, sampler))
    engine.recorded_logits = record_logits(engine)
    return engine


class Made(list):
    """Token ids of one request, and the logits [vocab] that each was taken from."""

    logits: list[torch.Tensor]


def add(engine, request_id, prompt, max_tokens, **origin):
    """A greedy request that makes exactly `max_tokens`."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    engine.add_request(request_id, prompt, params, **origin)


def run(engine, requests, max_tokens=6, cancel=None, gap=0):
    """Token ids of each prompt; requests arrive `gap` steps apart; cancel=(id, step)."""
    engine.recorded_logits.clear()
    queue = list(enumerate(requests))
    made: dict[str, Made] = {}
    reasons: dict[str, FinishReason] = {}
    step = 0
    while queue or engine.has_work():
        assert step < 3000, "the engine makes no progress"
        while queue and (gap == 0 or step % gap == 0):
            i, prompt = queue.pop(0)
            add(engine, f"r{i}", prompt, max_tokens)
            made[f"r{i}"] = Made()
            if gap:
                break
        if cancel is not None and step == cancel[1]:
            assert engine.abort(cancel[0])
        for out in engine.step():
            made[out.request_id] += out.token_ids
            if out.finished:
                assert out.error is None, out.error
                reasons[out.request_id] = out.finish_reason
        step += 1
    check_clean(engine)
    for request_id, ids in made.items():
        ids.logits = engine.recorded_logits.get(request_id, [])
    return [made[f"r{i}"] for i in range(len(requests))], reasons


def check_clean(engine):
    """Nothing leaks: all slots are free or cached, all nodes unlocked, no map keeps an entry."""
    cache, scheduler = engine.cache, engine.scheduler
    cache.check_conservation([])
    assert not scheduler.running and not scheduler.waiting and not engine.requests
    assert not cache._paths and not engine._detokenizers
    assert len(scheduler._free_rows) == engine.config.max_requests
    for node in cache.tree.nodes():
        assert node.locks == node.users == 0 and node.writer is None
    assert cache.usage([])["retiring"] == 0


def assert_matched(models, arch, prompt, got):
    """design.md's rules: logits within 1e-3, tokens the reference's best or a near-tie of it.

    got: `Made`. The reference reads the engine's own tokens, so one near-tie hides nothing behind.
    """
    want = reference_logits(models[arch][1], prompt, got)
    errors = relative_errors(got.logits, want)
    assert float(errors.max()) < MAX_RELATIVE_ERROR, errors
    gap = want.amax(-1) - want.gather(1, torch.tensor(got)[:, None])[:, 0]
    span = want.amax(-1) - want.amin(-1)
    assert bool((gap < MAX_RELATIVE_ERROR * span).all()), (got, gap)


def tokens(seed, count):
    return np.random.default_rng(seed).integers(3, TINY_VOCAB, count).tolist()


EVERYONE, GROUP_A, GROUP_B = tokens(1, 48), tokens(2, 32), tokens(3, 40)


def three_levels():
    """Prompts that share everyone's prefix, a group's, a session's, or nothing."""
    session = tokens(4, 20)
    return [
        EVERYONE + GROUP_A + session + tokens(10, 5),
        EVERYONE + GROUP_A + session + tokens(11, 9),
        EVERYONE + GROUP_A + tokens(12, 3),
        EVERYONE + GROUP_B + tokens(13, 7),
        EVERYONE + GROUP_B + tokens(14, 1),
        EVERYONE + tokens(15, 4),
        tokens(16, 6),
    ]
