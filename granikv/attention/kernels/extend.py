"""extend_attention: rows of extend requests over HOT path, COLD spans and own chunk, one pass.

    keys in token order   |-- RUN --|-- RUN --|---- SLOTS: suffix and own chunk ----|
    a row at position p sees keys at positions [0, p], or (p - window, p]; only blocks that cross
    an edge of a row's range are masked, and blocks outside of all rows' ranges are not read

A program owns one (request, tile of its rows x GQA group, KV head) and writes the output itself.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from granikv.attention.kernels.build import KernelBuild, scale_arguments, scales_of
from granikv.attention.kernels.common import (
    INTERPRET,
    KIND_RUN,
    LOG2_E,
    as_operands,
    attend,
    attend_masked,
    load_rows,
    load_some_rows,
)
from granikv.attention.variants import AttentionShape, HotTile
from granikv.core import ExtendSegment

_KIND = tl.constexpr(int(ExtendSegment.KIND))
_START = tl.constexpr(int(ExtendSegment.START))
_LEN = tl.constexpr(int(ExtendSegment.LEN))
_POSITION = tl.constexpr(int(ExtendSegment.POSITION))


@triton.jit(do_not_specialize=["q_stride", "out_stride", "slots_stride"])
def extend_kernel(
    q_ptr,  # [T, HKV * G, D], row stride q_stride
    k_ptr,  # [capacity, HKV, D]
    v_ptr,
    out_ptr,  # [T, HKV * G, D], row stride out_stride
    extend_tiles_ptr,  # int32 [E, 2]: request, tile; longest first
    qo_indptr_ptr,  # int32 [R + 1]
    extend_indptr_ptr,  # int32 [R + 1]
    extend_segments_ptr,  # int32 [X, 8]
    row_position_ptr,  # int32 [T]
    row_request_ptr,  # int32 [T]
    request_slots_ptr,  # int32 [max_requests, slots_stride]
    q_stride,
    out_stride,
    slots_stride,
    scale_log2,
    v_scale,  # fp32, of FP8 V; None: V is stored as it is
    G: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAIR: tl.constexpr,  # queries are multiplied as pairs of e4m3
    WINDOW: tl.constexpr,  # keys that a row sees at most, its own included; 0: all
    INTERPRET: tl.constexpr,
):
    q_stride = tl.multiple_of(q_stride, 16)
    head = tl.program_id(0) % HKV
    work = extend_tiles_ptr + tl.program_id(0) // HKV * 2
    request = tl.load(work)
    first_row = tl.load(qo_indptr_ptr + request)
    num_rows = tl.load(qo_indptr_ptr + request + 1) - first_row
    m_index = tl.load(work + 1) * BLOCK_M + tl.arange(0, BLOCK_M)
    keep = m_index // G < num_rows
    row = first_row + m_index // G
    own = tl.load(row_position_ptr + row, mask=keep, other=-1)
    last = tl.max(own, 0)
    first = tl.min(tl.where(keep, own, last), 0)
    own = tl.where(keep, own, last)  # rows of the padding see what the last one sees

    d = tl.arange(0, BLOCK_D)
    qo_head = head * G + m_index % G
    q = load_some_rows(q_ptr, row.to(tl.int64) * q_stride + qo_head * D, keep, d, D)
    q, low, scale = as_operands(q, k_ptr.dtype.element_ty, scale_log2, PAIR, INTERPRET)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    n = tl.arange(0, BLOCK_N)
    k_head, v_head = k_ptr + head * D, v_ptr + head * D
    slots_row = tl.load(row_request_ptr + first_row).to(tl.int64) * slots_stride
    for segment in range(
        tl.load(extend_indptr_ptr + request), tl.load(extend_indptr_ptr + request + 1)
    ):
        segment_ptr = extend_segments_ptr + segment * 8
        kind = tl.load(segment_ptr + _KIND)
        span_start = tl.load(segment_ptr + _START)
        span_len = tl.load(segment_ptr + _LEN)
        position = tl.load(segment_ptr + _POSITION)
        some = tl.minimum(tl.maximum(last + 1 - position, 0), span_len)
        every = tl.minimum(tl.maximum(first + 1 - position, 0), span_len)
        # blocks [begin, whole) need no mask
        begin = 0
        if WINDOW > 0:
            # the first row sees keys from `lowest` on, every row from `within` on
            lowest = tl.minimum(tl.maximum(first + 1 - WINDOW - position, 0), some)
            within = tl.minimum(tl.maximum(last + 1 - WINDOW - position, 0), some)
            begin = lowest + tl.cdiv(within - lowest, BLOCK_N) * BLOCK_N
            whole = begin + tl.maximum(every - begin, 0) // BLOCK_N * BLOCK_N
            # one loop over both edges: its steps before `whole` are the blocks before `begin`
            edges, end = whole - (begin - lowest), tl.maximum(some, whole)
        else:
            whole = every // BLOCK_N * BLOCK_N
            edges, end = whole, some
        slots_ptr = request_slots_ptr + slots_row + span_start + n
        if kind == KIND_RUN:
            for n0 in range(begin, whole, BLOCK_N):
                offsets = (span_start + n0 + n).to(tl.int64) * (HKV * D)
                k = load_rows(k_head, offsets, d, D, BLOCK_D)
                v = load_rows(v_head, offsets, d, D, BLOCK_D)
                acc, m, total = attend(q, low, k, v, acc, m, total, scale, PAIR, INTERPRET)
        else:
            for n0 in range(begin, whole, BLOCK_N):
                offsets = tl.load(slots_ptr + n0).to(tl.int64) * (HKV * D)
                k = load_rows(k_head, offsets, d, D, BLOCK_D)
                v = load_rows(v_head, offsets, d, D, BLOCK_D)
                acc, m, total = attend(q, low, k, v, acc, m, total, scale, PAIR, INTERPRET)
        for n0 in tl.range(edges, end, BLOCK_N, num_stages=1):
            if WINDOW > 0:
                n0 = tl.where(n0 < whole, n0 + begin - whole, n0)
            exists = n0 + n < some
            slots = span_start + n0 + n
            if kind != KIND_RUN:
                slots = tl.load(slots_ptr + n0, mask=exists, other=0)
            offsets = slots.to(tl.int64) * (HKV * D)
            k = load_some_rows(k_head, offsets, exists, d, D)
            v = load_some_rows(v_head, offsets, exists, d, D)
            seen = exists[None, :] & ((position + n0 + n)[None, :] <= own[:, None])
            if WINDOW > 0:
                seen &= (position + n0 + n)[None, :] > own[:, None] - WINDOW
            acc, m, total = attend_masked(q, low, k, v, seen, acc, m, total, scale, PAIR, INTERPRET)
    o = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if v_scale is not None:
        o = o * v_scale
    pointers = out_ptr + row.to(tl.int64)[:, None] * out_stride + (qo_head * D)[:, None]
    tl.store(
        pointers + d[None, :],
        o.to(out_ptr.dtype.element_ty),
        mask=keep[:, None] & (d[None, :] < D),
    )


@lru_cache(maxsize=64)
def extend_build(shape: AttentionShape, tile: HotTile, window: int = 0) -> KernelBuild:
    """extend_attention's kernel; window: see there."""
    tile = tile.fit(shape)
    v_scale = scales_of(shape, "v_scale")
    plan = ["extend_tiles_ptr", "qo_indptr_ptr", "extend_indptr_ptr", "extend_segments_ptr"]
    rows = ["row_position_ptr", "row_request_ptr", "request_slots_ptr"]
    return KernelBuild(
        extend_kernel,
        {
            "q_ptr": "*T",
            **dict.fromkeys(["k_ptr", "v_ptr"], f"*{shape.kv_type}"),
            "out_ptr": "*T",
            **dict.fromkeys([*plan, *rows], "*i32"),
            **dict.fromkeys(["q_stride", "out_stride", "slots_stride"], "i32"),
            "scale_log2": "fp32",
            **v_scale.types,
        },
        {
            **v_scale.constants,
            "G": shape.group_size,
            "HKV": shape.num_kv_heads,
            "D": shape.head_dim,
            "BLOCK_D": shape.block_d,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "PAIR": tile.takes_pairs(shape),
            "WINDOW": window,
            "INTERPRET": INTERPRET,
        },
        {"num_warps": tile.num_warps, "num_stages": tile.num_stages},
    )


