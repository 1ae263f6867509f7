"""A step as files for the test host, and the launches that GpuAttention makes for it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from granikv.attention import gpu, reference
from granikv.attention.kernels.build import KernelBuild
from granikv.attention.variants import LAYOUTS, Layout
from granikv.core import Count
from tests.kernels.support import DEVICE, Row, Step
from trtllm_plugin.table import ARCHITECTURES

ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
PLAN_INPUTS = (
    "counts",
    "row_request",
    "row_position",
    "slot_mapping",
    "hot_items",
    "hot_rows",
    "cold_items",
    "merge_indptr",
    "merge_partials",
    "qo_indptr",
    "extend_indptr",
    "extend_segments",
    "extend_tiles",
)
LAYER, BINDING = 1, 7


@dataclass
class Launch:
    """One launch of GpuAttention: the kernel's description, its grid and arguments by name.

    side: on the second stream.
    """

    build: KernelBuild
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    side: bool


def whole_blocks(rows: list[Row], layout: Layout) -> list[Row]:
    """The rows; where the layout has a Gluon tile, with HOT spans of at least one of its blocks."""
    least = layout.hot_gluon.block_n if layout.hot_gluon else 0
    return [replace(r, hot=[(g, start, max(n, least)) for g, start, n in r.hot]) for r in rows]


def raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def packed_rows(step: Step) -> torch.Tensor:
    """[rows, (Hq + 2 Hkv) * D]: q, k and v before rope."""
    rows = step.q.shape[0]
    return torch.cat([x.reshape(rows, -1) for x in (step.q, step.new_k, step.new_v)], 1)


def angles(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    half = step.dim // 2
    turn = torch.arange(step.request_slots.shape[1])[:, None] * 0.97 ** torch.arange(half)
    return turn.float().cos().contiguous(), turn.float().sin().contiguous()


def prepared(
    step: Step, capture: bool = False, capability: int = 0, num_sms: int = 132
) -> gpu.GpuAttention:
    """Attention with rope that has the step's plan.

    capability, num_sms: of a GPU that is only imagined; 0: what the tests run on.
    """
    attention = step.attention()
    if capability:
        attention.capability, attention.pdl = capability, capability >= 90
        attention.num_sms = num_sms
        shared = ARCHITECTURES.get(capability, ARCHITECTURES[80])
        attention.shape = replace(attention.shape, shared_memory_bytes=shared)
        attention._find_gluon()
    attention.rope = tuple(x.to(DEVICE) for x in angles(step))
    attention.prepare(step.plan, step.split.layout, capture)
    return attention


def run_rows(step: Step, attention: gpu.GpuAttention) -> torch.Tensor:
    """GpuAttention's output for the packed rows, on its device."""
    rows, (qo, kv) = packed_rows(step).to(DEVICE), step.heads
    q, k, v = rows.view(len(rows), qo + 2 * kv, step.dim).split([qo, kv, kv], 1)
    return attention.run(LAYER, q, k, v)


def record(
    step: Step, monkeypatch, capture: bool = False, capability: int = 90, num_sms: int = 132
) -> list[Launch]:
    """What GpuAttention launches on a GPU of this capability, in order; nothing runs."""
    made: list[Launch] = []
    on_side: list[Any] = []

    def keep(build: KernelBuild, grid: tuple[int, ...], *arguments: Any) -> None:
        named = dict(zip(build.types, arguments, strict=True))
        made.append(Launch(build, grid, named, bool(on_side)))

    @contextmanager
    def stream(entered: Any) -> Iterator[None]:
        on_side.append(entered)
        yield
        on_side.pop()

    attention = prepared(step, capture, capability, num_sms)
    nothing = SimpleNamespace(record=lambda: None, wait_event=lambda event: None)
    attention._side = attention._fork = attention._join = nothing
    attention.on_gpu = True
    with monkeypatch.context() as patch:
        patch.setattr(KernelBuild, "launch", keep)
        patch.setattr(torch.cuda, "stream", stream)
        patch.setattr(torch.cuda, "current_stream", lambda: nothing)
        run_rows(step, attention)
    return made


def twin(step: Step) -> torch.Tensor:
    """The oracle's output fp32 [T, Hq * D] of the packed rows; q and k are rounded after rope."""
    total = int(step.plan.counts[Count.NUM_ROWS])
    position = torch.from_numpy(step.plan.row_position[:total]).long()
    cos, sin = (x[position][:, None] for x in angles(step))

    def rotated(x: torch.Tensor) -> torch.Tensor:
        low, high = x[:total].float().chunk(2, dim=-1)
        turned = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
        return turned.to(step.dtype).float()

    return reference.attention_step(
        rotated(step.q),
        rotated(step.new_k),
        step.new_v[:total].float(),
        step.k[LAYER].to(torch.float32, copy=True),  # it appends
        step.v[LAYER].to(torch.float32, copy=True),
        step.request_slots,
        step.plan,
        step.dim**-0.5,
    )


