"""FP8 KV: saturation on the way in, every layout and head shape, and that hits equal misses."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path

import pytest
import torch
from support import ABSURD, DEVICE, ON_GPU, Row, Step, compare
from test_kernels_step import EVERYONE, EXTENDS, MIXED, OTHER, TOOLS

from granikv.attention.gpu import FP8, GpuAttention
from granikv.attention.kernels.append import append_kv
from granikv.attention.reference import quantize_kv
from granikv.attention.variants import FP8_LAYOUTS, AttentionShape
from granikv.core import Count
from granikv.errors import InvalidArgument
from granikv.models.layers import RotaryTable, apply_rope

SCALES = (0.037, 0.61)  # no powers of two: the stored values are rounded
DTYPES = [torch.bfloat16, torch.float16] if ON_GPU else [torch.float32]


def stored(arena: torch.Tensor) -> torch.Tensor:
    """Bytes of an FP8 arena, on the CPU."""
    return arena.cpu().view(torch.uint8)


def appended(k: torch.Tensor, v: torch.Tensor, rope: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What FP8 arenas hold in the slots of k and v [rows, heads, dim]; the last row is padding."""
    rows, heads, dim = k.shape
    arena = torch.full((2, 64, heads, dim), 448.0).to(FP8).to(DEVICE)
    counts = torch.zeros(16, dtype=torch.int32)
    counts[Count.NUM_ROWS] = rows - 1
    slots = torch.randperm(63)[:rows].int()
    plan = {
        "counts": counts,
        "slot_mapping": torch.cat([slots[:-1], torch.tensor([ABSURD]).int()]),
        "row_position": torch.arange(rows).int(),
    }
    plan = {name: value.to(DEVICE) for name, value in plan.items()}
    angles = RotaryTable(dim, 64, 10000.0)
    append_kv(
        arena[0], arena[1], plan, torch.zeros(rows, heads, dim, device=DEVICE, dtype=k.dtype),
        k.to(DEVICE), v.to(DEVICE), shape=AttentionShape(heads, heads, dim, 4, fp8_kv=True),
        rope=(angles.cos.to(DEVICE), angles.sin.to(DEVICE)) if rope else None, kv_scales=SCALES,
    )  # fmt: skip
    written = stored(arena)
    untouched = [i for i in range(64) if i not in slots[:-1].tolist()]
    assert (written[:, untouched] == stored(torch.tensor([448.0]).to(FP8))).all()
    got_k, got_v = (written[i, slots[:-1].long()].view(FP8).float() for i in (0, 1))
    return got_k, got_v


def test_append_saturates_and_rounds_to_even():
    torch.manual_seed(0)
    k = torch.randn(30, 2, 64) * 10.0 ** torch.randint(-5, 5, (30, 2, 64))
    v = torch.randn(30, 2, 64)
    k[0, 0, :8] = torch.tensor(
        [1e30, -1e30, math.inf, -math.inf, 0.0, -0.0, 1e-30, 448 * SCALES[0]]
    )
    v[:16, 0, 0] = (torch.arange(16) + 0.5) / 8 * SCALES[1]  # ties of the step 2**-3
    v[:16, 0, 1] = (torch.arange(16) + 0.5) / 512 * SCALES[1]  # and of subnormals
    got_k, got_v = appended(k, v, rope=False)
    assert torch.equal(got_k, quantize_kv(k, SCALES[0]).float()[:-1])
    assert torch.equal(got_v, quantize_kv(v, SCALES[1]).float()[:-1])
    assert got_k[0, 0, :4].tolist() == [448.0, -448.0, 448.0, -448.0]


@pytest.mark.skipif(not ON_GPU, reason="the interpreter has no FP8 NaN")
def test_nan_stays_nan_when_appended():
    k = torch.full((2, 2, 64), math.nan)
    got_k, got_v = appended(k, k, rope=False)
    assert torch.isnan(got_k).all() and torch.isnan(got_v).all()


