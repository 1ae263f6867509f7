"""Tiny random models, ours and transformers', for the engine tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import make_tiny_hf
from tiny_engine import ARCHS

from granikv.models import load_model

LONG = {"max_position_embeddings": 8192}


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    import transformers

    folders = {a: make_tiny_hf(tmp_path_factory.mktemp(a), a, seed=3, **LONG) for a in ARCHS}
    return {
        a: (
            load_model(f),
            getattr(transformers, a).from_pretrained(str(f), dtype=torch.float32).eval(),
        )
        for a, f in folders.items()
    }
