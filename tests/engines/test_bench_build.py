"""What `granikv bench build` measures against: the network without plugins, random checkpoints."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from helpers import make_tiny_hf
from safetensors.torch import load_file

from granikv.bench.build import BuildCase, run_build_bench, without_plugins
from granikv.bench.random_checkpoint import write_checkpoint
from granikv.bench.shapes import find_shape
from granikv.engines.checkpoint import open_checkpoint
from granikv.engines.export import check_weights, export_rank
from granikv.engines.io import BuildLimits
from granikv.engines.sharding import Shard
from granikv.errors import InvalidArgument


@pytest.mark.parametrize("tp_size", [1, 2])
def test_without_plugins_the_network_keeps_its_weights_and_shapes(tmp_path, tp_size):
    checkpoint = open_checkpoint(make_tiny_hf(tmp_path / "model", "Qwen3ForCausalLM"))
    shard = Shard(checkpoint.config, tp_size)
    export_rank(checkpoint, shard, BuildLimits(4, 16, 64, 256), "float32", tmp_path)
    whole = onnx.load(str(tmp_path / "rank0.onnx"), load_external_data=False)
    weights = {x.name for x in whole.graph.initializer} - {"rope_cos", "rope_sin"}
    products = [node.name for node in whole.graph.node if node.op_type == "Gemm"]
    alone = without_plugins(whole)
    assert [x.name for x in alone.graph.input] == ["token_ids", "sample_rows"]
    assert weights < {x.name for x in alone.graph.initializer}
    assert [node.name for node in alone.graph.node if node.op_type == "Gemm"] == products
    (tmp_path / "alone.onnx").write_bytes(alone.SerializeToString())
    session = onnxruntime.InferenceSession(str(tmp_path / "alone.onnx"))
    feeds = {"token_ids": np.arange(5, dtype=np.int32), "sample_rows": np.int32([1, 4])}
    (logits,) = session.run(None, feeds)
    assert logits.shape == (2, shard.vocab_shard) and np.isfinite(logits).all()


def test_a_random_checkpoint_has_every_weight_of_its_shape(tmp_path):
    changes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 97}
    shape = find_shape("llama-3.1-8b")
    path = write_checkpoint(tmp_path, shape, num_hidden_layers=2, **changes)
    checkpoint = open_checkpoint(path)
    assert (checkpoint.config.num_layers, checkpoint.config.head_dim) == (2, 128)
    check_weights(checkpoint, Shard(checkpoint.config))
    tensors = load_file(str(path / "model.safetensors"))
    norm = tensors.pop("model.norm.weight")
    assert bool((norm == 1).all()) and norm.dtype == torch.bfloat16
    query = tensors["model.layers.1.self_attn.q_proj.weight"].float()
    other = tensors["model.layers.0.self_attn.q_proj.weight"].float()
    assert not torch.equal(query, other)  # TensorRT would keep it once
    assert query.shape == (4096, 64) and 0.01 < float(query.std()) < 0.03


def test_a_missing_library_is_refused_before_anything_is_written(monkeypatch, tmp_path):
    monkeypatch.setattr("granikv.bench.build.choose_builder", lambda name: (name, "1"))
    monkeypatch.setattr("granikv.bench.build.write_checkpoint", None)
    case = BuildCase("x", find_shape("llama-3.1-8b"), 1, 97, 1)
    with pytest.raises(InvalidArgument, match="plugin: expected.*build_plugin.py, got .*none.so"):
        run_build_bench([case], tmp_path / "none.so", "rtx")


@pytest.mark.parametrize(
    ("builder", "capabilities", "own", "match"),
    [
        ("rtx", ("8.9", "9.0"), None, "compute-capability: expected one that rtx serves.*'9.0'"),
        ("tensorrt", ("8.9",), None, "compute-capability: expected none with --builder tensorrt"),
        ("rtx", (), "9.0", "compute-capability: expected one that rtx serves.*'9.0'"),
    ],
)
def test_a_gpu_that_is_not_served_is_refused_before_anything_is_written(
    monkeypatch, tmp_path, builder, capabilities, own, match
):
    monkeypatch.setattr("granikv.bench.build.choose_builder", lambda name: (name, "1"))
    monkeypatch.setattr("granikv.engines.build.own_capability", lambda name: own)
    monkeypatch.setattr("granikv.bench.build.write_checkpoint", None)
    (tmp_path / "plugin.so").touch()
    case = BuildCase("x", find_shape("llama-3.1-8b"), 1, 97, 1)
    with pytest.raises(InvalidArgument, match=match):
        run_build_bench([case], tmp_path / "plugin.so", builder, capabilities)
