"""What crosses the border of an engine: inputs and outputs of the network and of the plugins.

One table, read by the ONNX export, the manifest, the executor and the plugin's tests. Plan fields
keep name and shape of PLAN_FIELDS. The KV arenas are not tensors of the network: the attention
plugin finds them, outside the graph, by the last dimension of `launch_dims`.
It knows nothing of TensorRT, ONNX or torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from granikv.attention.variants import LAYOUTS, AttentionShape
from granikv.config import LIMITS, ModelConfig
from granikv.core import PLAN_FIELDS, PlanCapacities
from granikv.errors import InvalidArgument

ATTENTION_OP, ALL_REDUCE_OP = "HotColdAttention", "AllReduce"
PLUGIN_VERSION, PLUGIN_NAMESPACE = "1", "granikv"
MAX_BINDINGS = 64  # arena pairs that one process may register
DTYPES = ("float32", "float16", "bfloat16")  # of a network

Dims = tuple[str | int, ...]  # a string is a dynamic dimension, see EngineIO.ranges


@dataclass(frozen=True)
class TensorSpec:
    """A tensor at the border. dtype: "int32", "float32", or "network": the network's own."""

    name: str
    dims: Dims
    dtype: str
    meaning: str


@dataclass(frozen=True)
class BuildLimits:
    """What an engine is built for. Lengths are in tokens. Raises InvalidArgument."""

    max_requests: int = 256  # running at once; also the most rows whose logits are returned
    max_tokens: int = 512  # rows of a step
    max_seq_len: int = 4096
    capacity_tokens: int = 65536  # of the KV arena, at most; its memory is taken at load

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_tokens", "max_seq_len", "capacity_tokens"):
            _, highest = LIMITS["max_num_batched_tokens" if name == "max_tokens" else name]
            if not 1 <= getattr(self, name) <= highest:
                raise InvalidArgument(name, getattr(self, name), f"1 to {highest}")


# Dynamic names of the symbols of PLAN_FIELDS; other symbols are sizes fixed at build time. Items
# have the launch grid as their size: surplus entries are skipped by the counts on the device.
_DYNAMIC = {"T": "rows", "H": "hot_grid", "C": "cold_grid"}
_PLAN_FIELDS = {field.name: field for field in PLAN_FIELDS}


def _plan_field(name: str) -> TensorSpec:
    field = _PLAN_FIELDS[name]
    dims = tuple(_DYNAMIC.get(str(size), size) for size in field.shape)
    return TensorSpec(name, dims, field.dtype, field.meaning)


# host scalars as dimensions of an empty tensor: a plugin cannot read device data on the host
LAUNCH_DIMS: Dims = (0, "layout_index", "row_tiles", "has_runs", "has_decode", "binding")

PLAN_INPUTS: tuple[TensorSpec, ...] = (
    TensorSpec(
        "request_slots", ("max_requests+1", "max_seq_len"), "int32",
        "slot of each position of each request row; the last row is for padding",
    ),
    *(
        _plan_field(name)
        for name in (
            "counts", "row_request", "row_position", "slot_mapping", "hot_items", "hot_rows",
            "cold_items", "merge_indptr", "merge_partials", "qo_indptr", "extend_indptr",
            "extend_segments",
        )
    ),
    TensorSpec(
        "extend_tiles", ("tiles", 2), "int32",
        "(extend request, tile of stacked rows) of each block, longest context first",
    ),
    TensorSpec(
        "launch_dims", LAUNCH_DIMS, "int32",
        "no elements; its dimensions: index of the layout in LAYOUTS, tiles of block_m stacked "
        "rows of the largest HOT item, whether a COLD item is a run, whether a row decodes or is "
        "padding, the number under which the arenas are registered",
    ),
)  # fmt: skip

NETWORK_INPUTS: tuple[TensorSpec, ...] = (
    TensorSpec("token_ids", ("rows",), "int32", "input ids, each at least 0"),
    TensorSpec("sample_rows", ("samples",), "int32", "rows whose logits are returned"),
    *PLAN_INPUTS,
)

NETWORK_OUTPUTS: tuple[TensorSpec, ...] = (
    TensorSpec("logits", ("samples", "vocab_shard"), "float32", "of this rank's vocabulary rows"),
)

PLUGIN_INPUTS: tuple[TensorSpec, ...] = (
    TensorSpec("qkv", ("rows", "qkv_width"), "network", "q, k, v heads of a row, before rope"),
    TensorSpec("rope_cos", ("max_seq_len", "head_dim/2"), "float32", "of each position"),
    TensorSpec("rope_sin", ("max_seq_len", "head_dim/2"), "float32", "of each position"),
    *PLAN_INPUTS,
)
PLUGIN_OUTPUTS = (TensorSpec("out", ("rows", "qo_width"), "network", "heads of a row"),)
ATTENTION_ATTRIBUTES = ("layer", "num_qo_heads", "num_kv_heads", "head_dim", "max_partials")
ALL_REDUCE_ATTRIBUTES = ("tp_size", "tp_rank")


