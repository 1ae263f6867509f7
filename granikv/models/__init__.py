"""Models: files in, one Decoder out."""

from __future__ import annotations

from pathlib import Path

import torch

from granikv.config import ModelConfig
from granikv.errors import ModelFileError
from granikv.models.embedded import find_embedded
from granikv.models.gguf_loader import GGUFFile, gguf_config, load_gguf
from granikv.models.llama import Attend, Decoder
from granikv.models.weights import (
    ARCHITECTURES,
    check_hf_weights,
    load_hf,
    read_hf_config,
    stores_fp8,
)

__all__ = [
    "ARCHITECTURES", "Attend", "Decoder", "check_weights", "find_model", "load_config",
    "load_model", "stores_fp8",
]  # fmt: skip


def load_model(
    path: str | Path | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    quantization: str | None = None,
) -> Decoder:
    """Decoder of a GGUF file, of a Hugging Face folder, or (None) of the embedded model.

    quantization: how projections of more bits become FP8, see EngineConfig; None: not at all.
    Raises ModelFileError for a missing, truncated, corrupt or unknown file, and Unsupported for
    a known setting that is not served.
    """
    path = find_model(path)
    load = load_hf if path.is_dir() else load_gguf
    return Decoder(*load(path, dtype, device, quantization), device)


def load_config(path: str | Path | None = None) -> ModelConfig:
    """The shape of the model that load_model would load, without its weights; same errors."""
    path = find_model(path)
    return read_hf_config(path) if path.is_dir() else gguf_config(GGUFFile(path))


def check_weights(path: Path) -> None:
    """Raises ModelFileError where load_model would, as far as the headers of the files tell."""
    if path.is_dir():
        check_hf_weights(path)
    else:
        GGUFFile(path)


def find_model(path: str | Path | None = None) -> Path:
    """The file or folder; None: the embedded model. Raises ModelFileError when nothing is there."""
    path = find_embedded() if path is None else Path(path)
    if not path.exists():
        raise ModelFileError(
            f"{path}: expected a GGUF file or a folder with config.json and *.safetensors, "
            "found nothing"
        )
    return path
