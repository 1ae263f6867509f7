"""The plugins' operators in Python, so that ONNX Runtime can run an exported graph on the CPU.

HotColdAttention is granikv's own torch twin behind the plugin's inputs; AllReduce sums between
threads, one per rank. ONNX Runtime takes Python operators in the domain ai.onnx.contrib only, so
`runnable` moves the plugin nodes there; nothing else of the graph changes.
"""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
import torch.distributed as dist
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnxruntime_extensions import PyCustomOpDef, get_library_path, onnx_op

from granikv.attention.reference import attention_step
from granikv.attention.variants import LAYOUTS
from granikv.core import Count, SpanKind, StepPlan
from granikv.engines.graph import PLUGIN_DOMAIN
from granikv.engines.io import (
    ALL_REDUCE_ATTRIBUTES,
    ALL_REDUCE_OP,
    ATTENTION_ATTRIBUTES,
    ATTENTION_OP,
    PLUGIN_INPUTS,
)
from granikv.models.layers import apply_rope

CONTRIB = "ai.onnx.contrib"
_F32, _I32 = PyCustomOpDef.dt_float, PyCustomOpDef.dt_int32
_COMMON = {
    "plugin_version": PyCustomOpDef.dt_string,
    "plugin_namespace": PyCustomOpDef.dt_string,
}

# what the plugin finds outside the graph: binding -> (k, v), each [L, capacity, Hkv, D]
ARENAS: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


def _attributes(names):
    return _COMMON | {name: PyCustomOpDef.dt_int64 for name in names}


@onnx_op(
    op_type=ATTENTION_OP,
    inputs=[_I32 if spec.dtype == "int32" else _F32 for spec in PLUGIN_INPUTS],
    outputs=[_F32],
    attrs=_attributes(ATTENTION_ATTRIBUTES),
)
def hot_cold_attention(*arrays, **attributes):
    return attention(arrays, **attributes)


def attention(arrays, layer, num_qo_heads, num_kv_heads, head_dim, max_partials, **_):
    """What the plugin computes: q and k rotated in fp32, then rounded to the arenas' dtype."""
    inputs = {spec.name: x for spec, x in zip(PLUGIN_INPUTS, arrays, strict=True)}
    plan = StepPlan(
        step_id=0,
        row_token=np.empty(0, np.int32),
        sample_rows=np.empty(0, np.int32),
        slot_writes=np.empty((0, 3), np.int32),
        **{name: x for name, x in inputs.items() if name in StepPlan.__dataclass_fields__},
    )
    rows, total = int(plan.counts[0]), inputs["qkv"].shape[0]
    assert plan.counts[7] <= max_partials
    dims = inputs["launch_dims"].shape
    assert len(dims) == 6 and dims[0] == 0
    has_decode = plan.counts[1] > 0 or total > rows
    assert dims[4] == has_decode and len(inputs["hot_items"]) >= plan.counts[3]
    hot = plan.hot_items[: plan.counts[Count.NUM_HOT_ITEMS]]
    cold = plan.cold_items[: plan.counts[Count.NUM_COLD_ITEMS]]
    assert len(cold) == plan.counts[Count.NUM_COLD_ITEMS]  # the grid covers them
    assert dims[3] == (SpanKind.RUN in cold[:, 1])
    stacked = hot[:, 1].max(initial=1) * (num_qo_heads // num_kv_heads)
    block_m = list(LAYOUTS.values())[dims[1]].hot.block_m
    assert (dims[2] - 1) * block_m < stacked <= dims[2] * block_m
    qkv = torch.from_numpy(inputs["qkv"]).view(total, -1, head_dim)[:rows]
    qk, v = qkv.split([num_qo_heads + num_kv_heads, num_kv_heads], dim=1)
    cos, sin = (torch.tensor(inputs[f"rope_{x}"][plan.row_position[:rows]]) for x in ("cos", "sin"))
    qk = apply_rope(qk, torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None])
    k_arena, v_arena = ARENAS[dims[5]]
    qk = qk.to(k_arena.dtype)
    out = torch.zeros(total, num_qo_heads * head_dim)
    out[:rows] = attention_step(
        qk[:, :num_qo_heads], qk[:, num_qo_heads:], v, k_arena[layer], v_arena[layer],
        torch.from_numpy(inputs["request_slots"]), plan, head_dim**-0.5,
    )  # fmt: skip
    return out.numpy()


class Group:
    """Ranks that sum together, threads of one process; in rank order on each."""

    def __init__(self, size: int):
        self.barrier = threading.Barrier(size, timeout=60)
        self.parts: list[np.ndarray | None] = [None] * size

    def sum(self, x: np.ndarray, rank: int) -> np.ndarray:
        self.parts[rank] = x
        self.barrier.wait()
        total = np.add.reduce(np.stack(self.parts), axis=0)
        self.barrier.wait()
        return total


class ProcessGroup:
    """The same between processes, over torch.distributed."""

    def __init__(self, size: int):
        self.size = size

    def sum(self, x: np.ndarray, rank: int) -> np.ndarray:
        assert dist.get_rank() == rank
        parts = [torch.empty(x.shape) for _ in range(self.size)]
        dist.all_gather(parts, torch.from_numpy(x))
        return np.add.reduce(np.stack([part.numpy() for part in parts]), axis=0)


GROUPS: dict[int, Group | ProcessGroup] = {}


@onnx_op(
    op_type=ALL_REDUCE_OP,
    inputs=[_F32],
    outputs=[_F32],
    attrs=_attributes(ALL_REDUCE_ATTRIBUTES),
)
def all_reduce(x, tp_size, tp_rank, **_):
    return GROUPS[tp_size].sum(x, tp_rank)


def runnable(path: Path) -> Path:
    """A copy of the graph, beside it, that ONNX Runtime can run."""
    model = onnx.load(str(path), load_external_data=False)
    for node in model.graph.node:
        if node.domain == PLUGIN_DOMAIN:
            node.domain = CONTRIB
    for opset in model.opset_import:
        if opset.domain == PLUGIN_DOMAIN:
            opset.domain = CONTRIB
    copy = path.with_suffix(".runnable.onnx")
    onnx.save_model(model, str(copy))
    return copy


def session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(get_library_path())
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(
        str(runnable(path)), options, providers=["CPUExecutionProvider"]
    )


class HotColdAttention(OpRun):
    """The same for onnx's reference evaluator, which runs bf16."""

    op_domain = PLUGIN_DOMAIN

    def _run(self, qkv, *arrays, **attributes):
        out = attention((qkv.astype(np.float32), *arrays), **attributes)
        return (out.astype(qkv.dtype),)


class Gemm(OpRun):
    """Sums in fp32, one rounding to the inputs' type, as a GPU does it."""

    op_domain = ""

    def _run(self, a, b, c=None, transB=0, **_):  # noqa: N803
        assert transB == 1
        out = a.astype(np.float32) @ b.astype(np.float32).T
        return ((out if c is None else out + c.astype(np.float32)).astype(a.dtype),)


def evaluator(path: Path) -> ReferenceEvaluator:
    """Slow, for tiny graphs of any dtype; run as a session is. tp 1 only."""
    return ReferenceEvaluator(onnx.load(str(path)), new_ops=[HotColdAttention, Gemm])
