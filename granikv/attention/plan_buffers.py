"""The plan's arrays in fixed device buffers, and the launch sizes that follow from them.

Both GPU paths use it: the kernels of `GpuAttention` and the engine's attention plugin. One copy
per step. For a CUDA graph the grids are capacities (powers of two of the SM count) and surplus
blocks exit, so one graph serves every plan with the same `graph_key`.
It launches nothing and does not need Triton.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from granikv.attention.variants import AttentionShape, Layout, extend_tile, layouts_of
from granikv.config import ModelConfig
from granikv.core import (
    PLAN_FIELDS,
    Count,
    HotItem,
    HotVariant,
    PlanCapacities,
    SpanKind,
    StepPlan,
)
from granikv.errors import InvalidArgument

NOT_READ_HERE = ("row_token", "sample_rows", "slot_writes")
# TensorRT's for every address of a network's input (setTensorAddress); the kernels want 16
ADDRESS_ALIGNMENT_BYTES = 256


class PlanBuffers:
    """`plan`: int32 device tensors by field of PLAN_FIELDS, and extend_tiles [tiles, 2].

    `prepare` fills them from a StepPlan and sets layout, num_rows, num_decode_rows, num_tiles,
    hot_grid, cold_grid, row_tiles (of block_m stacked rows, of the largest HOT item) and has_runs
    (a COLD item is a run). num_sms: of the device, 1 on a CPU.
    gluon: set where a Gluon kernel may serve HOT items: each must then fill a block of its tile.
    """

    gluon = False

    def __init__(
        self, shape: AttentionShape, capacities: PlanCapacities, device: torch.device, num_sms: int
    ):
        self.shape, self.capacities, self.device = shape, capacities, device
        self.num_sms = num_sms
        self.on_gpu = device.type == "cuda"
        rows = self.capacities.max_rows
        sizes = {
            f.name: self.capacities.resolve(f.shape)
            for f in PLAN_FIELDS
            if f.where == "device" and f.name not in NOT_READ_HERE
        }
        sizes["extend_tiles"] = (rows + self.capacities.max_requests, 2)
        at, places = 0, {}
        step = ADDRESS_ALIGNMENT_BYTES // 4
        for name, size in sizes.items():
            places[name] = (at, int(np.prod(size)), size)
            at += -(-places[name][1] // step) * step
        self._packed = torch.zeros(at, dtype=torch.int32, device=self.device)
        self.plan = {n: self._packed[a : a + c].view(s) for n, (a, c, s) in places.items()}
        # two staging buffers: one may still be on its way when the next step is prepared
        self._staging = [
            torch.zeros(at, dtype=torch.int32, pin_memory=self.on_gpu) for _ in range(2)
        ]
        self._host = [
            {n: s[a : a + c].view(z).numpy() for n, (a, c, z) in places.items()}
            for s in self._staging
        ]
        self._copied: list[Any] = [torch.cuda.Event() for _ in range(2)] if self.on_gpu else []
        self._turn = 0

    def prepare(self, plan: StepPlan, layout: Layout | None = None, capture: bool = False) -> None:
        """Send the plan to the device; one copy, no wait on the GPU.

        layout: None takes the plan's own (`plan.layout`, a name of LAYOUTS), or one by its items.
        capture: grids are capacity classes instead of exact, for a graph that serves other plans.
        Raises InvalidArgument when an array is over its capacity, ValueError for an unknown
        kind or variant, and with `gluon` InvalidArgument for an item shorter than a block.
        """
        turn = self._turn = 1 - self._turn
        if self.on_gpu:
            self._copied[turn].synchronize()
        counts = plan.counts
        self.num_rows = int(counts[Count.NUM_ROWS])
        self.num_decode_rows = int(counts[Count.NUM_DECODE_ROWS])
        num_hot, num_cold = int(counts[Count.NUM_HOT_ITEMS]), int(counts[Count.NUM_COLD_ITEMS])
        num_extend = int(counts[Count.NUM_EXTEND_REQUESTS])
        used = {
            "counts": 16,
            "row_request": self.num_rows,
            "row_position": self.num_rows,
            "slot_mapping": self.num_rows,
            "hot_items": num_hot,
            "hot_rows": int(counts[Count.NUM_HOT_ROWS]),
            "cold_items": num_cold,
            "merge_indptr": self.num_decode_rows + 1,
            "qo_indptr": num_extend + 1,
            "extend_indptr": num_extend + 1,
            "extend_segments": int(counts[Count.NUM_EXTEND_SEGMENTS]),
        }
        if self.num_decode_rows:
            used["merge_partials"] = int(plan.merge_indptr[self.num_decode_rows])
        max_partials = max(1, self.capacities.max_partials)
        if int(counts[Count.NUM_PARTIALS]) > max_partials:
            raise InvalidArgument(
                "num_partials", counts[Count.NUM_PARTIALS], f"at most {max_partials}"
            )
        host = self._host[turn]
        for name, count in used.items():
            source = getattr(plan, name)[:count]
            if count > len(host[name]):
                raise InvalidArgument(name, count, f"at most {len(host[name])} entries")
            if source.ndim == 2:
                host[name][:count, : source.shape[1]] = source
            else:
                host[name][:count] = source
        self._check_items(host["hot_items"][:num_hot], host["cold_items"][:num_cold])
        self.layout = layout or self._layout_of(plan, host["hot_items"][:num_hot])
        self._check_lengths(host["hot_items"][:num_hot, HotItem.KV_LEN])
        self._set_grids(host, num_hot, num_cold, num_extend, capture)
        self._packed.copy_(self._staging[turn], non_blocking=True)
        if self.on_gpu:
            self._copied[turn].record()

    @property
    def graph_key(self) -> tuple[str, int, int, int, bool]:
        """Plans prepared with capture=True and equal keys (and rows) may share a graph."""
        grids = (self.hot_grid, self.cold_grid, self.row_tiles)
        return (self.layout.name, *grids, self.has_runs)

    def _check_items(self, hot: np.ndarray, cold: np.ndarray) -> None:
        for values, allowed, name in (
            (hot[:, 6], HotVariant, "hot variant"),
            (cold[:, 1], SpanKind, "span kind"),
        ):
            wrong = values[(values < 0) | (values >= len(allowed))]
            if len(wrong):
                raise ValueError(f"{name}: expected one of {list(allowed)}, got {wrong[0]}")

    def _check_lengths(self, hot: np.ndarray) -> None:
        """plan_splits keeps this in the layouts that it picks for a step."""
        tile = self.layout.hot_gluon if self.gluon else None
        if tile is not None and hot.min(initial=tile.block_n) < tile.block_n:
            expected = f"at least {tile.block_n} in layout {self.layout.name}"
            raise InvalidArgument("hot_items' kv_len", int(hot.min()), expected)

    def _layout_of(self, plan: StepPlan, hot: np.ndarray) -> Layout:
        layouts = layouts_of(self.shape)
        name = getattr(plan, "layout", "")
        if name:
            if name not in layouts:
                raise ValueError(f"layout: expected one of {sorted(layouts)}, got {name!r}")
            return layouts[name]
        stacked = int(hot[:, 1].max(initial=0)) * self.shape.group_size
        if not len(hot):
            return layouts["flat"]
        return layouts["small" if stacked <= 48 else "mid" if stacked <= 128 else "large"]

    def _set_grids(
        self, host: dict, num_hot: int, num_cold: int, num_extend: int, capture: bool
    ) -> None:
        block_m = self.layout.hot.fit(self.shape).block_m
        rows = host["hot_items"][:num_hot, 1] * self.shape.group_size
        self.row_tiles = int(-(-rows.max(initial=1) // block_m))
        self.has_runs = bool((host["cold_items"][:num_cold, 1] == SpanKind.RUN).any())
        self.hot_grid, self.cold_grid = num_hot, num_cold
        if capture:
            self.hot_grid = self._grid_class(num_hot, self.capacities.max_hot_items)
            self.cold_grid = self._grid_class(num_cold, self.capacities.max_cold_items)
        self.num_tiles = 0
        if num_extend:
            indptr = host["qo_indptr"][: num_extend + 1].astype(np.int64)
            stacked = np.diff(indptr) * self.shape.group_size
            block_m = extend_tile(self.shape).block_m
            tiles = -(-stacked // block_m)
            request = np.repeat(np.arange(num_extend), tiles)
            tile = np.arange(len(request)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
            # later tiles see more keys
            last = indptr[request] + (tile + 1) * block_m // self.shape.group_size
            keys = host["row_position"][np.minimum(last, indptr[request + 1]) - 1]
            order = np.argsort(-keys, kind="stable")
            self.num_tiles = len(order)
            host["extend_tiles"][: len(order)] = np.stack([request, tile], 1)[order]

    def _grid_class(self, num_items: int, capacity: int) -> int:
        """Smallest power of two times the SM count, in blocks, that holds the items."""
        if num_items == 0:
            return 0
        items = max(1, self.num_sms // self.shape.num_kv_heads)
        while items < num_items:
            items *= 2
        return min(items, capacity)


def default_capacities(max_requests: int, shape: AttentionShape) -> PlanCapacities:
    """Sizes for max_requests decode rows and 8,192 rows of a step."""
    max_partials = max(4096, 8 * max_requests)
    return PlanCapacities(
        max_requests=max_requests,
        max_rows=max(8192, max_requests),
        max_hot_items=4096,
        max_hot_rows=max_partials,  # each has a partial state
        max_cold_items=max(4096, 4 * max_requests),
        max_partials=max_partials,
        max_extend_segments=16 * max_requests,
        max_slot_writes=1,
    )


def step_capacities(max_requests: int, max_tokens: int, shape: AttentionShape) -> PlanCapacities:
    """Sizes of an executor's buffers: one request row more, that of padding.

    max_requests: rows of the request table; max_tokens: rows of a step.
    """
    return replace(
        default_capacities(max_requests + 1, shape), max_rows=max(max_tokens, max_requests + 16)
    )


def attention_shape(
    model_config: ModelConfig, dtype: torch.dtype, fp8_kv: bool = False
) -> AttentionShape:
    """The heads that kernels and plan_splits need; dtype: of q, and of KV unless fp8_kv.

    Raises Unsupported without a kernel.
    """
    heads = (model_config.num_qo_heads, model_config.num_kv_heads, model_config.head_dim)
    return AttentionShape(*heads, element_bytes=dtype.itemsize, fp8_kv=fp8_kv)


def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 1 on a CPU."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
