"""The network of one rank as an ONNX graph: nodes only, weights by name, offset and length.

    token_ids -> embedding -> [norm, qkv, HotColdAttention, out, + , norm, gate_up, SiLU, down, +]
              -> sample_rows of the last layer -> norm, lm_head -> logits

Norms and logits are fp32, all else the network's dtype. Products are Gemm with transB, so that a
weight lies in the file as the checkpoint has it, and a tied lm_head is the embedding itself.
Attention and all-reduce are plugin nodes; a plugin's op type is its name.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from granikv.engines.io import (
    ALL_REDUCE_OP,
    ATTENTION_OP,
    NETWORK_INPUTS,
    NETWORK_OUTPUTS,
    PLAN_INPUTS,
    PLUGIN_NAMESPACE,
    PLUGIN_VERSION,
    EngineIO,
    TensorSpec,
)
from granikv.engines.sharding import Shard, WeightSpec

OPSET, IR_VERSION = 17, 9  # read by TensorRT 10.x and by ONNX Runtime from 1.15 on
PLUGIN_DOMAIN = "granikv"  # TensorRT finds plugins by name; checkers leave a foreign domain alone
ALIGN_BYTES = 4096  # of every weight in the file

ONNX_TYPES = {
    "int32": TensorProto.INT32,
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
}
ELEMENT_BYTES = {"int32": 4, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Placed:
    """Where a weight lies in the file of weights."""

    spec: WeightSpec
    dtype: str  # a key of ONNX_TYPES
    offset_bytes: int
    size_bytes: int


def all_weights(shard: Shard, max_seq_len: int) -> list[WeightSpec]:
    """The initialisers of the graph: rope tables, which no checkpoint has, and the model's."""
    half = shard.config.head_dim // 2
    tables = [WeightSpec(f"rope_{x}", (max_seq_len, half), "float32", ()) for x in ("cos", "sin")]
    return [*tables, *shard.weights()]


def place_weights(specs: list[WeightSpec], dtype: str) -> list[Placed]:
    """Offsets in the order of the specs; dtype: of the network."""
    placed, at = [], 0
    for spec in specs:
        kind = dtype if spec.dtype == "network" else spec.dtype
        size_bytes = spec.num_elements * ELEMENT_BYTES[kind]
        placed.append(Placed(spec, kind, at, size_bytes))
        at += -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
    return placed


def build_graph(
    shard: Shard, io: EngineIO, dtype: str, placed: list[Placed], weights_file: str
) -> ModelProto:
    """The graph of a rank. weights_file: name beside the graph; placed: what lies in it."""
    graph = _Graph(shard, io, dtype)
    graph.build()
    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            f"granikv-rank{shard.rank}",
            [_value(io, spec, dtype) for spec in NETWORK_INPUTS],
            [_value(io, spec, dtype) for spec in NETWORK_OUTPUTS],
            [*graph.constants, *(_external(x, weights_file) for x in placed)],
        ),
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(PLUGIN_DOMAIN, 1)],
        ir_version=IR_VERSION,
        producer_name="granikv",
    )
    return model


def _value(io: EngineIO, spec: TensorSpec, dtype: str) -> ValueInfoProto:
    kind = dtype if spec.dtype == "network" else spec.dtype
    return helper.make_tensor_value_info(spec.name, ONNX_TYPES[kind], list(io.dims(spec)))


def _external(placed: Placed, weights_file: str) -> TensorProto:
    tensor = TensorProto(
        name=placed.spec.name,
        data_type=ONNX_TYPES[placed.dtype],
        dims=placed.spec.shape,
        data_location=TensorProto.EXTERNAL,
    )
    for key, value in (
        ("location", weights_file),
        ("offset", placed.offset_bytes),
        ("length", placed.size_bytes),
    ):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


