"""TorchExecutor with a tiny decoder: order, device-side tokens, moves, failures."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from granikv.config import EngineConfig, ModelConfig
from granikv.core import ColdItem, Count, Move, SpanKind, StepOutput, StepPlan
from granikv.errors import InvalidArgument
from granikv.executor.torch_executor import TorchExecutor

MODEL = ModelConfig("llama", 2, 16, 16, 4, 2, 8, 23, 64)


class TinyDecoder:
    """Embedding, two attention layers with a residual, output by the embedding's transpose."""

    config, rotary, rope_in_attend = MODEL, None, False

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(23, 32, generator=generator)
        self.kv = torch.randn(2, 2, 32, 16, generator=generator)
        self.positions_seen: list[list[int]] = []

    def forward(self, token_ids, positions, attend, sample_rows):
        self.positions_seen.append(positions.tolist())
        x = self.embedding[token_ids] + torch.sin(positions[:, None] * 0.1)
        for layer in range(2):
            k, v = ((x @ self.kv[layer, i]).view(-1, 2, 8) for i in range(2))
            x = x + attend(layer, x.view(-1, 4, 8), k, v)
        return x[sample_rows] @ self.embedding.T


class GreedySampler:
    def __init__(self):
        self.calls: list[tuple[list[int], list[int]]] = []

    def sample(self, logits, rows, output_positions):
        self.calls.append((rows, output_positions))
        return StepOutput(token_ids=logits.argmax(-1).numpy().astype(np.int32))


def make_plan(tokens, position, slots, writes=(), row=5, moves=(), sample=True) -> StepPlan:
    """One request at request row `row`: its tokens from `position` on, its slots so far."""
    n = len(tokens)
    decode = n == 1 and position > 0
    counts = np.zeros(16, np.int32)
    counts[Count.NUM_ROWS], counts[Count.NUM_SAMPLE_ROWS] = n, int(sample)
    counts[Count.NUM_SLOT_WRITES] = len(writes)
    cold = np.zeros((1, 8), np.int32)
    if decode:
        counts[[Count.NUM_DECODE_ROWS, Count.NUM_COLD_ITEMS, Count.NUM_PARTIALS]] = 1
        cold[0, ColdItem.KIND], cold[0, ColdItem.LEN] = SpanKind.SLOTS, position + 1
    else:
        counts[[Count.NUM_EXTEND_REQUESTS, Count.NUM_EXTEND_SEGMENTS]] = 1
    i32 = lambda x: np.asarray(x, np.int32)  # noqa: E731
    return StepPlan(
        0,
        counts,
        row_token=i32(tokens),
        row_request=i32([row] * n),
        row_position=i32(range(position, position + n)),
        slot_mapping=i32(slots[position : position + n]),
        hot_items=np.zeros((0, 8), np.int32),
        hot_rows=i32([]),
        cold_items=cold,
        merge_indptr=i32([0, int(decode)]),
        merge_partials=i32([0]),
        qo_indptr=i32([0, n]),
        extend_indptr=i32([0, 1]),
        extend_segments=i32([[SpanKind.SLOTS, 0, position + n, 0, 0, 0]]),
        sample_rows=i32([n - 1] if sample else []),
        slot_writes=i32([[row, p, slots[p]] for p in writes]).reshape(-1, 3),
        moves=list(moves),
    )


def make_executor(depth: int = 1, **kwargs) -> TorchExecutor:
    config = EngineConfig(capacity_tokens=64, max_requests=8, async_depth=depth, **kwargs)
    return TorchExecutor(config, TinyDecoder(), GreedySampler())


PROMPT, SLOTS = [3, 1, 4, 1, 5], [40, 12, 9, 33, 20, 21, 7, 50, 51, 2]


def generate(executor: TorchExecutor, count: int) -> list[int]:
    """Prefill, then decodes launched one ahead with ids that are still on the device."""
    handles = [executor.launch(make_plan(PROMPT, 0, SLOTS, range(5)))]
    for p in range(5, 4 + count):
        handles.append(executor.launch(make_plan([-1], p, SLOTS, [p])))
    return [int(executor.wait(h).token_ids[0]) for h in handles]


def full_recompute(count: int) -> list[int]:
    """The same by prefilling everything anew for each token."""
    tokens = list(PROMPT)
    for _ in range(count):
        executor = make_executor()
        n = len(tokens)
        out = executor.wait(executor.launch(make_plan(tokens, 0, SLOTS, range(n))))
        tokens.append(int(out.token_ids[0]))
        executor.close()
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize("depth", [0, 1])
def test_decode_equals_full_recompute(depth):
    executor = make_executor(depth)
    assert generate(executor, 5) == full_recompute(5)
    assert executor.sampler.calls == [([5], [p]) for p in range(5, 10)]
    executor.close()


def test_moves_gather_scattered_slots_before_the_step():
    executor = make_executor()
    executor.keep_logits = True
    executor.wait(executor.launch(make_plan(PROMPT, 0, SLOTS, range(5))))
    plain = executor.wait(executor.launch(make_plan([7], 5, SLOTS, [5]))).logits
    moved = [*range(55, 60), *SLOTS[5:]]
    move = Move(np.asarray(SLOTS[:5], np.int32), 55)
    plan = make_plan([7], 5, moved, range(6), moves=[move])
    assert np.allclose(executor.wait(executor.launch(plan)).logits, plain, atol=1e-5)
    assert torch.equal(executor.k_arena[:, 55:60], executor.k_arena[:, SLOTS[:5]])
    executor.close()


@pytest.mark.parametrize("depth", [0, 1])
def test_failed_step_raises_in_wait_and_the_worker_lives(depth):
    executor = make_executor(depth)
    bad = make_plan(PROMPT, 0, SLOTS, range(5))
    bad.extend_segments[0, 0] = 9
    failed = executor.launch(bad)
    good = executor.launch(make_plan(PROMPT, 0, SLOTS, range(5)))
    with pytest.raises(ValueError, match="9"):
        executor.wait(failed)
    assert executor.wait(good).token_ids.shape == (1,) and executor.wait(good).elapsed_s > 0
    executor.close()


def test_step_without_samples():
    executor = make_executor()
    out = executor.wait(executor.launch(make_plan(PROMPT, 0, SLOTS, range(5), sample=False)))
    assert out.token_ids.shape == (0,) and executor.sampler.calls == []
    executor.close()


def test_arena_that_does_not_fit_says_what_would():
    config = EngineConfig(capacity_tokens=2**31 - 1)
    with pytest.raises(InvalidArgument, match="capacity_tokens: expected at most"):
        TorchExecutor(config, TinyDecoder(), GreedySampler())


def test_dtype_other_than_float32_is_refused():
    with pytest.raises(InvalidArgument, match="dtype"):
        make_executor(dtype="float16")
