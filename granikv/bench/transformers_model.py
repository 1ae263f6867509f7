"""The embedded or a given model in transformers, in fp32: the reference of demo and benchmarks."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def load_transformers(path: Path) -> Any:
    """The model of a GGUF file or a Hugging Face folder, ready to run.

    transformers' own notes and bars are switched off: they would bury the caller's lines.
    """
    import torch
    from transformers import AutoModelForCausalLM, modeling_gguf_pytorch_utils
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)
    modeling_gguf_pytorch_utils.tqdm = lambda items, **options: items
    source = {"pretrained_model_name_or_path": str(path)}
    if path.is_file():
        source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    with _gguf_parsed_once():
        return AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()


@contextlib.contextmanager
def _gguf_parsed_once() -> Iterator[None]:
    """transformers parses the file twice and makes the table of tensor names for every module,
    which is half of its loading time; here both are kept."""
    import gguf

    originals = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, original in originals.items():
        setattr(gguf, name, functools.lru_cache(1)(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(gguf, name, original)
