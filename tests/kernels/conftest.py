"""Kernel tests run compiled on a GPU, else by Triton's interpreter in a process of their own.

The interpreter is chosen when Triton is imported, and other tests of this process import it.
"""

import os
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
FILES = {f.name for f in Path(__file__).parent.glob("test_*.py")}
RUNNER = "test_in_interpreter.py"  # starts the process that interprets
COMPILED = "test_compiled.py"  # for sm_90, on any machine; the interpreter cannot
if INTERPRETED:
    collect_ignore = [RUNNER, COMPILED]
elif torch.cuda.is_available():
    collect_ignore = [RUNNER]
else:
    collect_ignore = sorted(FILES - {RUNNER, COMPILED})


def pytest_collection_modifyitems(items):
    """Files named on the command line are collected whatever collect_ignore says."""
    if INTERPRETED or torch.cuda.is_available():
        return
    reason = "needs a GPU, or TRITON_INTERPRET=1 in the environment of a pytest of its own"
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.name not in (RUNNER, COMPILED):
            item.add_marker(pytest.mark.skip(reason=reason))
