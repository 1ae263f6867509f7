"""The compiled CPU kernels, called with tensors; `library` is None where they are not to be had.

They attend a shared prefix for all its rows at once, and scattered slots without a gather, do what
the rows need before and after (rope, append, merge), multiply few rows by a weight and do what
lies between the products. They know nothing of plans: cpu.py decides which spans come here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from granikv.native.build import kernel_name, library

__all__ = [
    "Heads", "ProductShape", "RowShape", "Rows", "Span", "Spans", "add_rms_norm", "kernel_name",
    "library", "multiplies", "product", "silu_mul", "takes",
]  # fmt: skip

MAX_HEAD_DIM = 256
MAX_STATE_FLOATS = 1024  # heads x head size of one task: its states stay in the cache
TASK = np.dtype(
    [
        (name, np.int64)
        for name in (
            "start",
            "length",
            "rows",
            "num_rows",
            "first_head",
            "num_heads",
            "first_part",
            "slots",
        )  # fmt: skip
    ]
)


@dataclass(frozen=True)
class Span:
    """Tokens that every one of `rows` sees: the run from `start` on, or `slots`.

    rows: int64 [R]; slots: int32 [length] or None. length is a multiple of num_splits (1 for
    slots); split i of row r gives part first_part + i * R + r.
    """

    rows: np.ndarray
    length: int
    first_part: int
    start: int = 0
    num_splits: int = 1
    slots: np.ndarray | None = None


class Heads(ctypes.Structure):
    _fields_ = (
        ("num_kv_heads", ctypes.c_int32),
        ("group_size", ctypes.c_int32),
        ("dim", ctypes.c_int32),
        ("sm_scale", ctypes.c_float),
    )


class Spans:
    """Spans of one step, ready for all its layers."""

    def __init__(self, library: ctypes.CDLL, heads: Heads, spans: Sequence[Span]):
        self._call, self._heads = library.granikv_spans, heads
        self._arrays: list[np.ndarray] = []  # the tasks point into them
        # as many heads together as leave a task for every thread
        num_pieces = sum(span.num_splits for span in spans)
        together = -(-heads.num_kv_heads * num_pieces // torch.get_num_threads())
        most = MAX_STATE_FLOATS // heads.dim
        self._heads_together = max(1, min(together, heads.num_kv_heads, most))
        tasks = [self._tasks_of(span) for span in spans]
        self._tasks = np.concatenate(tasks) if tasks else np.empty(0, TASK)
        work = self._tasks["length"] * self._tasks["num_rows"] * self._tasks["num_heads"]
        self._tasks = self._tasks[np.argsort(-work, kind="stable")]  # the short ones fill the end
        self._tasks_at = self._tasks.ctypes.data

    def _tasks_of(self, span: Span) -> np.ndarray:
        first_head = np.arange(0, self._heads.num_kv_heads, self._heads_together)
        tasks = np.zeros((span.num_splits, len(first_head)), TASK)
        length, split = span.length // span.num_splits, np.arange(span.num_splits)[:, None]
        tasks["start"] = span.start + split * length
        tasks["length"], tasks["num_rows"] = length, len(span.rows)
        tasks["rows"] = self._address(span.rows, np.int64)
        tasks["first_head"] = first_head
        tasks["num_heads"] = np.minimum(self._heads_together, self._heads.num_kv_heads - first_head)
        tasks["first_part"] = span.first_part + split * len(span.rows)
        if span.slots is not None:
            tasks["slots"] = self._address(span.slots, np.int32)
        return tasks.ravel()

    def _address(self, array: np.ndarray, dtype: type) -> int:
        self._arrays.append(np.ascontiguousarray(array, dtype))
        return self._arrays[-1].ctypes.data

    def run(
        self,
        q: torch.Tensor,
        k_layer: torch.Tensor,
        v_layer: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """q [T, Hq, D], k_layer and v_layer [capacity, Hkv, D] -> o [parts, Hq, D] and natural
        lse [parts, Hq], at the spans' parts; all float32 and contiguous."""
        pointers = (x.data_ptr() for x in (q, k_layer, v_layer, o, lse))
        heads = ctypes.addressof(self._heads)
        self._call(self._tasks_at, len(self._tasks), heads, *pointers, torch.get_num_threads())