def plugin_abi_hash() -> str:
    """Hex digest of what graph and plugins must agree on; in every manifest."""

    def shapes(specs: tuple[TensorSpec, ...]) -> list:
        return [[spec.name, [str(d) for d in spec.dims], spec.dtype] for spec in specs]

    agreed = {
        "version": [PLUGIN_VERSION, PLUGIN_NAMESPACE],
        ATTENTION_OP: [shapes(PLUGIN_INPUTS), shapes(PLUGIN_OUTPUTS), ATTENTION_ATTRIBUTES],
        ALL_REDUCE_OP: ALL_REDUCE_ATTRIBUTES,
        "layouts": list(LAYOUTS),
        "fields": [[f.name, [str(s) for s in f.shape], f.dtype] for f in PLAN_FIELDS],
    }
    text = json.dumps(agreed, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class EngineIO:
    """The table with numbers: one rank's network for some limits.

    config: of one rank (sharding.py); capacities: sizes of the plan's buffers, as the executor
    makes them (plan_buffers.step_capacities).
    """

    def __init__(
        self, limits: BuildLimits, config: ModelConfig, capacities: PlanCapacities, vocab_shard: int
    ):
        self.limits, self.capacities = limits, capacities
        self.vocab_shard = vocab_shard
        group = config.gqa_group_size
        rows, most = capacities.max_rows, limits.max_requests
        tiles = rows + capacities.max_requests
        # (min, opt, max) of every dynamic dimension; opt is a busy decode step
        self.ranges: dict[str, tuple[int, int, int]] = {
            "rows": (1, min(most, rows), rows),
            "samples": (1, most, most),
            "hot_grid": (0, min(256, capacities.max_hot_items), capacities.max_hot_items),
            "cold_grid": (0, min(most, capacities.max_cold_items), capacities.max_cold_items),
            "tiles": (0, min(128, tiles), tiles),
            "layout_index": (0, 0, len(LAYOUTS) - 1),
            "row_tiles": (0, 1, max(1, -(-most * group // 16))),  # 16: the smallest block_m
            "has_runs": (0, 0, 1),
            "has_decode": (0, 1, 1),
            "binding": (0, 0, MAX_BINDINGS - 1),
        }
        self._fixed: Mapping[str, int] = {
            "max_requests+1": limits.max_requests + 1,
            "max_seq_len": limits.max_seq_len,
            "vocab_shard": vocab_shard,
            "head_dim/2": config.head_dim // 2,
            "qo_width": config.num_qo_heads * config.head_dim,
            "qkv_width": (config.num_qo_heads + 2 * config.num_kv_heads) * config.head_dim,
        }

    def dims(self, spec: TensorSpec) -> Dims:
        """The spec's dimensions with fixed sizes as numbers; strings are keys of `ranges`."""
        return tuple(self._size(dim) for dim in spec.dims)

    def _size(self, dim: str | int) -> str | int:
        if isinstance(dim, int) or dim in self.ranges:
            return dim
        if dim in self._fixed:
            return self._fixed[dim]
        return self.capacities.resolve((dim,))[0]

    def shape(self, spec: TensorSpec, which: str = "max") -> tuple[int, ...]:
        """Numbers for the optimisation profile; which: "min", "opt" or "max"."""
        index = ("min", "opt", "max").index(which)
        return tuple(
            dim if isinstance(dim, int) else self.ranges[dim][index] for dim in self.dims(spec)
        )

    def describe(self) -> dict:
        """JSON for the manifest: every input and output with its dimensions and ranges."""
        return {
            "inputs": [self._entry(spec) for spec in NETWORK_INPUTS],
            "outputs": [self._entry(spec) for spec in NETWORK_OUTPUTS],
        }

    def _entry(self, spec: TensorSpec) -> dict:
        shapes = {w: list(self.shape(spec, w)) for w in ("min", "opt", "max")}
        return {
            "name": spec.name, "dims": list(self.dims(spec)), "dtype": spec.dtype, **shapes,
            "meaning": spec.meaning,
        }  # fmt: skip


def attention_shape_of(config: ModelConfig, dtype: str) -> AttentionShape:
    """Heads of one rank for the plan's capacities. Raises Unsupported without a kernel."""
    heads = (config.num_qo_heads, config.num_kv_heads, config.head_dim)
    return AttentionShape(*heads, element_bytes=4 if dtype == "float32" else 2)
