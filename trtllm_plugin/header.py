"""Writes what the plugin is built from: one file of all cubins, and a C++ table of how to launch.

granikv_cubins.h     structs of src/kernel_table.h: cubins, programs, layout names
granikv_cubins.bin   the cubins one after another, 16-byte aligned; equal ones once
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from granikv.attention.variants import LAYOUTS
from granikv.errors import GraniKVError
from trtllm_plugin.aot import compile_all, source_hash
from trtllm_plugin.table import (
    ARCHITECTURES,
    DEFAULT_ARCHITECTURES,
    ELEMENT_BYTES,
    MODELS,
    PINNED_TRITON,
    TP_SIZES,
    Job,
    LayoutProgram,
    Program,
    heads_of,
    program,
)

DEFAULT_CACHE = Path("out/plugin/kernels")
DEFAULT_ARCH = ",".join(map(str, DEFAULT_ARCHITECTURES))
ELEMENTS = {"bf16": "kBF16", "fp16": "kHALF", "fp32": "kFLOAT"}  # of TensorRT's DataType
CUBIN_ALIGNMENT = 16

Models = Annotated[str, typer.Option(help=f"'all' or some of: {', '.join(MODELS)}")]
Elements = Annotated[str, typer.Option(help=f"'all' or some of: {', '.join(ELEMENT_BYTES)}")]
Arch = Annotated[str, typer.Option(help=f"compute capabilities, of {sorted(ARCHITECTURES)}")]
Tp = Annotated[str, typer.Option(help=f"tensor-parallel sizes, 'all' or some of {TP_SIZES}")]
Jobs = Annotated[int, typer.Option(help="processes; 0: one per core")]


def programs_for(models: str, elements: str, arch: str, tp: str = "all") -> list[Program]:
    """Programs of comma-separated options. Raises InvalidArgument with what is allowed."""
    sizes = TP_SIZES if tp == "all" else [int(n) if n.isdigit() else 0 for n in tp.split(",")]
    names = list(MODELS) if models == "all" else models.split(",")
    types = None if elements == "all" else elements.split(",")
    capabilities = [int(a) if a.isdigit() else 0 for a in arch.split(",")]
    return [program(heads, c) for c in capabilities for heads in heads_of(names, types, sizes)]


def _c_string(text: str) -> str:
    return json.dumps(text)


def _cubin_row(described: dict[str, Any], offset: int, size: int) -> str:
    parameters = " ".join(f"{name}:{kind}" for name, kind in described["parameters"])
    tensor_map = described["tensor_map"] or {
        "swizzle": 0,
        "element_bytes": 0,
        "data_type": 0,
        "box": [0, 0],
    }
    box = ", ".join(str(b) for b in tensor_map["box"])
    numbers = [
        described["capability"],
        f"{offset}u",
        f"{size}u",
        described["shared_bytes"],
        described["num_warps"],
        described["scratch_bytes"],
        described["scratch_align"],
    ]
    return (
        f"    {{{_c_string(described['kernel'])}, {', '.join(map(str, numbers))},\n"
        f"        {_c_string(parameters)},\n"
        f"        {{{tensor_map['data_type']}, {tensor_map['element_bytes']}, "
        f"{tensor_map['swizzle']}, {{{box}}}}}}},\n"
    )


def _layout_row(part: LayoutProgram, index: dict[str, int]) -> str:
    def at(job: Job | None) -> str:
        return "-1" if job is None else str(index[job.key])

    def pair(jobs: list[Job | None]) -> str:
        return f"{{{at(jobs[0])}, {at(jobs[1])}}}"

    flags = ", ".join(str(f).lower() for f in (part.layout.one_launch, part.layout.cold_first))
    cold = ", ".join(pair(jobs) for jobs in part.cold)
    return (
        f"            {{{pair(part.small)}, {pair(part.hot)}, {at(part.hot_gluon)}, "
        f"{{{cold}}}, {at(part.cold_gluon)}, {float(part.layout.gluon_blocks_per_sm or 0)}f, "
        f"{pair(part.merge)}, {part.merge_heads}, {flags}}},  // {part.layout.name}\n"
    )


def write_table(programs: list[Program], kernels: Path, out: Path) -> tuple[Path, Path]:
    """(header, blob) in `out` for compiled programs; files are left alone when nothing changed."""
    index: dict[str, int] = {}
    rows: list[str] = []
    places: dict[bytes, int] = {}
    blob = bytearray()
    for job in (job for made in programs for job in made.jobs()):
        if job.key in index:
            continue
        content = (kernels / f"{job.key}.cubin").read_bytes()
        digest = hashlib.sha256(content).digest()
        if digest not in places:
            blob += bytes(-len(blob) % CUBIN_ALIGNMENT)
            places[digest] = len(blob)
            blob += content
        described = json.loads((kernels / f"{job.key}.json").read_text())
        index[job.key] = len(rows)
        rows.append(_cubin_row(described, places[digest], len(content)))
    made_rows = []
    for made in programs:
        heads = made.heads
        layouts = "".join(_layout_row(part, index) for part in made.layouts)
        made_rows.append(
            f"    {{{made.capability}, {heads.num_qo_heads}, {heads.num_kv_heads}, "
            f"{heads.head_dim}, nvinfer1::DataType::{ELEMENTS[heads.element]}, "
            f"{index[made.append.key]}, {index[made.extend.key]},\n        {{\n{layouts}        }}}},\n"
        )
    names = ", ".join(_c_string(name) for name in LAYOUTS)
    text = (
        "// Generated by trtllm_plugin/header.py; do not edit.\n#pragma once\n"
        '#include "kernel_table.h"\n\nnamespace granikv::generated {\n\n'
        f"inline constexpr char kSourceHash[] = {_c_string(source_hash())};\n"
        f"inline constexpr char kTritonVersion[] = {_c_string(PINNED_TRITON)};\n"
        f"inline constexpr size_t kBlobBytes = {len(blob)};\n"
        f"static_assert(kNumLayouts == {len(LAYOUTS)});\n"
        f"inline constexpr char const* kLayoutNames[] = {{{names}}};\n\n"
        f"inline constexpr Cubin kCubins[] = {{\n{''.join(rows)}}};\n\n"
        f"inline constexpr Program kPrograms[] = {{\n{''.join(made_rows)}}};\n\n"
        "}  // namespace granikv::generated\n"
    )
    out.mkdir(parents=True, exist_ok=True)
    header, binary = out / "granikv_cubins.h", out / "granikv_cubins.bin"
    for path, wanted in ((header, text.encode()), (binary, bytes(blob))):
        if not path.exists() or path.read_bytes() != wanted:
            path.write_bytes(wanted)
    return header, binary


def run(
    models: Models = "all",
    elements: Elements = "all",
    arch: Arch = DEFAULT_ARCH,
    tp: Tp = "all",
    out: Annotated[Path, typer.Option(help="folder of the table")] = Path("out/plugin/generated"),
    cache: Annotated[Path, typer.Option(help="folder of compiled kernels")] = DEFAULT_CACHE,
    jobs: Jobs = 0,
) -> None:
    """Compile the kernels' cubins and write the table that the plugin is built from."""
    try:
        programs = programs_for(models, elements, arch, tp)
        kernels = compile_all(programs, cache, jobs or None)
    except GraniKVError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    header, blob = write_table(programs, kernels, out)
    typer.echo(f"{header}; {blob}: {blob.stat().st_size / 2**20:.1f} MiB")


def main() -> None:
    typer.run(run)


if __name__ == "__main__":
    main()
