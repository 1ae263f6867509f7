"""The pages that FlashInfer is given, with a double of it that adds up the keys it reads."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from granikv.attention.variants import AttentionShape
from granikv.bench import attention_baselines
from granikv.bench.attention_baselines import flashinfer_baselines
from granikv.bench.attention_step import AttentionCase

SHAPE = AttentionShape(4, 2, 16, 4)
PAGE = attention_baselines.PAGE_SIZE


def read(kv, indptr, indices, last):
    """Sum of the keys of each list of pages [lists], of page and place in it."""
    sums = []
    for a, b, tokens in zip(indptr[:-1].tolist(), indptr[1:].tolist(), last.tolist(), strict=True):
        keys = kv[indices[a:b].long(), 0].flatten(0, 1)
        sums.append(keys[: max(0, (b - a - 1) * PAGE + tokens)].sum())
        assert 1 <= tokens <= PAGE
    return torch.stack(sums)


class Flat:
    def __init__(self, *args, **kwargs):
        pass

    def plan(self, indptr, indices, last, *heads, **types):
        self.lists = (indptr, indices, last)

    def run(self, q, kv):
        return read(kv, *self.lists)


class Cascade(Flat):
    def plan(self, qo_indptr, indptr, indices, last, *heads, **types):
        self.sizes = qo_indptr[0].diff()
        self.levels = list(zip(indptr, indices, last, strict=True))

    def run(self, q, kv):
        shared, own = (read(kv, *level) for level in self.levels)
        return shared.repeat_interleave(self.sizes) + own


@pytest.mark.parametrize(
    ("groups", "suffix_len"),
    [(((100, 3), (48, 2)), (5, 16, 17, 31, 1)), (((32, 2), (16, 1)), 16), (((7, 1), (160, 4)), 9)],
)
def test_flat_and_cascade_read_the_same_keys(monkeypatch, groups, suffix_len):
    double = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=Flat, MultiLevelCascadeAttentionWrapper=Cascade
    )
    monkeypatch.setitem(sys.modules, "flashinfer", double)
    monkeypatch.setattr(attention_baselines, "WORKSPACE_BYTES", 16)
    case = AttentionCase("test", groups, suffix_len)
    storage = torch.rand(2 * 2 * 2 * (case.unique_tokens + 32 * case.batch) * 2 * 16)
    found = {
        n: (call, extra)
        for n, call, extra in flashinfer_baselines(case, SHAPE, torch.float32, 2, storage)
    }
    assert found["flashinfer-cascade"][1]["error_to_flat"] < 1e-6
    call = found["flashinfer-flat"][0]
    assert not torch.equal(call(0), call(1))  # each layer has KV of its own
    # of ones, the sums are the numbers of keys: the whole context and nothing of unused places
    ones = dict(
        (n, c)
        for n, c, _ in flashinfer_baselines(case, SHAPE, torch.float32, 1, torch.ones_like(storage))
    )
    per_key = SHAPE.num_kv_heads * SHAPE.head_dim
    want = torch.from_numpy(case.prefix_of_request + case.suffix_lens) * per_key
    for call in ones.values():
        assert torch.equal(call().long(), want.long())
    with pytest.raises(ValueError, match="storage: expected"):
        list(flashinfer_baselines(case, SHAPE, torch.float32, 2, storage[:1000]))
