"""In TensorRT's place: the rank's graph in ONNX Runtime, behind the calls of EngineRuntime.

It is as strict: shapes within the build's ranges, every tensor bound, memory read by address.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import standins

from granikv.engines.manifest import RuntimeFacts, load_manifest

_TYPES = {"int32": ctypes.c_int32, "float32": ctypes.c_float}


class EngineDouble:
    device_type, file_kind = "cpu", "graph"

    def __init__(self, io: dict, facts: RuntimeFacts | None = None):
        """io: of the manifest."""
        self._facts = facts or RuntimeFacts()
        self._inputs = {entry["name"]: entry for entry in io["inputs"]}
        self._outputs = {entry["name"]: entry for entry in io["outputs"]}
        self._addresses: dict[str, int] = {}
        self._shapes = {
            name: tuple(entry["dims"])
            for name, entry in self._inputs.items()
            if all(isinstance(dim, int) for dim in entry["dims"])
        }
        self.bound: set[int] = set()
        self.loaded = None
        self.num_runs = self.num_shape_calls = 0

    def facts(self):
        return self._facts

    def load(self, path, io):
        self.loaded = path
        self._session = standins.session(path)

    def join_ranks(self, rank, tp_size, share):
        assert share(bytes([rank] * 8)) == bytes(8)
        standins.GROUPS[tp_size] = standins.ProcessGroup(tp_size)

    def bind_arenas(self, binding, k_arena, v_arena, config):
        assert k_arena.shape[2:] == (config.num_kv_heads, config.head_dim)
        standins.ARENAS[binding] = (k_arena, v_arena)
        self.bound.add(binding)

    def unbind_arenas(self, binding):
        self.bound.remove(binding)
        del standins.ARENAS[binding]

    def set_input_shape(self, name, shape):
        entry = self._inputs[name]
        self.num_shape_calls += 1
        if len(shape) != len(entry["dims"]):
            return False
        if not all(a <= x <= b for a, x, b in zip(entry["min"], shape, entry["max"], strict=True)):
            return False
        self._shapes[name] = shape
        return True

    def set_tensor_address(self, name, address):
        if name not in self._inputs and name not in self._outputs:
            return False
        assert address % 16 == 0
        self._addresses[name] = address
        return True

    def _array(self, name, shape, dtype):
        size = int(np.prod(shape))
        memory = (_TYPES[dtype] * size).from_address(self._addresses[name])
        return np.ctypeslib.as_array(memory).reshape(shape)

    def execute_async_v3(self, stream):
        if set(self._shapes) != set(self._inputs):
            return False
        feeds = {
            name: self._array(name, self._shapes[name], entry["dtype"])
            for name, entry in self._inputs.items()
        }
        for name, result in zip(self._outputs, self._session.run(None, feeds), strict=True):
            self._array(name, result.shape, "float32")[...] = result
        self.num_runs += 1
        return True


def from_folder(plugin: str) -> EngineDouble:
    """As a rank's process makes it: `plugin` names the engines' folder here."""
    return EngineDouble(load_manifest(Path(plugin)).io)
