"""quantization: what FP8 weights compute, how far logits move, and where they are refused."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import dense_attend, make_tiny_hf

from granikv.config import EngineConfig, ModelConfig
from granikv.engine import Engine
from granikv.engines.checkpoint import open_checkpoint
from granikv.engines.sharding import Shard
from granikv.errors import InvalidArgument, Unsupported
from granikv.executor import resolve_device
from granikv.executor.torch_ranks import checkpoint_reader, random_reader, rank_weights
from granikv.gpu_cost_model import GpuCostModel
from granikv.models import load_model
from granikv.models.fp8 import FP8, Fp8Input, Fp8Weight, join_rows, quantize_weight
from granikv.models.fp8_linear import Fp8Linear
from granikv.models.linear import Linear
from granikv.models.random_weights import load_random, read_shape
from granikv.sampling_params import SamplingParams

NAMES = ["fp8", "fp8_per_tensor"]
ARCHS = ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
# Of max|a - b| / max|b| per position, and of the rms over all; bf16's own is about a tenth of it.
MAX_ERROR, MAX_RMS_ERROR = 0.2, 0.13
SHAPE = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512, "max_position_embeddings": 256,
}  # fmt: skip


def random_model(tmp_path, arch: str, dtype=torch.float32, quantization=None):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"architectures": [arch]}))
    return load_random(tmp_path, dtype, quantization=quantization)


def logits_of(decoder, num_tokens: int = 24) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, decoder.config.vocab_size, (num_tokens,), generator=generator)
    return decoder.forward(ids, torch.arange(num_tokens), dense_attend(decoder.config))


# --- numbers ----------------------------------------------------------------------------------


def test_every_channel_has_its_own_scale_or_all_have_one():
    weight = torch.randn(5, 64) * 10.0 ** torch.arange(-2, 3)[:, None]
    weight[1], weight[3, 7] = 0.0, -5e4
    own, shared = (quantize_weight(weight, name) for name in NAMES)
    largest = weight.abs().amax(-1)
    for i in (0, 2, 3, 4):
        assert own.scales[i] == pytest.approx(float(largest[i]) / 448)
        assert own.values[i].float().abs().max() == 448
    assert shared.scales.tolist() == pytest.approx([float(largest.max()) / 448] * 5)
    for got in (own, shared):
        assert got.values.dtype == FP8 and not got.values[1].float().any()
        error = (got.values.float() * got.scales[:, None] - weight).abs()
        assert (error <= weight.abs() / 16 + got.scales[:, None] * 2**-10).all()


@pytest.mark.parametrize("fp8", [Fp8Input(), Fp8Input(0.011)], ids=["own", "fixed"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_twin_computes_what_the_scaled_product_does(fp8, with_bias):
    """In float64 from the definition, and by torch's own product where this CPU has it."""
    torch.manual_seed(0)
    stored = quantize_weight(
        torch.randn(48, 64) * 2.0 ** torch.arange(48).remainder(7)[:, None], "fp8"
    )
    weight = Fp8Weight(stored.values, stored.scales, fp8)
    bias = torch.randn(48) if with_bias else None
    linear = Fp8Linear(weight, bias, torch.float32)
    x = torch.randn(7, 64) * 3.0 ** torch.arange(7)[:, None]
    rows = fp8.quantize(x)
    if fp8.scale is None:  # every row by itself: neighbours do not change it
        assert torch.equal(linear(x)[2:3], linear(x[2:3]))
    else:
        assert rows.scales.unique().tolist() == pytest.approx([0.011])
        assert rows.values[6].float().abs().max() == 448  # saturated
    wide = rows.values.double() * rows.scales.double()
    want = wide @ (weight.values.double() * weight.scales.double()[:, None]).T
    want = want if bias is None else want + bias.double()
    got, largest = linear(x), want.abs().max()
    assert (got - want).abs().max() < 1e-6 * largest
    assert torch.equal(linear(x), linear(rows))  # quantised in front, or here
    assert linear(x[:0]).shape == (0, 48)
    theirs = torch._scaled_mm(
        rows.values, weight.values.t(), scale_a=rows.scales, scale_b=weight.scales.view(1, -1),
        out_dtype=torch.float32, use_fast_accum=True,
    )  # fmt: skip
    theirs = theirs if bias is None else theirs + bias
    assert (got - theirs).abs().max() < 1e-6 * largest


