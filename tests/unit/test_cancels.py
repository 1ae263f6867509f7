"""C43: 10,000 requests that are added and cancelled leave no entry in any map of the process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import tokenizers
import zmq
from tokenizers import decoders, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import map_sizes

from granikv.bench.host import NullExecutor
from granikv.config import EngineConfig, ModelConfig
from granikv.engine import Engine
from granikv.serving import wire
from granikv.serving.engine_process import EngineLoop
from granikv.text import Tokenizer

PAIRS, PER_TURN = 10_000, 50
MUST_EXIST = (  # that the walk finds them is part of the test
    "loop.live", "loop.engine.requests", "loop.engine._detokenizers", "loop.engine._outputs",
    "loop.engine.scheduler.waiting", "loop.engine.scheduler.running", "loop.engine.cache._paths",
    "loop.engine.cache._admitted", "loop.engine.cache.slot_writes",
    "loop.engine.cache.storage._retiring", "loop.engine.cache.storage._victims",
    "loop.engine.cache.tree.roots", "loop.engine.cache.policy._promotable",
)  # fmt: skip


@pytest.fixture
def tokenizer():
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocab = {char: i for i, char in enumerate(sorted(byte_level.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer, backend.decoder = byte_level, decoders.ByteLevel()
    made = Tokenizer(backend)
    for token in range(made.vocab_size):
        made.token_bytes(token)  # remembered, at most the vocabulary
    return made


@pytest.fixture
def served(tokenizer, tmp_path):
    """The engine process's loop over an engine without a model, and the client's two sockets."""
    address, context = f"ipc://{tmp_path}/s", zmq.Context()
    commands, reports = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    commands.bind(address + ".in")
    reports.bind(address + ".out")
    model = ModelConfig("llama", 2, 64, 64, 4, 2, 16, tokenizer.vocab_size, 256)
    config = EngineConfig(
        capacity_tokens=2048, max_requests=16, min_extent_tokens=8, profile="default"
    )
    loop = EngineLoop(address, drain_s=5.0)
    loop.engine = Engine(config, executor=NullExecutor(model), tokenizer=tokenizer)
    yield loop, commands, reports
    loop.engine.close()
    loop.context.destroy(linger=0)
    context.destroy(linger=0)


def add_and_cancel(served, first, count):
    """Pairs of commands through the sockets, PER_TURN of each a turn; returns the answers.

    Prompts share a prefix by sevens. Of each turn's requests some wait, some prefill, some decode
    when the cancel comes, in the same message or two steps later.
    """
    loop, commands, reports = served
    answered = []
    for block in range(first, first + count, PER_TURN):
        ids = [f"r{i}" for i in range(block, block + PER_TURN)]
        adds = [
            wire.Add(name, f"agent {i % 7}, do what {name} says", {"max_tokens": 9, "stop": ["é"]})
            for i, name in enumerate(ids)
        ]
        aborts = [wire.Abort(name) for name in ids]
        for batch in (adds + aborts[::2], [], aborts[1::2], []):
            commands.send(wire.encode(batch))
            assert loop.commands.poll(5000)
            outputs = loop.take_commands() + loop.step()
            loop.send(outputs)
        while reports.poll(0):
            answered += [
                (o.request_id, o.finish_reason)
                for o in wire.decode_report(reports.recv()).outputs
                if o.finished
            ]
    while loop.engine.has_work():
        loop.send(loop.step())
    loop.engine.cache.evict(loop.engine.config.capacity_tokens)
    return answered


def test_c43_ten_thousand_cancels_leave_every_map_as_it_was(served):
    loop, _, _ = served
    add_and_cancel(served, 0, 4 * PER_TURN)
    before = map_sizes("loop", loop)
    for path in MUST_EXIST:
        assert before[path] == 0, path
    answered = add_and_cancel(served, 10**6, PAIRS)
    assert {name for name, _ in answered} >= {f"r{10**6 + i}" for i in range(PAIRS)}
    assert {reason for _, reason in answered} == {"cancelled"}
    after = map_sizes("loop", loop)
    assert after == before, {p: (before.get(p), n) for p, n in after.items() if before.get(p) != n}
    usage = loop.engine.cache.usage([])
    assert usage["free"] + usage["reserved"] == usage["capacity"]
