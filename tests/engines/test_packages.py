"""Says, in a run without them, which packages the other engine tests want."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("name", ["onnx", "onnxruntime", "onnxruntime_extensions"])
def test_the_onnx_packages_are_installed(name):
    pytest.importorskip(name, reason=f"{name} is missing: no engine test runs; `make setup`")
