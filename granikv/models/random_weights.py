"""Models with random weights from a config.json alone: speed can be measured without a download.

Values are small and seeded, so that activations stay finite and two runs are alike; the text
that such a model makes is noise.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import torch

from granikv.config import ModelConfig
from granikv.models.fp8 import quantizing
from granikv.models.llama import Decoder
from granikv.models.weights import build_weights, read_hf_config


def read_shape(config_path: str | Path) -> ModelConfig:
    """The shape in a config.json (the file or its folder). Raises ModelFileError, Unsupported."""
    path = Path(config_path)
    return read_hf_config(path if path.is_dir() else path.parent)


def load_random(
    config_path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    quantization: str | None = None,
) -> Decoder:
    """Decoder with the shape of a Hugging Face config.json (the file or its folder).

    quantization: see load_model.
    Raises ModelFileError for a missing or unusable file.
    """
    config = read_shape(config_path)
    get = quantizing(random_tensors(dtype, device, seed), quantization, device)
    return Decoder(config, build_weights(config, get), device)


def random_tensors(
    dtype: torch.dtype, device: torch.device | str, seed: int = 0
) -> Callable[[str, tuple[int, ...]], torch.Tensor]:
    """get(name, shape) gives the same values whenever it is called: every rank cuts the same."""

    def get(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=device)
        generator = torch.Generator(device).manual_seed(seed + crc32(name.encode()))
        tensor = torch.empty(shape, dtype=dtype, device=device)
        return tensor.normal_(0.0, 0.02, generator=generator)

    return get
