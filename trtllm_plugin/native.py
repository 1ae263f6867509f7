"""Compiles and links libgranikv_trt.so with g++: finds the headers, keeps objects by content.

Headers are taken from where they are installed, never copied into the project: those of a
container or toolkit, else TensorRT's from the package kernel-lens and CUDA's from Triton.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from granikv.errors import GraniKVError

SOURCES = Path(__file__).parent / "src"
HEADER_PACKAGE = "kernel-lens==2.0.1"  # holds the headers of TensorRT 10.14.1
TENSORRT_FOLDERS = (
    "/usr/include/x86_64-linux-gnu",
    "/usr/include/aarch64-linux-gnu",
    "/usr/local/tensorrt/include",
    "/opt/tensorrt/include",
)
FLAGS = "-std=c++17 -O2 -fPIC -fvisibility=hidden -Wall -Wextra -Wno-deprecated-declarations"
# The C++ library inside, and nothing but the entry points outside: CUDA libraries that a process
# has loaded for all export parts of a C++ library of their own, which ours would be bound to.
LINK_FLAGS = "-static-libstdc++ -static-libgcc -Wl,--exclude-libs,ALL -Wl,-z,defs"


class BuildError(GraniKVError):
    """A header, the compiler or a source that does not compile; says what to do."""


def tensorrt_include(given: Path | None, packages: Path) -> Path:
    """Folder with NvInferRuntime.h; fetches HEADER_PACKAGE (0.2 MB) into `packages` as a last resort."""
    if given is not None:
        if not (given / "NvInferRuntime.h").is_file():
            raise BuildError(
                f"--tensorrt-include: expected a folder with NvInferRuntime.h: {given}"
            )
        return given
    spec = importlib.util.find_spec("kernel_lens")
    installed = list(spec.submodule_search_locations or []) if spec else []
    places = [Path(folder) for folder in TENSORRT_FOLDERS]
    for root in (*installed, str(packages / "kernel_lens")):
        places.append(Path(root, "include", "tensorrt"))
    for place in places:
        if (place / "NvInferRuntime.h").is_file():
            return place
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    command += ["--no-deps", "--target", str(packages), HEADER_PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or not (places[-1] / "NvInferRuntime.h").is_file():
        raise BuildError(
            "NvInferRuntime.h: found neither in a container's folders nor by "
            f"`pip install --no-deps {HEADER_PACKAGE}`; give --tensorrt-include\n{done.stderr.strip()}"
        )
    return places[-1]


def cuda_include(given: Path | None) -> Path:
    """Folder with cuda.h and cuda_runtime_api.h: a toolkit's, or the one inside Triton."""
    if given is not None:
        places = [given]
    else:
        root = os.environ.get("CUDA_HOME", "/usr/local/cuda")
        places = [Path(root, "include")]
        spec = importlib.util.find_spec("triton")
        for folder in spec.submodule_search_locations or [] if spec else []:
            places.append(Path(folder, "backends", "nvidia", "include"))
    for place in places:
        # crt/host_defines.h: the runtime's package alone lacks it
        if all(
            (place / n).is_file() for n in ("cuda.h", "cuda_runtime_api.h", "crt/host_defines.h")
        ):
            return place
    looked = ", ".join(map(str, places))
    raise BuildError(f"cuda.h and cuda_runtime_api.h: not in {looked}; give --cuda-include")


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{what}: {' '.join(command)}\n{done.stdout}{done.stderr}")


def compiler() -> str:
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if not found:
        raise BuildError("g++: expected a C++17 compiler on PATH (Debian: apt-get install g++)")
    return found


def build_library(
    table: Path, out: Path, objects: Path, includes: list[Path], num_jobs: int
) -> tuple[Path, int]:
    """(out / libgranikv_trt.so, number of sources compiled) from the table's header and blob.

    An object is kept under the hash of its source, all headers and the command; only that of
    kernel_table.cpp depends on the table.
    """
    objects.mkdir(parents=True, exist_ok=True)
    blob = (table / "granikv_cubins.bin").resolve()
    base = [compiler(), *FLAGS.split(), f"-I{SOURCES}"]
    for folder in includes:
        base += ["-isystem", str(folder)]
    version = subprocess.run([base[0], "--version"], capture_output=True, text=True).stdout
    common = hashlib.sha256(f"{version} {' '.join(base)}".encode())
    for header in sorted(SOURCES.glob("*.h")):
        common.update(header.read_bytes())
    made: list[Path] = []
    todo: list[list[str]] = []
    for source in sorted(SOURCES.glob("*.cpp")):
        digest = common.copy()
        digest.update(source.read_bytes())
        command = list(base)
        if source.stem == "kernel_table":
            digest.update((table / "granikv_cubins.h").read_bytes() + blob.read_bytes())
            command += [f"-I{table}", f'-DGRANIKV_CUBIN_FILE="{blob}"']
        made.append(objects / f"{source.stem}-{digest.hexdigest()[:16]}.o")
        if not made[-1].exists():
            partial = made[-1].with_suffix(f".{os.getpid()}.part")
            todo.append([*command, "-c", str(source), "-o", str(partial)])

    def compile_one(command: list[str]) -> None:
        _run(command, Path(command[-3]).name)
        partial = Path(command[-1])
        partial.replace(partial.with_suffix("").with_suffix(".o"))

    with ThreadPoolExecutor(max(1, num_jobs)) as pool:
        list(pool.map(compile_one, todo))
    out.mkdir(parents=True, exist_ok=True)
    library = out / "libgranikv_trt.so"
    exports = SOURCES / "exports.map"
    flags = [f"-Wl,--version-script={exports}", *LINK_FLAGS.split()]
    parts = [*(path.name for path in made), exports.read_text(), LINK_FLAGS]
    stamp = hashlib.sha256(" ".join(parts).encode()).hexdigest()
    marker = objects / f"linked-{hashlib.sha256(str(library.resolve()).encode()).hexdigest()[:8]}"
    if not library.exists() or not marker.exists() or marker.read_text() != stamp:
        partial = out / f".libgranikv_trt.{os.getpid()}.so"
        link = [base[0], "-shared", "-o", str(partial), *map(str, made)]
        _run([*link, "-ldl", "-lpthread", *flags], "linking")
        partial.replace(library)
        marker.write_text(stamp)
    return library, len(todo)
