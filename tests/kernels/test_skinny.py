"""Products of few rows against fp32, in the interpreter and at full size on an sm_90 GPU."""

from __future__ import annotations

import pytest
import torch
from support import DEVICE, ON_GPU

from granikv.models import skinny
from granikv.models.fused import add_rms_norm
from granikv.models.linear import Linear
from granikv.models.skinny import Tile, tile_of

# the interpreter truncates where fp32 becomes bf16
HALF = [torch.bfloat16, torch.float16] if ON_GPU else [torch.float16]
IS_HOPPER = ON_GPU and torch.cuda.get_device_capability() in skinny.CAPABILITIES
needs_hopper = pytest.mark.skipif(
    not IS_HOPPER, reason="needs an sm_90 GPU: run pytest tests/kernels/test_skinny.py on one"
)


def made(rows: int, width: int, depth: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, depth, generator=g).to(dtype).to(DEVICE)
    weight = (torch.randn(width, depth, generator=g) * depth**-0.5).to(dtype).to(DEVICE)
    return x, weight


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def silu_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    gate, up = (x.float() @ weight.float().t()).chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_parts_sum_to_the_product(dtype):
    for rows, split in ((1, 1), (5, 2), (19, 4)):
        x, weight = made(rows, 128, 1024, dtype)
        block_t = 16 if rows < 16 else 32
        parts = skinny.partial_sums(x, weight, Tile(block_t, 128, split, 2))
        assert parts.shape == (split, rows, 128) and parts.dtype == torch.float32
        assert error(parts.sum(0), x.float() @ weight.float().t()) < 1e-5
        if split > 1:  # each part is its own columns' sum, not a copy of another
            first = x[:, : 1024 // split].float() @ weight[:, : 1024 // split].float().t()
            assert error(parts[0], first) < 1e-5


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_gated_is_silu_of_the_first_half(dtype):
    x, weight = made(6, 256, 256, dtype)
    got = skinny.gated(x, weight)
    assert got.shape == (6, 128) and got.dtype == dtype
    assert error(got, silu_of(x, weight)) < 1e-2
    assert error(got, silu_of(x, weight.roll(128, 0))) > 0.1  # up * silu(gate) is another thing


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_the_norm_sums_parts(dtype):
    parts = torch.randn(3, 5, 64).to(DEVICE)
    x, weight = torch.randn(5, 64).to(dtype).to(DEVICE), torch.ones(64, dtype=dtype).to(DEVICE)
    want = (x.float() + parts.sum(0)).to(dtype)
    for where in {DEVICE, "cpu"}:
        normed, total = add_rms_norm(parts.to(where), x.to(where), weight.to(where), 1e-5)
        assert torch.equal(total, want.to(where)) and normed.dtype == dtype
        whole = add_rms_norm(want.to(where), None, weight.to(where), 1e-5)[0]
        assert error(normed, whole) < 1e-2


def test_tiles_fill_the_gpu_and_divide_the_sum():
    for rows in (1, 8, 17, 64, 65, 128):
        for width, depth in ((4096, 4096), (4096, 14336), (5120, 13824), (5120, 5120), (128, 256)):
            tile = tile_of(rows, width // 64, depth, num_sms=132)
            assert tile.block_t >= rows and depth % (tile.split * tile.block_k) == 0
            assert 2 <= tile.num_stages <= 8
            assert width // 64 * tile.split >= 118 or width == 128
        assert tile_of(rows, 224, 4096, weights=2).split == 1


def test_other_devices_keep_their_product():
    x, weight = torch.randn(3, 256), torch.randn(128, 256)
    linear = Linear(weight)
    assert torch.equal(linear.partial_sums(x), linear(x))
    assert not skinny.takes(x.bfloat16(), weight.bfloat16())


def test_only_full_waves_of_blocks_and_full_tiles_are_taken():
    """Llama-3.1-8B's products, and Qwen2.5-14B's over two ranks, as measured on an H200."""
    fills = {
        (4096, 4096, False): True, (4096, 14336, False): True, (28672, 4096, True): True,
        (5120, 2560, False): False, (5120, 6912, False): False, (13824, 5120, True): False,
    }  # fmt: skip
    for (width, depth, gated), want in fills.items():
        weight = torch.empty(width, depth, dtype=torch.bfloat16, device="meta")
        for rows in (1, 32, 64, 128):
            assert skinny._fills(rows, weight, gated, 132) == want, (rows, width, depth)
        assert not skinny._fills(96, weight, gated, 132)


@needs_hopper
@pytest.mark.parametrize("rows", [1, 8, 33, 96, 128])
def test_full_sizes(rows):
    for width, depth in ((4096, 14336), (5120, 5120)):
        x, weight = made(rows, width, depth, torch.bfloat16)
        parts = skinny.partial_sums(x, weight)
        assert parts.dim() == 3
        assert error(parts.sum(0), x.float() @ weight.float().t()) < 1e-3
        assert torch.equal(parts, skinny.partial_sums(x, weight))
        assert error(skinny.gated(x, weight), silu_of(x, weight)) < 1e-2


@needs_hopper
def test_a_linear_takes_it():
    x, weight = made(8, 4096, 14336, torch.bfloat16)
    assert skinny.takes(x, weight)
    assert torch.equal(Linear(weight).partial_sums(x), skinny.partial_sums(x, weight))
    x, weight = made(64, 28672, 256, torch.bfloat16)
    assert skinny.takes(x, weight, gated=True)
    assert torch.equal(Linear(weight).gated(x), skinny.gated(x, weight))


@needs_hopper
def test_what_is_not_taken():
    x, weight = made(8, 4096, 4096, torch.bfloat16)
    assert not skinny.takes(x.expand(8, -1).repeat(32, 1), weight)  # more rows than MAX_ROWS
    assert not skinny.takes(x, weight.t())
    assert not skinny.takes(x.float(), weight.float())
    assert not skinny.takes(x[:, :4000], weight[:, :4000].contiguous())
    assert Linear(weight, torch.zeros(4096).to(weight)).partial_sums(x).dim() == 2  # has a bias
