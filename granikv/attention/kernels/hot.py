"""hot_prefix_attention: one read of a contiguous span serves all stacked rows of its group.

    rows of an item = decode rows x GQA group (M)      KV head h
    Q [M, D]  x  K[kv_start : kv_start + kv_len, h]    -> one state per row and item

A program owns one (item, row tile, KV head). The variants cascade and gemm are the same source: the
layout's tile decides how many stacked rows one read serves.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from granikv.attention.kernels.build import KernelBuild
from granikv.attention.kernels.common import (
    INTERPRET,
    LOG2_E,
    as_operands,
    attend,
    attend_masked,
    load_rows,
    load_some_rows,
    prefetch_rows,
    start_dependents,
    store_state,
    wait_for_previous,
)
from granikv.attention.variants import AttentionShape, HotTile
from granikv.core import Count, HotItem

_NUM_ITEMS = tl.constexpr(int(Count.NUM_HOT_ITEMS))
_ROW_ENTRY = tl.constexpr(int(HotItem.FIRST_ROW_ENTRY))
_NUM_ROWS = tl.constexpr(int(HotItem.NUM_ROWS))
_KV_START = tl.constexpr(int(HotItem.KV_START))
_KV_LEN = tl.constexpr(int(HotItem.KV_LEN))
_POSITION = tl.constexpr(int(HotItem.POSITION))
_PARTIAL = tl.constexpr(int(HotItem.FIRST_PARTIAL))


@triton.jit
def hot_tile(
    q_ptr,  # [T, HKV * G, D], row stride q_stride
    k_ptr,  # [capacity, HKV, D]
    v_ptr,
    k_desc,
    v_desc,
    o_ptr,  # fp32 [S, HKV * G, D]
    lse_ptr,  # fp32 [S, HKV * G]
    item_ptr,  # int32 [8]: the item
    hot_rows_ptr,  # int32 [HR]
    row_position_ptr,  # int32 [T]
    tile,
    head,
    q_stride,
    scale_log2,
    G: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TAIL_N: tl.constexpr,
    PREFETCH: tl.constexpr,  # tokens, a power of two, or 0
    ELEMENT_BYTES: tl.constexpr,  # of K and V
    PAIR: tl.constexpr,  # queries are multiplied as pairs of e4m3
    TMA: tl.constexpr,  # k_desc and v_desc are descriptors of the arenas [capacity, HKV * D]
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    first_entry = tl.load(item_ptr + _ROW_ENTRY)
    num_rows = tl.load(item_ptr + _NUM_ROWS)
    kv_start = tl.load(item_ptr + _KV_START)
    kv_len = tl.load(item_ptr + _KV_LEN)
    position = tl.load(item_ptr + _POSITION)
    first_partial = tl.load(item_ptr + _PARTIAL)
    if PREFETCH > 0:
        # The path to the first product is item -> rows -> q -> K. The extent is known after the
        # first load, so the L2 fetches its head meanwhile, also while the launch before works:
        # an extent's KV is older than this step.
        ahead = tl.minimum(tl.arange(0, PREFETCH), kv_len - 1)
        line = tl.arange(0, BLOCK_D * ELEMENT_BYTES // 128) * (128 // ELEMENT_BYTES)
        lines = (kv_start + ahead).to(tl.int64) * (HKV * D) + head * D
        prefetch_rows(k_ptr + lines[:, None] + line[None, :])
        prefetch_rows(v_ptr + lines[:, None] + line[None, :])
    m_index = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    entry = m_index // G
    keep = entry < num_rows
    row = tl.load(hot_rows_ptr + first_entry + entry, mask=keep, other=0)
    seen_len = tl.load(row_position_ptr + row, mask=keep, other=0) + 1 - position
    seen_len = tl.minimum(tl.maximum(seen_len, 0), kv_len)
    longest = tl.max(tl.where(keep, seen_len, 0), 0)
    shortest = tl.min(tl.where(keep, seen_len, kv_len), 0)

    qo_head = head * G + m_index % G
    d = tl.arange(0, BLOCK_D)
    q_offsets = row.to(tl.int64) * q_stride + qo_head * D
    # so far only the plan was read, and what is older than this step
    wait_for_previous(PDL)
    q = load_some_rows(q_ptr, q_offsets, keep, d, D)
    q, low, scale = as_operands(q, k_ptr.dtype.element_ty, scale_log2, PAIR, INTERPRET)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)

    # 64-bit base, 32-bit offsets inside a block
    start = kv_start.to(tl.int64) * (HKV * D) + head * D
    k_block, v_block = k_ptr + start, v_ptr + start
    whole = shortest // BLOCK_N * BLOCK_N
    if TMA:
        for n0 in range(0, whole, BLOCK_N):
            k = k_desc.load([kv_start + n0, head * D])
            v = v_desc.load([kv_start + n0, head * D])
            acc, m, total = attend(q, low, k, v, acc, m, total, scale, PAIR, INTERPRET)
    else:
        offsets = tl.arange(0, BLOCK_N) * (HKV * D)
        for n0 in range(0, whole, BLOCK_N):
            k = load_rows(k_block + n0 * (HKV * D), offsets, d, D, BLOCK_D)
            v = load_rows(v_block + n0 * (HKV * D), offsets, d, D, BLOCK_D)
            acc, m, total = attend(q, low, k, v, acc, m, total, scale, PAIR, INTERPRET)
    # the tail is peeled: a mask in the loop costs 12% when compute-bound
    # beyond the end the last key is read again and its score masked: no load needs a mask
    tail = tl.arange(0, TAIL_N)
    for n0 in tl.range(whole, longest, TAIL_N, num_stages=1):
        tail_offsets = tl.minimum(n0 + tail, longest - 1) * (HKV * D)
        k_tail = load_rows(k_block, tail_offsets, d, D, BLOCK_D)
        v_tail = load_rows(v_block, tail_offsets, d, D, BLOCK_D)
        seen = (n0 + tail)[None, :] < seen_len[:, None]
        acc, m, total = attend_masked(
            q, low, k_tail, v_tail, seen, acc, m, total, scale, PAIR, INTERPRET
        )
    index = (first_partial + entry) * (HKV * G) + qo_head
    store_state(o_ptr, lse_ptr, index, keep, acc, m, total, d, D)


@triton.jit(do_not_specialize=["q_stride"])
def hot_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_desc,
    v_desc,
    o_ptr,
    lse_ptr,
    counts_ptr,  # int32 [16]
    hot_items_ptr,  # int32 [H, 8]
    hot_rows_ptr,
    row_position_ptr,
    q_stride,
    scale_log2,
    G: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TAIL_N: tl.constexpr,
    PREFETCH: tl.constexpr,
    ELEMENT_BYTES: tl.constexpr,
    PAIR: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    q_stride = tl.multiple_of(q_stride, 16)
    start_dependents(PDL)
    item = tl.program_id(0) // HKV
    head = tl.program_id(0) % HKV
    tile = tl.program_id(1)
    item_ptr = hot_items_ptr + item * 8  # the grid is never beyond the plan's capacity
    num_rows = tl.load(item_ptr + _NUM_ROWS)
    if item >= tl.load(counts_ptr + _NUM_ITEMS):
        # a launch must not end before the one it depends on, even without work
        wait_for_previous(PDL)
    elif tile * BLOCK_M < num_rows * G:
        hot_tile(
            q_ptr, k_ptr, v_ptr, k_desc, v_desc, o_ptr, lse_ptr, item_ptr, hot_rows_ptr,
            row_position_ptr, tile, head, q_stride, scale_log2,
            G, HKV, D, BLOCK_D, BLOCK_M, BLOCK_N, TAIL_N,
            PREFETCH, ELEMENT_BYTES, PAIR, TMA, PDL, INTERPRET,
        )  # fmt: skip


def prefetch_tokens(tile: HotTile, shape: AttentionShape) -> int:
    """Tokens that a block asks the L2 for; none where no L2 is, or where a head is part of a line."""
    whole_lines = shape.head_dim == shape.block_d and shape.head_dim * shape.kv_element_bytes >= 128
    return tile.prefetch_tokens if whole_lines and not INTERPRET else 0


@lru_cache(maxsize=256)
def hot_build(shape: AttentionShape, tile: HotTile, tma: bool, pdl: bool) -> KernelBuild:
    """hot_prefix_attention's kernel; tma: K and V also come as descriptors."""
    tile = tile.fit(shape)
    kv = f"*{shape.kv_type}"
    descriptor = f"tensordesc<{kv[1:]}[{tile.block_n}, {shape.head_dim}]>" if tma else kv
    plan = ["counts_ptr", "hot_items_ptr", "hot_rows_ptr", "row_position_ptr"]
    return KernelBuild(
        hot_kernel,
        {
            "q_ptr": "*T",
            **dict.fromkeys(["k_ptr", "v_ptr"], kv),
            **dict.fromkeys(["k_desc", "v_desc"], descriptor),
            **dict.fromkeys(["o_ptr", "lse_ptr"], "*fp32"),
            **dict.fromkeys(plan, "*i32"),
            "q_stride": "i32",
            "scale_log2": "fp32",
        },
        {
            "G": shape.group_size,
            "HKV": shape.num_kv_heads,
            "D": shape.head_dim,
            "BLOCK_D": shape.block_d,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "TAIL_N": min(32, tile.block_n),
            "PREFETCH": prefetch_tokens(tile, shape),
            "ELEMENT_BYTES": shape.kv_element_bytes,
            "PAIR": tile.takes_pairs(shape),
            "TMA": tma,
            "PDL": pdl,
            "INTERPRET": INTERPRET,
        },
        {
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            "launch_pdl": pdl,
            "maxnreg": tile.max_registers,
        },
    )