def write_step(
    step: Step, folder: Path, attention: gpu.GpuAttention, bind: bool = True, **changes: int
) -> None:
    """The step's inputs in the format of trtllm_plugin/tests/run_step.h.

    changes: entries of launch_dims, or workspace_offset, instead of the step's own.
    """
    rows = len(step.q)
    used = _used(step, attention)
    cos, sin = angles(step)
    tensors = [packed_rows(step), cos, sin, step.request_slots]
    tensors += [attention.plan[name][: used.get(name, 1 << 30)] for name in PLAN_INPUTS]
    has_decode = bool(attention.num_decode_rows or rows > attention.num_rows)
    layout = list(LAYOUTS).index(attention.layout.name)
    launch_dims = [0, layout, launch_size(attention, "row_tiles")]
    launch_dims += [int(launch_size(attention, "has_runs")), int(has_decode)]
    shapes = [list(t.shape) for t in tensors] + [[*launch_dims, BINDING]]
    num_layers, capacity = step.k.shape[:2]
    lines = [
        f"field layer i32:{LAYER}",
        f"field num_qo_heads i32:{step.heads[0]}",
        f"field num_kv_heads i32:{step.heads[1]}",
        f"field head_dim i32:{step.dim}",
        f"field max_partials i32:{attention.o_partials.shape[0]}",
        f"element {ELEMENTS[step.dtype]}",
        *(f"{key} {value}" for key, value in changes.items()),
        f"num_layers {num_layers}",
        f"capacity {capacity}",
        f"num_qo_heads {step.heads[0]}",
        f"num_kv_heads {step.heads[1]}",
        f"head_dim {step.dim}",
        f"binding {BINDING}",
        f"max_rows {rows + 5}",
        f"bind {int(bind)}",
    ]
    for index, shape in enumerate(shapes):
        name = "-"
        if index < len(tensors) and tensors[index].numel():
            name = f"{index}.bin"
            (folder / name).write_bytes(raw(tensors[index]))
        lines.append(f"tensor {index} {len(shape)} {' '.join(map(str, shape))} {name}")
    (folder / "k.bin").write_bytes(raw(step.k))
    (folder / "v.bin").write_bytes(raw(step.v))
    (folder / "manifest.txt").write_text("\n".join(lines) + "\n")


def zero_rows(folder: Path) -> None:
    """Changes a written step to one whose qkv has no rows."""
    manifest = folder / "manifest.txt"
    text, count = re.subn(r"^tensor 0 2 \d+ (\d+) \S+$", r"tensor 0 2 0 \1 -", manifest.read_text(),
                          flags=re.MULTILINE)  # fmt: skip
    assert count == 1
    manifest.write_text(text)


def launch_size(attention: gpu.GpuAttention, name: str) -> int:
    """A grid or flag of the prepared plan; some versions keep them private."""
    return int(vars(attention).get(name, vars(attention).get(f"_{name}")))


def _used(step: Step, attention: gpu.GpuAttention) -> dict[str, int]:
    """First dimension of the inputs that are as long as the grid, or as what is in use."""
    counts = step.plan.counts
    return {
        "hot_items": launch_size(attention, "hot_grid"),
        "cold_items": launch_size(attention, "cold_grid"),
        "extend_tiles": launch_size(attention, "num_tiles"),
        "hot_rows": len(step.plan.hot_rows),
        "merge_partials": len(step.plan.merge_partials),
        "extend_segments": len(step.plan.extend_segments),
        "merge_indptr": int(counts[1]) + 1,
        "qo_indptr": int(counts[2]) + 1,
        "extend_indptr": int(counts[2]) + 1,
    }


def run_host(host: Path, library: Path, *arguments: object, env: dict | None = None) -> str:
    """Output of the test host. Raises AssertionError with its message when it fails."""
    done = subprocess.run(
        [str(host), str(library), *map(str, arguments)],
        capture_output=True, text=True, timeout=120, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.strip()
    return done.stdout


def read_out(path: Path, step: Step) -> torch.Tensor:
    bits = {torch.float32: np.int32}.get(step.dtype, np.int16)
    return torch.from_numpy(np.frombuffer(path.read_bytes(), bits).copy()).view(step.dtype)
