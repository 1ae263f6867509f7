"""Builds the compiled CPU kernel with the machine's C++ compiler at first use; kept in the cache.

It is loaded beside torch and runs on torch's OpenMP threads. Without a compiler, or with
GRANIKV_NATIVE=0, `library` is None and torch's operators do the same work.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from granikv import env
from granikv.outputs import write_atomically

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
SOURCES = tuple(FOLDER / name for name in ("spans.cpp", "rows.cpp", "product.cpp", "layer.cpp"))
HEADERS = (FOLDER / "vectors.h",)
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-ffp-contract=fast", "-fopenmp",
)  # fmt: skip
VERSION_TIMEOUT_S, BUILD_TIMEOUT_S = 10, 120
CHECKSUM_BYTES = 32


@functools.cache
def library() -> ctypes.CDLL | None:
    """The loaded kernel, or None where it cannot be built or is switched off."""
    if not env.read("GRANIKV_NATIVE"):
        return None
    named = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if named is None:
        log.info("no C++ compiler: shared prefixes are attended by torch alone")
        return None
    try:
        return _load(shlex.split(named))
    except (OSError, subprocess.SubprocessError, ValueError, AttributeError) as error:
        text = getattr(error, "stderr", None) or str(error)
        log.warning(
            "the CPU kernel could not be built, torch alone attends: %s", text.strip()[-500:]
        )
        return None


def _load(compiler: list[str]) -> ctypes.CDLL:
    """The library for this source, compiler and processor; compiled if the cache has no whole one.

    A new one is loaded before it is kept, and kept with its checksum behind it: a file that was
    cut would end the process when its missing pages are touched.
    """
    version = _run([*compiler, "--version"], VERSION_TIMEOUT_S)
    key = (*_texts(), compiler, *FLAGS, version, _processor(), torch.__version__)
    name = f"attention-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.so"
    folder = _cache_folder()
    if folder is not None and _is_whole(folder / name):
        return _open(folder / name)
    with tempfile.TemporaryDirectory(prefix="granikv-") as build:
        made = Path(build) / name
        _compile(compiler, made)
        loaded = _open(made)
        try:
            if folder is not None:
                _keep(made.read_bytes(), folder / name)
        except OSError as error:
            log.warning("the CPU kernel could not be kept in %s: %s", folder, error)
    return loaded


def _texts() -> list[str]:
    return [file.read_text() for file in (*SOURCES, *HEADERS)]


def kernel_name() -> str:
    """What attends here: another source, compiler or processor has another name, and other times."""
    loaded = library()
    return "torch" if loaded is None else Path(loaded._name).stem


def _cache_folder() -> Path | None:
    try:
        return Path.home() / ".cache" / "granikv"
    except RuntimeError:  # no HOME, and no such user
        return None


def _open(path: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(path))
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    loaded.granikv_spans.argtypes = [pointer, integer, *[pointer] * 6, ctypes.c_int]
    rows: list[Any] = [pointer, integer]
    loaded.granikv_append.argtypes = [*rows, *rows, *rows, *rows, *[pointer] * 6, ctypes.c_int]
    loaded.granikv_merge.argtypes = [pointer, integer, integer, *[pointer] * 4, ctypes.c_int]
    loaded.granikv_product.argtypes = [*[pointer] * 5, ctypes.c_int]
    loaded.granikv_max_product_rows.restype = integer
    loaded.granikv_add_rms_norm.argtypes = [
        integer, integer, *[pointer] * 3, ctypes.c_float, *[pointer] * 2, ctypes.c_int,
    ]  # fmt: skip
    loaded.granikv_silu_mul.argtypes = [integer, integer, *[pointer] * 2, ctypes.c_int]
    for function in (
        loaded.granikv_spans, loaded.granikv_append, loaded.granikv_merge, loaded.granikv_product,
        loaded.granikv_add_rms_norm, loaded.granikv_silu_mul,
    ):  # fmt: skip
        function.restype = None
    return loaded


def _is_whole(path: Path) -> bool:
    try:
        data = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(data[:-CHECKSUM_BYTES]).digest() == data[-CHECKSUM_BYTES:]


def _keep(data: bytes, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, data + hashlib.sha256(data).digest())


def _compile(compiler: list[str], path: Path) -> None:
    options = [*FLAGS, "-shared", "-fPIC", "-o", str(path), *map(str, SOURCES)]
    _run([*compiler, *options], BUILD_TIMEOUT_S)


def _run(command: list[str], timeout_s: float) -> str:
    """Its output. Raises SubprocessError with what it wrote; one that hangs is killed with all
    that it started."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, out, errors)
    return out


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return "".join(sorted({x for x in lines if x.startswith(("flags", "Features", "model name"))}))
