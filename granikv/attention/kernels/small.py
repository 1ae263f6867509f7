"""HOT and COLD items of a small step in one launch, HOT first: one launch less, one wave.

    blocks | HOT item 0 x Hkv | HOT item 1 x Hkv | ... | COLD item 0 x Hkv | ... | surplus: exit

In one launch every block pays for the registers of the largest tile, so this is for small tiles.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from granikv.attention.kernels.build import KernelBuild
from granikv.attention.kernels.cold import cold_tile, run_stages
from granikv.attention.kernels.common import (
    INTERPRET,
    LOG2_E,
    start_dependents,
    wait_for_previous,
)
from granikv.attention.kernels.hot import hot_tile, prefetch_tokens
from granikv.attention.variants import AttentionShape, HotTile
from granikv.core import Count

_NUM_HOT = tl.constexpr(int(Count.NUM_HOT_ITEMS))
_NUM_COLD = tl.constexpr(int(Count.NUM_COLD_ITEMS))


@triton.jit(do_not_specialize=["q_stride", "slots_stride", "num_row_tiles"])
def small_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    lse_ptr,
    counts_ptr,  # int32 [16]
    hot_items_ptr,  # int32 [H, 8]
    hot_rows_ptr,
    cold_items_ptr,  # int32 [C, 8]
    row_position_ptr,
    row_request_ptr,
    request_slots_ptr,
    q_stride,
    slots_stride,
    num_row_tiles,
    scale_log2,
    G: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLD_N: tl.constexpr,
    RUN_STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    ELEMENT_BYTES: tl.constexpr,
    PAIR: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    q_stride = tl.multiple_of(q_stride, 16)
    start_dependents(PDL)
    head = tl.program_id(0) % HKV
    index = tl.program_id(0) // HKV
    num_hot = tl.load(counts_ptr + _NUM_HOT) * num_row_tiles
    if index < num_hot:
        item_ptr = hot_items_ptr + index // num_row_tiles * 8
        hot_tile(
            q_ptr, k_ptr, v_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, item_ptr, hot_rows_ptr,
            row_position_ptr, index % num_row_tiles, head, q_stride, scale_log2,
            G, HKV, D, BLOCK_D, BLOCK_M, BLOCK_N, COLD_N,
            PREFETCH, ELEMENT_BYTES, PAIR, False, PDL, INTERPRET,
        )  # fmt: skip
    elif index - num_hot < tl.load(counts_ptr + _NUM_COLD):
        cold_tile(
            q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, cold_items_ptr + (index - num_hot) * 8,
            row_position_ptr, row_request_ptr, request_slots_ptr, head, q_stride, slots_stride,
            scale_log2, G, HKV, D, BLOCK_D, COLD_N, RUN_STAGES, PDL, INTERPRET,
        )  # fmt: skip
    else:
        wait_for_previous(PDL)  # a launch must not end before the one it depends on


@lru_cache(maxsize=64)
def small_build(
    shape: AttentionShape, tile: HotTile, cold_n: int, has_runs: bool, pdl: bool
) -> KernelBuild:
    """small_step_attention's kernel; cold_n: tokens of a COLD block."""
    tile = tile.fit(shape)
    plan = ["counts_ptr", "hot_items_ptr", "hot_rows_ptr", "cold_items_ptr"]
    rows = ["row_position_ptr", "row_request_ptr", "request_slots_ptr"]
    return KernelBuild(
        small_kernel,
        {
            "q_ptr": "*T",
            **dict.fromkeys(["k_ptr", "v_ptr"], f"*{shape.kv_type}"),
            **dict.fromkeys(["o_ptr", "lse_ptr"], "*fp32"),
            **dict.fromkeys([*plan, *rows], "*i32"),
            **dict.fromkeys(["q_stride", "slots_stride", "num_row_tiles"], "i32"),
            "scale_log2": "fp32",
        },
        {
            "G": shape.group_size,
            "HKV": shape.num_kv_heads,
            "D": shape.head_dim,
            "BLOCK_D": shape.block_d,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "COLD_N": min(cold_n, tile.block_n),
            "RUN_STAGES": run_stages(tile.num_stages, has_runs),
            "PREFETCH": prefetch_tokens(tile, shape),
            "ELEMENT_BYTES": shape.kv_element_bytes,
            "PAIR": tile.takes_pairs(shape),
            "PDL": pdl,
            "INTERPRET": INTERPRET,
        },
        {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "launch_pdl": pdl},
    )


def small_step_attention(
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
    tile: HotTile,
    cold_n: int,
    num_items: int,
    num_row_tiles: int = 1,
    has_runs: bool = True,
    pdl: bool = False,
) -> None:
    """hot_prefix_attention and cold_suffix_attention of all items; arguments as theirs.

    num_items: grid capacity, HOT items times num_row_tiles plus COLD items. cold_n: tokens of a
    COLD block.
    """
    if num_items == 0:
        return
    small_build(shape, tile, cold_n, has_runs, pdl).launch(
        (num_items * shape.num_kv_heads,),
        q, k_arena, v_arena, o_partials, lse_partials, plan["counts"], plan["hot_items"],
        plan["hot_rows"], plan["cold_items"], plan["row_position"], plan["row_request"],
        request_slots, q.stride(0), request_slots.stride(0), num_row_tiles, sm_scale * LOG2_E,
    )  # fmt: skip
