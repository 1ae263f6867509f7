"""Models: files in, one Decoder out."""

from __future__ import annotations

from pathlib import Path

import torch

from granikv.errors import ModelFileError
from granikv.models.embedded import find_embedded
from granikv.models.gguf_loader import load_gguf
from granikv.models.llama import Attend, Decoder
from granikv.models.weights import ARCHITECTURES, load_hf

__all__ = ["ARCHITECTURES", "Attend", "Decoder", "load_model"]


def load_model(
    path: str | Path | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Decoder:
    """Decoder of a GGUF file, of a Hugging Face folder, or (None) of the embedded model.

    Raises ModelFileError for a missing, truncated, corrupt or unknown file, and Unsupported for
    a known setting that is not served.
    """
    path = find_embedded() if path is None else Path(path)
    if path.is_dir():
        return Decoder(*load_hf(path, dtype), device)
    if not path.is_file():
        raise ModelFileError(
            f"{path}: expected a GGUF file or a folder with config.json and *.safetensors, "
            "found nothing"
        )
    return Decoder(*load_gguf(path, dtype), device)
