"""Other attention over the same requests: FlashInfer (flat, grouped cascade), SDPA per group.

FlashInfer stores KV in pages of 16 tokens, scattered; whole pages of a prefix are shared, its last
tokens are private. Its answers are checked by the error between flat and cascade. SDPA reads the
contiguous prefix only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch

from granikv.attention.variants import AttentionShape
from granikv.bench.attention_step import AttentionCase

PAGE_SIZE = 16
WORKSPACE_BYTES = 512 * 2**20

Baseline = tuple[str, Callable[..., torch.Tensor], dict]


def baselines(case: AttentionCase, shape: AttentionShape, dtype: torch.dtype) -> Iterator[Baseline]:
    """(name, call, extra metrics) of each installed baseline."""
    yield from flashinfer_baselines(case, shape, dtype)
    if any(n for n, _ in case.groups):
        yield sdpa_baseline(case, shape, dtype)


def flashinfer_baselines(
    case: AttentionCase,
    shape: AttentionShape,
    dtype: torch.dtype,
    num_layers: int = 1,
    storage: torch.Tensor | None = None,
) -> Iterator[Baseline]:
    """Calls take the layer, 0 if none is given. storage: as AttentionBench has it."""
    try:
        import flashinfer
    except ImportError:
        return
    prefix_pages = [n // PAGE_SIZE for n, _ in case.groups]
    private = case.prefix_of_request % PAGE_SIZE + case.suffix_lens
    private_pages = -(-private // PAGE_SIZE)
    sizes = [size for _, size in case.groups]
    device = "cuda" if storage is None else storage.device
    num_pages = sum(prefix_pages) + int(private_pages.sum())
    size = (num_layers, num_pages, 2, PAGE_SIZE, shape.num_kv_heads, shape.head_dim)
    if storage is None:
        kv = torch.randn(size, device=device, dtype=dtype)
    elif math.prod(size) <= storage.numel():
        kv = storage[: math.prod(size)].view(size)
    else:
        raise ValueError(f"storage: expected {math.prod(size)} elements, got {storage.numel()}")
    order = np.random.default_rng(0).permutation(num_pages).astype(np.int32)
    cuts = np.cumsum(prefix_pages)
    prefixes = np.split(order[: cuts[-1]], cuts[:-1])
    suffixes = np.split(order[cuts[-1] :], np.cumsum(private_pages)[:-1])
    owner = np.repeat(np.arange(len(sizes)), sizes)
    full = [np.concatenate([prefixes[g], suffixes[i]]) for i, g in enumerate(owner)]
    q = torch.randn(case.batch, shape.num_qo_heads, shape.head_dim, device=device, dtype=dtype)
    heads = (shape.num_qo_heads, shape.num_kv_heads, shape.head_dim, PAGE_SIZE)
    types = {"q_data_type": dtype, "kv_data_type": dtype}

    def ints(values: object) -> torch.Tensor:
        return torch.tensor(np.asarray(values, np.int32), device=device)

    def indptr(lengths: object) -> torch.Tensor:
        return ints(np.concatenate([[0], np.cumsum(np.asarray(lengths))]))

    def workspace() -> torch.Tensor:
        return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    flat = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), "NHD", use_tensor_cores=True)
    last = ints((private - 1) % PAGE_SIZE + 1)
    flat.plan(indptr([len(f) for f in full]), ints(np.concatenate(full)), last, *heads, **types)
    yield "flashinfer-flat", lambda layer=0: flat.run(q, kv[layer]), {"page_size": PAGE_SIZE}
    if not sum(prefix_pages):
        return
    cascade = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(), "NHD")
    cascade.plan(
        [indptr(sizes), ints(np.arange(case.batch + 1))],
        [indptr(prefix_pages), indptr(private_pages)],
        [ints(np.concatenate(prefixes)), ints(np.concatenate(suffixes))],
        [ints([PAGE_SIZE] * len(sizes)), last],
        *heads,
        causal=False,
        **types,
    )
    want, got = flat.run(q, kv[0]).float(), cascade.run(q, kv[0]).float()
    error = float((got - want).norm() / want.norm())
    yield "flashinfer-cascade", lambda layer=0: cascade.run(q, kv[layer]), {"error_to_flat": error}


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
