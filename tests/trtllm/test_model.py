"""trtllm_model.py on stand-ins: its network against the table of engine I/O and the ONNX graph."""

from __future__ import annotations

import json
from collections import Counter

import networks
import numpy as np
import onnx
import pytest
import torch
from helpers import make_tiny_hf
from plugin_doubles import creators
from test_graph_against_torch import MAX_RELATIVE_ERROR, make_engine
from tiny_engine import run, three_levels

from granikv.engines.build import ExportSettings
from granikv.engines.checkpoint import open_checkpoint
from granikv.engines.export import export_rank
from granikv.engines.io import (
    ALL_REDUCE_OP,
    ATTENTION_OP,
    NETWORK_INPUTS,
    NETWORK_OUTPUTS,
    PLAN_INPUTS,
    BuildLimits,
)
from granikv.engines.sharding import Shard
from granikv.engines.trtllm_checkpoint import ARCHITECTURE, convert, parameter_name
from granikv.errors import EngineMismatch, InvalidArgument, Unavailable, Unsupported

ARCHS = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
LIMITS = BuildLimits(max_requests=4, max_tokens=16, max_seq_len=64, capacity_tokens=256)
RANKS = [(1, 0), (2, 1), (4, 3)]  # tp 4: more ranks than KV heads


def converted(path, out, tp_size, dtype="bfloat16", limits=LIMITS):
    convert(
        ExportSettings(
            path, out, tp_size, dtype, limits.max_requests, limits.max_tokens,
            limits.max_seq_len, limits.capacity_tokens,
        )
    )  # fmt: skip
    return out


def onnx_graph(path, folder, tp_size, rank, dtype="bfloat16"):
    folder.mkdir(exist_ok=True)
    checkpoint = open_checkpoint(path)
    export_rank(checkpoint, Shard(checkpoint.config, tp_size, rank), LIMITS, dtype, folder)
    return onnx.load(str(folder / f"rank{rank}.onnx")).graph


def test_importing_the_file_registers_the_class(trtllm):
    cls = trtllm.models.MODEL_MAP[ARCHITECTURE]
    assert cls.__name__ == ARCHITECTURE and cls is getattr(trtllm.model, ARCHITECTURE)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("tp_size,rank", RANKS)