class _Graph:
    def __init__(self, shard: Shard, io: EngineIO, dtype: str):
        self.shard, self.io = shard, io
        self.config, self.own = shard.config, shard.rank_config
        self.dtype = dtype
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = []

    def _node(self, op: str, inputs: list[str], output: str, **attributes) -> str:
        self.nodes.append(helper.make_node(op, inputs, [output], name=output, **attributes))
        return output

    def _plugin(self, op: str, inputs: list[str], output: str, **attributes: int) -> str:
        return self._node(
            op,
            inputs,
            output,
            domain=PLUGIN_DOMAIN,
            plugin_version=PLUGIN_VERSION,
            plugin_namespace=PLUGIN_NAMESPACE,
            **attributes,
        )

    def _constant(self, name: str, values: list[int] | float) -> str:
        dtype = np.int64 if isinstance(values, list) else np.float32
        self.constants.append(numpy_helper.from_array(np.array(values, dtype), name))
        return name

    def _cast(self, x: str, output: str, dtype: str) -> str:
        """x in `dtype`; no node where it is that already."""
        if self.dtype == "float32":
            return x
        return self._node("Cast", [x], output, to=ONNX_TYPES[dtype])

    def build(self) -> None:
        self._constant("rms_eps", self.config.rms_norm_eps)
        if self.config.qk_norm:
            heads, dim = self.own.num_qo_heads + self.own.num_kv_heads, self.own.head_dim
            self._constant("head_shape", [0, heads + self.own.num_kv_heads, dim])
            self._constant("head_split", [heads, self.own.num_kv_heads])
            width = (heads + self.own.num_kv_heads) * dim
            self._constant("row_shape", [0, width])
        f = self.own.intermediate_size
        self._constant("mlp_split", [f, f])
        x = self._node("Gather", ["embedding", "token_ids"], "embedded", axis=0)
        for layer in range(self.config.num_layers):
            x = self._layer(layer, x)
        normed = self._rms_norm(x, "final_norm", "final")
        head = "embedding" if self.shard.shares_embedding else "lm_head"
        if self.dtype == "float32":
            self._node("Gemm", [normed, head], "logits", transB=1)
        else:
            self._node("Gemm", [normed, head], "logits/product", transB=1)
            self._cast("logits/product", "logits", "float32")

    def _layer(self, layer: int, x: str) -> str:
        at = f"layers.{layer}."
        normed = self._rms_norm(x, at + "input_norm", at + "input")
        inputs = [normed, at + "qkv"]
        if self.config.attention_bias:
            inputs.append(at + "qkv_bias")
        qkv = self._node("Gemm", inputs, at + "qkv/product", transB=1)
        if self.config.qk_norm:
            qkv = self._norm_heads(qkv, at)
        out = self._plugin(
            ATTENTION_OP,
            [qkv, "rope_cos", "rope_sin", *(spec.name for spec in PLAN_INPUTS)],
            at + "attention",
            layer=layer,
            num_qo_heads=self.own.num_qo_heads,
            num_kv_heads=self.own.num_kv_heads,
            head_dim=self.own.head_dim,
            max_partials=self.io.capacities.max_partials,
        )
        if layer == self.config.num_layers - 1:  # nobody reads the other rows any more
            x = self._node("Gather", [x, "sample_rows"], at + "sampled", axis=0)
            out = self._node("Gather", [out, "sample_rows"], at + "attention/sampled", axis=0)
        out = self._all_reduce(self._node("Gemm", [out, at + "out"], at + "out/product", transB=1))
        x = self._node("Add", [x, out], at + "attention/sum")
        normed = self._rms_norm(x, at + "post_norm", at + "post")
        both = self._node("Gemm", [normed, at + "gate_up"], at + "gate_up/product", transB=1)
        gate, up = at + "gate", at + "up"
        self.nodes.append(
            helper.make_node("Split", [both, "mlp_split"], [gate, up], name=gate, axis=1)
        )
        sigmoid = self._node("Sigmoid", [gate], at + "gate/sigmoid")
        silu = self._node("Mul", [gate, sigmoid], at + "gate/silu")
        product = self._node("Mul", [silu, up], at + "mlp/product")
        down = self._node("Gemm", [product, at + "down"], at + "down/product", transB=1)
        return self._node("Add", [x, self._all_reduce(down)], at + "mlp/sum")

    def _all_reduce(self, x: str) -> str:
        """x summed over the ranks; in which order is NCCL's."""
        if self.shard.tp_size == 1:
            return x
        ranks = {"tp_size": self.shard.tp_size, "tp_rank": self.shard.rank}
        return self._plugin(ALL_REDUCE_OP, [x], x + "/reduced", **ranks)

    def _rms_norm(self, x: str, weight: str, at: str) -> str:
        """x / rms(x) * weight over the last axis, in fp32."""
        wide = self._cast(x, at + "/wide", "float32")
        square = self._node("Mul", [wide, wide], at + "/square")
        mean = self._node("ReduceMean", [square], at + "/mean", axes=[-1], keepdims=1)
        shifted = self._node("Add", [mean, "rms_eps"], at + "/shifted")
        root = self._node("Sqrt", [shifted], at + "/root")
        normed = self._node("Div", [wide, root], at + "/normed")
        scaled = self._node("Mul", [normed, weight], at + "/scaled")
        return self._cast(scaled, at + "/narrow", self.dtype)

    def _norm_heads(self, qkv: str, at: str) -> str:
        """RMSNorm per head of q and k; v passes."""
        heads = self._node("Reshape", [qkv, "head_shape"], at + "heads")
        qk, v = at + "heads/qk", at + "heads/v"
        self.nodes.append(
            helper.make_node("Split", [heads, "head_split"], [qk, v], name=qk, axis=1)
        )
        normed = self._rms_norm(qk, at + "qk_norm", at + "qk")
        joined = self._node("Concat", [normed, v], at + "heads/joined", axis=1)
        return self._node("Reshape", [joined, "row_shape"], at + "heads/rows")
