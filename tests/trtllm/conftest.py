"""TensorRT-LLM's route on stand-ins: their packages are importable only while a test here runs."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import SimpleNamespace

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
for folder in (HERE, HERE.parent, HERE.parent / "engines", HERE.parent / "e2e"):
    sys.path.insert(0, str(folder))

NEEDED = ("onnx", "onnxruntime", "onnxruntime_extensions")
if any(importlib.util.find_spec(name) is None for name in NEEDED):
    collect_ignore = sorted(path.name for path in HERE.glob("test_*.py"))

LIBRARY = "libgranikv_trt.so"


def _forget():
    for name in list(sys.modules):
        if name.partition(".")[0] in ("tensorrt", "tensorrt_llm"):
            del sys.modules[name]


@pytest.fixture
def trtllm(monkeypatch, tmp_path):
    """trtllm_model.py loaded as trtllm-build does, over the stand-ins; the library is found."""
    from plugin_doubles import creators

    _forget()
    monkeypatch.syspath_prepend(str(HERE / "standin"))
    library = tmp_path / LIBRARY
    library.write_bytes(b"")
    monkeypatch.setenv("GRANIKV_PLUGIN", str(library))
    trt = importlib.import_module("tensorrt")
    registry = trt.get_plugin_registry()
    registry._libraries[str(library)] = creators(trt)
    loader = SourceFileLoader("models", str(ROOT / "trtllm_plugin" / "trtllm_model.py"))
    spec = importlib.util.spec_from_loader("models", loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    yield SimpleNamespace(
        trt=trt,
        model=module,
        registry=registry,
        common=importlib.import_module("tensorrt_llm._common"),
        models=importlib.import_module("tensorrt_llm.models"),
        config=importlib.import_module("tensorrt_llm.models.modeling_utils").PretrainedConfig,
    )
    _forget()