def test_append_quantises_after_rope():
    torch.manual_seed(1)
    k, v = torch.randn(2, 20, 2, 64)
    cos, sin = RotaryTable(64, 64, 10000.0).lookup(torch.arange(20), torch.float32)
    want = quantize_kv(apply_rope(k, cos, sin), SCALES[0]).float()[:-1]
    got_k, got_v = appended(k, v, rope=True)
    assert (got_k != want).float().mean() < 1e-3  # a fused multiply-add turns a tie around
    assert (got_k - want).abs().max() <= 32  # one step, of the largest
    assert torch.equal(got_v, quantize_kv(v, SCALES[1]).float()[:-1])


@pytest.mark.parametrize("layout", FP8_LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_ragged_groups_in_every_layout(layout, dtype):
    if layout == "flat":
        rows = [dataclasses.replace(r, flat=True) for r in MIXED]
    else:
        rows = MIXED + EXTENDS if layout == "large" or ON_GPU else MIXED
    Step(rows, dtype=dtype, layout=FP8_LAYOUTS[layout], kv_scales=SCALES).check()


@pytest.mark.parametrize("heads", [(9, 3), (7, 1), (16, 1), (3, 3)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_group_sizes(heads, dtype):
    rows = [Row([EVERYONE], 37), Row([EVERYONE], 5), Row([OTHER], 9, num_new=4)]
    Step(rows, heads=heads, dtype=dtype, kv_scales=SCALES).check()


@pytest.mark.parametrize("dim", [96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_head_sizes(dim, dtype):
    Step([*MIXED[:3], EXTENDS[0]], heads=(4, 1), dim=dim, dtype=dtype, kv_scales=SCALES).check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_fp8_beside_queries_of_16_bits(dtype):
    Step([MIXED[0], MIXED[5], EXTENDS[0]], dtype=dtype, kv_scales=SCALES).check()


@pytest.mark.parametrize("layout", ["small", "mid", "large", "groups"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_fp8_queries_as_pairs_of_e4m3(layout, dtype):
    """A tile of 64 rows or more: rows of all sizes have scales of their own, zeros stay zeros."""
    assert FP8_LAYOUTS[layout].hot.takes_pairs(AttentionShape(2, 1, 64, 2, fp8_kv=True))
    rows = MIXED if ON_GPU else [MIXED[0], MIXED[1], MIXED[5], EXTENDS[0]]
    step = Step(rows, dtype=dtype, layout=FP8_LAYOUTS[layout], kv_scales=(1.0, 1.0))
    for i, factor in enumerate((0.0, 1e-6, 1e-3, 0.3)):
        step.q[i % len(step.q)] *= factor
    step.q[3] = -step.q[3].abs()
    step.q[3, :, 0] = 1e-4  # the largest number is far from the largest magnitude
    step.q[-1, 0, :8] = torch.tensor([40.0, 20.0, 1.0, 0.01, -40.0, -1.0, 0.0, 5e-4])
    step.check()


def test_fp8_decode_equals_dense_attention_over_dequantised_kv():
    """In float64, without the twin: the scales are where they belong."""
    dtype = DTYPES[0]
    step = Step([Row([EVERYONE, TOOLS], 37), Row([], 50)], dtype=dtype, kv_scales=SCALES)
    attention = step.attention()
    out = step.run(attention).double().view(2, 4, 64)
    k, v = (x[1].cpu().double() * s for x, s in zip((attention.k_arena, attention.v_arena), SCALES, strict=True))  # fmt: skip
    for row, slots in enumerate(step.slots):
        keys, values = (x[torch.from_numpy(slots).long()].repeat_interleave(2, 1) for x in (k, v))
        scores = torch.einsum("hd,nhd->hn", step.q[row].double(), keys) * 64**-0.5
        want = torch.einsum("hn,nhd->hd", scores.softmax(-1), values)
        compare(out[row], want, dtype)


def test_an_extend_row_reads_its_own_chunk_as_it_is_stored():
    """A prompt in one chunk (a miss) and its second part behind the stored first one (a hit)."""
    dtype = DTYPES[0]
    miss = Step([Row([EVERYONE], 33, num_new=33)], dtype=dtype, kv_scales=SCALES)
    attention = miss.attention()
    whole = miss.run(attention)
    hit = Step([Row([EVERYONE], 33, num_new=13)], dtype=dtype, kv_scales=SCALES)
    assert [s.tolist() for s in hit.slots] == [s.tolist() for s in miss.slots]
    hit.k, hit.v = attention.k_arena.cpu(), attention.v_arena.cpu()
    hit.q, hit.new_k, hit.new_v = (x[-13:] for x in (miss.q, miss.new_k, miss.new_v))
    rest = hit.run()
    assert torch.equal(rest, whole[-13:])
    unquantised = Step([Row([EVERYONE], 33, num_new=33)], dtype=dtype)
    unquantised.k, unquantised.v = (
        x.cpu().to(dtype) for x in (attention.k_arena, attention.v_arena)
    )
    assert not torch.allclose(rest.float(), unquantised.run()[-13:].float(), atol=1e-3)


def test_fp8_bad_input_names_the_argument():
    step = Step(MIXED[:1], kv_scales=SCALES)
    arenas = (step.k.to(DEVICE), step.v.to(DEVICE), step.request_slots.to(DEVICE))
    with pytest.raises(InvalidArgument, match="kv_scales: expected"):
        GpuAttention(step.config, *arenas, kv_scales=torch.ones(3, 2))
    with pytest.raises(InvalidArgument, match="dtype: expected"):
        GpuAttention(step.config, *arenas, dtype=torch.float64)
    wide = [x.float() for x in arenas[:2]]
    with pytest.raises(InvalidArgument, match="kv_scales: expected.*FP8"):
        GpuAttention(step.config, *wide, arenas[2], kv_scales=torch.ones(2, 2))


@pytest.mark.timeout(280)
def test_fp8_hits_equal_misses_in_the_engine(tmp_path, caplog):
    """The same prompts twice, and dense attention over values that went through e4m3."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from helpers import dense_attend, make_tiny_hf
    from reference_logits import relative_errors
    from test_executor_step import make_gpu_engine
    from tiny_engine import run, tokens

    from granikv.models import load_model

    folder = make_tiny_hf(tmp_path, seed=3)
    decoder = load_model(folder, device=DEVICE)
    models = {"LlamaForCausalLM": (decoder, None)}
    make_gpu_engine(models, kv_cache_dtype="fp8").close()
    assert "no k_scale and v_scale" in caplog.text
    caplog.clear()
    decoder.kv_scales = torch.tensor([[0.1, 0.1]] * 3)
    prompts = [tokens(1, 40) + tokens(3, 5), tokens(1, 40) + tokens(4, 9)]
    engine = make_gpu_engine(models, kv_cache_dtype="fp8")
    assert not caplog.text
    miss, hit = (run(engine, prompts, max_tokens=2)[0] for _ in range(2))
    stats, token_bytes = engine.stats(), decoder.config.kv_bytes_per_token(1)
    assert stats["cached_tokens"] > 0
    assert stats["kv_bytes"] == stats["capacity_tokens"] * token_bytes
    engine.close()
    for first, second in zip(miss, hit, strict=True):
        assert first == second
        assert relative_errors(second.logits, torch.stack(first.logits)).max() < 1e-4
    decoder.rope_in_attend = False
    dense = dense_attend(decoder.config)

    def fake_quantised(layer, q, k, v):
        scales = decoder.kv_scales[layer].tolist()
        k, v = (quantize_kv(x, s).float() * s for x, s in zip((k, v), scales, strict=True))
        return dense(layer, q, k, v)

    for prompt, first in zip(prompts, miss, strict=True):
        ids = torch.tensor(prompt + first[:-1], device=DEVICE)
        rows = torch.arange(len(prompt) - 1, len(ids), device=DEVICE)
        want = decoder.forward(ids, torch.arange(len(ids), device=DEVICE), fake_quantised, rows)
        assert relative_errors(first.logits, want.cpu()).max() < 1e-2  # a rounding may turn around