def test_joined_parts_keep_their_values():
    parts = [quantize_weight(torch.randn(m, 32) * m, "fp8_per_tensor") for m in (8, 2, 2)]
    joined = join_rows("qkv", parts)
    x = torch.randn(3, 32)
    want = torch.cat([Fp8Linear(p, None, torch.float32)(x) for p in parts], dim=-1)
    assert torch.equal(Fp8Linear(joined, None, torch.float32)(x), want)
    assert joined.scales.unique().numel() == 3 and joined.input.scale is None
    calibrated = [
        Fp8Weight(p.values, p.scales, Fp8Input(s))
        for p, s in zip(parts, (1.0, 3.0, 2.0), strict=True)
    ]
    assert join_rows("qkv", calibrated).input.scale == 3.0
    with pytest.raises(Unsupported, match="qkv: its 3 parts.*input_scale, got 1"):
        join_rows("qkv", [calibrated[0], *parts[1:]])
    with pytest.raises(Unsupported, match="qkv: its 2 parts.*FP8 weights, got 1"):
        join_rows("qkv", [torch.ones(2, 32), parts[0]])


@pytest.mark.parametrize("arch", ARCHS)
def test_logits_stay_within_the_stated_tolerance(tmp_path, arch):
    half = logits_of(random_model(tmp_path, arch, torch.bfloat16))
    for name in NAMES if arch == ARCHS[0] else NAMES[:1]:
        decoder = random_model(tmp_path, arch, torch.bfloat16, name)
        kinds = [type(getattr(decoder.layers[0], x)) for x in ("qkv", "out", "gate_up", "down")]
        assert kinds == [Fp8Linear] * 4 and type(decoder.lm_head) is Linear
        assert decoder.embedding.dtype == decoder.layers[0].input_norm.dtype == torch.bfloat16
        got = logits_of(decoder)
        error = (got - half).abs().amax(-1) / half.abs().amax(-1)
        rms = (got - half).pow(2).mean().sqrt() / half.pow(2).mean().sqrt()
        assert error.max() < MAX_ERROR and 0.03 < rms < MAX_RMS_ERROR, (error.max(), rms)


def test_only_attentions_output_has_a_launch_of_its_own(tmp_path, monkeypatch):
    decoder = random_model(tmp_path, ARCHS[0], quantization="fp8")
    taken = []
    monkeypatch.setattr(
        "granikv.models.fp8_linear.quantize_rows",
        lambda x, fp8: taken.append(x.shape[-1]) or fp8.quantize(x),
    )
    logits_of(decoder, 3)
    assert taken == [SHAPE["num_attention_heads"] * SHAPE["head_dim"]] * SHAPE["num_hidden_layers"]


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_cut_weights_are_those_of_the_whole_model(tmp_path, name, random):
    """Ranks hold slices of one quantisation: scales of row-parallel weights are not their own."""
    if random:
        (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"architectures": ARCHS[:1]}))
        config, read = read_shape(tmp_path), random_reader(torch.float32, torch.device("cpu"), name)
    else:
        checkpoint = open_checkpoint(make_tiny_hf(tmp_path, seed=3))
        config = checkpoint.config
        read = checkpoint_reader(checkpoint, torch.float32, quantization=name)
    one, *ranks = (rank_weights(Shard(config, *cut), read) for cut in ((1, 0), (2, 0), (2, 1)))
    half = config.intermediate_size // 2
    for layer, whole in enumerate(one.layers):
        halves = [w.layers[layer] for w in ranks]
        for field in ("out", "down"):
            want, got = getattr(whole, field), [getattr(h, field) for h in halves]
            assert torch.equal(torch.cat([g.values.float() for g in got], 1), want.values.float())
            assert all(torch.equal(g.scales, want.scales) for g in got)
            assert all(g.values.is_contiguous() for g in got)
        gate = torch.cat([h.gate_up.values.float()[:half] for h in halves])
        assert torch.equal(gate, whole.gate_up.values.float()[: 2 * half])
        for first in (0, half):  # gate, up
            scales = torch.cat([h.gate_up.scales[first : first + half] for h in halves])
            assert torch.equal(scales, whole.gate_up.scales[2 * first : 2 * first + 2 * half])


