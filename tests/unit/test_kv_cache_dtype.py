"""kv_cache_dtype: where it is refused, what it does to sizes and costs, and a checkpoint's scales."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import make_tiny_hf

from granikv.attention.plan_buffers import attention_shape
from granikv.attention.variants import LAYOUTS
from granikv.config import EngineConfig, ModelConfig
from granikv.core import Move, StepPlan
from granikv.errors import InvalidArgument, ModelFileError, Unsupported
from granikv.executor import resolve_device
from granikv.executor.step_setup import apply_moves
from granikv.gpu_cost_model import GpuCostModel
from granikv.inspection import kv_facts
from granikv.models import load_model

MODEL = ModelConfig("LlamaForCausalLM", 4, 256, 512, 8, 2, 64, 128, 4096)
FP8_NAMES = ["fp8", "fp8_e4m3"]


def pretend_gpu(monkeypatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(InvalidArgument, match="kv_cache_dtype: .*'auto', 'fp8'.*got 'fp4'"):
        EngineConfig(kv_cache_dtype="fp4")


@pytest.mark.parametrize("name", FP8_NAMES)
def test_fp8_is_refused_where_nothing_converts_it(name, monkeypatch):
    with pytest.raises(InvalidArgument, match=f"kv_cache_dtype.*8.9.*'cpu'.*got '{name}'"):
        resolve_device(EngineConfig(device="cpu", kv_cache_dtype=name))
    with pytest.raises(InvalidArgument, match="kv_cache_dtype.*executor='torch'"):
        EngineConfig(executor="tensorrt", engine_dir="e", plugin="p", kv_cache_dtype=name)
    pretend_gpu(monkeypatch, (8, 6))
    with pytest.raises(InvalidArgument, match="kv_cache_dtype.*8.9.*has 8.6"):
        resolve_device(EngineConfig(device="cuda", kv_cache_dtype=name))
    pretend_gpu(monkeypatch, (8, 9))
    resolved = resolve_device(EngineConfig(device="cuda", kv_cache_dtype=name))
    assert (resolved.dtype, resolved.kv_dtype) == ("bfloat16", "float8_e4m3fn")


def test_sizes_and_costs_follow_the_stored_type(monkeypatch):
    pretend_gpu(monkeypatch, (9, 0))
    wide, narrow = (
        kv_facts(EngineConfig(device="cuda", kv_cache_dtype=name, capacity_tokens=1000), MODEL)
        for name in ("auto", "fp8")
    )
    planned = kv_facts(EngineConfig(device="cuda"), MODEL)
    assert "planned" in str(planned["capacity, tokens"]) and "arena, bytes" not in planned
    assert wide["bytes per token"] == 2 * narrow["bytes per token"] == 2 * 2 * 4 * 2 * 64
    assert wide["arena, bytes"] == 2 * narrow["arena, bytes"]
    assert (wide["dtype"], narrow["dtype"]) == ("bfloat16", "float8_e4m3fn")
    shape = attention_shape(MODEL, torch.bfloat16, fp8_kv=True)
    assert shape.kv_bytes_per_token * 2 == attention_shape(MODEL, torch.bfloat16).kv_bytes_per_token
    wide_cost, narrow_cost = (GpuCostModel.load("default", MODEL, 2, "", n) for n in (None, 1))
    for rows, tokens in ((1, 1 << 16), (8, 1 << 20)):
        spans = [
            c.marginal_flat_us(rows, tokens) - c.merge_us(rows) for c in (wide_cost, narrow_cost)
        ]
        assert spans[0] == pytest.approx(2 * spans[1])
    read = [
        c.hot_us("cascade", 1, 1 << 20) - c.profile["item_us"] for c in (wide_cost, narrow_cost)
    ]
    assert read[1] == pytest.approx(read[0] / 2)


def test_every_tile_fits_shared_memory_with_its_widened_blocks():
    for dim in (64, 128, 256):
        model = ModelConfig("LlamaForCausalLM", 1, 64, 64, 8, 2, dim, 32, 64)
        for dtype in (torch.bfloat16, torch.float32):
            shape = attention_shape(model, dtype, fp8_kv=True)
            for layout in LAYOUTS.values():
                for tile in (layout.hot, layout.cold):
                    assert tile.fit(shape).block_n >= 16


def test_moves_copy_fp8_arenas():
    arena = torch.randn(2, 16, 2, 4).to(torch.float8_e4m3fn)
    before = arena.float()
    plan = StepPlan.__new__(StepPlan)
    plan.moves = [Move(np.array([9, 3], np.int32), 12)]
    apply_moves(plan, (arena,))
    assert torch.equal(arena.float()[:, 12:14], before[:, [9, 3]])
    assert torch.equal(arena.float()[:, :12], before[:, :12])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_tiny_hf(tmp_path_factory.mktemp("tiny"), num_hidden_layers=2)


def with_tensors(checkpoint, folder, tensors):
    """A copy of the checkpoint with more tensors."""
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_bytes((checkpoint / name).read_bytes())
    stored = load_file(checkpoint / "model.safetensors")
    save_file(stored | tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("k_name", "v_name"),
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("kv_scale", "kv_scale"),
    ],
)
def test_scales_of_a_checkpoint_are_read(checkpoint, tmp_path, k_name, v_name):
    tensors = {}
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn."
        tensors[prefix + k_name] = torch.tensor([0.5 + layer])
        tensors[prefix + v_name] = torch.tensor(0.25 + layer)
    scales = load_model(with_tensors(checkpoint, tmp_path, tensors)).kv_scales
    k = [[0.25], [1.25]] if k_name == v_name else [[0.5], [1.5]]
    assert torch.equal(scales, torch.cat([torch.tensor(k), torch.tensor([[0.25], [1.25]])], 1))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"0.self_attn.k_scale": torch.tensor(0.5)}, "layers.0.self_attn.v_scale: .*3 are missing"),
        ({"0.self_attn.k_scale": torch.tensor(0.0)}, "positive number, got 0.0"),
        ({"0.self_attn.k_scale": torch.tensor(float("nan"))}, "positive number, got nan"),
        ({"0.self_attn.k_scale": torch.ones(2)}, r"one value, got \[2\]"),
    ],
)
def test_scales_that_make_no_sense_are_refused(checkpoint, tmp_path, tensors, message):
    named = {f"model.layers.{name}": value for name, value in tensors.items()}
    with pytest.raises(ModelFileError, match=message):
        load_model(with_tensors(checkpoint, tmp_path, named))


def test_a_checkpoint_that_quantises_its_kv_alone_is_served(checkpoint, tmp_path):
    folder = with_tensors(checkpoint, tmp_path, {})
    config = json.loads((folder / "config.json").read_text())
    quantization = {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "kv_cache_scheme": {"type": "float", "num_bits": 8, "strategy": "tensor"},
    }
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    assert load_model(folder).kv_scales is None
    quantization["config_groups"] = {"group_0": {"weights": {"num_bits": 8}}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(Unsupported, match="quantization_config"):
        load_model(folder)
