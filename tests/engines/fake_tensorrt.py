"""In the place of the module `tensorrt`: what TensorRTRuntime calls of it, as strict as it is documented.

Nothing is raised: TensorRT logs, and returns None or False. An engine is a file of JSON, made by
`engine_file`. Every call goes to `calls`, in order.
"""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

VERSION = "10.14.1.48"
TYPES = {"int32": "INT32", "float32": "FLOAT"}


class TensorIOMode(Enum):
    NONE = 0
    INPUT = 1
    OUTPUT = 2


class DataType(Enum):
    FLOAT = 0
    HALF = 1
    INT32 = 3


def engine_file(path: Path, io: dict, version: str = VERSION) -> None:
    """io: of a manifest; the engine's own order is another than the network's."""
    tensors = [
        [x["name"], mode, TYPES[x["dtype"]], x["dims"], x["min"], x["max"]]
        for mode, side in (("OUTPUT", "outputs"), ("INPUT", "inputs"))
        for x in reversed(io[side])
    ]
    path.write_text(json.dumps({"version": version, "tensors": tensors}))


class Module(ModuleType):
    """For sys.modules["tensorrt"]. Names in `fail` give what their failing gives."""

    TensorIOMode, DataType = TensorIOMode, DataType
    Builder = OnnxParser = object  # a placeholder package has none

    def __init__(self, version: str = VERSION):
        super().__init__("tensorrt")
        self.__version__ = version
        self.calls: list[tuple] = []
        self.fail: set[str] = set()
        self.libraries: set[str] = set()
        module = self

        class Logger:
            WARNING = 2

            def __init__(self, min_severity: int):
                module.calls.append(("Logger", min_severity))

        class Runtime:
            def __init__(self, logger: Logger):
                assert isinstance(logger, Logger)
                module.calls.append(("Runtime",))

            def deserialize_cuda_engine(self, serialized_engine: Any) -> Engine | None:
                module.calls.append(("deserialize_cuda_engine",))
                try:
                    made = json.loads(bytes(serialized_engine))
                except ValueError:
                    return None
                return Engine(module, made) if made["version"] == module.__version__ else None

        self.Logger, self.Runtime = Logger, Runtime

    def get_plugin_registry(self) -> Module:
        return self

    def load_library(self, plugin_path: str) -> object | None:
        """NvInferRuntimeCommon.h: "nullptr if any of the plugins are already registered"."""
        self.calls.append(("load_library", plugin_path))
        if self.libraries or "load_library" in self.fail:
            return None
        self.libraries.add(plugin_path)
        return object()


class Engine:
    def __init__(self, module: Module, made: dict):
        self.module = module
        self.tensors = {name: rest for name, *rest in made["tensors"]}
        self.num_io_tensors = len(self.tensors)

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode[self.tensors[name][0]] if name in self.tensors else TensorIOMode.NONE

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType[self.tensors[name][1]]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(-1 if isinstance(dim, str) else dim for dim in self.tensors[name][2])

    def create_execution_context(self) -> Context | None:
        self.module.calls.append(("create_execution_context",))
        return None if "create_execution_context" in self.module.fail else Context(self)


class Context:
    def __init__(self, engine: Engine):
        self.engine, self.module = engine, engine.module
        self.addresses: dict[str, int] = {}
        inputs = {name: x for name, x in engine.tensors.items() if x[0] == "INPUT"}
        self.shapes = {
            name: None if -1 in engine.get_tensor_shape(name) else tuple(dims)
            for name, (_, _, dims, _, _) in inputs.items()
        }

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.module.calls.append(("set_input_shape", name, tuple(shape)))
        if name not in self.shapes:
            return False
        _, _, dims, least, most = self.engine.tensors[name]
        if len(shape) != len(dims) or not all(
            a <= x <= b for a, x, b in zip(least, shape, most, strict=True)
        ):
            return False
        self.shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self.module.calls.append(("set_tensor_address", name, memory))
        if name not in self.engine.tensors:
            return False
        self.addresses[name] = memory
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        self.module.calls.append(("execute_async_v3", stream_handle))
        if "execute_async_v3" in self.module.fail or None in self.shapes.values():
            return False
        return self.addresses.keys() == self.engine.tensors.keys()
