"""Builds one engine in a process of its own: `python -m granikv.engines.build_worker REQUEST`.

REQUEST is the JSON of builders.BuildRequest, or asks for the version or this GPU's capability. The
last line of standard output is JSON: what was made or asked for, or an error. A crash of the library or its memory
never reaches the caller.
It imports neither torch nor onnx.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODULES = {"tensorrt": "tensorrt", "rtx": "tensorrt_rtx_bindings"}


def load_tensorrt(builder: str) -> Any:
    """The bindings. Raises ImportError for a missing or an empty package."""
    module = importlib.import_module(MODULES[builder])
    if not hasattr(module, "Builder") or not hasattr(module, "OnnxParser"):
        raise ImportError(f"{MODULES[builder]} has no Builder: it is a placeholder package")
    return module


def load_plugins(trt: Any, plugin: str) -> Callable[[], str]:
    """A shared library with getCreators, or, for tests, a Python module `name:function`; or none, "".

    Returns what asks the library for its last error, which TensorRT's own message leaves out.
    Raises OSError or RuntimeError for a library that cannot be loaded.
    """
    if not plugin:
        return lambda: ""
    if not plugin.endswith(".so"):
        module, _, function = plugin.partition(":")
        getattr(importlib.import_module(module), function)(trt)
        return lambda: ""
    library = ctypes.CDLL(plugin)  # a missing dependency is named here, not by TensorRT
    library.granikvLastError.restype = ctypes.c_char_p
    if trt.get_plugin_registry().load_library(plugin) is None:
        raise RuntimeError(f"{plugin}: TensorRT's registry did not take it")
    return lambda: (library.granikvLastError() or b"").decode(errors="replace")


def build(request: dict) -> dict:
    """Writes request["engine"]; returns what the manifest says of it. Raises RuntimeError."""
    trt = load_tensorrt(request["builder"])
    messages: list[str] = []

    class Logger(trt.ILogger):  # type: ignore[name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                messages.append(message)

    logger = Logger()
    last_error = load_plugins(trt, request["plugin"])

    def failure(*parts: str) -> RuntimeError:
        said = [text for text in (last_error(), *parts, *messages) if text]
        return RuntimeError("\n".join(said) or "TensorRT gave no reason")

    trt_builder = trt.Builder(logger)
    flags = 0
    if hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED"):  # types are the graph's
        flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = trt_builder.create_network(flags)
    begin = time.monotonic()
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(request["onnx"]):
        raise failure(*(str(parser.get_error(i)) for i in range(parser.num_errors)))
    parse_s = time.monotonic() - begin
    config = trt_builder.create_builder_config()
    profile = trt_builder.create_optimization_profile()
    for name, shapes in request["profile"].items():
        profile.set_shape(name, *(tuple(shapes[x]) for x in ("min", "opt", "max")))
    config.add_optimization_profile(profile)
    capabilities = request["compute_capabilities"] if request["builder"] == "rtx" else []
    if capabilities:
        config.num_compute_capabilities = len(capabilities)
        for index, capability in enumerate(capabilities):
            known = getattr(trt.ComputeCapability, f"SM{capability.replace('.', '')}", None)
            if known is None:
                raise RuntimeError(f"compute capability {capability} is not one of this TensorRT's")
            config.set_compute_capability(known, index)
    begin = time.monotonic()
    serialized = trt_builder.build_serialized_network(network, config)
    if serialized is None:
        raise failure()
    build_s = time.monotonic() - begin
    with Path(request["engine"]).open("wb") as file:
        file.write(serialized)
    return {
        "version": trt.__version__,
        "compute_capabilities": capabilities or [own_capability()],
        "parse_s": parse_s,
        "build_s": build_s,
        "num_layers": network.num_layers,
        "inputs": [_tensor(network.get_input(i)) for i in range(network.num_inputs)],
        "outputs": [_tensor(network.get_output(i)) for i in range(network.num_outputs)],
    }


def _tensor(tensor: Any) -> list:
    """[name, dims (-1: dynamic), TensorRT's name of the type]"""
    return [tensor.name, list(tensor.shape), tensor.dtype.name]


def own_capability() -> str:
    """Of GPU 0, through the driver's library. Raises RuntimeError without a GPU."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(f"no GPU driver: {error}") from None
    values = []
    device = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        raise RuntimeError("the GPU driver sees no device")
    for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
        value = ctypes.c_int()
        if cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
            raise RuntimeError("the GPU driver does not tell the compute capability")
        values.append(value.value)
    return f"{values[0]}.{values[1]}"


def main() -> int:
    request = json.loads(sys.argv[1])
    try:
        if request.get("probe"):
            result = {"version": load_tensorrt(request["builder"]).__version__}
        elif request.get("own_capability"):
            result = {"compute_capability": own_capability()}
        else:
            result = build(request)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(result))
    return int("error" in result)


if __name__ == "__main__":
    raise SystemExit(main())
