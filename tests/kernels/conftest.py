"""Kernel tests run compiled on a GPU, else by Triton's interpreter in a process of their own.

The interpreter is chosen when Triton is imported, and other tests of this process import it.
"""

import os
from pathlib import Path

import torch

HERE = Path(__file__).parent
DIRECT = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
RUNNER = "test_in_interpreter.py"
collect_ignore = [f.name for f in HERE.glob("test_*.py") if (f.name == RUNNER) == DIRECT]
