"""GPU attention: the recipe append, HOT, COLD, merge, extend over the plan's work items.

The plan's arrays go to fixed device buffers once per step (plan_buffers.py); a layer only launches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from granikv import env
from granikv.attention.kernels.append import append_kv
from granikv.attention.kernels.cold import cold_suffix_attention
from granikv.attention.kernels.extend import extend_attention
from granikv.attention.kernels.hot import hot_prefix_attention
from granikv.attention.kernels.merge import merge_states
from granikv.attention.kernels.small import small_step_attention
from granikv.attention.plan_buffers import (
    PlanBuffers,
    attention_shape,
    default_capacities,
    sm_count,
)
from granikv.attention.variants import (
    FIRST_WITH_DEPENDENT_LAUNCHES,
    GluonTile,
    Layout,
    extend_tile,
    takes_descriptors,
    takes_gluon,
)
from granikv.config import ModelConfig
from granikv.core import PlanCapacities, StepPlan
from granikv.errors import InvalidArgument

QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8 = torch.float8_e4m3fn


class GpuAttention(PlanBuffers):
    """Attention of one engine on a GPU: `prepare` once per step, `run` once per layer.

    k_arena, v_arena: [num_layers, capacity, Hkv, D], one dtype with q or float8_e4m3fn;
    request_slots: int32 [max_requests, max_seq_len]; all on one device, owned by the caller; run
    appends to the arenas. capacities: sizes of the plan's buffers. Beside FP8 arenas only: dtype
    of q (bfloat16 if None), kv_scales fp32 [num_layers, 2] of K and V (1.0 if None). Raises
    InvalidArgument for a wrong shape, dtype or device, Unsupported for heads without a kernel.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        k_arena: torch.Tensor,
        v_arena: torch.Tensor,
        request_slots: torch.Tensor,
        capacities: PlanCapacities | None = None,
        pdl: bool | None = None,
        dtype: torch.dtype | None = None,
        kv_scales: torch.Tensor | None = None,
    ):
        heads = (model_config.num_kv_heads, model_config.head_dim)
        for name, arena in (("k_arena", k_arena), ("v_arena", v_arena)):
            if arena.ndim != 4 or tuple(arena.shape[2:]) != heads:
                raise InvalidArgument(name, tuple(arena.shape), f"[L, capacity, {heads}]")
            if arena.dtype not in (*QUERY_DTYPES, FP8):
                raise InvalidArgument(name, arena.dtype, f"one of {(*QUERY_DTYPES, FP8)}")
            if not arena.is_contiguous() or arena.device != k_arena.device:
                raise InvalidArgument(name, arena.stride(), f"contiguous, on {k_arena.device}")
        if request_slots.dtype != torch.int32 or request_slots.device != k_arena.device:
            raise InvalidArgument("request_slots", request_slots.dtype, "int32, on the device")
        device, fp8_kv = k_arena.device, k_arena.dtype == FP8
        self.dtype = _query_dtype(k_arena.dtype, dtype)
        self.kv_scales = _layer_scales(kv_scales, k_arena.shape[0], fp8_kv)
        shape = attention_shape(model_config, self.dtype, fp8_kv)
        self.capability = 0  # major * 10 + minor; 0 without a GPU
        if device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            self.capability = 10 * major + minor
            limits = driver.active.utils.get_device_properties(device.index)
            shape = replace(shape, shared_memory_bytes=limits["max_shared_mem"])
        capacities = capacities or default_capacities(request_slots.shape[0], shape)
        super().__init__(shape, capacities, device, sm_count(device))
        self.sm_scale = model_config.head_dim**-0.5
        self.window = model_config.sliding_window or 0  # of extends; the plan clips decode rows
        self.k_arena, self.v_arena, self.request_slots = k_arena, v_arena, request_slots
        self.pdl = self.capability >= FIRST_WITH_DEPENDENT_LAUNCHES if pdl is None else pdl
        self._find_gluon()
        self._make_device_buffers()
        self.rope: tuple[torch.Tensor, torch.Tensor] | None = None

    def _find_gluon(self) -> None:
        """Modules of the Gluon kernels, where they are taken."""
        self._hot_gluon: Any = None
        self._cold_gluon: Any = None
        wanted = self.k_arena.dtype == torch.bfloat16 and env.read("GRANIKV_GLUON")
        if wanted and takes_gluon(self.shape, self.capability, triton.__version__):
            from granikv.attention.kernels import cold_gluon, hot_gluon

            self._hot_gluon, self._cold_gluon = hot_gluon, cold_gluon
        self.gluon = self._hot_gluon is not None

    def _make_device_buffers(self) -> None:
        rows = self.capacities.max_rows
        heads, dim = self.shape.num_qo_heads, self.shape.head_dim
        states = max(1, self.capacities.max_partials)
        self.o_partials = torch.zeros(states, heads, dim, device=self.device)
        self.lse_partials = torch.zeros(states, heads, device=self.device)
        self.out = torch.zeros(rows, heads, dim, dtype=self.dtype, device=self.device)
        self._descriptors: dict[int | GluonTile, list[Any]] = {}  # by tokens of a block, or tile
        self._side = torch.cuda.Stream(self.device) if self.on_gpu else None
        self._fork = torch.cuda.Event() if self.on_gpu else None
        self._join = torch.cuda.Event() if self.on_gpu else None

    # -- once per step -------------------------------------------------------------------------

    def prepare(self, plan: StepPlan, layout: Layout | None = None, capture: bool = False) -> None:
        """PlanBuffers.prepare, and the descriptors that the layout's tiles load K and V by."""
        super().prepare(plan, layout, capture)
        tile = self.layout.hot_gluon
        if tile is not None and self._hot_gluon is not None:
            self._describe(tile, self._hot_gluon.hot_gluon_descriptor, tile.block_n)
            return
        if takes_descriptors(self.layout.hot, self.shape, self.capability):
            block_n = self.layout.hot.fit(self.shape).block_n
            self._describe(block_n, _descriptor, block_n)

    def _describe(self, key: int | GluonTile, describe: Callable[..., Any], block_n: int) -> None:
        """Descriptors of every layer's K and V, once per key."""
        if key not in self._descriptors:
            self._descriptors[key] = [
                (describe(k, block_n), describe(v, block_n))
                for k, v in zip(self.k_arena, self.v_arena, strict=True)
            ]

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
            k_layer, v_layer, self.plan, q, k, v, shape=self.shape, rope=self.rope,
            kv_scales=self.kv_scales[layer], pdl=self.pdl,
        )  # fmt: skip
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
            q, k_layer, v_layer, self.request_slots, self.plan, self._score_scale(layer), out,
            shape=self.shape, tile=extend_tile(self.shape), num_tiles=self.num_tiles,
            v_scale=self.kv_scales[layer][1], window=self.window,
        )  # fmt: skip
        return out.view(num_rows, self.shape.num_qo_heads * self.shape.head_dim)

    def _score_scale(self, layer: int) -> float:
        """sm_scale for K as it is stored."""
        return self.sm_scale * self.kv_scales[layer][0]

    def _check_rows(self, name: str, rows: torch.Tensor, num_heads: int) -> None:
        """What the kernels rely on; a row stride of packed q, k and v is fine."""
        dim = self.shape.head_dim
        if rows.dtype != self.dtype or rows.device != self.device:
            found = f"{rows.dtype} on {rows.device}"
            raise InvalidArgument(name, found, f"{self.dtype} on {self.device}")
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
            "sm_scale": self._score_scale(layer),
            "o_partials": self.o_partials,
            "lse_partials": self.lse_partials,
            "shape": self.shape,
        }
        one_stream = layout.one_launch or not (self.hot_grid and self.cold_grid)
        # across two streams a dependent merge was measured: no gain, up to 4% slower at B=256
        pdl = self.pdl and one_stream
        cold = inputs | {
            "request_slots": self.request_slots,
            "tile": layout.cold,
            "num_items": self.cold_grid,
            "has_runs": self.has_runs,
        }
        if layout.one_launch and self.hot_grid:
            small_step_attention(
                **inputs, request_slots=self.request_slots, tile=layout.hot, cold_n=layout.cold.block_n,
                has_runs=self.has_runs, num_row_tiles=self.row_tiles,
                num_items=self.hot_grid * self.row_tiles + self.cold_grid, pdl=pdl,
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
                self._cold(inputs, cold)
                self._join.record()
            if layout.cold_first:
                self._hot(layer, inputs, False)
            torch.cuda.current_stream().wait_event(self._join)
        merge_states(
            self.plan, self.o_partials, self.lse_partials, out,
            shape=self.shape, tile=layout.merge, v_scale=self.kv_scales[layer][1], pdl=pdl,
        )  # fmt: skip

    def _cold(self, inputs: dict[str, Any], cold: dict[str, Any]) -> None:
        """COLD items beside HOT ones; cold: the portable kernel's arguments."""
        wanted = self.layout.gluon_blocks_per_sm
        blocks = self.cold_grid * self.shape.num_kv_heads
        if self._cold_gluon is None or wanted is None or blocks < wanted * self.num_sms:
            cold_suffix_attention(**cold)
        else:
            self._cold_gluon.cold_gluon_attention(
                **inputs, request_slots=self.request_slots, num_items=self.cold_grid,
                max_registers=self.layout.gluon_registers,
            )  # fmt: skip

    def _hot(self, layer: int, inputs: dict[str, Any], pdl: bool) -> None:
        layout = self.layout
        if layout.hot_gluon is not None and self._hot_gluon is not None:
            arenas = ("k_arena", "v_arena")
            self._hot_gluon.hot_gluon_attention(
                **{name: value for name, value in inputs.items() if name not in arenas},
                descriptors=self._descriptors[layout.hot_gluon][layer],
                tile=layout.hot_gluon, num_items=self.hot_grid,
            )  # fmt: skip
            return
        tile = layout.hot
        made = self._descriptors.get(tile.fit(self.shape).block_n) if tile.tma else None
        hot_prefix_attention(
            **inputs, descriptors=made[layer] if made else None, tile=tile,
            num_items=self.hot_grid, num_row_tiles=self.row_tiles, pdl=pdl,
        )  # fmt: skip


def _descriptor(arena: torch.Tensor, block_n: int) -> Any:
    """Of K or V [capacity, Hkv, D], for blocks of block_n tokens of one head."""
    return TensorDescriptor.from_tensor(arena.flatten(1), [block_n, arena.shape[2]])


def _query_dtype(stored: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """Of q beside KV that is stored as `stored`. Raises InvalidArgument."""
    found = dtype or (torch.bfloat16 if stored == FP8 else stored)
    if found not in QUERY_DTYPES or stored not in (FP8, found):
        raise InvalidArgument("dtype", found, f"one of {QUERY_DTYPES}, that of the arenas or FP8's")
    return found


def _layer_scales(
    kv_scales: torch.Tensor | None, num_layers: int, fp8_kv: bool
) -> list[tuple[float, float]]:
    """(K, V) of each layer, on the host: launches take them as scalars. Raises InvalidArgument."""
    if kv_scales is None:
        return [(1.0, 1.0)] * num_layers
    if not fp8_kv or tuple(kv_scales.shape) != (num_layers, 2):
        expected = f"[{num_layers}, 2], beside FP8 arenas only"
        raise InvalidArgument("kv_scales", tuple(kv_scales.shape), expected)
    return [(float(k), float(v)) for k, v in kv_scales.tolist()]