def test_inputs_and_output_are_the_tables(trtllm, tmp_path, arch, tp_size, rank):
    path = make_tiny_hf(tmp_path / "model", arch)
    model = networks.load(trtllm, converted(path, tmp_path / "out", tp_size), rank)
    network, wrapper = networks.build(trtllm, model)
    io = model.io
    assert [x.name for x in network.inputs] == [spec.name for spec in NETWORK_INPUTS]
    for tensor, wrapped, spec in zip(network.inputs, wrapper.tensors, NETWORK_INPUTS, strict=True):
        dims = io.dims(spec)
        assert tensor.shape == [-1 if isinstance(d, str) else d for d in dims], spec.name
        assert tensor.dtype is trtllm.trt.DataType.INT32
        (profile,) = wrapped.profiles
        assert list(profile) == list(tensor.dimension_names.values())
        for index, (dim, sizes) in enumerate(zip(dims, profile.values(), strict=True)):
            sizes = (sizes,) * 3 if isinstance(sizes, int) else sizes
            assert sizes == tuple(io.shape(spec, w)[index] for w in ("min", "opt", "max"))
            if isinstance(dim, str):
                assert tensor.dimension_names[index] == dim
    ranges: dict = {}  # trtllm-build refuses a name with two ranges
    for wrapped in wrapper.tensors:
        for name, sizes in wrapped.profiles[0].items():
            assert ranges.setdefault(name, sizes) == sizes
    (output,), (spec,) = network.outputs, NETWORK_OUTPUTS
    assert (output.name, output.dtype) == (spec.name, trtllm.trt.DataType.FLOAT)
    assert output.shape == [-1, io.vocab_shard]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("tp_size,rank", RANKS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_plugins_and_weights_are_the_onnx_graphs(trtllm, tmp_path, arch, tp_size, rank, dtype):
    path = make_tiny_hf(tmp_path / "model", arch)
    graph = onnx_graph(path, tmp_path / "onnx", tp_size, rank, dtype)
    model = networks.load(trtllm, converted(path, tmp_path / "out", tp_size, dtype), rank)
    network, wrapper = networks.build(trtllm, model)

    plugins = [x for x in network.layers if x.kind == "PLUGIN_V3"]
    nodes = [x for x in graph.node if x.op_type in (ATTENTION_OP, ALL_REDUCE_OP)]
    assert [type(x.plugin).__name__ for x in plugins] == [
        {ATTENTION_OP: "Attention", ALL_REDUCE_OP: "AllReduce"}[x.op_type] for x in nodes
    ]
    for layer, node in zip(plugins, nodes, strict=True):
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        assert attributes.pop("plugin_version") == b"1"
        assert attributes.pop("plugin_namespace") == b"granikv"
        assert layer.plugin.fields == attributes
        assert wrapper.plugin_infos[layer.name][1] == node.op_type
    inputs = {id(x): x.name for x in network.inputs}
    cos, sin = (model.transformer.rope_cos, model.transformer.rope_sin)
    for name, table in (("rope_cos", cos), ("rope_sin", sin)):
        inputs[id(wrapper.parameter_tensors[table].trt_tensor)] = name
    for layer, node in zip(plugins, nodes, strict=True):
        if node.op_type == ATTENTION_OP:
            names = [inputs[id(x)] for x in layer.inputs[1:]]
            assert names == list(node.input[1:])
            assert names[2:] == [spec.name for spec in PLAN_INPUTS]

    parameters = dict(model.named_parameters())
    expected = {parameter_name(x.name): x for x in graph.initializer if is_weight(x)}
    assert parameters.keys() == expected.keys()
    for name, tensor in expected.items():
        found = parameters[name]._value
        raw = onnx.numpy_helper.to_array(tensor)
        assert tuple(found.shape) == raw.shape, name
        assert np.array_equal(found.view(torch.uint8).numpy(), bytes_of(raw)), name
    kinds = Counter(x.kind for x in network.layers)
    ops = Counter(x.op_type for x in graph.node)
    assert kinds["MATRIX_MULTIPLY"] == ops["Gemm"]
    assert kinds["CONSTANT"] == len(expected)  # none twice: shared tables are one constant
    assert kinds["GATHER"] == ops["Gather"] == 3
    assert kinds["SQRT"] == ops["Sqrt"] and kinds["CAST"] == ops["Cast"]


def is_weight(initializer):
    return initializer.name in ("embedding", "lm_head", "final_norm", "rope_cos", "rope_sin") or (
        initializer.name.startswith("layers.")
    )


def bytes_of(array):
    return np.ascontiguousarray(array).view(np.uint8).reshape(*array.shape[:-1], -1)


@pytest.mark.parametrize(
    "arch,tp_size", [("LlamaForCausalLM", 1), ("Qwen2ForCausalLM", 2), ("Qwen3ForCausalLM", 4)]
)
def test_logits_are_the_torch_executors(trtllm, tmp_path, arch, tp_size):
    """The whole engine drives the recorded network, computed layer by layer, in lockstep."""
    path = make_tiny_hf(tmp_path / "model", arch, seed=3)
    limits = BuildLimits(12, 64, 160, 1024)
    folder = converted(path, tmp_path / "out", tp_size, "float32", limits)
    models = [networks.load(trtllm, folder, rank) for rank in range(tp_size)]

    def session(onnx_path):
        return networks.Session(trtllm, models[int(onnx_path.stem.removeprefix("rank"))])

    engine = make_engine(path, tp_size, tmp_path, run_by={"make_session": session})
    run(engine, three_levels(), max_tokens=4)
    seen = engine.executor.seen
    engine.close()
    assert len(seen.errors) == 7 * 4 and max(seen.errors) < MAX_RELATIVE_ERROR
    assert min(seen.prefills, seen.decodes, seen.hot) > 1


def test_a_tied_head_is_the_embedding_at_tp_1_only(trtllm, tmp_path):
    path = make_tiny_hf(tmp_path / "model", tie_word_embeddings=True)
    whole = networks.load(trtllm, converted(path, tmp_path / "tp1", 1), 0)
    assert whole.lm_head.weight is whole.transformer.vocab_embedding.weight
    cut = networks.load(trtllm, converted(path, tmp_path / "tp2", 2), 1)
    assert cut.lm_head.weight is not cut.transformer.vocab_embedding.weight
    for model in (whole, cut):
        networks.build(trtllm, model)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_batch_size": 8}, {"max_seq_len": 128}, {"max_num_tokens": 8192},
        {"use_cache": False}, {"max_beam_width": 2}, {"prompt_embedding_table_size": 8},
        {"max_draft_len": 4}, {"gather_context_logits": True},
        {"speculative_decoding_draft_tokens_external": True},
        {"lora_target_modules": ["attn_qkv"]},
        {"spec_decoding_is_generation_length_variable": True},
    ],
)  # fmt: skip
def test_a_build_for_something_else_is_refused(trtllm, tmp_path, changes):
    path = make_tiny_hf(tmp_path / "model")
    model = networks.load(trtllm, converted(path, tmp_path / "out", 1), 0)
    (name,) = changes
    name = name if name != "spec_decoding_is_generation_length_variable" else "further arguments"
    trtllm.common.set_network(trtllm.common.Network(trtllm.trt.INetworkDefinition()))
    with pytest.raises(InvalidArgument, match=f"{name}.*checkpoint was made for"):
        model.prepare_inputs(**networks.arguments(model.limits, **changes))


