"""What is compiled ahead of time: models x tensor-parallel splits x layouts x architectures.

Tiles, constants and options come from granikv.attention; here is only who needs which. A job
names a `*_build` function of the kernels and its arguments, so that it can go to a process.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from granikv.attention.kernels.append import append_build
from granikv.attention.kernels.build import KernelBuild
from granikv.attention.kernels.cold import cold_build
from granikv.attention.kernels.extend import extend_build
from granikv.attention.kernels.hot import hot_build
from granikv.attention.kernels.merge import merge_build, merge_heads
from granikv.attention.kernels.small import small_build
from granikv.attention.variants import (
    FIRST_WITH_DEPENDENT_LAUNCHES,
    LAYOUTS,
    AttentionShape,
    GluonTile,
    Layout,
    extend_tile,
    takes_descriptors,
    takes_gluon,
)
from granikv.errors import InvalidArgument

# Compute capability (major * 10 + minor) -> a block's shared memory in bytes. From 9.0 on a cubin
# serves that capability only; that of 8.0 serves all of 8.x whose shared memory it fits.
ARCHITECTURES = {
    80: 163 * 1024,
    86: 99 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
    103: 227 * 1024,
    120: 99 * 1024,
    121: 99 * 1024,
}
DEFAULT_ARCHITECTURES = (80, 90, 100, 103, 120, 121)
PINNED_TRITON = "3.6.0"  # the Makefile's; cubins are made with no other
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
TP_SIZES = (1, 2, 4, 8, 16)
HALF = ("bf16", "fp16")

# model: (num_qo_heads, num_kv_heads, head_dim, element types)
MODELS: dict[str, tuple[int, int, int, tuple[str, ...]]] = {
    "smollm2-135m": (9, 3, 64, ("bf16", "fp16", "fp32")),  # the embedded model
    "llama-3.2-1b": (32, 8, 64, HALF),
    "llama-3.2-3b": (24, 8, 128, HALF),
    "llama-3.1-8b": (32, 8, 128, HALF),
    "llama-3.3-70b": (64, 8, 128, HALF),
    "qwen2.5-0.5b": (14, 2, 64, HALF),
    "qwen2.5-1.5b": (12, 2, 128, HALF),
    "qwen2.5-3b": (16, 2, 128, HALF),
    "qwen2.5-7b": (28, 4, 128, HALF),
    "qwen2.5-14b": (40, 8, 128, HALF),
    "qwen2.5-32b": (40, 8, 128, HALF),
    "qwen2.5-72b": (64, 8, 128, HALF),
    "qwen3-0.6b": (16, 8, 128, HALF),
    "qwen3-1.7b": (16, 8, 128, HALF),
    "qwen3-4b": (32, 8, 128, HALF),
    "qwen3-8b": (32, 8, 128, HALF),
    "qwen3-14b": (40, 8, 128, HALF),
    "qwen3-32b": (64, 8, 128, HALF),
    "mistral-7b": (32, 8, 128, HALF),
    "mistral-nemo-12b": (32, 8, 128, HALF),
    "mistral-small-24b": (32, 8, 128, HALF),
}


def cold_gluon_build(shape: AttentionShape, max_registers: int | None) -> KernelBuild:
    """That of cold_gluon.py, imported where it is taken: its interface is the pinned Triton's."""
    from granikv.attention.kernels import cold_gluon

    return cold_gluon.cold_gluon_build(shape, max_registers)


def hot_gluon_build(shape: AttentionShape, tile: GluonTile) -> KernelBuild:
    """That of hot_gluon.py, likewise."""
    from granikv.attention.kernels import hot_gluon

    return hot_gluon.hot_gluon_build(shape, tile)


BUILDERS = {
    function.__name__: function
    for function in (
        append_build,
        hot_build,
        hot_gluon_build,
        cold_build,
        cold_gluon_build,
        small_build,
        merge_build,
        extend_build,
    )
}


