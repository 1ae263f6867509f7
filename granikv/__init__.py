"""GraniKV: LLM serving for agents that share long prefixes. The public names, nothing else.

Names load on first use, so that a Triton stub that needs only plain data does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from granikv.config import EngineConfig
    from granikv.engine import Engine
    from granikv.llm import LLM
    from granikv.sampling_params import SamplingParams

_HOMES = {
    "EngineConfig": "granikv.config",
    "Engine": "granikv.engine",
    "LLM": "granikv.llm",
    "SamplingParams": "granikv.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'granikv' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


__all__ = ["LLM", "Engine", "EngineConfig", "SamplingParams"]
