"""What a GPU's memory is for: how many tokens of KV fit beside everything else.

    |<----------------------- total ------------------------>|
    | weights and others' | fixed | KV arena | never touched |
                          |<------- free when planned ------>|
    |<----------- gpu_memory_utilization ---->|

Planned once, when the weights are on the device; `fixed` is computed, not measured. It knows no
torch: shapes and free bytes go in, a table comes out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from granikv.config import INT32_MAX, EngineConfig, ModelConfig
from granikv.core import PLAN_FIELDS, PlanCapacities
from granikv.errors import Unavailable

# Temporary bytes per logit of a slice that is sampled: fp32 copies, a sort with its indices, fp64
# sums. And rows of a slice (device_sampling.SLICE_ROWS).
SAMPLING_BYTES_PER_LOGIT = 80
SAMPLED_ROWS = 128
# A graph keeps its logits for as long as it lives. So many of the largest at once: one per layout
# that a mix of groups needs. The rest is the driver's share of graphs, and products' workspaces.
LARGEST_GRAPHS = 8
GRAPHS_BASE_BYTES = 512 * 2**20
ROW_INPUT_BYTES = 6 * 8  # int64 fields of DeviceRows
INDEX_BYTES, FP32_BYTES = 4, 4

LOWER = {  # the settings that make an item smaller
    "request table": "max_requests or max_seq_len",
    "attention workspace": "max_requests or max_num_batched_tokens",
    "activations": "max_num_batched_tokens",
    "logits and sampling": "max_requests",
    "CUDA graphs": "max_requests",
}


@dataclass(frozen=True)
class MemoryPlan:
    """fixed: bytes by item of LOWER; usable_bytes: for them and the arena together."""

    total_bytes: int
    free_bytes: int
    utilization: float
    fixed: dict[str, int]
    token_bytes: int
    capacity_tokens: int

    @property
    def usable_bytes(self) -> int:
        return usable_bytes(self.total_bytes, self.free_bytes, self.utilization)

    def table(self) -> str:
        """One line per item, GiB."""
        arena_bytes = self.capacity_tokens * self.token_bytes
        rows = {
            f"gpu_memory_utilization={self.utilization:g} of": self.total_bytes,
            "in use before (weights, others)": self.total_bytes - self.free_bytes,
            **self.fixed,
            f"KV arena, {self.capacity_tokens} tokens": arena_bytes,
            "left of the share": self.usable_bytes - sum(self.fixed.values()) - arena_bytes,
        }
        return "\n".join(f"  {name:<36}{size / 2**30:8.2f} GiB" for name, size in rows.items())


def usable_bytes(total_bytes: int, free_bytes: int, utilization: float) -> int:
    """Of what is free, all but the share of the whole that stays untouched."""
    return free_bytes - math.ceil((1.0 - utilization) * total_bytes)


def fixed_bytes(
    config: EngineConfig,
    model: ModelConfig,
    capacities: PlanCapacities,
    element_bytes: int,
    vocab_size: int,
    has_context: bool = False,
) -> dict[str, int]:
    """Bytes on one device beside weights and arena, by item of LOWER.

    model: of one rank; element_bytes: of an activation; vocab_size: of all ranks. has_context: an
    engine's execution context exists; what it holds (activations, the plugin's workspace, graphs'
    activations) is in use already, not to come.
    """
    rows, step_rows = config.max_requests, max(config.max_num_batched_tokens, config.max_requests)
    seq_len = config.max_seq_len or model.max_position
    q_width = model.num_qo_heads * model.head_dim
    qkv_width = q_width + 2 * model.num_kv_heads * model.head_dim
    partial_bytes = (q_width + model.num_qo_heads) * FP32_BYTES
    plan_bytes = INDEX_BYTES * sum(
        math.prod(capacities.resolve(f.shape)) for f in PLAN_FIELDS if f.where == "device"
    )
    # live at once in a layer: residual, product, norm and their like; then what is widest, thrice
    # (gate and up with their product; q, k, v before and after the norm of heads)
    row_bytes = element_bytes * (
        5 * model.hidden_size + 3 * max(model.intermediate_size, qkv_width)
    )
    workspace_bytes = max(1, capacities.max_partials) * partial_bytes
    workspace_bytes += capacities.max_rows * q_width * element_bytes
    if has_context:
        row_bytes = workspace_bytes = 0
    logits_bytes = rows * vocab_size * FP32_BYTES
    counts_bytes = logits_bytes + logits_bytes // 2  # of penalties; half of it while they grow
    sampling_bytes = min(rows, SAMPLED_ROWS) * vocab_size * SAMPLING_BYTES_PER_LOGIT
    return {
        "request table": (rows + 1) * seq_len * INDEX_BYTES + step_rows * ROW_INPUT_BYTES,
        "attention workspace": workspace_bytes + plan_bytes,
        "activations": step_rows * row_bytes,
        "logits and sampling": 2 * logits_bytes + counts_bytes + sampling_bytes,
        "CUDA graphs": LARGEST_GRAPHS * logits_bytes + rows * row_bytes + GRAPHS_BASE_BYTES,
    }


def plan_memory(
    config: EngineConfig,
    total_bytes: int,
    free_bytes: int,
    fixed: dict[str, int],
    token_bytes: int,
) -> MemoryPlan:
    """The arena's capacity: config.capacity_tokens if set, else all that fits.

    fixed: of `fixed_bytes`; token_bytes: K and V of one token. Raises Unavailable with what to
    lower when that does not fit, or when the tokens of one step would not.
    """
    share = config.gpu_memory_utilization
    usable = usable_bytes(total_bytes, free_bytes, share)
    fits = min(INT32_MAX, max(0, usable - sum(fixed.values())) // token_bytes)
    least = config.max_num_batched_tokens + config.page_tokens + 1  # one step, the padding slot
    wanted = config.capacity_tokens
    plan = MemoryPlan(
        total_bytes, free_bytes, share, fixed, token_bytes, fits if wanted is None else wanted
    )
    if fits >= (least if wanted is None else wanted):
        return plan
    advice = f"raise gpu_memory_utilization={share:g}, or lower "
    if wanted is not None and fits > config.page_tokens:
        advice += f"capacity_tokens to {fits} or less"
    else:
        largest = sorted(fixed, key=lambda name: -fixed[name])
        advice += "; ".join(f"{LOWER[name]} ({fixed[name] / 2**30:.2f} GiB)" for name in largest)
    needed = f"{least} tokens, one step" if wanted is None else f"capacity_tokens={wanted}"
    raise Unavailable(
        f"KV arena: expected memory for {needed}, got {fits} tokens of {token_bytes} bytes; "
        f"{advice}\n{plan.table()}"
    )