@dataclass(frozen=True)
class Heads:
    """Attention heads of one tensor-parallel rank, and the element type of q and KV."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    element: str  # bf16, fp16 or fp32

    def on(self, capability: int) -> AttentionShape:
        return AttentionShape(
            self.num_qo_heads,
            self.num_kv_heads,
            self.head_dim,
            ELEMENT_BYTES[self.element],
            ARCHITECTURES[capability],
        )


def key_of(build: KernelBuild, element: str, capability: int) -> str:
    """Name of the cubin of `build`."""
    said = [build.name, build.signature(element), build.constants, build.options]
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]
    return f"sm{capability}-{build.name}-{digest}"


@dataclass(frozen=True)
class Job:
    """One cubin: a `*_build` function, its arguments, the element type, the architecture."""

    builder: str
    arguments: tuple[Any, ...]
    element: str
    capability: int

    def build(self) -> KernelBuild:
        return BUILDERS[self.builder](*self.arguments)

    @property
    def key(self) -> str:
        """Equal for jobs that give the same cubin; a file name."""
        return key_of(self.build(), self.element, self.capability)


@dataclass
class LayoutProgram:
    """The kernels of one layout: [dependent launch], and for COLD [has runs][dependent launch].

    hot_gluon: in the place of `hot`. cold_gluon: in the place of `cold` beside HOT, from
    layout.gluon_blocks_per_sm on.
    """

    layout: Layout
    merge_heads: int  # heads of a merge block
    small: list[Job | None] = field(default_factory=lambda: [None, None])  # [has runs]
    hot: list[Job | None] = field(default_factory=lambda: [None, None])
    hot_gluon: Job | None = None
    cold: list[list[Job | None]] = field(default_factory=lambda: [[None, None], [None, None]])
    cold_gluon: Job | None = None
    merge: list[Job | None] = field(default_factory=lambda: [None, None])


@dataclass
class Program:
    """All kernels of one layer's heads on one architecture."""

    heads: Heads
    capability: int
    append: Job
    extend: Job
    layouts: list[LayoutProgram]  # in the order of LAYOUTS: the index is `launch_dims[1]`

    def jobs(self) -> list[Job]:
        found: list[Job | None] = [self.append, self.extend]
        for part in self.layouts:
            found += [*part.small, *part.hot, part.hot_gluon]
            found += [*part.cold[0], *part.cold[1], part.cold_gluon, *part.merge]
        return [job for job in found if job is not None]


def heads_of(
    models: Iterable[str],
    elements: Iterable[str] | None = None,
    tp_sizes: Iterable[int] = TP_SIZES,
) -> list[Heads]:
    """Distinct heads of a rank of these models, at every TP size that cuts them (sharding.Shard):
    with more ranks than KV heads each rank has one. Many a size gives what another model has.

    elements: None takes all types of each model. Raises InvalidArgument for an unknown model or TP
    size, or for types and sizes that leave nothing.
    """
    models, wanted = list(models), None if elements is None else set(elements)
    tp_sizes = list(tp_sizes)
    for tp in tp_sizes:
        if tp not in TP_SIZES:
            raise InvalidArgument("tp", tp, f"one of {', '.join(map(str, TP_SIZES))}")
    found: dict[Heads, None] = {}
    for model in models:
        if model not in MODELS:
            raise InvalidArgument("models", model, f"one of {', '.join(MODELS)}")
        qo, kv, dim, types = MODELS[model]
        for tp in tp_sizes:
            if qo % tp == 0 and (kv % tp == 0 or tp % kv == 0):
                for element in types:
                    if wanted is None or element in wanted:
                        found[Heads(qo // tp, max(1, kv // tp), dim, element)] = None
    if not found:
        expected = (
            f"a type of {models} ({', '.join(ELEMENT_BYTES)}), at a tp of {tp_sizes} that cuts it"
        )
        raise InvalidArgument("elements", sorted(wanted or ()), expected)
    return list(found)


def program(heads: Heads, capability: int) -> Program:
    """Which kernels GpuAttention launches for these heads, layout by layout.

    Raises InvalidArgument for an unknown architecture.
    """
    if capability not in ARCHITECTURES:
        raise InvalidArgument("arch", capability, f"one of {sorted(ARCHITECTURES)}")
    shape = heads.on(capability)
    dependent = capability >= FIRST_WITH_DEPENDENT_LAUNCHES
    has_gluon = heads.element == "bf16" and takes_gluon(shape, capability, PINNED_TRITON)

    def job(builder: Any, *arguments: Any) -> Job:
        return Job(builder.__name__, arguments, heads.element, capability)

    def hot(tile: Any, pdl: bool) -> Job:
        return job(hot_build, shape, tile, takes_descriptors(tile, shape, capability), pdl)

    layouts = []
    for layout in LAYOUTS.values():
        part = LayoutProgram(layout, merge_heads(shape, layout.merge))
        # dependent launches where the step's launches follow each other on one stream
        may_depend = [dependent] if layout.one_launch else [False, dependent]
        if has_gluon and layout.hot_gluon is not None:
            part.hot_gluon = job(hot_gluon_build, shape, layout.hot_gluon)
        if has_gluon and layout.gluon_blocks_per_sm is not None:
            part.cold_gluon = job(cold_gluon_build, shape, layout.gluon_registers)
        for pdl in sorted(set(may_depend)):
            part.merge[pdl] = job(merge_build, shape, layout.merge, pdl)
            if not layout.one_launch and part.hot_gluon is None:
                part.hot[pdl] = hot(layout.hot, pdl)
            for runs in (False, True):
                part.cold[runs][pdl] = job(cold_build, shape, layout.cold, runs, pdl)
        if layout.one_launch:
            for runs in (False, True):
                part.small[runs] = job(
                    small_build, shape, layout.hot, layout.cold.block_n, runs, dependent
                )
        layouts.append(part)
    return Program(
        heads,
        capability,
        job(append_build, shape, True, dependent),
        job(extend_build, shape, extend_tile(shape)),
        layouts,
    )
