"""What TensorRTRuntime calls of TensorRT, and that the engine's double takes the same calls.

TYPES: parameters without self, from tensorrt-stubs 10.13.0.35.1 (PyPI), tensorrt_bindings/tensorrt.pyi.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from pathlib import Path

import fake_tensorrt
import pytest
from engine_double import EngineDouble

from granikv.engines import runtime
from granikv.engines.runtime import EngineRuntime

TYPES = {
    "Logger": ("min_severity",),
    "Runtime": ("logger",),
    "get_plugin_registry": (),
    "IPluginRegistry.load_library": ("plugin_path",),
    "Runtime.deserialize_cuda_engine": ("serialized_engine",),
    "ICudaEngine.create_execution_context": (),  # both overloads have defaults
    "ICudaEngine.get_tensor_name": ("index",),
    "ICudaEngine.get_tensor_mode": ("name",),
    "ICudaEngine.get_tensor_dtype": ("name",),
    "ICudaEngine.get_tensor_shape": ("name",),
    "IExecutionContext.set_input_shape": ("name", "shape"),
    "IExecutionContext.set_tensor_address": ("name", "memory"),
    "IExecutionContext.execute_async_v3": ("stream_handle",),
}
OWNERS = {
    "self._trt": "",
    "self._runtime": "Runtime.",
    "self._engine": "ICudaEngine.",
    "engine": "ICudaEngine.",
    "trt.get_plugin_registry()": "IPluginRegistry.",
    "trt": "",
    "self._context": "IExecutionContext.",
}
NOT_CALLED = {"Logger.WARNING", "TensorIOMode", "TensorIOMode.INPUT", "__version__"}
CONTEXT_CALLS = [name for name in TYPES if name.startswith("IExecutionContext.")]


def test_the_runtime_calls_nothing_else_and_with_these_parameters():
    tree = ast.parse(Path(runtime.__file__).read_text())
    called: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = OWNERS.get(ast.unparse(node.func.value))
            if owner is not None:
                assert not node.keywords
                called[owner + node.func.attr] = len(node.args)
    assert called == {name: len(parameters) for name, parameters in TYPES.items()}
    read = {
        ast.unparse(node).removeprefix("self._trt.")
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("self._trt.")
    }
    assert {name for name in read if "(" not in name} <= TYPES.keys() | NOT_CALLED


@pytest.mark.parametrize("call", CONTEXT_CALLS)
def test_the_double_takes_what_the_context_takes(call):
    name = call.split(".")[1]
    for owner in (EngineRuntime, EngineDouble):
        parameters = list(inspect.signature(getattr(owner, name)).parameters)[1:]
        assert len(parameters) == len(TYPES[call]), owner
        assert parameters[0] == TYPES[call][0] or len(parameters) == 1


@pytest.mark.parametrize("call", TYPES)
def test_the_stand_in_for_the_module_takes_what_tensorrt_takes(call):
    module = fake_tensorrt.Module()
    owners = {
        "Runtime": module.Runtime, "ICudaEngine": fake_tensorrt.Engine,
        "IExecutionContext": fake_tensorrt.Context, "IPluginRegistry": module,
    }  # fmt: skip
    owner, _, name = call.rpartition(".")
    called = getattr(owners.get(owner, module), name)
    parameters = [p for p in inspect.signature(called).parameters if p != "self"]
    assert tuple(parameters) == TYPES[call]


@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx_bindings") is None, reason="no TensorRT-RTX here"
)
@pytest.mark.parametrize("call", [name for name in TYPES if "." in name])
def test_the_types_are_those_of_bindings_that_can_be_asked(call):
    """TensorRT-RTX's bindings are of the same interface; their signatures are in docstrings."""
    import tensorrt_rtx_libs  # noqa: F401 - loads what the bindings need
    from tensorrt_rtx_bindings import tensorrt_rtx as trt

    owner, name = call.split(".")
    text = getattr(getattr(trt, owner), name).__doc__
    overloads = re.findall(rf"{name}\(self: [\w.]+(.*?)\) ->", text)
    wanted = TYPES[call]
    found = [
        tuple(p for p in re.findall(r", (\w+): ", overload.split(" = ")[0]))
        for overload in overloads
    ]
    assert wanted in found or (not wanted and all(" = " in x for x in overloads)), text
