"""Builds an engine of two HotColdAttention nodes with TensorRT-RTX: rtx_build.py LIBRARY

From ONNX, for compute capability 12.0, without a GPU: the real builder configures the plugin, asks
for shapes and workspace and writes it into an engine. LD_LIBRARY_PATH must have libtensorrt_rtx.so.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import onnx
import tensorrt_rtx_libs  # noqa: F401 - loads what the bindings need
from onnx import TensorProto, helper
from tensorrt_rtx_bindings import tensorrt_rtx as trt

HEADER = Path(__file__).resolve().parents[2] / "trtllm_plugin" / "src" / "plugin_io.h"
QO, KV, DIM, MAX_ROWS, MAX_SEQ = 9, 3, 64, 128, 256
LAUNCH_DIMS_MAX = (0, 7, 64, 1, 1, 255)
# (smallest, usual, largest) of the dimensions that vary, by input
RANGES = {
    "qkv": (1, 8, MAX_ROWS), "row_request": (1, 8, MAX_ROWS), "row_position": (1, 8, MAX_ROWS),
    "slot_mapping": (1, 8, MAX_ROWS), "hot_items": (0, 4, 64), "hot_rows": (0, 8, MAX_ROWS),
    "cold_items": (0, 8, 64), "merge_indptr": (1, 9, MAX_ROWS + 1), "merge_partials": (0, 16, 512),
    "qo_indptr": (1, 1, 33), "extend_indptr": (1, 1, 33), "extend_segments": (0, 0, 64),
    "extend_tiles": (0, 0, 64),
}  # fmt: skip
WIDTHS = {"qkv": (QO + 2 * KV) * DIM, "hot_items": 8, "cold_items": 8, "extend_segments": 8}
FIXED = {
    "rope_cos": (MAX_SEQ, DIM // 2), "rope_sin": (MAX_SEQ, DIM // 2),
    "request_slots": (17, MAX_SEQ), "counts": (16,),
}  # fmt: skip


def input_names() -> list[str]:
    text = HEADER.read_text().split("GRANIKV_ATTENTION_OUTPUTS")[0]
    return re.findall(r'X\(k\w+,\s*"(\w+)"', text)


def model() -> bytes:
    inputs, names = [], input_names()
    for name in names:
        kind = TensorProto.INT32
        if name == "qkv":
            kind = TensorProto.BFLOAT16
        elif name.startswith("rope"):
            kind = TensorProto.FLOAT
        shape: list[int | str] = list(FIXED.get(name, ()))
        if name == "launch_dims":
            shape = [0, *(f"launch{i}" for i in range(1, 6))]
        elif not shape:
            width = {"extend_tiles": 2, **WIDTHS}.get(name)
            shape = [f"num_{name}", *([width] if width else [])]
        inputs.append(helper.make_tensor_value_info(name, kind, shape))
    nodes, outputs = [], []
    for layer in range(2):
        nodes.append(
            helper.make_node(
                "HotColdAttention",
                names,
                [f"out{layer}"],
                name=f"layer{layer}",
                domain="granikv",
                plugin_version="1",
                plugin_namespace="granikv",
                layer=layer,
                num_qo_heads=QO,
                num_kv_heads=KV,
                head_dim=DIM,
                max_partials=512,
            )  # fmt: skip
        )
        outputs.append(
            helper.make_tensor_value_info(
                f"out{layer}", TensorProto.BFLOAT16, ["num_qkv", QO * DIM]
            )
        )
    graph = helper.make_graph(nodes, "attention", inputs, outputs)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("granikv", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()


def main(library: str) -> None:
    logger = trt.Logger(trt.Logger.WARNING)
    builder = trt.Builder(logger)
    assert trt.get_plugin_registry().load_library(library) is not None
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    assert parser.parse(model()), [str(parser.get_error(i)) for i in range(parser.num_errors)]
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM120, 0)
    profile = builder.create_optimization_profile()
    for name, sizes in RANGES.items():
        width = {"extend_tiles": 2, **WIDTHS}.get(name)
        profile.set_shape(name, *((n, width) if width else (n,) for n in sizes))
    profile.set_shape("launch_dims", (0, 0, 1, 0, 0, 0), (0, 1, 1, 0, 1, 0), LAUNCH_DIMS_MAX)
    config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    assert engine is not None, "no engine; see the log above"
    content = bytes(engine)
    assert content.count(b"HotColdAttention") >= 1, "the engine does not name the plugin"
    print(f"engine {len(content)} bytes, inputs {network.num_inputs}, layers {network.num_layers}")
    print("passed")


if __name__ == "__main__":
    assert onnx.__version__
    main(sys.argv[1])