def extend_attention(
    q: torch.Tensor,
    k_arena: torch.Tensor,
    v_arena: torch.Tensor,
    request_slots: torch.Tensor,
    plan: dict[str, torch.Tensor],
    sm_scale: float,
    out: torch.Tensor,
    *,
    shape: AttentionShape,
    tile: HotTile,
    num_tiles: int,
    v_scale: float = 1.0,
    window: int = 0,
) -> None:
    """Rows of each extend request over its segments: q [T, Hq, D] -> out [T, Hq, D].

    plan: device tensors by field name, and extend_tiles int32 [E, 2] for tile.block_m.
    num_tiles: entries of extend_tiles in use. v_scale: of FP8 V; that of K is in sm_scale.
    window: a row sees the last `window` keys up to its own; 0: all.
    """
    if num_tiles == 0:
        return
    extend_build(shape, tile, window).launch(
        (num_tiles * shape.num_kv_heads,),
        q, k_arena, v_arena, out, plan["extend_tiles"], plan["qo_indptr"], plan["extend_indptr"],
        plan["extend_segments"], plan["row_position"], plan["row_request"], request_slots,
        q.stride(0), out.stride(0), request_slots.stride(0), sm_scale * LOG2_E,
        *scale_arguments(shape, v_scale),
    )  # fmt: skip
