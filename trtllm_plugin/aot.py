"""Compiles the attention kernels to cubins without a GPU: python -m trtllm_plugin.aot --help

A cubin is cached under a hash of the kernels' sources, the variant table and Triton's version.
It knows nothing of TensorRT; header.py writes what the plugin reads.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from granikv.attention.kernels import build as kernel_build
from granikv.errors import GraniKVError
from granikv.processes import die_with_parent
from trtllm_plugin.table import ARCHITECTURES, PINNED_TRITON, Job, Program

SIZES = {"p": 8, "i": 4, "f": 4, "l": 8, "m": 128}  # bytes of a parameter, by kind
PTX_SIZES = {"u64": 8, "b64": 8, "s64": 8, "u32": 4, "b32": 4, "s32": 4, "f32": 4}


class CompileError(GraniKVError):
    """A kernel does not compile, or does not fit its architecture."""


def source_hash() -> str:
    """Of all that decides what a cubin is, besides its key."""
    kernels = Path(kernel_build.__file__).parent
    sources = [*sorted(kernels.glob("*.py")), kernels.parent / "variants.py", Path(__file__)]
    digest = hashlib.sha256(PINNED_TRITON.encode())
    for path in sources:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def compile_job(job: Job) -> Any:
    """Triton's CompiledKernel for the job. Needs the pinned Triton, no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    if triton.__version__ != PINNED_TRITON:
        raise CompileError(f"triton: expected {PINNED_TRITON}, got {triton.__version__}")
    if triton.knobs.runtime.interpret:
        raise CompileError("TRITON_INTERPRET is set: unset it to compile kernels")
    build = job.build()
    kind = GluonASTSource if build.kernel.is_gluon() else ASTSource
    source = kind(
        build.kernel, build.signature(job.element), build.indexed_constants(), build.attributes()
    )
    target = GPUTarget("cuda", job.capability, 32)
    return triton.compile(source, target=target, options=dict(build.options))


def parameters(job: Job, described: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(name, kind) of each parameter of the cubin, kinds as in SIZES.

    described: Triton's `tensordesc_meta`, one entry per descriptor that became a tensor map. A
    map is followed by its shape and strides; two scratch pointers end every list.
    """
    build, found, maps = job.build(), [], 0
    for name, kind in build.types.items():
        if kind.startswith("*"):
            found.append((name, "p"))
        elif kind.startswith("tensordesc"):
            if maps >= len(described):
                raise CompileError(f"{job.key}: {name} did not become a tensor map")
            maps += 1
            found.append((name, "m"))
            found += [(f"{name}_shape{i}", "i") for i in range(2)]
            found += [(f"{name}_stride{i}", "l") for i in range(2)]
        else:
            found.append((name, {"i32": "i", "fp32": "f"}[kind]))
    return [*found, ("global_scratch", "p"), ("profile_scratch", "p")]


def ptx_sizes(ptx: str) -> list[int]:
    """Bytes of each parameter of the kernel, as its PTX declares them."""
    declared = ptx[ptx.index(".entry") :]
    declared = declared[: declared.index(")")]
    sizes = []
    for line in re.findall(r"\.param[^,\n]*", declared):
        array = re.search(r"\.b8 \S+\[(\d+)\]", line)
        scalar = re.search(r"\.([usbf]\d+)", line)
        assert array or scalar, line
        sizes.append(int(array[1]) if array else PTX_SIZES[scalar[1]] if scalar else 0)
    return sizes


def describe(job: Job, compiled: Any) -> dict[str, Any]:
    """What the plugin must know to launch the cubin. Raises CompileError if it could not."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    meta = compiled.metadata
    maps = list(getattr(meta, "tensordesc_meta", None) or [])
    params = parameters(job, maps)
    expected = [SIZES[kind] for _, kind in params]
    if ptx_sizes(compiled.asm["ptx"]) != expected:
        raise CompileError(
            f"{job.key}: parameters are {ptx_sizes(compiled.asm['ptx'])} bytes, expected {expected}"
        )
    limit = ARCHITECTURES[job.capability]
    if meta.shared > limit:
        raise CompileError(f"{job.key}: {meta.shared} bytes of shared memory, limit {limit}")
    if meta.num_ctas != 1 or meta.profile_scratch_size or any(m != maps[0] for m in maps):
        raise CompileError(f"{job.key}: a cluster, a profile scratch or maps that differ")
    tensor_map = None
    if maps:
        tensor_map = {
            "swizzle": maps[0]["swizzle"],
            "element_bytes": maps[0]["elem_size"],
            "data_type": TMA_DTYPE_DEVICE_TO_HOST[maps[0]["elem_type"]],
            "box": maps[0]["block_size"],
        }
    return {
        "kernel": meta.name,
        "capability": job.capability,
        "parameters": params,
        "shared_bytes": meta.shared,
        "num_warps": meta.num_warps,
        "scratch_bytes": meta.global_scratch_size,
        "scratch_align": meta.global_scratch_align,
        "tensor_map": tensor_map,
        "constants": job.build().constants,
    }


def _make(job: Job, folder: Path) -> None:
    """Compile into folder/KEY.cubin and KEY.json; the JSON comes last and marks it as complete."""
    try:
        compiled = compile_job(job)
        described = describe(job, compiled)
    except CompileError:
        raise
    except Exception as error:
        raise CompileError(f"{job.key}: {type(error).__name__}: {error}") from error
    for suffix, content in (
        (".cubin", compiled.asm["cubin"]),
        (".json", json.dumps(described, indent=1).encode()),
    ):
        partial = folder / f".{job.key}.{os.getpid()}{suffix}"
        partial.write_bytes(content)
        partial.replace(folder / f"{job.key}{suffix}")


def _start_worker(scratch: str, parent_pid: int) -> None:
    die_with_parent(parent_pid)  # or it waits for work for good when that is killed
    # line tables double a cubin; Triton's own cache would keep a second copy of each
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    os.environ["TRITON_CACHE_DIR"] = scratch


def compile_all(
    programs: Iterable[Program], cache: Path, num_jobs: int | None = None, progress: bool = True
) -> Path:
    """Compile what is missing, in num_jobs processes; returns the folder of the cubins.

    Raises CompileError, which names the kernel.
    """
    from rich.progress import Progress, TimeElapsedColumn

    folder = cache / source_hash()
    folder.mkdir(parents=True, exist_ok=True)
    jobs = {job.key: job for made in programs for job in made.jobs()}
    missing = [job for key, job in jobs.items() if not (folder / f"{key}.json").exists()]
    columns = (*Progress.get_default_columns(), TimeElapsedColumn())
    with Progress(*columns, disable=not progress) as bar:
        task = bar.add_task(f"{len(jobs)} kernels", total=len(jobs))
        bar.update(task, completed=len(jobs) - len(missing))
        if missing:
            with (
                tempfile.TemporaryDirectory(dir=folder, prefix=".triton-") as scratch,
                ProcessPoolExecutor(
                    min(num_jobs or os.cpu_count() or 1, len(missing)),
                    mp_context=get_context("spawn"),
                    initializer=_start_worker,
                    initargs=(scratch, os.getpid()),
                ) as pool,
            ):
                running = [pool.submit(_make, job, folder) for job in missing]
                try:
                    for done in as_completed(running):
                        done.result()
                        bar.advance(task)
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
    return folder


if __name__ == "__main__":
    from trtllm_plugin.header import main

    main()
