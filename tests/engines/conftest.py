"""Engine tests need the ONNX packages of the `test` extra; test_packages.py says what is missing."""

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
sys.path.insert(0, str(Path(__file__).parents[1]))

NEEDED = ("onnx", "onnxruntime", "onnxruntime_extensions")
if any(importlib.util.find_spec(name) is None for name in NEEDED):
    files = {path.name for path in Path(__file__).parent.glob("test_*.py")}
    collect_ignore = sorted(files - {"test_packages.py"})
