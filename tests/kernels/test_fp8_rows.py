"""Rows that become FP8 on their way to a product: the launches against their torch twins.

On a GPU also the product itself, under capture, and the engine on it.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
sys.path.insert(0, str(Path(__file__).parents[1]))
from support import DEVICE, ON_GPU, compare

from granikv.attention.reference import quantize_kv
from granikv.config import EngineConfig
from granikv.engine import Engine
from granikv.models import fused, fused_kernels
from granikv.models.fp8 import FP8_MAX, Fp8Input, Fp8Rows, Fp8Weight, quantize_weight
from granikv.models.fp8_linear import Fp8Linear
from granikv.models.random_weights import load_random

DTYPES = [torch.bfloat16, torch.float16] if ON_GPU else [torch.float32]
INPUTS = [Fp8Input(), Fp8Input(0.037)]  # own scales; one of a checkpoint, no power of two
WIDTHS = [48, 200, 1024, *([14336, 18944] if ON_GPU else [])]
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU of compute capability 8.9 or newer")


def rows_of(num_rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Rows of very different size, one of zeros, with 1e4 behind each: a stride, never read."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.full((num_rows, width + 16), 1e4)
    wide[:, :width] = torch.randn(num_rows, width, generator=generator)
    wide[:, :width] *= 4.0 ** torch.arange(-3, num_rows - 3)[:, None]
    wide[1] = 0.0
    return wide.to(dtype).to(DEVICE)[:, :width]


def same(got: Fp8Rows, want: Fp8Rows) -> None:
    """Scales agree; values too but for a few that a last bit pushed over a rounding's edge."""
    assert got.values.shape == want.values.shape and got.values.is_contiguous()
    assert got.scales.shape == (got.values.shape[0], 1) and got.scales.dtype == torch.float32
    torch.testing.assert_close(got.scales.cpu(), want.scales, rtol=1e-5, atol=0.0)
    a, b = got.values.cpu().float(), want.values.float()
    assert not a.isnan().any()
    assert (a != b).float().mean() <= 0.01
    assert ((a - b).abs() <= b.abs() / 8 + 2**-9).all()  # one step


