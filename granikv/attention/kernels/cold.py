"""cold_suffix_attention: the spans that one decode row reads alone, split-KV.

    item = (row, span): RUN    slots start .. start + len          (a prefix read flat)
                        SLOTS  request_slots[request, start + i]   (the suffix)

A program owns one (item, KV head). The GQA rows are padded to 16 for the tensor
cores (the other way round, 8 columns, V would not be copied asynchronously).
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from granikv.attention.kernels.build import KernelBuild
from granikv.attention.kernels.common import (
    INTERPRET,
    KIND_RUN,
    LOG2_E,
    as_operand,
    attend_clamped,
    load_rows,
    load_some_rows,
    start_dependents,
    store_state,
    wait_for_previous,
)
from granikv.attention.variants import AttentionShape, ColdTile
from granikv.core import ColdItem, Count

_NUM_ITEMS = tl.constexpr(int(Count.NUM_COLD_ITEMS))
_ROW = tl.constexpr(int(ColdItem.ROW))
_KIND = tl.constexpr(int(ColdItem.KIND))
_START = tl.constexpr(int(ColdItem.START))
_LEN = tl.constexpr(int(ColdItem.LEN))
_POSITION = tl.constexpr(int(ColdItem.POSITION))
_PARTIAL = tl.constexpr(int(ColdItem.FIRST_PARTIAL))


@triton.jit
def cold_tile(
    q_ptr,  # [T, HKV * G, D], row stride q_stride
    k_ptr,  # [capacity, HKV, D]
    v_ptr,
    o_ptr,  # fp32 [S, HKV * G, D]
    lse_ptr,  # fp32 [S, HKV * G]
    item_ptr,  # int32 [8]: the item
    row_position_ptr,  # int32 [T]
    row_request_ptr,  # int32 [T]
    request_slots_ptr,  # int32 [max_requests, slots_stride]
    head,
    q_stride,
    slots_stride,
    scale_log2,
    G: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RUN_STAGES: tl.constexpr,  # 0: no item is a RUN
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    row = tl.load(item_ptr + _ROW)
    kind = tl.load(item_ptr + _KIND)
    span_start = tl.load(item_ptr + _START)
    position = tl.load(item_ptr + _POSITION)
    num_keys = tl.load(row_position_ptr + row) + 1 - position
    num_keys = tl.minimum(tl.maximum(num_keys, 0), tl.load(item_ptr + _LEN))

    g = tl.arange(0, 16)
    keep = g < G
    d = tl.arange(0, BLOCK_D)
    qo_head = head * G + g
    wait_for_previous(PDL)  # so far only the plan was read
    q = load_some_rows(q_ptr + row.to(tl.int64) * q_stride, qo_head * D, keep, d, D)
    q = as_operand(q, k_ptr.dtype.element_ty)
    acc = tl.zeros([16, BLOCK_D], tl.float32)
    m = tl.full([16], float("-inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    n = tl.arange(0, BLOCK_N)
    k_head, v_head = k_ptr + head * D, v_ptr + head * D
    # Beyond the end the last key is read again and its score masked: no block needs masked loads.
    # One of the two loops runs over all keys, the other over none.
    scattered = num_keys
    if RUN_STAGES > 0:  # noqa: SIM102 - decided when compiled; the kind is decided when run
        if kind == KIND_RUN:
            scattered = 0
            first = span_start.to(tl.int64) * (HKV * D)
            for n0 in tl.range(0, num_keys, BLOCK_N, num_stages=RUN_STAGES):
                offsets = tl.minimum(n0 + n, num_keys - 1) * (HKV * D)
                k = load_rows(k_head + first, offsets, d, D, BLOCK_D)
                v = load_rows(v_head + first, offsets, d, D, BLOCK_D)
                acc, m, total = attend_clamped(
                    q, k, v, n0 + n < num_keys, acc, m, total, scale_log2, INTERPRET
                )
    request = tl.load(row_request_ptr + row).to(tl.int64)
    slots_ptr = request_slots_ptr + request * slots_stride + span_start
    for n0 in range(0, scattered, BLOCK_N):
        slots = tl.load(slots_ptr + tl.minimum(n0 + n, scattered - 1))
        offsets = slots.to(tl.int64) * (HKV * D)
        k = load_rows(k_head, offsets, d, D, BLOCK_D)
        v = load_rows(v_head, offsets, d, D, BLOCK_D)
        acc, m, total = attend_clamped(
            q, k, v, n0 + n < scattered, acc, m, total, scale_log2, INTERPRET
        )
    index = tl.load(item_ptr + _PARTIAL) * (HKV * G) + qo_head
    store_state(o_ptr, lse_ptr, index, keep, acc, m, total, d, D)


@triton.jit(do_not_specialize=["q_stride", "slots_stride"])
def cold_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    lse_ptr,
    counts_ptr,  # int32 [16]
    cold_items_ptr,  # int32 [C, 8]
    row_position_ptr,
    row_request_ptr,
    request_slots_ptr,
    q_stride,
    slots_stride,
    scale_log2,
    G: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RUN_STAGES: tl.constexpr,  # 0: no item is a RUN
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    q_stride = tl.multiple_of(q_stride, 16)
    start_dependents(PDL)
    item = tl.program_id(0) // HKV
    if item >= tl.load(counts_ptr + _NUM_ITEMS):
        # a launch must not end before the one it depends on, even without work
        wait_for_previous(PDL)
        return
    cold_tile(
        q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, cold_items_ptr + item * 8, row_position_ptr,
        row_request_ptr, request_slots_ptr, tl.program_id(0) % HKV, q_stride, slots_stride,
        scale_log2, G, HKV, D, BLOCK_D, BLOCK_N, RUN_STAGES, PDL, INTERPRET,
    )  # fmt: skip


def run_stages(num_stages: int, has_runs: bool) -> int:
    """Stages of the RUN loop: a stage of it holds as much as two of the loop over slots."""
    return max(2, (num_stages + 1) // 2) if has_runs else 0


@lru_cache(maxsize=256)
def cold_build(shape: AttentionShape, tile: ColdTile, has_runs: bool, pdl: bool) -> KernelBuild:
    """cold_suffix_attention's kernel; has_runs: False when every item is SLOTS."""
    tile = tile.fit(shape)
    plan = ["counts_ptr", "cold_items_ptr", "row_position_ptr", "row_request_ptr"]
    return KernelBuild(
        cold_kernel,
        {
            "q_ptr": "*T",
            **dict.fromkeys(["k_ptr", "v_ptr"], f"*{shape.kv_type}"),
            **dict.fromkeys(["o_ptr", "lse_ptr"], "*fp32"),
            **dict.fromkeys([*plan, "request_slots_ptr"], "*i32"),
            **dict.fromkeys(["q_stride", "slots_stride"], "i32"),
            "scale_log2": "fp32",
        },
        {
            "G": shape.group_size,
            "HKV": shape.num_kv_heads,
            "D": shape.head_dim,
            "BLOCK_D": shape.block_d,
            "BLOCK_N": tile.block_n,
            "RUN_STAGES": run_stages(tile.num_stages, has_runs),
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


def cold_suffix_attention(
    q: torch.Tensor,
    k_arena: torch.Tensor,
    v_arena: torch.Tensor,
    request_slots: torch.Tensor,
    plan: dict[str, torch.Tensor],
    sm_scale: float,
    o_partials: torch.Tensor,
    lse_partials: torch.Tensor,
    *,
    shape: AttentionShape,
    tile: ColdTile,
    num_items: int,
    has_runs: bool = True,
    pdl: bool = False,
) -> None:
    """q [T, Hq, D], arenas [capacity, Hkv, D] -> o fp32 [S, Hq, D], lse_log2 fp32 [S, Hq].

    request_slots: int32 [max_requests, max_seq_len]. plan: device tensors by field name.
    num_items is the grid's capacity; items beyond counts exit. has_runs: False when every item is
    SLOTS, which saves registers.
    """
    if num_items == 0:
        return
    cold_build(shape, tile, has_runs, pdl).launch(
        (num_items * shape.num_kv_heads,),
        q, k_arena, v_arena, o_partials, lse_partials, plan["counts"], plan["cold_items"],
        plan["row_position"], plan["row_request"], request_slots,
        q.stride(0), request_slots.stride(0), sm_scale * LOG2_E,
    )  # fmt: skip
