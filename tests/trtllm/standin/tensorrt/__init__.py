"""Stand-in of TensorRT: a network that records its layers and, given inputs, computes their values.

Names and signatures are those of tests/trtllm/api.json; what has an underscore, and `feeds`,
`value` and `kind`, is the stand-in's own.
"""

from __future__ import annotations

from enum import Enum

import torch

__version__ = "10.14.1.48"
DataType = Enum("DataType", ["FLOAT", "HALF", "BF16", "INT32", "INT64"])
PluginFieldType = Enum("PluginFieldType", ["INT32", "FLOAT32"])
TensorRTPhase = Enum("TensorRTPhase", ["BUILD", "RUNTIME"])
TensorLocation = Enum("TensorLocation", ["DEVICE", "HOST"])

_TORCH = {
    DataType.FLOAT: torch.float32,
    DataType.HALF: torch.float16,
    DataType.BF16: torch.bfloat16,
    DataType.INT32: torch.int32,
    DataType.INT64: torch.int64,
}


class ITensor:
    """shape: -1 where it is dynamic. value: a torch tensor, or None in a network without feeds."""

    def __init__(self, name, dtype, shape, value=None):
        self.name, self.dtype, self.shape, self.value = name, dtype, list(shape), value
        self.dimension_names = {}
        if value is not None:
            assert value.dtype == _TORCH[dtype], (name, dtype, value.dtype)
            assert len(value.shape) == len(self.shape), (name, shape, value.shape)
            pairs = zip(self.shape, value.shape, strict=True)
            assert all(a in (-1, b) for a, b in pairs), (name, shape, value.shape)

    def set_dimension_name(self, index, name):
        self.dimension_names[index] = name


class ILayer:
    def __init__(self, kind, name, inputs, output, plugin=None):
        self.kind, self.name, self.inputs, self.plugin = kind, name, inputs, plugin
        self._output = output

    def get_output(self, index):
        assert index == 0
        return self._output


class INetworkDefinition:
    def __init__(self, feeds=None):
        self.feeds = feeds
        self.inputs, self.outputs, self.layers = [], [], []

    def add_input(self, name, dtype, shape):
        assert name not in [x.name for x in self.inputs], f"two inputs {name}"
        value = None if self.feeds is None else self.feeds[name]
        self.inputs.append(ITensor(name, dtype, shape, value))
        return self.inputs[-1]

    def add_plugin_v3(self, inputs, shape_inputs, plugin):
        assert shape_inputs == []
        values = None if self.feeds is None else [x.value for x in inputs]
        dtype, shape, value = plugin._output(inputs, values)
        return self._add("PLUGIN_V3", inputs, dtype, shape, value, plugin)

    def mark_output(self, tensor):
        self.outputs.append(tensor)

    def _add(self, kind, inputs, dtype, shape, value, plugin=None):
        name = f"(Unnamed Layer* {len(self.layers)}) [{kind}]"
        output = ITensor(name + "_output", dtype, shape, value)
        self.layers.append(ILayer(kind, name, list(inputs), output, plugin))
        return self.layers[-1]


class PluginField:
    def __init__(self, name, data, type=PluginFieldType.INT32):  # noqa: A002
        self.name, self.data, self.type = name, data, type


class PluginFieldCollection(list):
    def __init__(self, arg0):
        super().__init__(arg0)


class IPluginCreatorV3One:
    """make: the stand-in's; called with the fields by name, returns a plugin or None."""

    def __init__(self, name, make):
        self.name, self._make = name, make

    def create_plugin(self, name, field_collection, phase):
        assert phase is TensorRTPhase.BUILD and name == self.name
        for field in field_collection:
            assert field.type is PluginFieldType.INT32 and field.data.dtype == "int32"
        return self._make(**{field.name: int(field.data[0]) for field in field_collection})


class IPluginRegistry:
    """Creators appear when a library is loaded; the test says which, by path."""

    def __init__(self):
        self._libraries, self._creators, self._loaded = {}, {}, []

    def get_creator(self, type, version, plugin_namespace=""):  # noqa: A002
        return self._creators.get((type, version, plugin_namespace))

    def load_library(self, plugin_path):
        self._loaded.append(plugin_path)
        creators = self._libraries.get(plugin_path)
        if creators is None:
            return None
        self._creators.update(creators)
        return object()


_registry = IPluginRegistry()


def get_plugin_registry():
    return _registry
