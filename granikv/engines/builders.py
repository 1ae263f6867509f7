"""Which TensorRT is here, and builds by it, each in a process of its own that ends with this one.

TensorRT for RTX has no engine for compute capability 9.0; it is here for machines that it serves,
and for builds without a GPU.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path

from granikv.engines.io import NETWORK_INPUTS, NETWORK_OUTPUTS, EngineIO
from granikv.errors import EngineMismatch, InvalidArgument, Unavailable
from granikv.processes import start_owned

BUILDERS = ("auto", "tensorrt", "rtx", "none")
# TensorRT for RTX builds for 7.5 too, which no kernel of the plugin runs on
RTX_COMPUTE_CAPABILITIES = ("8.0", "8.6", "8.9", "12.0", "12.1")
TRT_TYPES = {"int32": "INT32", "float32": "FLOAT"}  # of DataType, by the table's names
RTX_LIBRARY = "libtensorrt_rtx.so"  # its parser opens it by this name, without a version


@dataclass(frozen=True)
class BuildRequest:
    """Shapes are by input: {"min": [...], "opt": [...], "max": [...]}. plugin: "" for none."""

    builder: str
    onnx: str
    engine: str
    plugin: str
    profile: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    compute_capabilities: list[str] = field(default_factory=list)  # empty: this machine's GPU


def profile_of(io: EngineIO) -> dict[str, dict[str, list[int]]]:
    """Shapes of every input with a dynamic dimension."""
    return {
        spec.name: {which: list(io.shape(spec, which)) for which in ("min", "opt", "max")}
        for spec in NETWORK_INPUTS
        if any(isinstance(dim, str) for dim in io.dims(spec))
    }


def choose_builder(name: str) -> tuple[str, str | None]:
    """(builder, its version); auto: full TensorRT where it is importable, else none.

    Raises InvalidArgument for an unknown name, Unavailable for one that is not installed.
    """
    if name not in BUILDERS:
        raise InvalidArgument("builder", name, f"one of {BUILDERS}")
    if name == "none":
        return "none", None
    wanted = "tensorrt" if name == "auto" else name
    with _environment(wanted) as environ:
        result = _run({"builder": wanted, "probe": True}, environ, check=False)
    if "error" not in result:
        return wanted, result["version"]
    if name == "auto":
        return "none", None
    package = {"tensorrt": "TensorRT 10.13 or later", "rtx": "tensorrt-rtx-cu13-bindings"}[wanted]
    raise Unavailable(
        f"builder {wanted}: expected {package}, got {result['error']}; install it, run in the "
        "project's container, or build with --builder none and stop at ONNX"
    )


def check_capabilities(builder: str, capabilities: Sequence[str]) -> None:
    """Raises InvalidArgument unless the builder makes engines for these compute capabilities.

    capabilities: as asked for; only rtx builds for other GPUs than this machine's.
    """
    if capabilities and builder != "rtx":
        expected = f"none with --builder {builder}; leave it out, or take --builder rtx"
        raise InvalidArgument("compute-capability", list(capabilities), expected)
    for capability in capabilities:
        if capability not in RTX_COMPUTE_CAPABILITIES:
            served = ", ".join(RTX_COMPUTE_CAPABILITIES)
            expected = f"one that rtx serves ({served}), or --builder tensorrt on the GPU itself"
            raise InvalidArgument("compute-capability", capability, expected)


def own_capability(builder: str) -> str:
    """Of this machine's first GPU, like "9.0". Raises Unavailable, with what builds without one."""
    result = _run({"own_capability": True}, dict(os.environ), check=False)
    if "error" in result:
        other = "name GPUs with --compute-capability" if builder == "rtx" else "run on the GPU"
        raise Unavailable(
            f"builder {builder}: expected a GPU to build for, got {result['error']}; {other}, or "
            "stop at ONNX with --builder none"
        )
    return result["compute_capability"]


def build_engine(request: BuildRequest) -> dict:
    """Writes the engine; returns version, compute_capabilities, parse_s and build_s (seconds in
    TensorRT), num_layers, and inputs and outputs of the network as TensorRT has them.

    Raises Unavailable with what TensorRT said.
    """
    partial = Path(f"{request.engine}.{os.getpid()}.partial")
    try:
        with _environment(request.builder) as environ:
            result = _run(asdict(request) | {"engine": str(partial)}, environ, check=True)
        partial.replace(request.engine)
    finally:
        partial.unlink(missing_ok=True)
    return result


def check_network(made: dict, io: EngineIO) -> None:
    """Raises EngineMismatch unless the network that build_engine made has the table's tensors."""
    for kind, specs in (("inputs", NETWORK_INPUTS), ("outputs", NETWORK_OUTPUTS)):
        wanted = [
            [s.name, [-1 if isinstance(d, str) else d for d in io.dims(s)], TRT_TYPES[s.dtype]]
            for s in specs
        ]
        for expected, found in zip_longest(wanted, made[kind]):
            if expected != found:
                raise EngineMismatch(
                    f"{kind} of the engine's network: expected {expected}, got {found}; graph and "
                    "engine are of two versions of granikv: build again into another folder"
                )


def _run(request: dict, environ: dict[str, str], check: bool) -> dict:
    command = [sys.executable, "-m", "granikv.engines.build_worker", json.dumps(request)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start_owned(command, text=True, env=environ, **pipes) as worker:
        try:
            stdout, stderr = worker.communicate()
        except BaseException:
            worker.kill()
            raise
    try:
        result = json.loads(stdout.splitlines()[-1])
    except (IndexError, ValueError):
        tail = (stderr or stdout)[-2000:]
        result = {"error": f"the builder process ended with {worker.returncode}: {tail}"}
    if check and "error" in result:
        raise Unavailable(f"{request['onnx']}: no engine: {result['error']}")
    return result


@contextlib.contextmanager
def _environment(builder: str) -> Iterator[dict[str, str]]:
    """os.environ, with what the RTX parser needs on the loader's path before a process starts."""
    environ = dict(os.environ)
    if builder != "rtx":
        yield environ
        return
    with tempfile.TemporaryDirectory(prefix="granikv_rtx_") as folder:
        spec = importlib.util.find_spec("tensorrt_rtx_libs")
        paths = [folder]
        for place in (spec.submodule_search_locations or []) if spec else []:
            paths.append(place)
            for library in Path(place).glob(f"{RTX_LIBRARY}.*"):
                link = Path(folder, RTX_LIBRARY)
                if not link.exists():
                    link.symlink_to(library)
        if environ.get("LD_LIBRARY_PATH"):
            paths.append(environ["LD_LIBRARY_PATH"])
        environ["LD_LIBRARY_PATH"] = ":".join(paths)
        yield environ