class RowShape(ctypes.Structure):
    _fields_ = (
        ("num_qo_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("dim", ctypes.c_int32),
    )


class Rows:
    """Rope, append and merge of one step's rows, for all its layers.

    slots: int32 [T]; angles: cos and sin of each row, float32 [T, D / 2], or None: no rope.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        shape: RowShape,
        slots: np.ndarray,
        angles: tuple[torch.Tensor, torch.Tensor] | None,
    ):
        self._library, self._shape = library, shape
        self._slots = np.ascontiguousarray(slots, np.int32)
        self._angles = None if angles is None else tuple(x.contiguous() for x in angles)
        self._q = torch.empty(len(slots), shape.num_qo_heads, shape.dim)

    def append(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_layer: torch.Tensor,
        v_layer: torch.Tensor,
    ) -> torch.Tensor:
        """Write k and v [T, Hkv, D] to the rows' slots of the layer, k after rope.

        Returns q [T, Hq, D] after rope, contiguous, valid until the next call. Within a row the
        heads lie side by side; rows may be apart.
        """
        strided = (x for row in (q, k, v) for x in (row.data_ptr(), row.stride(0)))
        cos, sin = (x.data_ptr() for x in self._angles) if self._angles else (None, None)
        self._library.granikv_append(
            ctypes.addressof(self._shape), len(self._slots), *strided, cos, sin,
            self._slots.ctypes.data, self._q.data_ptr(), k_layer.data_ptr(), v_layer.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return self._q

    def merge(self, o: torch.Tensor, lse: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Rows [R, Hq, D] from parts o [P, Hq, D], natural lse [P, Hq]; index int64 [R, most]."""
        out = torch.empty(len(index), *o.shape[1:])
        self._library.granikv_merge(
            ctypes.addressof(self._shape), *index.shape, index.data_ptr(), o.data_ptr(),
            lse.data_ptr(), out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out


class ProductShape(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64) for name in ("num_rows", "width", "num_outputs", "x_stride")
    )


def multiplies(x: torch.Tensor) -> bool:
    """Whether `product` serves the rows x [T, N]: few, float32, numbers of a row side by side."""
    if x.dtype != torch.float32 or x.device.type != "cpu" or x.stride(1) != 1:
        return False
    loaded = library()
    return loaded is not None and 0 < len(x) <= loaded.granikv_max_product_rows()


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x weight^T + bias [T, M] of an x that `multiplies` names; weight [M, N], bias [M] or None,
    float32 and contiguous. Raises ValueError for widths that differ."""
    loaded = library()
    assert loaded is not None
    if x.shape[1] != weight.shape[1]:
        raise ValueError(f"x: expected {weight.shape[1]} columns, got {x.shape[1]}")
    y = torch.empty(len(x), len(weight))
    shape = ProductShape(len(x), weight.shape[1], len(weight), x.stride(0))
    at = None if bias is None else bias.data_ptr()
    loaded.granikv_product(
        ctypes.addressof(shape), x.data_ptr(), weight.data_ptr(), at, y.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return y


def takes(*rows: torch.Tensor | None) -> bool:
    """Whether `add_rms_norm` and `silu_mul` serve these: contiguous float32 on the CPU."""
    return library() is not None and all(
        x is None or (x.dtype == torch.float32 and x.device.type == "cpu" and x.is_contiguous())
        for x in rows
    )


def add_rms_norm(
    delta: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """delta, x [T, N], weight [N] -> (normed, x + delta), both [T, N]; all that `takes` names."""
    loaded = library()
    assert loaded is not None
    normed = torch.empty_like(delta)
    total = delta if x is None else torch.empty_like(delta)
    loaded.granikv_add_rms_norm(
        *delta.shape, delta.data_ptr(), None if x is None else x.data_ptr(), weight.data_ptr(), eps,
        normed.data_ptr(), total.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return normed, total


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 F], gate first, that `takes` names -> silu(gate) * up [T, F]."""
    loaded = library()
    assert loaded is not None
    num_rows, width = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty(num_rows, width)
    loaded.granikv_silu_mul(
        num_rows, width, gate_up.data_ptr(), out.data_ptr(), torch.get_num_threads()
    )
    return out
