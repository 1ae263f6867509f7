#!/usr/bin/env python3
"""Builds libgranikv_trt.so: kernels to cubins, their table, headers found, C++ compiled, loaded.

    python build_scripts/build_plugin.py                          all models, all architectures
    python build_scripts/build_plugin.py --arch 90 --models llama-3.1-8b,qwen3-8b

No GPU and no TensorRT are needed: Python packages and g++. In a container, its headers are used.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from granikv.errors import GraniKVError  # noqa: E402
from trtllm_plugin.aot import compile_all  # noqa: E402
from trtllm_plugin.header import (  # noqa: E402
    DEFAULT_ARCH,
    Arch,
    Elements,
    Jobs,
    Models,
    Tp,
    programs_for,
    write_table,
)
from trtllm_plugin.native import (  # noqa: E402
    BuildError,
    build_library,
    cuda_include,
    tensorrt_include,
)
from trtllm_plugin.table import Program  # noqa: E402

DEFAULT_OUT = ROOT / "out" / "plugin"


def load_and_check(library: Path) -> str:
    """The library's own summary. Raises BuildError when it does not load or rejects its table."""
    try:
        loaded = ctypes.CDLL(str(library))
    except OSError as error:
        raise BuildError(f"{library}: does not load: {error}") from error
    for name in ("granikvCheckTable", "granikvBuildSummary"):
        getattr(loaded, name).restype = ctypes.c_char_p
    wrong = loaded.granikvCheckTable().decode()
    if wrong:
        raise BuildError(f"{library}: {wrong}")
    return str(loaded.granikvBuildSummary().decode())


def build(
    programs: list[Program],
    out: Path,
    jobs: int = 0,
    tensorrt: Path | None = None,
    cuda: Path | None = None,
    cache: Path | None = None,
    progress: bool = True,
) -> Path:
    """The library with these kernels. Raises GraniKVError with what to do."""
    started, num_jobs = time.monotonic(), jobs or os.cpu_count() or 1
    cache = cache or out

    def say(text: str) -> None:
        if progress:
            typer.echo(f"[{time.monotonic() - started:5.1f} s] {text}")

    includes = [tensorrt_include(tensorrt, cache / "packages"), cuda_include(cuda)]
    say(f"headers: {', '.join(map(str, includes))}")
    kernels = compile_all(programs, cache / "kernels", num_jobs, progress)
    header, blob = write_table(programs, kernels, out / "generated")
    say(f"table: {len(programs)} programs, {blob.stat().st_size / 2**20:.1f} MiB of cubins")
    library, count = build_library(header.parent, out, cache / "objects", includes, num_jobs)
    say(f"C++: {count} sources compiled, {library.stat().st_size / 2**20:.1f} MiB linked")
    summary = load_and_check(library)
    say(f"{library}\n{summary}")
    return library


def main(
    models: Models = "all",
    elements: Elements = "all",
    arch: Arch = DEFAULT_ARCH,
    tp: Tp = "all",
    out: Annotated[Path, typer.Option(help="folder of the library")] = DEFAULT_OUT,
    jobs: Jobs = 0,
    tensorrt_include: Annotated[
        Path | None, typer.Option(help="folder with NvInferRuntime.h; found if not given")
    ] = None,
    cuda_include: Annotated[
        Path | None, typer.Option(help="folder with cuda_runtime_api.h; found if not given")
    ] = None,
) -> None:
    """Build libgranikv_trt.so."""
    try:
        programs = programs_for(models, elements, arch, tp)
        build(programs, out, jobs, tensorrt_include, cuda_include)
    except GraniKVError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    typer.run(main)