def test_another_checkpoint_is_refused(trtllm, tmp_path):
    out = converted(make_tiny_hf(tmp_path / "model"), tmp_path / "out", 2)
    file = out / "config.json"
    config = json.loads(file.read_text())
    for change, error, match in (
        ({"granikv": None}, InvalidArgument, "convert_checkpoint.py"),
        ({"granikv": config["granikv"] | {"plugin_abi_hash": "0" * 16}}, EngineMismatch,
         "plugin_abi_hash.*convert the checkpoint again"),
        ({"mapping": {"world_size": 4, "tp_size": 2, "pp_size": 2}}, Unsupported, "world_size"),
    ):  # fmt: skip
        file.write_text(json.dumps(config | change))
        with pytest.raises(error, match=match):
            networks.load(trtllm, out, 0)


def test_a_missing_or_strange_library_is_an_error_that_names_it(trtllm, tmp_path, monkeypatch):
    model = networks.load(trtllm, converted(make_tiny_hf(tmp_path / "m"), tmp_path / "out", 1), 0)
    monkeypatch.delenv("GRANIKV_PLUGIN")
    with pytest.raises(Unavailable, match="GRANIKV_PLUGIN.*build_plugin.py"):
        networks.build(trtllm, model)
    strange = tmp_path / "strange.so"
    strange.write_bytes(b"")
    monkeypatch.setenv("GRANIKV_PLUGIN", str(strange))
    with pytest.raises(Unavailable, match="strange.so.*did not take it"):
        networks.build(trtllm, model)
    monkeypatch.setenv("GRANIKV_PLUGIN", str(tmp_path / "none.so"))
    with pytest.raises(InvalidArgument, match="GRANIKV_PLUGIN.*none.so"):
        networks.build(trtllm, model)
    trtllm.registry._creators.update(creators(trtllm.trt))  # loaded by somebody else
    networks.build(trtllm, model)
