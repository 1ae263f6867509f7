"""FP8 checkpoints of Hugging Face: both forms that are served, and each that is not, by name."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import dense_attend, make_tiny_hf

from granikv.config import EngineConfig
from granikv.config_check import check_engine
from granikv.engines.checkpoint import open_checkpoint
from granikv.engines.sharding import Shard
from granikv.errors import InvalidArgument, ModelFileError, Unsupported
from granikv.executor.torch_ranks import checkpoint_reader, rank_weights
from granikv.models import check_weights, load_model
from granikv.models.weights import load_hf

Q_PROJ = "model.layers.0.self_attn.q_proj."
COMPRESSED = {  # as llm-compressor writes it
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"type": "float", "num_bits": 8, "strategy": "channel", "dynamic": False},
            "input_activations": {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True},
        }
    },
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
}  # fmt: skip
STATIC = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}


def compressed(**changes) -> dict:
    """COMPRESSED with other values: weights__strategy="block" and the like."""
    made = copy.deepcopy(COMPRESSED)
    for name, value in changes.items():
        part, _, field = name.partition("__")
        if field:
            made["config_groups"]["group_0"][part][field] = value
        elif part in made["config_groups"]["group_0"]:
            made["config_groups"]["group_0"][part] = value
        else:
            made[part] = value
    return made


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return make_tiny_hf(tmp_path_factory.mktemp("plain"), "Qwen2ForCausalLM", num_hidden_layers=2)


def write(plain: Path, folder: Path, quantization: dict, tensors: dict) -> Path:
    folder.mkdir(exist_ok=True)
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


def quantized(plain: Path, per_channel: bool, suffix: str, input_suffix: str = "") -> dict:
    """The plain checkpoint's tensors, projections in e4m3; input scales differ by projection."""
    tensors = load_file(plain / "model.safetensors")
    for number, name in enumerate(sorted(n for n in tensors if n.endswith("_proj.weight"))):
        weight = tensors[name]
        largest = weight.abs().amax(-1, keepdim=True) if per_channel else weight.abs().max()
        scale = largest / 448
        tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
        stem = name.removesuffix("weight")
        tensors[stem + suffix] = scale.bfloat16() if per_channel else scale
        if per_channel:  # what the file says counts, rounded as it is
            tensors[name] = (
                (weight / scale.bfloat16().float()).clamp(-448, 448).to(torch.float8_e4m3fn)
            )
        if input_suffix:
            tensors[stem + input_suffix] = torch.tensor(0.01 + number / 1000)
    return tensors


