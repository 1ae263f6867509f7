"""Engine tests: they need the ONNX packages of the `test` extra."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
sys.path.insert(0, str(Path(__file__).parents[1]))

for name in ("onnx", "onnxruntime", "onnxruntime_extensions"):
    pytest.importorskip(name)
