"""GPU attention: the recipe append, HOT, COLD, merge, extend over the plan's work items.

The plan's arrays go to fixed device buffers once per step; a layer only launches. Inside a CUDA
graph the grids are capacities (powers of two of the SM count) and surplus blocks exit, so one
graph serves every plan with the same `graph_key`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from granikv.attention.kernels.append import append_kv
from granikv.attention.kernels.cold import cold_suffix_attention
from granikv.attention.kernels.extend import extend_attention
from granikv.attention.kernels.hot import EVERY_VARIANT, hot_prefix_attention
from granikv.attention.kernels.merge import merge_states
from granikv.attention.kernels.small import small_step_attention
from granikv.attention.variants import (
    FIRST_WITH_DEPENDENT_LAUNCHES,
    LAYOUTS,
    AttentionShape,
    HotTile,
    Layout,
    extend_tile,
    takes_descriptors,
)
from granikv.config import ModelConfig
from granikv.core import PLAN_FIELDS, Count, HotVariant, PlanCapacities, SpanKind, StepPlan
from granikv.errors import InvalidArgument

NOT_READ_HERE = ("row_token", "sample_rows", "slot_writes")


class GpuAttention:
    """Attention of one engine on a GPU: `prepare` once per step, `run` once per layer.

    k_arena, v_arena: [num_layers, capacity, Hkv, D], one dtype with q; request_slots: int32
    [max_requests, max_seq_len]; all on one device, owned by the caller; run appends to the arenas.
    capacities: sizes of the plan's buffers. Raises InvalidArgument for a wrong shape, dtype or
    device, Unsupported for heads without a kernel.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        k_arena: torch.Tensor,
        v_arena: torch.Tensor,
        request_slots: torch.Tensor,
        capacities: PlanCapacities | None = None,
        pdl: bool | None = None,
    ):
        heads = (model_config.num_kv_heads, model_config.head_dim)
        for name, arena in (("k_arena", k_arena), ("v_arena", v_arena)):
            if arena.ndim != 4 or tuple(arena.shape[2:]) != heads:
                raise InvalidArgument(name, tuple(arena.shape), f"[L, capacity, {heads}]")
            if arena.dtype not in (torch.bfloat16, torch.float16, torch.float32):
                raise InvalidArgument(name, arena.dtype, "bfloat16, float16 or float32")
            if not arena.is_contiguous() or arena.device != k_arena.device:
                raise InvalidArgument(name, arena.stride(), f"contiguous, on {k_arena.device}")
        if request_slots.dtype != torch.int32 or request_slots.device != k_arena.device:
            raise InvalidArgument("request_slots", request_slots.dtype, "int32, on the device")
        self.shape = self.shape_of(model_config, k_arena.dtype)
        self.sm_scale = model_config.head_dim**-0.5
        self.k_arena, self.v_arena, self.request_slots = k_arena, v_arena, request_slots
        self.device = k_arena.device
        self.on_gpu = self.device.type == "cuda"
        self.num_sms = 1
        self.capability = 0  # major * 10 + minor; 0 without a GPU
        if self.on_gpu:
            properties = torch.cuda.get_device_properties(self.device)
            self.num_sms = properties.multi_processor_count
            self.capability = properties.major * 10 + properties.minor
            limits = driver.active.utils.get_device_properties(self.device.index)
            self.shape = replace(self.shape, shared_memory_bytes=limits["max_shared_mem"])
        self.pdl = self.capability >= FIRST_WITH_DEPENDENT_LAUNCHES if pdl is None else pdl
        self.capacities = capacities or default_capacities(request_slots.shape[0], self.shape)
        self._make_buffers()
        self.rope: tuple[torch.Tensor, torch.Tensor] | None = None

    @staticmethod
    def shape_of(model_config: ModelConfig, dtype: torch.dtype) -> AttentionShape:
        """The shape that plan_splits needs. Raises Unsupported for heads without a kernel."""
        heads = (model_config.num_qo_heads, model_config.num_kv_heads, model_config.head_dim)
        return AttentionShape(*heads, element_bytes=dtype.itemsize)

    def _make_buffers(self) -> None:
        rows = self.capacities.max_rows
        sizes = {
            f.name: self.capacities.resolve(f.shape)
            for f in PLAN_FIELDS
            if f.where == "device" and f.name not in NOT_READ_HERE
        }
        sizes["extend_tiles"] = (rows + self.capacities.max_requests, 2)
        at, places = 0, {}
        for name, size in sizes.items():
            places[name] = (at, int(np.prod(size)), size)
            at += -(-places[name][1] // 4) * 4  # 16-byte aligned, as the kernels are told
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
        heads, dim = self.shape.num_qo_heads, self.shape.head_dim
        states = max(1, self.capacities.max_partials)
        self.o_partials = torch.zeros(states, heads, dim, device=self.device)
        self.lse_partials = torch.zeros(states, heads, device=self.device)
        self.out = torch.zeros(rows, heads, dim, dtype=self.k_arena.dtype, device=self.device)
        self._descriptors: dict[int, list[Any]] = {}
        self._side = torch.cuda.Stream(self.device) if self.on_gpu else None
        self._fork = torch.cuda.Event() if self.on_gpu else None
        self._join = torch.cuda.Event() if self.on_gpu else None

    # -- once per step -------------------------------------------------------------------------

    def prepare(self, plan: StepPlan, layout: Layout | None = None, capture: bool = False) -> None:
        """Send the plan to the device; one copy, no wait on the GPU.

        layout: None takes the plan's own (`plan.layout`, a name of LAYOUTS), or one by its items.
        capture: grids are capacity classes instead of exact, for a graph that serves other plans.
        Raises InvalidArgument when an array is over its capacity, ValueError for an unknown
        kind or variant.
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
        if int(counts[Count.NUM_PARTIALS]) > self.o_partials.shape[0]:
            raise InvalidArgument(
                "num_partials", counts[Count.NUM_PARTIALS], f"at most {self.o_partials.shape[0]}"
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
        self._set_grids(host, num_hot, num_cold, num_extend, capture)
        for tile in (self.layout.hot, self.layout.gemm):
            if tile is not None and tile.tma:
                self._make_descriptors(tile)
        self._packed.copy_(self._staging[turn], non_blocking=True)
        if self.on_gpu:
            self._copied[turn].record()

    def _make_descriptors(self, tile: HotTile) -> None:
        """Descriptors of every layer's K and V for the tile's blocks, once per block size."""
        block_n = tile.fit(self.shape).block_n
        if not takes_descriptors(tile, self.shape, self.capability):
            return
        if block_n not in self._descriptors:
            self._descriptors[block_n] = [
                tuple(
                    TensorDescriptor.from_tensor(x.flatten(1), [block_n, self.shape.head_dim])
                    for x in (self.k_arena[layer], self.v_arena[layer])
                )
                for layer in range(self.k_arena.shape[0])
            ]

    @property
    def graph_key(self) -> tuple[str, int, int, int, bool]:
        """Plans prepared with capture=True and equal keys (and rows) may share a graph."""
        grids = (self._hot_grid, self._cold_grid, self._row_tiles)
        return (self.layout.name, *grids, self._has_runs)

    def _check_items(self, hot: np.ndarray, cold: np.ndarray) -> None:
        for values, allowed, name in (
            (hot[:, 6], HotVariant, "hot variant"),
            (cold[:, 1], SpanKind, "span kind"),
        ):
            wrong = values[(values < 0) | (values >= len(allowed))]
            if len(wrong):
                raise ValueError(f"{name}: expected one of {list(allowed)}, got {wrong[0]}")

    def _layout_of(self, plan: StepPlan, hot: np.ndarray) -> Layout:
        name = getattr(plan, "layout", "")
        if name:
            if name not in LAYOUTS:
                raise ValueError(f"layout: expected one of {sorted(LAYOUTS)}, got {name!r}")
            return LAYOUTS[name]
        stacked = int(hot[:, 1].max(initial=0)) * self.shape.group_size
        if not len(hot):
            return LAYOUTS["flat"]
        return LAYOUTS["small" if stacked <= 48 else "mid" if stacked <= 128 else "large"]

    def _set_grids(
        self, host: dict, num_hot: int, num_cold: int, num_extend: int, capture: bool
    ) -> None:
        block_m = self.layout.hot.fit(self.shape).block_m
        rows = host["hot_items"][:num_hot, 1] * self.shape.group_size
        self._row_tiles = int(-(-rows.max(initial=1) // block_m))
        self._has_runs = bool((host["cold_items"][:num_cold, 1] == SpanKind.RUN).any())
        self._hot_grid, self._cold_grid = num_hot, num_cold
        if capture:
            self._hot_grid = self._grid_class(num_hot, self.capacities.max_hot_items)
            self._cold_grid = self._grid_class(num_cold, self.capacities.max_cold_items)
        self._num_tiles = 0
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
            self._num_tiles = len(order)
            host["extend_tiles"][: len(order)] = np.stack([request, tile], 1)[order]

    def _grid_class(self, num_items: int, capacity: int) -> int:
        """Smallest power of two times the SM count, in blocks, that holds the items."""
        if num_items == 0:
            return 0
        items = max(1, self.num_sms // self.shape.num_kv_heads)
        while items < num_items:
            items *= 2
        return min(items, capacity)

    # -- once per layer ------------------------------------------------------------------------

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq * D], a buffer that the next layer reuses.

        k and q are after rope, unless `rope` is set: (cos, sin), fp32 [max_position, D / 2];
        then q is rotated in place. Rows may be padded: T >= the plan's rows; those give 0.
        Raises InvalidArgument for a wrong dtype, shape, stride, alignment or device.
        """
        for name, rows in (("k", k), ("v", v)):
            self._check_rows(name, rows, self.shape.num_kv_heads)
        k_layer, v_layer = self.k_arena[layer], self.v_arena[layer]
        append_kv(
            k_layer, v_layer, self.plan, q, k, v, shape=self.shape, rope=self.rope, pdl=self.pdl
        )
        return self.attend(layer, q)

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """`run` without the append."""
        self._check_rows("q", q, self.shape.num_qo_heads)
        num_rows = q.shape[0]
        if num_rows > self.out.shape[0]:
            raise InvalidArgument("q", num_rows, f"at most {self.out.shape[0]} rows")
        k_layer, v_layer = self.k_arena[layer], self.v_arena[layer]
        out = self.out[:num_rows]
        if self.num_decode_rows or num_rows > self.num_rows:
            self._decode(layer, q, out)
        extend_attention(
            q, k_layer, v_layer, self.request_slots, self.plan, self.sm_scale, out,
            shape=self.shape, tile=extend_tile(self.shape), num_tiles=self._num_tiles,
        )  # fmt: skip
        return out.view(num_rows, self.shape.num_qo_heads * self.shape.head_dim)

    def _check_rows(self, name: str, rows: torch.Tensor, num_heads: int) -> None:
        """What the kernels rely on; a row stride of packed q, k and v is fine."""
        dim = self.shape.head_dim
        if rows.dtype != self.k_arena.dtype or rows.device != self.device:
            found = f"{rows.dtype} on {rows.device}"
            raise InvalidArgument(name, found, f"{self.k_arena.dtype} on {self.device}")
        if rows.ndim != 3 or tuple(rows.shape[1:]) != (num_heads, dim):
            raise InvalidArgument(name, tuple(rows.shape), f"[rows, {num_heads}, {dim}]")
        strides = rows.stride()
        if rows.shape[0] and (strides[0] % 16 or strides[1:] != (dim, 1)):
            raise InvalidArgument(name, strides, f"strides (a multiple of 16, {dim}, 1)")
        if rows.data_ptr() % 16:
            raise InvalidArgument(name, rows.data_ptr(), "an address of 16-byte alignment")

    def _decode(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        layout = self.layout
        inputs: dict[str, Any] = {
            "q": q,
            "k_arena": self.k_arena[layer],
            "v_arena": self.v_arena[layer],
            "plan": self.plan,
            "sm_scale": self.sm_scale,
            "o_partials": self.o_partials,
            "lse_partials": self.lse_partials,
            "shape": self.shape,
        }
        one_stream = layout.one_launch or not (self._hot_grid and self._cold_grid)
        # across two streams a dependent merge was measured: no gain, up to 4% slower at B=256
        pdl = self.pdl and one_stream and layout.gemm is None
        cold = inputs | {
            "request_slots": self.request_slots,
            "tile": layout.cold,
            "num_items": self._cold_grid,
            "has_runs": self._has_runs,
        }
        if layout.one_launch and self._hot_grid:
            small_step_attention(
                **inputs, request_slots=self.request_slots, tile=layout.hot, cold_n=layout.cold.block_n,
                has_runs=self._has_runs, num_row_tiles=self._row_tiles,
                num_items=self._hot_grid * self._row_tiles + self._cold_grid, pdl=pdl,
            )  # fmt: skip
        elif one_stream or not self.on_gpu:
            self._hot(layer, inputs, pdl)
            cold_suffix_attention(**cold, pdl=pdl)
        else:
            assert self._side is not None and self._fork is not None and self._join is not None
            self._fork.record()
            if not layout.cold_first:
                self._hot(layer, inputs, False)
            with torch.cuda.stream(self._side):
                self._side.wait_event(self._fork)
                cold_suffix_attention(**cold)
                self._join.record()
            if layout.cold_first:
                self._hot(layer, inputs, False)
            torch.cuda.current_stream().wait_event(self._join)
        merge_states(
            self.plan, self.o_partials, self.lse_partials, out,
            shape=self.shape, tile=layout.merge, pdl=pdl,
        )  # fmt: skip

    def _hot(self, layer: int, inputs: dict[str, Any], pdl: bool) -> None:
        layout = self.layout
        launches = [(layout.hot, EVERY_VARIANT)]
        if layout.gemm is not None:
            launches = [
                (layout.gemm, int(HotVariant.GEMM)),
                (layout.hot, int(HotVariant.CASCADE)),
            ]
        for tile, variant in launches:
            made = self._descriptors.get(tile.fit(self.shape).block_n) if tile.tma else None
            hot_prefix_attention(
                **inputs, descriptors=made[layer] if made else None, tile=tile,
                num_items=self._hot_grid, num_row_tiles=self._row_tiles, variant=variant, pdl=pdl,
            )  # fmt: skip


def default_capacities(max_requests: int, shape: AttentionShape) -> PlanCapacities:
    """Sizes for max_requests decode rows and 8,192 rows of a step."""
    return PlanCapacities(
        max_requests=max_requests,
        max_rows=max(8192, max_requests),
        max_hot_items=4096,
        max_hot_rows=8 * max_requests,
        max_cold_items=max(4096, 4 * max_requests),
        max_partials=max(4096, 8 * max_requests),
        max_extend_segments=16 * max_requests,
        max_slot_writes=1,
    )
