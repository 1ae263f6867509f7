"""Loads the plugin library through TensorRT-RTX's plugin registry: rtx_registry.py LIBRARY

Creates both plugins from fields as the ONNX parser would, and checks that bad ones are refused.
"""

from __future__ import annotations

import sys

import numpy as np
import tensorrt_rtx_libs  # noqa: F401 - loads what the bindings need
from tensorrt_rtx_bindings import tensorrt_rtx as trt


class Logger(trt.ILogger):
    def __init__(self) -> None:
        super().__init__()
        self.errors: list[str] = []

    def log(self, severity: trt.ILogger.Severity, text: str) -> None:
        if severity <= trt.ILogger.Severity.ERROR:
            self.errors.append(text)


def main(library: str) -> None:
    logger = Logger()
    trt.Runtime(logger)  # the registry logs to the first logger that TensorRT is given
    registry = trt.get_plugin_registry()
    handle = registry.load_library(library)
    assert handle is not None, logger.errors
    names = {(c.name, c.plugin_version, c.plugin_namespace) for c in registry.all_creators}
    assert {("HotColdAttention", "1", "granikv"), ("AllReduce", "1", "granikv")} <= names, names
    creator = registry.get_creator("HotColdAttention", "1", "granikv")
    fields = {"layer": 2, "num_qo_heads": 9, "num_kv_heads": 3, "head_dim": 64, "max_partials": 16}

    def create(values: dict[str, int]):
        made = [
            trt.PluginField(name, np.array([value], np.int32), trt.PluginFieldType.INT32)
            for name, value in values.items()
        ]
        collection = trt.PluginFieldCollection(made)
        return creator.create_plugin("layer2", collection, trt.TensorRTPhase.BUILD)

    plugin = create(fields)
    assert plugin is not None, logger.errors
    core = plugin.get_capability_interface(trt.PluginCapabilityType.CORE)
    assert core is not None
    try:
        refused = create(fields | {"head_dim": 7})
    except RuntimeError:
        refused = None
    assert refused is None
    print("passed")


if __name__ == "__main__":
    main(sys.argv[1])
