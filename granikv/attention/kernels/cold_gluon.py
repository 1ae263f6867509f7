"""cold_suffix_attention in Gluon, for COLD blocks beside compute-bound HOT blocks.

    scores^T [N, 8] = K [N, D] x q^T [D, 8]        o^T [D, 8] += V^T [D, N] x p^T [N, 8]

Keys are the rows of both products and the queries of a GQA group are the 8 columns of one
instruction, where cold.py pads them to 16 rows: half the products, half the accumulators. K and V
have one buffer each; the next block's are asked for as soon as this one's have left it, so that
five blocks fit beside a HOT block. cold.py is its oracle. Imported only where it is taken: Gluon's
interface changes with Triton's minor version.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from granikv.attention.kernels.build import KernelBuild
from granikv.attention.kernels.common import LOG2_E
from granikv.attention.variants import KEYS_FIRST_TOKENS, AttentionShape
from granikv.core import ColdItem, Count, SpanKind

_RUN = gl.constexpr(int(SpanKind.RUN))
_NUM_ITEMS = gl.constexpr(int(Count.NUM_COLD_ITEMS))
_ROW = gl.constexpr(int(ColdItem.ROW))
_KIND = gl.constexpr(int(ColdItem.KIND))
_START = gl.constexpr(int(ColdItem.START))
_LEN = gl.constexpr(int(ColdItem.LEN))
_POSITION = gl.constexpr(int(ColdItem.POSITION))
_PARTIAL = gl.constexpr(int(ColdItem.FIRST_PARTIAL))


@gluon.jit
def _slots(block, n, keys, start, slots_ptr, is_run, BLOCK_N: gl.constexpr):
    """Arena slots int32 [N] of a block; beyond the end that of the last key, without keys any."""
    at = gl.maximum(gl.minimum(block * BLOCK_N + n, keys - 1), 0)
    other = gl.where(is_run, start + at, 0)
    return gl.load(slots_ptr + at, mask=(at < keys) & (is_run == 0), other=other)


@gluon.jit
def _copy(slots, base, smem, COPY: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr):
    """Ask for the heads [N, D] of the slots; one group."""
    slots = gl.convert_layout(slots, gl.SliceLayout(1, COPY))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, COPY))
    at = (slots.to(gl.int64) * (HKV * D))[:, None] + d[None, :]
    async_copy.async_copy_global_to_shared(smem, base + at)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["q_stride", "slots_stride"])
def cold_gluon_kernel(
    q_ptr,  # [T, HKV * G, D], row stride q_stride
    k_ptr,  # [capacity, HKV, D]
    v_ptr,
    o_ptr,  # fp32 [S, HKV * G, D]
    lse_ptr,  # fp32 [S, HKV * G]
    counts_ptr,  # int32 [16]
    cold_items_ptr,  # int32 [C, 8]
    row_position_ptr,  # int32 [T]
    row_request_ptr,  # int32 [T]
    request_slots_ptr,  # int32 [max_requests, slots_stride]
    q_stride,
    slots_stride,
    scale_log2,
    G: gl.constexpr,
    HKV: gl.constexpr,
    D: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    GROUP: gl.constexpr = 8 if G <= 8 else 16
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    item = gl.program_id(0) // HKV
    head = gl.program_id(0) % HKV
    if item >= gl.load(counts_ptr + _NUM_ITEMS):
        return
    item_ptr = cold_items_ptr + item * 8
    row = gl.load(item_ptr + _ROW)
    is_run = gl.load(item_ptr + _KIND) == _RUN
    start = gl.load(item_ptr + _START)
    keys = gl.load(row_position_ptr + row) + 1 - gl.load(item_ptr + _POSITION)
    keys = gl.minimum(gl.maximum(keys, 0), gl.load(item_ptr + _LEN))
    request = gl.load(row_request_ptr + row).to(gl.int64)
    slots_ptr = request_slots_ptr + request * slots_stride + start

    n = gl.arange(0, BLOCK_N, layout=gl.BlockedLayout([1], [32], [1], [0]))
    key = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, MMA))
    q_d = gl.arange(0, D, layout=gl.SliceLayout(1, RIGHT))
    q_g = gl.arange(0, GROUP, layout=gl.SliceLayout(0, RIGHT))
    k_shared = gl.allocate_shared_memory(k_ptr.dtype.element_ty, [BLOCK_N, D], SHARED)
    v_shared = gl.allocate_shared_memory(k_ptr.dtype.element_ty, [BLOCK_N, D], SHARED)
    k_head, v_head = k_ptr + head * D, v_ptr + head * D
    # slots_j: of the block j after the current one, loaded two blocks before they are needed
    slots_0 = _slots(0, n, keys, start, slots_ptr, is_run, BLOCK_N)
    slots_1 = _slots(1, n, keys, start, slots_ptr, is_run, BLOCK_N)
    slots_2 = _slots(2, n, keys, start, slots_ptr, is_run, BLOCK_N)
    _copy(slots_0, k_head, k_shared, COPY, HKV, D)
    _copy(slots_0, v_head, v_shared, COPY, HKV, D)
    q_at = row.to(gl.int64) * q_stride + head * (G * D) + q_g[None, :] * D + q_d[:, None]
    q = gl.load(q_ptr + q_at, mask=q_g[None, :] < G, other=0.0)
    m = gl.full([GROUP], float("-inf"), gl.float32, layout=gl.SliceLayout(0, MMA))
    totals = gl.zeros([BLOCK_N, GROUP], gl.float32, layout=MMA)  # summed over keys at the end
    acc = gl.zeros([D, GROUP], gl.float32, layout=MMA)
    no_scores = gl.zeros([BLOCK_N, GROUP], gl.float32, layout=MMA)
    for n0 in range(0, keys, BLOCK_N):
        slots_3 = _slots(n0 // BLOCK_N + 3, n, keys, start, slots_ptr, is_run, BLOCK_N)
        async_copy.wait_group(1)
        scores = mma_v2(k_shared.load(LEFT), q, no_scores) * scale_log2
        _copy(slots_1, k_head, k_shared, COPY, HKV, D)
        scores = gl.where((n0 + key < keys)[:, None], scores, float("-inf"))
        m_new = gl.maximum(m, gl.max(scores, 0))
        p = gl.exp2(scores - m_new[None, :])
        alpha = gl.exp2(m - m_new)
        totals = totals * alpha[None, :] + p
        weights = gl.convert_layout(p.to(k_ptr.dtype.element_ty), RIGHT)
        async_copy.wait_group(1)
        v = v_shared.permute((1, 0)).load(LEFT)
        acc = mma_v2(v, weights, acc * alpha[None, :])
        _copy(slots_1, v_head, v_shared, COPY, HKV, D)
        m = m_new
        slots_1 = slots_2
        slots_2 = slots_3
    async_copy.wait_group(0)
    total = gl.sum(totals, 0)
    some = gl.where(total == 0.0, 1.0, total)
    lse = gl.where(total == 0.0, float("-inf"), m + gl.log2(some))
    d = gl.arange(0, D, layout=gl.SliceLayout(1, MMA))
    g = gl.arange(0, GROUP, layout=gl.SliceLayout(0, MMA))
    index = gl.load(item_ptr + _PARTIAL) * (HKV * G) + head * G + g
    gl.store(lse_ptr + index, lse, mask=g < G)
    pointers = o_ptr + index.to(gl.int64)[None, :] * D + d[:, None]
    gl.store(pointers, acc / some[None, :], mask=(g < G)[None, :])


@lru_cache(maxsize=64)
def cold_gluon_build(shape: AttentionShape, max_registers: int | None = None) -> KernelBuild:
    """The kernel for these heads; see variants.takes_gluon. It spills below 104 registers."""
    plan = ["counts_ptr", "cold_items_ptr", "row_position_ptr", "row_request_ptr"]
    return KernelBuild(
        cold_gluon_kernel,
        {
            **dict.fromkeys(["q_ptr", "k_ptr", "v_ptr"], "*T"),
            **dict.fromkeys(["o_ptr", "lse_ptr"], "*fp32"),
            **dict.fromkeys([*plan, "request_slots_ptr"], "*i32"),
            **dict.fromkeys(["q_stride", "slots_stride"], "i32"),
            "scale_log2": "fp32",
        },
        {
            "G": shape.group_size,
            "HKV": shape.num_kv_heads,
            "D": shape.head_dim,
            "BLOCK_N": KEYS_FIRST_TOKENS,
        },
        {"num_warps": 1, "maxnreg": max_registers},
    )


def cold_gluon_attention(
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
    num_items: int,
    max_registers: int | None = None,
) -> None:
    """cold.cold_suffix_attention without its choices of tile: the same arguments and results."""
    if num_items == 0:
        return
    cold_gluon_build(shape, max_registers).launch(
        (num_items * shape.num_kv_heads,),
        q, k_arena, v_arena, o_partials, lse_partials, plan["counts"], plan["cold_items"],
        plan["row_position"], plan["row_request"], request_slots,
        q.stride(0), request_slots.stride(0), sm_scale * LOG2_E,
    )  # fmt: skip
