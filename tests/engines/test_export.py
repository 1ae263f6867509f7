"""What the exporter writes: the bf16 graph against the fp32 one, weights, shards, memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import numpy as np
import onnx
import pytest
import torch
from helpers import make_tiny_hf

from granikv.config import ModelConfig
from granikv.core import PLAN_FIELDS
from granikv.engines.checkpoint import open_checkpoint
from granikv.engines.export import check_weights, export_rank, planned_bytes
from granikv.engines.io import (
    NETWORK_INPUTS,
    PLAN_INPUTS,
    PLUGIN_INPUTS,
    BuildLimits,
    plugin_abi_hash,
)
from granikv.engines.manifest import engine_io
from granikv.engines.sharding import Shard
from granikv.errors import InvalidArgument, ModelFileError
from granikv.models import load_model

ARCHS = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
LIMITS = BuildLimits(max_requests=4, max_tokens=16, max_seq_len=64, capacity_tokens=256)


def export(path, folder, dtype, tp_size=1, rank=0):
    folder.mkdir(exist_ok=True)
    checkpoint = open_checkpoint(path)
    shard = Shard(checkpoint.config, tp_size, rank)
    export_rank(checkpoint, shard, LIMITS, dtype, folder)
    graph = folder / f"rank{rank}.onnx"
    return onnx.load(str(graph), load_external_data=False).graph, graph


def without_casts(graph):
    """(op, inputs, outputs, attributes) of each node, casts joined to the tensor behind them."""
    source = {}
    for node in graph.node:
        if node.op_type == "Cast":
            source[node.output[0]] = source.get(node.input[0], node.input[0])
    names = {name: name for node in graph.node for name in node.output}
    names |= source
    # a graph output that a Cast makes is the same tensor as the product in front of it
    aliases = {v: k for k, v in source.items() if k == "logits"}

    def name(x):
        x = names.get(x, x)
        return aliases.get(x, x)

    return [
        (
            node.op_type,
            [name(x) for x in node.input],
            [name(x) for x in node.output],
            sorted((a.name, onnx.helper.get_attribute_value(a)) for a in node.attribute),
        )
        for node in graph.node
        if node.op_type != "Cast"
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_half_graph_is_the_fp32_graph_with_casts(tmp_path, arch, tp_size, dtype):
    path = make_tiny_hf(tmp_path / "model", arch)
    wide, _ = export(path, tmp_path / "wide", "float32", tp_size, tp_size - 1)
    half, file = export(path, tmp_path / "half", dtype, tp_size, tp_size - 1)
    assert not any(node.op_type == "Cast" for node in wide.node)
    assert without_casts(half) == without_casts(wide)
    assert [x.name for x in half.input] == [x.name for x in wide.input]
    kinds = {"bfloat16": onnx.TensorProto.BFLOAT16, "float16": onnx.TensorProto.FLOAT16}
    for a, b in zip(half.initializer, wide.initializer, strict=True):
        narrow = b.name.endswith(("embedding", "lm_head", "qkv", "qkv_bias", "out", "gate_up", "down"))  # fmt: skip
        assert a.data_type == (kinds[dtype] if narrow else b.data_type), a.name
        assert (a.name, list(a.dims)) == (b.name, list(b.dims))
    onnx.checker.check_model(str(file))
    counts = Counter(node.op_type for node in half.node)
    assert counts["HotColdAttention"] == 3 and counts["AllReduce"] == (6 if tp_size > 1 else 0)


def test_weights_are_the_decoders(tmp_path):
    path = make_tiny_hf(tmp_path / "model", "Qwen3ForCausalLM", vocab_size=98)
    decoder = load_model(path)
    shards = []
    for rank in range(2):
        _, file = export(path, tmp_path / "out", "bfloat16", 2, rank)
        model = onnx.load(str(file))
        shards.append(
            {
                x.name: torch.from_numpy(onnx.numpy_helper.to_array(x).astype(np.float32))
                for x in model.graph.initializer
            }
        )

    def rounded(x):
        return x.to(torch.bfloat16).float()

    layer, (low, high) = decoder.layers[1], shards
    whole = {n: torch.cat([s[f"layers.1.{n}"] for s in shards]) for n in ("qkv", "gate_up")}
    d = 16
    q, k, v = layer.qkv.weight.split([4 * d, 2 * d, 2 * d])
    own = [torch.cat((q[r * 32 :][:32], k[r * d :][:d], v[r * d :][:d])) for r in range(2)]
    assert torch.equal(whole["qkv"], rounded(torch.cat(own)))
    gate, up = layer.gate_up.weight.chunk(2)
    own = [torch.cat((gate[r * 40 :][:40], up[r * 40 :][:40])) for r in range(2)]
    assert torch.equal(whole["gate_up"], rounded(torch.cat(own)))
    for name, linear in (("out", layer.out), ("down", layer.down)):
        joined = torch.cat([s[f"layers.1.{name}"] for s in shards], dim=1)
        assert torch.equal(joined, rounded(linear.weight))
    joined = torch.cat([s["lm_head"] for s in shards])
    assert torch.equal(joined, rounded(decoder.lm_head.weight))
    assert torch.equal(low["layers.1.qk_norm"], high["layers.1.qk_norm"])
    assert torch.equal(low["layers.1.qk_norm"], layer.qk_norm[[0, 1, 4]])
    assert torch.equal(low["rope_cos"], decoder.rotary.cos[:64])


def config(**changes):
    settings = {
        "architecture": "LlamaForCausalLM", "num_layers": 1, "hidden_size": 64,
        "intermediate_size": 96, "num_qo_heads": 8, "num_kv_heads": 4, "head_dim": 16,
        "vocab_size": 101, "max_position": 128,
    }  # fmt: skip
    return ModelConfig(**(settings | changes))


@pytest.mark.parametrize(
    "changes,tp_size,match",
    [
        ({"num_qo_heads": 6, "num_kv_heads": 2}, 4, "num_qo_heads.*multiple of tp=4.*got 6"),
        ({"num_qo_heads": 24, "num_kv_heads": 8}, 3, "num_kv_heads.*tp=3.*got 8"),
        ({"intermediate_size": 97}, 2, "intermediate_size.*multiple of tp=2.*got 97"),
    ],
)
def test_models_that_do_not_divide_are_refused(changes, tp_size, match):
    with pytest.raises(InvalidArgument, match=match):
        Shard(config(**changes), tp_size, 0)


def test_ranks_cover_the_heads_and_the_vocabulary():
    for tp_size in (1, 2, 4, 8):
        shards = [Shard(config(), tp_size, rank) for rank in range(tp_size)]
        heads = [(s.first_kv_head, s.rank_config.num_kv_heads) for s in shards]
        assert {h for first, n in heads for h in range(first, first + n)} == set(range(4))
        for shard in shards:  # each query head finds its own KV head on its rank
            own = shard.rank_config
            first_q = shard.rank * own.num_qo_heads
            for q in range(first_q, first_q + own.num_qo_heads):
                kv = shard.first_kv_head + (q - first_q) // own.gqa_group_size
                assert kv == q // shard.config.gqa_group_size
        parts = [s.weights()[-1].parts[0] for s in shards]
        assert [p.first for p in parts] == [r * shards[0].vocab_shard for r in range(tp_size)]
        assert sum(p.count for p in parts) == 101


def test_the_table_follows_the_plan():
    names = [spec.name for spec in PLUGIN_INPUTS]
    assert names[:4] == ["qkv", "rope_cos", "rope_sin", "request_slots"]
    assert [s.name for s in NETWORK_INPUTS[2:]] == [s.name for s in PLAN_INPUTS] == names[3:]
    fields = {f.name: f for f in PLAN_FIELDS}
    dynamic = {"rows": "T", "hot_grid": "H", "cold_grid": "C"}
    for spec in PLAN_INPUTS:
        if spec.name in fields:
            assert tuple(dynamic.get(d, d) for d in spec.dims) == fields[spec.name].shape
    assert names[-1] == "launch_dims" and len(plugin_abi_hash()) == 16


def test_broken_checkpoints_are_refused_before_anything_is_written(tmp_path):
    path = make_tiny_hf(tmp_path / "model")
    file = path / "model.safetensors"
    content = file.read_bytes()
    for keep in (0, 5, 900, len(content) - 100):
        file.write_bytes(content[:keep])
        with pytest.raises(ModelFileError, match="truncated"):
            open_checkpoint(path)
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for entry in header.values():  # every tensor lies where the header does
        if "data_offsets" in entry:
            entry["data_offsets"] = [x - 10**6 for x in entry["data_offsets"]]
    moved = json.dumps(header).encode()
    file.write_bytes(len(moved).to_bytes(8, "little") + moved + content[8 + length :])
    with pytest.raises(ModelFileError, match="outside of the data"):
        open_checkpoint(path)
    file.write_bytes(content)
    settings = json.loads((path / "config.json").read_text())
    for change, match in (
        ({"num_hidden_layers": 4}, r"layers\.3\..*missing"),
        ({"intermediate_size": 81}, r"proj.*expected shape \[.*81"),
    ):
        (path / "config.json").write_text(json.dumps(settings | change))
        checkpoint = open_checkpoint(path)
        with pytest.raises(ModelFileError, match=match):
            check_weights(checkpoint, Shard(checkpoint.config))


MEASURE = """
import resource, sys
from pathlib import Path
from granikv.engines.checkpoint import open_checkpoint
from granikv.engines.export import export_rank
from granikv.engines.io import BuildLimits
from granikv.engines.sharding import Shard
checkpoint = open_checkpoint(sys.argv[1])
limits = BuildLimits(max_requests=4, max_tokens=16, max_seq_len=64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
export_rank(checkpoint, Shard(checkpoint.config), limits, "bfloat16", Path(sys.argv[2]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_follow_the_size_of_the_model(tmp_path):
    """Over 250 MB of bf16 weights: the exporter adds less than a slice's copies (32 MiB each)."""
    shape = {"hidden_size": 1024, "intermediate_size": 8192, "vocab_size": 32000, "num_attention_heads": 16}  # fmt: skip
    path = make_tiny_hf(tmp_path / "model", **shape)
    command = [sys.executable, "-c", MEASURE, str(path), str(tmp_path)]
    made = subprocess.run(command, capture_output=True, text=True, check=True)
    checkpoint = open_checkpoint(path)
    size_bytes = planned_bytes(Shard(checkpoint.config), LIMITS, "bfloat16")
    assert size_bytes > 250e6
    assert int(made.stdout) * 1024 < 160 * 2**20, made.stdout
    assert engine_io(Shard(checkpoint.config), LIMITS, "bfloat16").describe()["inputs"]