@pytest.mark.parametrize("fp8", INPUTS, ids=["own", "fixed"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantised_rows_are_the_twins(fp8, width, dtype):
    x = rows_of(6, width, dtype)
    got, want = fused_kernels.quantize_rows(x, fp8), fp8.quantize(x.cpu())
    assert torch.equal(got.scales.cpu(), want.scales)
    values = got.values.cpu().float()
    # a compiled product can round a tie of a wide row the other way
    assert (values != want.values.float()).float().mean() <= (1e-4 if ON_GPU else 0.0)
    largest = values.abs().amax(-1)
    if fp8.scale is None:
        assert largest.tolist() == [FP8_MAX, 0.0] + [FP8_MAX] * 4
    else:  # saturates, where the calibration did not see so much
        assert torch.equal(values, quantize_kv(x.cpu(), 0.037).float())
        assert largest[0] < FP8_MAX and largest[5] == FP8_MAX


@pytest.mark.parametrize("fp8", [None, *INPUTS], ids=["plain", "own", "fixed"])
@pytest.mark.parametrize("has_x", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm(fp8, has_x, dtype):
    torch.manual_seed(0)
    for width in WIDTHS[:4]:
        delta = rows_of(6, width, dtype)
        x = rows_of(6, width, dtype, seed=1).contiguous() if has_x else None
        weight = (torch.randn(width) + 2).to(dtype).to(DEVICE)
        got, total = fused_kernels.add_rms_norm(delta, x, weight, 1e-5, fp8)
        on_cpu = [None if t is None else t.cpu() for t in (delta, x, weight)]
        want, want_total = fused.add_rms_norm(*on_cpu, 1e-5, fp8)
        assert torch.equal(total.cpu(), want_total)
        if fp8 is None:
            compare(got.cpu().float(), want.float(), dtype)
        else:
            same(got, want)


@pytest.mark.parametrize("fp8", [None, *INPUTS], ids=["plain", "own", "fixed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul(fp8, dtype):
    for width in (*WIDTHS, 1040):  # 1040: more than a block where rows are cut
        gate_up = rows_of(6, 2 * width, torch.float32).clamp(-30, 30).to(dtype).contiguous()
        got, want = fused_kernels.silu_mul(gate_up, fp8), fused.silu_mul(gate_up.cpu(), fp8)
        if fp8 is None:
            compare(got.cpu().float(), want.float(), dtype)
        else:
            same(got, want)


@needs_gpu
def test_a_nan_reaches_the_product():
    x = torch.zeros(3, 64, dtype=torch.bfloat16, device=DEVICE)
    x[1, 5] = math.nan
    out = Fp8Linear(weight_of(32, 64), None, torch.bfloat16)(x)
    assert out.isnan().any(-1).tolist() == [False, True, False]


def weight_of(m: int, n: int) -> Fp8Weight:
    generator = torch.Generator().manual_seed(m)
    weight = torch.randn(m, n, generator=generator) * 2.0 ** torch.arange(m).remainder(9)[:, None]
    return quantize_weight(weight, "fp8").to(torch.device(DEVICE))


@needs_gpu
@pytest.mark.parametrize("m,n", [(48, 64), (6144, 4096), (4096, 14336)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("fp8", INPUTS, ids=["own", "fixed"])
def test_the_product_is_its_twins(m, n, with_bias, fp8):
    stored = weight_of(m, n)
    weight = Fp8Weight(stored.values, stored.scales, fp8)
    bias = torch.randn(m, dtype=torch.bfloat16, device=DEVICE) * 100 if with_bias else None
    ours = Fp8Linear(weight, bias, torch.bfloat16)
    twin = Fp8Linear(
        weight.to(torch.device("cpu")), None if bias is None else bias.cpu(), torch.float32
    )
    for num_rows in (0, 1, 2, 3, 17, 64, 200):
        x = torch.randn(num_rows, n, device=DEVICE).bfloat16() * 3
        got, want = ours(x), twin(x.cpu().float())
        assert got.shape == want.shape and got.dtype == torch.bfloat16
        if num_rows:  # against the size that a sum of n products has; channels differ by 2 ** 8
            values = stored.values.cpu().float() * stored.scales.cpu()[:, None]
            size = x.cpu().float().norm(dim=-1, keepdim=True) * values.norm(dim=-1) / n**0.5
            size = size if bias is None else size + bias.cpu().float().abs()
            error = (got.cpu().float() - want).abs() / size
            assert error.max() < 5e-2 and error.mean() < 5e-3, (num_rows, error.max(), error.mean())


@needs_gpu
def test_a_layer_is_captured():
    """No launch waits for the host, and a replay reads what the inputs hold then."""
    qkv = Fp8Linear(weight_of(96, 64), None, torch.bfloat16)
    down = Fp8Linear(weight_of(64, 48), None, torch.bfloat16)
    x, delta = (torch.randn(4, 64, device=DEVICE).bfloat16() for _ in range(2))
    weight = torch.ones(64, dtype=torch.bfloat16, device=DEVICE)

    def layer() -> torch.Tensor:
        normed, _ = fused.add_rms_norm(delta, x, weight, 1e-5, qkv.fp8_input)
        activated = fused.silu_mul(qkv(normed), down.fp8_input)
        return down(activated) + down(activated.values[:, :48].bfloat16())

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    x.copy_(torch.randn(4, 64))
    graph.replay()
    assert torch.equal(out, layer())


@needs_gpu
@pytest.mark.timeout(280)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_the_engine_on_a_gpu(tmp_path, kv_cache_dtype):
    """Decode steps are graphs; misses, then hits: logits within the stated tolerance of bf16's."""
    from helpers import dense_attend, make_tiny_hf
    from reference_logits import record_logits, relative_errors
    from tiny_engine import run, tokens

    folder = make_tiny_hf(tmp_path, "Qwen3ForCausalLM", seed=3)
    config = EngineConfig(
        model=folder, random_weights=True, device="cuda", quantization="fp8",
        kv_cache_dtype=kv_cache_dtype, capacity_tokens=1024, max_requests=8, min_extent_tokens=16,
        max_num_batched_tokens=64, max_seq_len=128, debug_checks=True, profile="default",
    )  # fmt: skip
    engine = Engine(config)
    engine.recorded_logits = record_logits(engine)
    prompts = [tokens(1, 40) + tokens(3, 5), tokens(1, 40) + tokens(4, 9)]
    made = [run(engine, prompts, max_tokens=12)[0] for _ in range(2)]
    counts = engine.executor.graph_counts
    assert counts.replays > counts.eager_decodes
    assert engine.stats()["cached_tokens"] > 0
    engine.close()
    assert engine.executor.decoder.layers[0].qkv.values.dtype == torch.float8_e4m3fn
    half = load_random(folder, torch.bfloat16, DEVICE)
    for prompt, tokens_made in zip(prompts * 2, made[0] + made[1], strict=True):
        ids = torch.tensor(prompt + tokens_made[:-1], device=DEVICE)
        rows = torch.arange(len(prompt) - 1, len(ids), device=DEVICE)
        positions = torch.arange(len(ids), device=DEVICE)
        want = half.forward(ids, positions, dense_attend(half.config), rows).cpu()
        assert relative_errors(tokens_made.logits, want).max() < 0.2
