"""The norm of what the ranks' products sum to: each rank stores its part in the others' memory.

    rank 0   part ---- NVLink ---> row of rank 1's exchange
    rank 1   part ---- NVLink ---> row of rank 0's exchange
    each     waits until a row's numbers are there, adds its parts in rank order, norms it

One launch instead of a copy, a sum, a copy and a norm. All ranks add the same rounded numbers in
the same order, so their results are equal bit for bit.

A number says itself that it is there: an exchange holds -0.0 where nothing has come yet, and no
part has it. So a part travels once, without a flag behind it and the fence that a flag needs. Who has
read a number puts -0.0 back. Two places take turns from call to call: each call waits for all
ranks, so none is two calls ahead of another, and nobody stores where -0.0 is yet to come.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from granikv.attention.kernels.common import INTERPRET, start_dependents, wait_for_previous
from granikv.attention.kernels.launch import Launcher
from granikv.models.fp8 import Fp8Input, Fp8Rows
from granikv.models.fused_kernels import (
    fixed_scales,
    fp8_kind,
    has_pdl,
    norm_row,
    output_rows,
    sum_parts,
)

TURNS = 2
BITS = {2: torch.int16, 4: torch.int32}  # by bytes of a number


@dataclass(frozen=True)
class Exchange:
    """Memory that every rank can write, [TURNS, ranks, max_rows, width].

    places: that of each rank, as this rank sees it.
    """

    rank: int
    places: tuple[torch.Tensor, ...]

    def __post_init__(self) -> None:
        """Nothing has come yet; the ranks have to meet before the first call."""
        self.own.fill_(-0.0)

    @property
    def own(self) -> torch.Tensor:
        return self.places[self.rank]

    def takes(self, num_rows: int, width: int, dtype: torch.dtype) -> bool:
        """Whether there is room for such rows."""
        max_rows = self.own.shape[2]
        return 0 < num_rows <= max_rows and (width, dtype) == (self.own.shape[3], self.own.dtype)


def exchange_shape(num_ranks: int, max_rows: int, width: int) -> tuple[int, ...]:
    return TURNS, num_ranks, max_rows, width


@triton.jit
def rank_sum_norm_kernel(
    delta_ptr,  # [PARTS, T, N], row stride delta_stride
    x_ptr,  # [T, N]
    weight_ptr,  # [N]
    normed_ptr,  # [T, N]
    total_ptr,  # [T, N]
    scales_ptr,  # fp32 [T], written when FP8
    fixed_scale,  # fp32 or None, see fused_kernels
    fixed_inverse,
    places,  # RANKS exchanges, as integers of x's width
    eps,
    delta_stride,
    part_stride,
    TURN: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    start_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    keep = n < N
    weight = tl.load(weight_ptr + n, mask=keep, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    part = sum_parts(delta_ptr, row, n, keep, delta_stride, part_stride, PARTS)
    part = part.to(x_ptr.dtype.element_ty)
    part = tl.where(part == 0.0, tl.zeros_like(part), part)  # -0.0 is taken
    BITS: tl.constexpr = places[RANK].dtype.element_ty
    NOTHING: tl.constexpr = -(2 ** (BITS.primitive_bitwidth - 1))  # -0.0
    to = ((TURN * RANKS + RANK) * MAX_ROWS + row) * N + n
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            tl.store(places[peer] + to, part.to(BITS, bitcast=True), mask=keep)
    x = tl.load(x_ptr + row * N + n, mask=keep, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK_N], tl.float32)
    for source in tl.static_range(RANKS):
        if source == RANK:
            total += part.to(tl.float32)
        else:
            from_ptr = places[RANK] + ((TURN * RANKS + source) * MAX_ROWS + row) * N + n
            theirs = tl.load(from_ptr, mask=keep, other=0, volatile=True)
            while tl.min((theirs != NOTHING).to(tl.int32), axis=0) == 0:
                theirs = tl.load(from_ptr, mask=keep, other=0, volatile=True)
            tl.store(from_ptr, tl.full([BLOCK_N], NOTHING, BITS), mask=keep)
            total += theirs.to(x_ptr.dtype.element_ty, bitcast=True).to(tl.float32)
    norm_row(
        total + x, weight, normed_ptr, total_ptr, scales_ptr, fixed_scale, fixed_inverse, eps, row,
        n, keep, N, True, FP8, INTERPRET,
    )  # fmt: skip


def add_rms_norm(
    exchange: Exchange,
    turn: int,
    delta: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    fp8: Fp8Input | None = None,
) -> tuple[torch.Tensor | Fp8Rows, torch.Tensor]:
    """`fused.add_rms_norm` of the sum of all ranks' delta, each rounded to the dtype of x.

    Every rank calls it with the same shape and turn; turns are 0, 1, 0, 1 and so on.
    """
    rows, width = x.shape
    parts = delta.shape[0] if delta.dim() == 3 else 1
    normed, scales, made = output_rows(x, width, fp8)
    total = torch.empty_like(x)
    block, pdl = triton.next_power_of_2(width), has_pdl(x.device)
    _, num_ranks, max_rows, _ = exchange.own.shape
    strides = delta.stride(-2), delta.stride(0)
    places = tuple(place.view(BITS[x.dtype.itemsize]) for place in exchange.places)
    key = exchange.own.shape, x.dtype, delta.dtype, parts, turn, exchange.rank, fp8_kind(fp8)
    _rank_sum_norm(
        (key, all(number % 16 == 0 for number in strides)), (rows,),
        (delta, x, weight, normed, total, scales, *fixed_scales(fp8), places, eps, *strides),
        {"TURN": turn, "RANK": exchange.rank, "RANKS": num_ranks, "MAX_ROWS": max_rows, "N": width,
         "BLOCK_N": block, "PARTS": parts, "FP8": fp8 is not None, "PDL": pdl, "INTERPRET": INTERPRET},
        {"launch_pdl": pdl, "num_warps": 8 if block >= 4096 else 4},
    )  # fmt: skip
    return made, total


_rank_sum_norm = Launcher(rank_sum_norm_kernel)