def hot_prefix_attention(
    q: torch.Tensor,
    k_arena: torch.Tensor,
    v_arena: torch.Tensor,
    plan: dict[str, torch.Tensor],
    sm_scale: float,
    o_partials: torch.Tensor,
    lse_partials: torch.Tensor,
    *,
    shape: AttentionShape,
    tile: HotTile,
    num_items: int,
    descriptors: tuple[Any, Any] | None = None,
    num_row_tiles: int = 1,
    pdl: bool = False,
) -> None:
    """q [T, Hq, D], arenas [capacity, Hkv, D] -> o fp32 [S, Hq, D], lse_log2 fp32 [S, Hq].

    plan: device tensors of the plan by field name. num_items is the grid's capacity; items beyond
    counts exit. descriptors: of K and V as [capacity, Hkv * D], blocks [tile.block_n, D]; they save
    registers and address arithmetic. num_row_tiles: the most tiles of tile.block_m stacked rows that an item has.
    """
    if num_items == 0:
        return
    hot_build(shape, tile, descriptors is not None, pdl).launch(
        (num_items * shape.num_kv_heads, num_row_tiles),
        q, k_arena, v_arena, *(descriptors or (k_arena, v_arena)), o_partials, lse_partials,
        plan["counts"], plan["hot_items"], plan["hot_rows"], plan["row_position"],
        q.stride(0), sm_scale * LOG2_E,
    )  # fmt: skip
