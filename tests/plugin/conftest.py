"""Builds the plugin for a few architectures once (kept in out/), its test host and a fake driver."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from granikv.errors import Unavailable
from trtllm_plugin.native import cuda_include, tensorrt_include
from trtllm_plugin.table import Heads, Program, program

ROOT = Path(__file__).resolve().parents[2]
HOST = ROOT / "trtllm_plugin" / "tests"
CACHE = ROOT / "out" / "plugin"
OUT = ROOT / "out" / ("plugin-test-gpu" if torch.cuda.is_available() else "plugin-test")


# on a GPU, at tp 1: heads of 64, and of 128 in groups of 2 to 8; README of trtllm_plugin has it, too
GPU_MODELS = "smollm2-135m,llama-3.1-8b,qwen2.5-7b,qwen2.5-14b,llama-3.3-70b,qwen3-0.6b"


def programs() -> list[Program]:
    """What the tests' library has kernels for: this machine's GPU, or a few without one."""
    from trtllm_plugin.header import programs_for  # it needs typer

    if torch.cuda.is_available():
        arch = "{}{}".format(*torch.cuda.get_device_capability())
        return programs_for(GPU_MODELS, "all", arch, "1")
    made = programs_for("smollm2-135m", "bf16", "80,90,120")
    # Llama-3.1-8B at tp 1, 2 and 4; the last where COLD has a Gluon kernel
    for num_qo_heads, capability in ((32, 80), (16, 80), (8, 90)):
        heads = Heads(num_qo_heads, num_qo_heads // 4, 128, "bf16")
        made.append(program(heads, capability))
    return made


def builder():
    """build_scripts/build_plugin.py as a module."""
    spec = importlib.util.spec_from_file_location(
        "build_plugin", ROOT / "build_scripts" / "build_plugin.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["build_plugin"] = module  # typer resolves annotations through it
    spec.loader.exec_module(module)
    return module


def make_library() -> Path:
    """The tests' library, built, or as it was brought here. Raises Unavailable without either."""
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if not (shutil.which("g++") or os.environ.get("CXX")):
        missing.append("g++")
    if not missing:
        return builder().build(programs(), OUT, cache=CACHE, progress=False)
    made = OUT / "libgranikv_trt.so"
    if not made.exists():
        raise Unavailable(f"building the plugin needs {', '.join(missing)}; or bring {made}")
    return made


@pytest.fixture(scope="session")
def library() -> Path:
    try:
        return make_library()
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def rtx() -> None:
    """Skips without TensorRT-RTX."""
    needed = ("tensorrt_rtx_bindings", "tensorrt_rtx_libs", "onnx")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(
            f"not installed: {', '.join(missing)}; install with: "
            ".venv/bin/python -m pip install -c build_scripts/constraints-cpu.txt -e '.[plugin]' "
            "(109 MB), then run this test again"
        )


def compile_once(name: str, options: list[str], sources: list[Path]) -> Path:
    """A program or library from the first of `sources`, again only when one of them changed."""
    folder = CACHE / "host"
    digest = hashlib.sha256(" ".join(options).encode())
    for source in sources:
        digest.update(source.read_bytes())
    made = folder / digest.hexdigest()[:16] / name
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        command = ["g++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Wno-deprecated-declarations"]
        command += [f"-I{HOST.parent / 'src'}", f"-I{HOST}", *options]
        for include in (tensorrt_include(None, CACHE / "packages"), cuda_include(None)):
            command += ["-isystem", str(include)]
        partial = made.with_name(f"{name}.{os.getpid()}")
        command += [str(sources[0]), "-o", str(partial), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        partial.replace(made)
    return made


def make_host() -> Path:
    """The test host's program."""
    headers = [*sorted(HOST.glob("*.h")), HOST.parent / "src" / "plugin_io.h"]
    return compile_once("host", [], [HOST / "host.cpp", *headers])


@pytest.fixture(scope="session")
def host(library) -> Path:
    return make_host()


@pytest.fixture(scope="session")
def fake_cuda(library) -> Path:
    """Folder with a libcuda.so.1 that writes launches down; see fake_cuda.cpp."""
    return compile_once("libcuda.so.1", ["-shared", "-fPIC"], [HOST / "fake_cuda.cpp"]).parent


@pytest.fixture(scope="session")
def fake_nccl(library) -> Path:
    """Folder with a libnccl.so.2 that prints what it is asked for."""
    return compile_once("libnccl.so.2", ["-shared", "-fPIC"], [HOST / "fake_nccl.cpp"]).parent