# --- the engine -------------------------------------------------------------------------------


def test_the_engine_on_a_cpu_says_what_it_does(tmp_path, caplog):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"architectures": [ARCHS[2]]}))
    settings = {
        "capacity_tokens": 1024,
        "max_seq_len": 128,
        "max_requests": 4,
        "profile": "default",
    }
    config = EngineConfig(
        tmp_path,
        random_weights=True,
        device="cpu",
        quantization="fp8",
        min_extent_tokens=16,
        **settings,
    )
    with caplog.at_level(logging.WARNING):
        engine = Engine(config)
    assert "quantization=fp8: no FP8 products on this CPU" in caplog.text
    prompt, made = list(range(3, 60)), []
    for turn in range(2):  # a miss, then a hit
        params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
        engine.add_request(f"r{turn}", prompt, params)
        made.append([])
        while engine.has_work():
            for out in engine.step():
                made[-1] += out.token_ids
    assert made[0] == made[1] and engine.stats()["cached_tokens"] > 0
    engine.close()
    decoder, ids = load_random(tmp_path, quantization="fp8"), list(prompt)
    for _ in range(5):
        rows = torch.arange(len(ids))
        logits = decoder.forward(torch.tensor(ids), rows, dense_attend(decoder.config), rows[-1:])
        ids.append(int(logits.argmax()))
    assert made[0] == ids[len(prompt) :]


def test_the_table_of_angles_lies_where_positions_are_looked_up(tmp_path):
    decoder = load_model(make_tiny_hf(tmp_path), device="meta")
    ids = torch.zeros(3, dtype=torch.int64, device="meta")
    rows = torch.arange(3, device="meta")
    assert decoder.forward(ids, rows, dense_attend(decoder.config)).device.type == "meta"


# --- refusals and sizes -----------------------------------------------------------------------


def pretend_gpu(monkeypatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)


def test_refusals_name_field_value_and_remedy(monkeypatch):
    with pytest.raises(InvalidArgument, match="quantization: .*None, 'fp8'.*got 'int8'"):
        EngineConfig(quantization="int8")
    with pytest.raises(InvalidArgument, match="quantization.*executor='torch'.*got 'fp8'"):
        EngineConfig(executor="tensorrt", engine_dir="e", plugin="p", quantization="fp8")
    assert resolve_device(EngineConfig(device="cpu", quantization="fp8")).dtype == "float32"
    on_gpu = EngineConfig(device="cuda", quantization="fp8")
    pretend_gpu(monkeypatch, (8, 6))
    with pytest.raises(InvalidArgument, match="quantization.*16-bit.*8.9.*has 8.6, got 'fp8'"):
        resolve_device(on_gpu)
    pretend_gpu(monkeypatch, (8, 9))
    assert resolve_device(on_gpu).dtype == "bfloat16"
    with pytest.raises(
        InvalidArgument, match="dtype.*'bfloat16'.*quantization='fp8', got 'float16'"
    ):
        resolve_device(EngineConfig(device="cuda", quantization="fp8", dtype="float16"))


def test_costs_count_a_layers_weights_once_and_the_head_twice():
    model = ModelConfig("LlamaForCausalLM", 32, 4096, 14336, 32, 8, 128, 128256, 8192)
    wide, narrow = (GpuCostModel.load("default", model, 2, "", 2, n) for n in (None, 1))
    # where 16-bit products are the longest, those of FP8 take half and the cache's reads win
    rows = next(n for n in range(16, 4096, 16) if wide.label(n, 100_000, 0) == "compute")
    assert narrow.label(rows, 100_000, 0) == "memory"
    assert narrow.label(8, 0, 0) == "memory" and narrow.label(4096, 0, 0) == "compute"