FORMS = {
    "compressed-tensors, channels": (COMPRESSED, (True, "weight_scale")),
    "compressed-tensors, static": (
        compressed(weights__strategy="tensor", input_activations__strategy="tensor",
                   input_activations__dynamic=False),
        (False, "weight_scale", "input_scale"),
    ),
    "fp8, static": (STATIC, (False, "weight_scale", "input_scale")),
    "fp8, inverse": (
        {"quant_method": "fp8", "weight_block_size": None}, (False, "weight_scale_inv"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_values_are_those_of_the_file(plain, tmp_path, form):
    """Nothing is quantised again: fused weights are the parts', times the parts' own scales."""
    quantization, how = FORMS[form]
    tensors = quantized(plain, *how)
    folder = write(plain, tmp_path / "fp8", quantization, tensors)
    check_weights(folder)
    _, weights = load_hf(folder, torch.float32)
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}."
        for fused, names in (
            (layer.qkv, [f"self_attn.{x}_proj." for x in "qkv"]),
            (layer.out, ["self_attn.o_proj."]),
            (layer.gate_up, ["mlp.gate_proj.", "mlp.up_proj."]),
            (layer.down, ["mlp.down_proj."]),
        ):
            parts = [
                tensors[prefix + n + "weight"].float() * tensors[prefix + n + how[1]].float()
                for n in names
            ]
            assert torch.equal(fused.values.float() * fused.scales[:, None], torch.cat(parts))
            scales = [float(tensors[prefix + n + how[2]]) for n in names] if how[2:] else None
            assert fused.input.scale == (None if scales is None else max(scales))
    ranks = [
        rank_weights(Shard(open_checkpoint(folder, fp8=True).config, 2, rank),
                     checkpoint_reader(open_checkpoint(folder, fp8=True), torch.float32))
        for rank in range(2)
    ]  # fmt: skip
    for index, layer in enumerate(weights.layers):
        halves = [rank.layers[index] for rank in ranks]
        down = torch.cat([half.down.values.float() for half in halves], 1)
        assert torch.equal(down, layer.down.values.float())
        assert all(torch.equal(half.down.scales, layer.down.scales) for half in halves)
        assert torch.equal(halves[1].gate_up.scales[:40], layer.gate_up.scales[40:80])
        assert halves[0].qkv.input == layer.qkv.input
    decoder, half = load_model(folder), load_model(plain)
    if "static" not in form:  # calibrated scales of these tests saturate
        ids = torch.arange(20)
        got, want = (d.forward(ids, ids, dense_attend(d.config)) for d in (decoder, half))
        assert 0 < (got - want).pow(2).mean().sqrt() / want.pow(2).mean().sqrt() < 0.6


@pytest.mark.parametrize(
    ("quantization", "match"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, r"weight_block_size=\[128, 128\]"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2'"),
        ({"quant_method": "fp8", "activation_scheme": "none"}, "activation_scheme='none'"),
        ({"quant_method": "gptq", "bits": 4}, "quant_method='gptq'"),
        (compressed(format="pack-quantized"), "format='pack-quantized'"),
        (compressed(weights__strategy="block"), "group_0.weights.strategy='block'"),
        (compressed(weights__num_bits=4), "group_0.weights=.*'num_bits': 4"),
        (compressed(weights__type="int"), "group_0.weights=.*'type': 'int'"),
        (compressed(input_activations=None), "group_0.input_activations=None"),
        (compressed(input_activations__strategy="group"), "input_activations.strategy='group'"),
        (compressed(config_groups={}), "config_groups={}"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_named_with_what_is(plain, tmp_path, quantization, match):
    folder = write(plain, tmp_path / "fp8", quantization, {})
    with pytest.raises(Unsupported, match=f"quantization_config: .*{match}.*expected FP8.*channel"):
        load_model(folder)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"weight_scale": None}, ModelFileError, "q_proj.weight: F8_E4M3: expected weight_scale"),
        ({"weight_scale": torch.ones(4, 4)}, Unsupported, r"q_proj.weight: scale: .*64.*\[4, 4\]"),
        ({"weight_scale": torch.tensor(-1.0)}, ModelFileError, "positive numbers, got -1"),
        ({"weight_scale": torch.tensor(torch.inf)}, ModelFileError, "positive numbers, got inf"),
        ({"input_scale": torch.ones(2)}, Unsupported, r"input_scale: expected one, got \[2\]"),
        ({"input_scale": torch.tensor(1.0)}, Unsupported, "qkv: its 3 parts.*input_scale, got 1"),
        ({"weight": torch.ones(64, 64).bfloat16()}, Unsupported, "qkv: its 3.*FP8 weights, got 2"),
        ({"weight": torch.ones(64, 64).to(torch.float8_e5m2)}, Unsupported, "float8_e5m2 is not"),
    ],
)  # fmt: skip
def test_broken_scales_are_refused(plain, tmp_path, changes, error, match):
    tensors = quantized(plain, False, "weight_scale")
    for name, value in changes.items():
        tensors.pop(Q_PROJ + name, None)
        if value is not None:
            tensors[Q_PROJ + name] = value
    folder = write(plain, tmp_path / "fp8", compressed(weights__strategy="tensor"), tensors)
    with pytest.raises(error, match=match):
        load_model(folder)
    if error is ModelFileError and "F8_E4M3" in match:
        with pytest.raises(error, match=match):  # before a server starts
            check_weights(folder)


def test_an_fp8_head_is_refused_by_name(plain, tmp_path):
    tensors = quantized(plain, False, "weight_scale")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
    tensors["lm_head.weight_scale"] = torch.tensor(1.0)
    with pytest.raises(Unsupported, match="lm_head.weight: torch.float8_e4m3fn is not served"):
        load_model(write(plain, tmp_path / "fp8", STATIC, tensors))


def test_an_engines_quantization_is_the_checkpoints(plain, tmp_path):
    folder = write(plain, tmp_path / "fp8", STATIC, quantized(plain, False, "weight_scale"))
    for asked in (None, "fp8"):
        assert (
            check_engine(EngineConfig(folder, device="cpu", quantization=asked))[0].quantization
            == "fp8"
        )
    assert check_engine(EngineConfig(plain, device="cpu"))[0].quantization is None
    with pytest.raises(
        InvalidArgument, match="quantization.*FP8 weights already.*'fp8_per_tensor'"
    ):
        check_engine(EngineConfig(folder, device="cpu", quantization="fp8_per_tensor"))
    with pytest.raises(Unsupported, match="F8_E4M3; start from a checkpoint that is not quantised"):
        open_checkpoint(folder)  # what `granikv build` reads
