"""Products of few rows with a large weight, as a decode step has them, on sm_90.

    y [T, N] = x [T, K] W [N, K]^T        W's rows are the rows of the instruction, T its columns

Such a product lasts as long as its weight takes to be read. cuBLAS loses a tenth to a third of that
where the weight has few rows: it reads with a part of the SMs, or adds a launch that sums what they
made. Here a launch asks the L2 for its first weights while the one before still works; `partial_sums`
leaves the sum to the norm that follows, `gated` applies SiLU before anything is stored.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from granikv.attention.kernels.common import (
    INTERPRET,
    dot_add,
    prefetch_rows,
    start_dependents,
    wait_for_previous,
)
from granikv.attention.kernels.launch import Launcher
from granikv.attention.plan_buffers import sm_count

CAPABILITIES = ((9, 0),)  # where it was measured
DTYPES = (torch.bfloat16, torch.float16)
MAX_ROWS = 128  # at 256 cuBLAS is faster
LEAST_ROWS_OF_128 = 112  # tiles of 128 columns with so few in use lose 10 to 20%
LEAST_FILL = 0.84  # of the SMs' turns; 0.82 lost 5 to 30% (Qwen2.5-14B over two ranks), 0.85 won
BLOCK_N = 64
PREFETCH_TOKENS = 256  # columns of a block's weights, asked of the L2 ahead
SHARED_BYTES = 220 * 1024
SPLITS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Tile:
    """block_t rows of x by block_k columns; split: parts that the sum over K has."""

    block_t: int
    block_k: int
    split: int
    num_stages: int


@triton.jit(do_not_specialize=["T"])
def skinny_kernel(
    x_desc,  # [T, K]
    w_desc,  # [N, K]; GATED: [2 N, K], gate first
    w_ptr,
    y_ptr,  # [SPLIT, T, N]
    T,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    PREFETCH: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    start_dependents(PDL)
    part = tl.program_id(0) % SPLIT
    n0 = tl.program_id(0) // SPLIT * BLOCK_N
    first = part * (K // SPLIT)
    n = n0 + tl.arange(0, BLOCK_N)
    if PREFETCH > 0:
        lines = n.to(tl.int64)[:, None] * K + first + tl.arange(0, PREFETCH // 64)[None, :] * 64
        prefetch_rows(w_ptr + lines)
        if GATED:
            prefetch_rows(w_ptr + lines + N * K)
    wait_for_previous(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for k in range(first, first + K // SPLIT, BLOCK_K):
        x = x_desc.load([0, k])
        acc = dot_add(w_desc.load([n0, k]), x.T, acc, INTERPRET)
        if GATED:
            up = dot_add(w_desc.load([N + n0, k]), x.T, up, INTERPRET)
    if GATED:
        # rounded as the product alone would be
        gate = acc.to(y_ptr.dtype.element_ty).to(tl.float32)
        acc = gate * tl.sigmoid(gate) * up.to(y_ptr.dtype.element_ty).to(tl.float32)
    t = tl.arange(0, BLOCK_T)
    to = (part.to(tl.int64) * T + t)[None, :] * N + n[:, None]
    tl.store(y_ptr + to, acc.to(y_ptr.dtype.element_ty), mask=(t < T)[None, :])


def takes(x: torch.Tensor, weight: torch.Tensor, gated: bool = False) -> bool:
    """Whether the kernel serves x [T, K] and weight [N, K] (gated: [2 N, K]) on their GPU, and was
    faster there."""
    return (
        x.is_cuda
        and 0 < x.shape[0] <= MAX_ROWS
        and x.dtype in DTYPES
        and x.stride(1) == 1
        and weight.is_contiguous()
        and weight.shape[0] % (2 * BLOCK_N) == 0
        and weight.shape[1] % PREFETCH_TOKENS == 0
        and _capability(x.device) in CAPABILITIES
        and _fills(x.shape[0], weight, gated, sm_count(x.device))
    )


def _fills(rows: int, weight: torch.Tensor, gated: bool, num_sms: int) -> bool:
    """Whether the tiles have rows and the SMs have blocks: cuBLAS is faster with fewer of either."""
    blocks = weight.shape[0] // BLOCK_N
    if gated:
        tile, num_blocks = tile_of(rows, blocks // 2, weight.shape[1], weights=2), blocks // 2
    else:
        tile = tile_of(rows, blocks, weight.shape[1], num_sms=num_sms)
        num_blocks = blocks * tile.split
    if tile.block_t > 64 and rows <= LEAST_ROWS_OF_128:
        return False
    waves = -(-num_blocks // num_sms)
    return num_blocks >= LEAST_FILL * waves * num_sms


def partial_sums(x: torch.Tensor, weight: torch.Tensor, tile: Tile | None = None) -> torch.Tensor:
    """x [T, K], weight [N, K] -> fp32 [S, T, N], which summed over S are the product."""
    rows, (width, depth) = x.shape[0], weight.shape
    tile = tile or tile_of(rows, width // BLOCK_N, depth, num_sms=sm_count(x.device))
    y = torch.empty(tile.split, rows, width, dtype=torch.float32, device=x.device)
    _launch(x, weight, y, tile, gated=False)
    return y


def gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, K], weight [2 N, K], gate first -> silu(gate) * up [T, N]."""
    rows, width = x.shape[0], weight.shape[0] // 2
    y = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    tile = tile_of(rows, width // BLOCK_N, weight.shape[1], weights=2)
    _launch(x, weight, y, tile, gated=True)
    return y


def tile_of(rows: int, blocks: int, depth: int, weights: int = 1, num_sms: int = 0) -> Tile:
    """The tile for x [rows, depth] and `blocks` blocks of weight rows, `weights` of them at a time.

    The sum is split until nine of ten of num_sms have a part.
    """
    block_t = max(16, triton.next_power_of_2(rows))
    block_k = 64 if block_t > 64 else 128
    splits = [s for s in SPLITS if depth % (s * block_k) == 0]
    split = next((s for s in splits if s * blocks >= 0.9 * num_sms), splits[-1])
    stage_bytes = (weights * BLOCK_N + block_t) * block_k * 2
    # two blocks fit an SM where a tile is large: one's end is another's middle
    stages = 3 if weights * block_t > 128 else min(8, SHARED_BYTES // stage_bytes)
    return Tile(block_t, block_k, split, stages)


def _launch(
    x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, tile: Tile, gated: bool
) -> None:
    width, depth = y.shape[-1], weight.shape[1]
    _skinny(
        (x.dtype, width, depth, tile, gated), (width // BLOCK_N * tile.split,),
        (
            TensorDescriptor.from_tensor(x, [tile.block_t, tile.block_k]),
            TensorDescriptor.from_tensor(weight, [BLOCK_N, tile.block_k]),
            weight, y, x.shape[0],
        ),
        {"N": width, "K": depth, "BLOCK_N": BLOCK_N, "BLOCK_T": tile.block_t,
         "BLOCK_K": tile.block_k, "SPLIT": tile.split, "GATED": gated,
         "PREFETCH": 0 if INTERPRET else PREFETCH_TOKENS, "PDL": not INTERPRET,
         "INTERPRET": INTERPRET},
        {"launch_pdl": not INTERPRET, "num_warps": 4, "num_stages": tile.num_stages},
    )  # fmt: skip


_skinny = Launcher(skinny_kernel)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
