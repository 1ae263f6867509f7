"""merge_states: each decode row's partial states, in plan order, into its output.

The order is the plan's, never that of arrival, so results repeat bit for bit. An empty state
(0, -inf) is the identity; a row without partials and a padded row give 0.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from granikv.attention.kernels.build import KernelBuild, scale_arguments, scales_of
from granikv.attention.kernels.common import start_dependents, wait_for_previous
from granikv.attention.variants import AttentionShape, MergeTile
from granikv.core import Count

_NUM_ROWS = tl.constexpr(int(Count.NUM_ROWS))
_NUM_DECODE = tl.constexpr(int(Count.NUM_DECODE_ROWS))


@triton.jit(do_not_specialize=["out_stride"])
def merge_kernel(
    o_ptr,  # fp32 [S, HQ, D]
    lse_ptr,  # fp32 [S, HQ]
    counts_ptr,  # int32 [16]
    merge_indptr_ptr,  # int32 [T + 1]
    merge_partials_ptr,  # int32 [S]
    out_ptr,  # [T, HQ, D]
    out_stride,
    v_scale,  # fp32, of FP8 V; None: V is stored as it is
    HQ: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    num_decode = tl.load(counts_ptr + _NUM_DECODE)
    num_rows = tl.load(counts_ptr + _NUM_ROWS)
    decodes = row < num_decode
    begin = tl.load(merge_indptr_ptr + row, mask=decodes, other=0)
    end = tl.load(merge_indptr_ptr + row + 1, mask=decodes, other=0)
    p = tl.arange(0, BLOCK_P)
    partial = tl.load(merge_partials_ptr + begin + p, mask=begin + p < end, other=0)
    wait_for_previous(PDL)  # so far only the plan was read
    # not earlier: blocks of the next launch would take the places of this one's
    start_dependents(PDL)
    if (row >= num_decode) & (row < num_rows):
        return  # an extend row
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    columns = h[:, None] * D + d[None, :]
    in_row = (h[:, None] < HQ) & (d[None, :] < D)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    m = tl.full([BLOCK_H], float("-inf"), tl.float32)
    for p0 in range(begin, end, BLOCK_P):
        exists = p0 + p < end
        if p0 > begin:
            partial = tl.load(merge_partials_ptr + p0 + p, mask=exists, other=0)
        index = partial.to(tl.int64) * HQ
        lse = tl.load(
            lse_ptr + index[:, None] + h[None, :],
            mask=exists[:, None] & (h[None, :] < HQ),
            other=float("-inf"),
        )
        o = tl.load(
            o_ptr + (index * D)[:, None, None] + columns[None, :, :],
            mask=exists[:, None, None] & in_row[None, :, :],
            other=0.0,
        )
        m_new = tl.maximum(m, tl.max(lse, 0))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        weight = tl.exp2(lse - base[None, :])
        alpha = tl.exp2(m - base)
        # an empty state's o is not looked at: it may be anything
        weighted = tl.where(weight[:, :, None] > 0.0, weight[:, :, None] * o, 0.0)
        acc = acc * alpha[:, None] + tl.sum(weighted, 0)
        total = total * alpha + tl.sum(weight, 0)
        m = m_new
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if v_scale is not None:
        out = out * v_scale
    pointers = out_ptr + row.to(tl.int64) * out_stride + columns
    tl.store(pointers, out.to(out_ptr.dtype.element_ty), mask=in_row)


def merge_heads(shape: AttentionShape, tile: MergeTile) -> int:
    """Heads of a block: its grid is (rows, cdiv(num_qo_heads, this))."""
    return min(tile.block_h, triton.next_power_of_2(shape.num_qo_heads))


@lru_cache(maxsize=64)
def merge_build(shape: AttentionShape, tile: MergeTile, pdl: bool) -> KernelBuild:
    """merge_states' kernel."""
    scale = scales_of(shape, "v_scale")
    return KernelBuild(
        merge_kernel,
        {
            **dict.fromkeys(["o_ptr", "lse_ptr"], "*fp32"),
            **dict.fromkeys(["counts_ptr", "merge_indptr_ptr", "merge_partials_ptr"], "*i32"),
            "out_ptr": "*T",
            "out_stride": "i32",
            **scale.types,
        },
        {
            **scale.constants,
            "HQ": shape.num_qo_heads,
            "D": shape.head_dim,
            "BLOCK_D": shape.block_d,
            "BLOCK_H": merge_heads(shape, tile),
            "BLOCK_P": tile.block_p,
            "PDL": pdl,
        },
        {"num_warps": tile.num_warps, "launch_pdl": pdl},
    )


def merge_states(
    plan: dict[str, torch.Tensor],
    o_partials: torch.Tensor,
    lse_partials: torch.Tensor,
    out: torch.Tensor,
    *,
    shape: AttentionShape,
    tile: MergeTile,
    v_scale: float = 1.0,
    pdl: bool = False,
) -> None:
    """o fp32 [S, Hq, D], lse_log2 fp32 [S, Hq] -> out [T, Hq, D]; extend rows are left alone.

    v_scale: of FP8 V.
    """
    num_rows = out.shape[0]
    if num_rows == 0:
        return
    merge_build(shape, tile, pdl).launch(
        (num_rows, triton.cdiv(shape.num_qo_heads, merge_heads(shape, tile))),
        o_partials, lse_partials, plan["counts"], plan["merge_indptr"], plan["merge_partials"],
        out, out.stride(0), *scale_arguments(shape, v_scale),
    )  # fmt: skip
