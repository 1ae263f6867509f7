"""Other attention over the same requests: FlashInfer (flat, grouped cascade), SDPA per group.

FlashInfer stores KV in pages of 16 tokens, scattered; its answers are checked against its own
dense KV by the error between flat and cascade. SDPA reads the contiguous prefix only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from granikv.attention.variants import AttentionShape
from granikv.bench.attention_step import AttentionCase

PAGE_SIZE = 16
WORKSPACE_BYTES = 512 * 2**20

Baseline = tuple[str, Callable[[], torch.Tensor], dict]


def baselines(case: AttentionCase, shape: AttentionShape, dtype: torch.dtype) -> Iterator[Baseline]:
    """(name, call, extra metrics) of each installed baseline."""
    yield from flashinfer_baselines(case, shape, dtype)
    if any(n for n, _ in case.groups):
        yield sdpa_baseline(case, shape, dtype)


def flashinfer_baselines(
    case: AttentionCase, shape: AttentionShape, dtype: torch.dtype
) -> Iterator[Baseline]:
    try:
        import flashinfer
    except ImportError:
        return
    if case.suffix_len % PAGE_SIZE or any(n % PAGE_SIZE for n, _ in case.groups):
        return  # whole pages only, so that both sides read the same keys
    suffix_pages = case.suffix_len // PAGE_SIZE
    prefix_pages = [n // PAGE_SIZE for n, _ in case.groups]
    sizes = [size for _, size in case.groups]
    num_pages = sum(prefix_pages) + case.batch * suffix_pages
    kv = torch.randn(
        num_pages, 2, PAGE_SIZE, shape.num_kv_heads, shape.head_dim, device="cuda", dtype=dtype
    )
    order = np.random.default_rng(0).permutation(num_pages).astype(np.int32)
    cuts = np.cumsum(prefix_pages)
    prefixes = np.split(order[: cuts[-1]], cuts[:-1])
    suffixes = order[cuts[-1] :].reshape(case.batch, suffix_pages)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    full = [np.concatenate([prefixes[g], suffixes[i]]) for i, g in enumerate(owner)]
    q = torch.randn(case.batch, shape.num_qo_heads, shape.head_dim, device="cuda", dtype=dtype)
    heads = (shape.num_qo_heads, shape.num_kv_heads, shape.head_dim, PAGE_SIZE)
    types = {"q_data_type": dtype, "kv_data_type": dtype}

    def ints(values: object) -> torch.Tensor:
        return torch.tensor(np.asarray(values, np.int32), device="cuda")

    def indptr(lengths: object) -> torch.Tensor:
        return ints(np.concatenate([[0], np.cumsum(np.asarray(lengths))]))

    def workspace() -> torch.Tensor:
        return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")

    flat = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), "NHD", use_tensor_cores=True)
    last = ints([PAGE_SIZE] * case.batch)
    flat.plan(indptr([len(f) for f in full]), ints(np.concatenate(full)), last, *heads, **types)
    yield "flashinfer-flat", lambda: flat.run(q, kv), {"page_size": PAGE_SIZE}
    if not sum(prefix_pages):
        return
    cascade = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(), "NHD")
    cascade.plan(
        [indptr(sizes), ints(np.arange(case.batch + 1))],
        [indptr(prefix_pages), indptr([suffix_pages] * case.batch)],
        [ints(np.concatenate(prefixes)), ints(suffixes.reshape(-1))],
        [ints([PAGE_SIZE] * len(sizes)), last],
        *heads,
        causal=False,
        **types,
    )
    want, got = flat.run(q, kv).float(), cascade.run(q, kv).float()
    error = float((got - want).norm() / want.norm())
    yield "flashinfer-cascade", lambda: cascade.run(q, kv), {"error_to_flat": error}


def sdpa_baseline(case: AttentionCase, shape: AttentionShape, dtype: torch.dtype) -> Baseline:
    """torch's fused attention, one call per group, prefix only (no suffix, no merge)."""
    heads, dim = shape.num_kv_heads, shape.head_dim
    dense = [
        tuple(
            torch.randn(1, heads, length, dim, device="cuda", dtype=dtype)
            for length in (size * shape.group_size, n, n)
        )
        for n, size in case.groups
        if n
    ]

    def call() -> torch.Tensor:
        for q, k, v in dense:
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return out

    return "torch-sdpa", call, {"prefix_only": True}
