"""hot_prefix_attention in Gluon, for compute-bound groups on sm_90.

    block = copying warp      K and V tiles [N, D] by descriptor into a ring, ahead of the products
            2 warpgroups      64 stacked rows each; the softmax of a block beside two products

The portable kernel's softmax runs while its matrix units wait: Triton orders the wait for a product
before it. Here a block's scores are asked for together with the weighted sum of the block before, and
its softmax runs beside that sum. hot.py is the oracle: the same items, tiles of 128 stacked rows.
Imported only where it is taken: Gluon's interface changes with Triton's minor version.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from granikv.attention.kernels.build import KernelBuild
from granikv.attention.kernels.common import LOG2_E
from granikv.attention.kernels.hot_gluon_softmax import pin, softmax
from granikv.attention.variants import AttentionShape, GluonTile
from granikv.core import Count, HotItem

_NUM_HOT = gl.constexpr(int(Count.NUM_HOT_ITEMS))
_ROW_ENTRY = gl.constexpr(int(HotItem.FIRST_ROW_ENTRY))
_NUM_ROWS = gl.constexpr(int(HotItem.NUM_ROWS))
_KV_START = gl.constexpr(int(HotItem.KV_START))
_KV_LEN = gl.constexpr(int(HotItem.KV_LEN))
_POSITION = gl.constexpr(int(HotItem.POSITION))
_PARTIAL = gl.constexpr(int(HotItem.FIRST_PARTIAL))

COPY_REGISTERS = 24  # of a thread of the copying warp


# The last block ends with its item: it begins within the block before, and those keys are masked.
# Nothing outside an item is read, where a NaN would survive a weight of 0.
# Ring entries of an item of n blocks: K0 K1 V0 K2 V1 ... K(n-1) V(n-2) V(n-1).


@gluon.jit
def _num_blocks(kv_len, BLOCK_N: gl.constexpr):
    return (kv_len + BLOCK_N - 1) // BLOCK_N


@gluon.jit
def _copy_tile(desc, row, column, entry, ring, full, empty, STAGES: gl.constexpr):
    slot = entry % STAGES
    mbarrier.wait(empty.index(slot), ((entry // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(slot), desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [row, column], full.index(slot), ring.index(slot))


@gluon.jit
def _copy_partition(
    k_desc,
    v_desc,
    ring,
    full,
    empty,
    hot_items_ptr,
    num_hot,
    HKV: gl.constexpr,
    D: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    entry = gl.to_tensor(0)
    for work in range(gl.program_id(0), num_hot, gl.num_programs(0)):
        item_ptr = hot_items_ptr + work // HKV * 8
        column = work % HKV * D
        start = gl.load(item_ptr + _KV_START)
        kv_len = gl.load(item_ptr + _KV_LEN)
        blocks = _num_blocks(kv_len, BLOCK_N)
        last = start + kv_len - BLOCK_N
        _copy_tile(k_desc, start, column, entry, ring, full, empty, STAGES)
        entry += 1
        for j in range(1, blocks):
            row = gl.minimum(start + j * BLOCK_N, last)
            _copy_tile(k_desc, row, column, entry, ring, full, empty, STAGES)
            _copy_tile(
                v_desc, start + (j - 1) * BLOCK_N, column, entry + 1, ring, full, empty, STAGES
            )
            entry += 2
        _copy_tile(v_desc, last, column, entry, ring, full, empty, STAGES)
        entry += 1


@gluon.jit
def _hot_step(
    q_smem,
    ring,
    full,
    empty,
    entry,
    p,
    acc,
    m,
    total,
    n0,
    seen_len,
    scale_log2,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Scores of the block from n0 on beside the weighted sum p of the block before.

    No branch between the products and their wait: ptxas would wait at the branch.
    """
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = acc.type.layout
    no_scores = gl.zeros([64, BLOCK_N], gl.float32, layout=S_LAYOUT)
    k_slot = entry % STAGES
    mbarrier.wait(full.index(k_slot), (entry // STAGES) & 1)
    scores = warpgroup_mma(
        q_smem, ring.index(k_slot).permute((1, 0)), no_scores, use_acc=False, is_async=True
    )
    v_slot = (entry + 1) % STAGES
    mbarrier.wait(full.index(v_slot), ((entry + 1) // STAGES) & 1)
    acc_next = warpgroup_mma(p, ring.index(v_slot), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(empty.index(k_slot), count=1)
    wide_p, alpha, m, total = softmax(scores, n0, seen_len, m, total, scale_log2, BLOCK_N, MASKED)
    total = pin(total)
    acc, wide_p, total = warpgroup_mma_wait(0, deps=[acc_next, wide_p, total])
    mbarrier.arrive(empty.index(v_slot), count=1)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
    p = gl.convert_layout(wide_p.to(q_smem.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
    return p, acc, m, total


@gluon.jit
def _hot_partition(
    q_ptr,
    q_smem,  # [64, D]
    ring,  # [STAGES, BLOCK_N, D]
    full,
    empty,
    o_ptr,
    lse_ptr,
    hot_items_ptr,
    hot_rows_ptr,
    row_position_ptr,
    num_hot,
    q_stride,
    scale_log2,
    FIRST: gl.constexpr,  # stacked row of the tile that this warpgroup begins with
    G: gl.constexpr,
    HKV: gl.constexpr,
    D: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    Q_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    q_index = FIRST + gl.arange(0, 64, layout=gl.SliceLayout(1, Q_LAYOUT))
    q_d = gl.arange(0, D, layout=gl.SliceLayout(0, Q_LAYOUT))
    index = FIRST + gl.arange(0, 64, layout=S_ROWS)
    o_index = FIRST + gl.arange(0, 64, layout=O_ROWS)
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, O_LAYOUT))
    no_scores = gl.zeros([64, BLOCK_N], gl.float32, layout=S_LAYOUT)
    entry = gl.to_tensor(0)
    for work in range(gl.program_id(0), num_hot, gl.num_programs(0)):
        item_ptr = hot_items_ptr + work // HKV * 8
        head = work % HKV
        first_entry = gl.load(item_ptr + _ROW_ENTRY)
        num_rows = gl.load(item_ptr + _NUM_ROWS)
        kv_len = gl.load(item_ptr + _KV_LEN)
        position = gl.load(item_ptr + _POSITION)
        first_partial = gl.load(item_ptr + _PARTIAL)
        blocks = _num_blocks(kv_len, BLOCK_N)

        q_keep = q_index // G < num_rows
        q_row = gl.load(hot_rows_ptr + first_entry + q_index // G, mask=q_keep, other=0)
        q_at = q_row.to(gl.int64) * q_stride + (head * G + q_index % G) * D
        q = gl.load(q_ptr + q_at[:, None] + q_d[None, :], mask=q_keep[:, None], other=0.0)
        q_smem.store(q)
        fence_async_shared()
        keep = index // G < num_rows
        row = gl.load(hot_rows_ptr + first_entry + index // G, mask=keep, other=0)
        seen_len = gl.load(row_position_ptr + row, mask=keep, other=0) + 1 - position
        seen_len = gl.where(keep, gl.minimum(gl.maximum(seen_len, 0), kv_len), kv_len)
        shortest = gl.min(seen_len, 0)

        m = gl.full([64], float("-inf"), gl.float32, layout=S_ROWS)
        total = gl.zeros([64], gl.float32, layout=S_ROWS)
        acc = gl.zeros([64, D], gl.float32, layout=O_LAYOUT)
        slot = entry % STAGES
        mbarrier.wait(full.index(slot), (entry // STAGES) & 1)
        scores = warpgroup_mma(
            q_smem, ring.index(slot).permute((1, 0)), no_scores, use_acc=False, is_async=True
        )
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(empty.index(slot), count=1)
        entry += 1
        wide_p, alpha, m, total = softmax(scores, 0, seen_len, m, total, scale_log2, BLOCK_N, True)
        p = gl.convert_layout(wide_p.to(q_smem.dtype), P_LAYOUT)
        whole = gl.maximum(gl.minimum(shortest // BLOCK_N, blocks), 1)
        for j in range(1, whole):
            p, acc, m, total = _hot_step(
                q_smem, ring, full, empty, entry, p, acc, m, total, j * BLOCK_N,
                seen_len, scale_log2, BLOCK_N, STAGES, False,
            )  # fmt: skip
            entry += 2
        for j in range(whole, blocks):
            p, acc, m, total = _hot_step(
                q_smem, ring, full, empty, entry, p, acc, m, total,
                gl.minimum(j * BLOCK_N, kv_len - BLOCK_N), seen_len, scale_log2, BLOCK_N, STAGES, True,
            )  # fmt: skip
            entry += 2
        slot = entry % STAGES
        mbarrier.wait(full.index(slot), (entry // STAGES) & 1)
        acc_next = warpgroup_mma(p, ring.index(slot), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc_next])
        mbarrier.arrive(empty.index(slot), count=1)
        entry += 1

        some = gl.where(total == 0.0, 1.0, total)
        lse = gl.where(total == 0.0, float("-inf"), m + gl.log2(some))
        to = (first_partial + index // G) * (HKV * G) + head * G + index % G
        gl.store(lse_ptr + to, lse, mask=keep)
        o = acc / gl.convert_layout(some, O_ROWS)[:, None]
        o_to = (first_partial + o_index // G) * (HKV * G) + head * G + o_index % G
        o_keep = o_index // G < num_rows
        gl.store(o_ptr + o_to.to(gl.int64)[:, None] * D + o_d[None, :], o, mask=o_keep[:, None])


@gluon.jit(do_not_specialize=["q_stride"])
def hot_gluon_kernel(
    q_ptr,  # [T, HKV * G, D], row stride q_stride
    k_desc,  # of K [capacity, HKV * D]
    v_desc,
    o_ptr,  # fp32 [S, HKV * G, D]
    lse_ptr,  # fp32 [S, HKV * G]
    counts_ptr,  # int32 [16]
    hot_items_ptr,  # int32 [H, 8]
    hot_rows_ptr,  # int32 [HR]
    row_position_ptr,  # int32 [T]
    q_stride,
    scale_log2,
    G: gl.constexpr,
    HKV: gl.constexpr,
    D: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    SUM_REGISTERS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
):
    q_smem = gl.allocate_shared_memory(k_desc.dtype, [2, 64, D], k_desc.layout)
    ring = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_N, D], k_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    # the grid is the plan's capacity; blocks beyond its items have nothing to do
    num_hot = gl.load(counts_ptr + _NUM_HOT) * HKV
    gl.warp_specialize(
        [
            (
                _hot_partition,
                (
                    q_ptr, q_smem.index(0), ring, full, empty, o_ptr, lse_ptr, hot_items_ptr,
                    hot_rows_ptr, row_position_ptr, num_hot, q_stride, scale_log2,
                    0, G, HKV, D, BLOCK_N, STAGES,
                ),
            ),
            (
                _hot_partition,
                (
                    q_ptr, q_smem.index(1), ring, full, empty, o_ptr, lse_ptr, hot_items_ptr,
                    hot_rows_ptr, row_position_ptr, num_hot, q_stride, scale_log2,
                    64, G, HKV, D, BLOCK_N, STAGES,
                ),
            ),
            (
                _copy_partition,
                (
                    k_desc, v_desc, ring, full, empty, hot_items_ptr, num_hot,
                    HKV, D, BLOCK_N, STAGES,
                ),
            ),
        ],
        [4, 1],
        [SUM_REGISTERS, COPY_REGISTERS],
    )  # fmt: skip


def hot_gluon_descriptor(arena: torch.Tensor, block_n: int) -> Any:
    """Of K or V [capacity, Hkv, D], for blocks of block_n tokens of one head."""
    layout = gl.NVMMASharedLayout(128, 16, 2)
    return TensorDescriptor.from_tensor(arena.flatten(1), [block_n, arena.shape[2]], layout)


@lru_cache(maxsize=64)
def hot_gluon_build(shape: AttentionShape, tile: GluonTile) -> KernelBuild:
    """The kernel for these heads; see variants.takes_gluon."""
    layout = gl.NVMMASharedLayout(128, 16, 2)
    descriptor = f"tensordesc<T[{tile.block_n}, {shape.head_dim}],{layout!r}>"
    plan = ["counts_ptr", "hot_items_ptr", "hot_rows_ptr", "row_position_ptr"]
    return KernelBuild(
        hot_gluon_kernel,
        {
            "q_ptr": "*T",
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
            "BLOCK_N": tile.block_n,
            "STAGES": tile.num_stages,
            "SUM_REGISTERS": tile.sum_registers,
            "COPY_REGISTERS": COPY_REGISTERS,
        },
        {"num_warps": 4, "maxnreg": tile.launch_registers},
    )


def hot_gluon_attention(
    q: torch.Tensor,
    descriptors: tuple[Any, Any],
    plan: dict[str, torch.Tensor],
    sm_scale: float,
    o_partials: torch.Tensor,
    lse_partials: torch.Tensor,
    *,
    shape: AttentionShape,
    tile: GluonTile,
    num_items: int,
) -> None:
    """hot.hot_prefix_attention, without its other choices: the same states.

    descriptors: of K and V by `hot_gluon_descriptor`. Items have at most 128 stacked rows and at
    least tile.block_n tokens.
    """
    if num_items == 0:
        return
    hot_gluon_build(shape, tile).launch(
        (num_items * shape.num_kv_heads,),
        q, *descriptors, o_partials, lse_partials,
        plan["counts"], plan["hot_items"], plan["hot_rows"], plan["row_position"],
        q.stride(0), sm_scale * LOG2_E,
    )  # fmt: skip
