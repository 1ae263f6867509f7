"""A Hugging Face folder of a published shape with random weights, written a block at a time.

For builds and their measurements: a tensor repeats one block of small numbers, from a place of its
own, and no text of such a model means anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import torch

from granikv.engines.export import write_stream
from granikv.engines.sharding import Shard
from granikv.models.weights import read_hf_config

BLOCK_ELEMENTS = 2**21


def write_checkpoint(folder: Path, shape: Path, **changes: int) -> Path:
    """config.json and model.safetensors (bf16) in `folder`, made if missing; returns it.

    shape: folder with a config.json; changes: keys of it to replace, like num_hidden_layers.
    Raises ModelFileError or Unsupported for a shape that is not served.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = json.loads((shape / "config.json").read_text(encoding="utf-8")) | changes
    (folder / "config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    weights = Shard(read_hf_config(folder)).weights()
    tensors = dict.fromkeys((part.source, part.shape) for spec in weights for part in spec.parts)
    header, at = {}, 0
    for name, size in tensors:
        end = at + 2 * torch.Size(size).numel()
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    block = torch.empty(BLOCK_ELEMENTS, dtype=torch.bfloat16)
    block.normal_(0.0, 0.02, generator=torch.Generator().manual_seed(0))
    ones = torch.ones_like(block)

    def blocks() -> Iterator[memoryview]:
        yield memoryview(len(text).to_bytes(8, "little") + text)
        for name, size in tensors:
            values = ones if name.endswith("norm.weight") else block
            left = torch.Size(size).numel()
            at = crc32(name.encode()) % BLOCK_ELEMENTS  # TensorRT keeps equal weights once
            while left:
                count = min(left, BLOCK_ELEMENTS - at)
                yield values[at : at + count].view(torch.uint8).numpy().data
                left, at = left - count, 0

    write_stream(folder / "model.safetensors", blocks(), lambda num_bytes: None)
    return folder
