"""The norm of what the ranks' products sum to: each rank stores its part in the others' memory.

    rank 0   part ---- NVLink ---> row of rank 1's exchange, then a flag of that row
    rank 1   part ---- NVLink ---> row of rank 0's exchange, then a flag of that row
    each     waits for the flags of a row, adds its parts in the order of the ranks, norms it

One launch instead of a copy, a sum, a copy and a norm. All ranks add the same rounded numbers in
the same order, so their results are equal bit for bit.

Two places take turns from call to call: a rank is never two calls ahead of another, since each
call waits for all, so nobody stores into what another still reads. A flag is lowered by who waited.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from granikv.attention.kernels.common import INTERPRET, start_dependents, wait_for_previous
from granikv.models.fp8 import Fp8Input, Fp8Rows
from granikv.models.fused_kernels import fixed_scales, has_pdl, norm_row, output_rows

TURNS = 2
FLAG_BYTES = 4


@dataclass(frozen=True)
class Exchange:
    """Memory that every rank can write. places: its address on each rank, as this rank sees it;
    own: this rank's, zeros at the start, kept alive."""

    rank: int
    places: tuple[int, ...]
    own: torch.Tensor
    max_rows: int
    width: int
    dtype: torch.dtype

    @property
    def num_ranks(self) -> int:
        return len(self.places)


def exchange_bytes(num_ranks: int, max_rows: int, width: int, dtype: torch.dtype) -> int:
    """Of one rank's exchange: flags, then rows, both [TURNS, ranks, max_rows]."""
    return TURNS * num_ranks * max_rows * (FLAG_BYTES + width * dtype.itemsize)


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
    places,  # addresses [RANKS]
    eps,
    delta_stride,
    part_stride,
    TURN: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    FLAGS_BYTES: tl.constexpr,  # of an exchange, in front of the rows
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
    part = tl.load(delta_ptr + row * delta_stride + n, mask=keep, other=0.0).to(tl.float32)
    for index in tl.static_range(1, PARTS):
        more_ptr = delta_ptr + index * part_stride.to(tl.int64) + row * delta_stride
        part += tl.load(more_ptr + n, mask=keep, other=0.0).to(tl.float32)
    part = part.to(x_ptr.dtype.element_ty)
    to = (TURN * RANKS + RANK) * MAX_ROWS + row
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            rows = (places[peer] + FLAGS_BYTES).to(x_ptr.dtype)
            tl.store(rows + to * N + n, part, mask=keep)
    tl.debug_barrier()  # the flags say that every thread has stored
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            flags = places[peer].to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(flags + to, 1, sem="release", scope="sys")
    x = tl.load(x_ptr + row * N + n, mask=keep, other=0.0).to(tl.float32)
    flags = places[RANK].to(tl.pointer_type(tl.int32))
    rows = (places[RANK] + FLAGS_BYTES).to(x_ptr.dtype)
    total = tl.zeros([BLOCK_N], tl.float32)
    for source in tl.static_range(RANKS):
        if source == RANK:
            total += part.to(tl.float32)
        else:
            at = (TURN * RANKS + source) * MAX_ROWS + row
            while tl.atomic_add(flags + at, 0, sem="acquire", scope="sys") == 0:
                pass
            tl.debug_barrier()
            theirs = tl.load(rows + at * N + n, mask=keep, other=0.0, volatile=True)
            total += theirs.to(tl.float32)
            tl.store(flags + at, 0)
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
    num_ranks, max_rows = exchange.num_ranks, exchange.max_rows
    rank_sum_norm_kernel[(rows,)](
        delta, x, weight, normed, total, scales, *fixed_scales(fp8), exchange.places, eps,
        delta.stride(-2), delta.stride(0), TURN=turn, RANK=exchange.rank, RANKS=num_ranks,
        MAX_ROWS=max_rows, FLAGS_BYTES=exchange_bytes(num_ranks, max_rows, 0, x.dtype), N=width,
        BLOCK_N=block, PARTS=parts, FP8=fp8 is not None, PDL=pdl, INTERPRET=INTERPRET,
        launch_pdl=pdl, num_warps=8 if block >= 4096 else 4,
    )  # fmt: skip
    return made, total


def takes(exchange: Exchange, num_rows: int, width: int, dtype: torch.dtype) -> bool:
    """Whether the exchange holds such rows."""
    return 0 < num_rows <= exchange.max_rows and width == exchange.width and dtype == exchange.dtype
