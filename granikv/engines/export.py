"""Writes the graph of one rank and its weights, slice by slice.

No more than a slice of one tensor is in memory at a time, so the memory that exporting takes does
not depend on the model's size. Files appear under their names only when they are whole.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch

from granikv.engines.checkpoint import Checkpoint
from granikv.engines.graph import Placed, all_weights, build_graph, place_weights
from granikv.engines.io import BuildLimits
from granikv.engines.manifest import engine_io
from granikv.engines.sharding import Part, Shard, WeightSpec
from granikv.models.layers import RotaryTable
from granikv.outputs import write_atomically

SLICE_BYTES = 32 * 2**20  # read at a time
TORCH_TYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}

Advance = Callable[[int], None]  # called with the bytes just written


@dataclass(frozen=True)
class WrittenFile:
    name: str
    size_bytes: int
    sha256: str


def check_weights(checkpoint: Checkpoint, shard: Shard) -> None:
    """Raises ModelFileError unless every tensor that the rank needs is there with its shape."""
    for name, shape in {(p.source, p.shape) for s in shard.weights() for p in s.parts}:
        checkpoint.check(name, shape)


def planned_bytes(shard: Shard, limits: BuildLimits, dtype: str) -> int:
    """Size of the rank's file of weights."""
    last = place_weights(all_weights(shard, limits.max_seq_len), dtype)[-1]
    return last.offset_bytes + last.size_bytes


def export_rank(
    checkpoint: Checkpoint,
    shard: Shard,
    limits: BuildLimits,
    dtype: str,
    folder: Path,
    advance: Advance = lambda num_bytes: None,
) -> list[WrittenFile]:
    """Writes rank{r}.onnx and rank{r}.weights into folder; returns both, the weights first."""
    placed = place_weights(all_weights(shard, limits.max_seq_len), dtype)
    weights = folder / f"rank{shard.rank}.weights"
    blocks = _placed_blocks(checkpoint, shard, limits, placed)
    written = [write_stream(weights, blocks, advance)]
    model = build_graph(shard, engine_io(shard, limits, dtype), dtype, placed, weights.name)
    content = model.SerializeToString(deterministic=True)
    path = folder / f"rank{shard.rank}.onnx"
    write_atomically(path, content)
    written.append(WrittenFile(path.name, len(content), hashlib.sha256(content).hexdigest()))
    return written


def write_stream(path: Path, blocks: Iterable[memoryview], advance: Advance) -> WrittenFile:
    """All blocks one after another; the file appears under its name only when it is whole."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    digest, size_bytes = hashlib.sha256(), 0
    try:
        with partial.open("wb", buffering=0) as file:
            for block in blocks:
                _write_all(file, block)
                digest.update(block)
                size_bytes += len(block)
                advance(len(block))
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return WrittenFile(path.name, size_bytes, digest.hexdigest())


def _placed_blocks(
    checkpoint: Checkpoint, shard: Shard, limits: BuildLimits, placed: list[Placed]
) -> Iterator[memoryview]:
    at = 0
    for item in placed:
        yield memoryview(bytes(item.offset_bytes - at))
        yield from weight_blocks(checkpoint, shard, limits, item.spec, item.dtype)
        at = item.offset_bytes + item.size_bytes


def _write_all(file: FileIO, chunk: memoryview) -> None:
    while len(chunk):  # one write takes at most 2 GiB
        chunk = chunk[file.write(chunk) :]


def weight_blocks(
    checkpoint: Checkpoint, shard: Shard, limits: BuildLimits, spec: WeightSpec, kind: str
) -> Iterator[memoryview]:
    """The bytes of one weight in dtype `kind`: its parts, then zeros up to its shape."""
    dtype = TORCH_TYPES[kind]
    if spec.name in ("rope_cos", "rope_sin"):
        c = shard.config
        table = RotaryTable(
            c.head_dim, limits.max_seq_len, c.rope_theta, c.rope_scaling, checkpoint.rope_divisors
        )
        yield _as_bytes(table.cos if spec.name == "rope_cos" else table.sin, dtype)
        return
    num_written = 0
    for part in spec.parts:
        for rows in _slices(checkpoint, part):
            yield _as_bytes(rows, dtype)
        num_written += part.num_elements
    missing = spec.num_elements - num_written
    if missing:
        yield _as_bytes(torch.zeros(missing), dtype)


def _slices(checkpoint: Checkpoint, part: Part) -> Iterator[torch.Tensor]:
    row_bytes = 4 * torch.Size(part.shape[1:]).numel()
    step = max(1, SLICE_BYTES // row_bytes)
    for first in range(part.first, part.first + part.count, step):
        count = min(step, part.first + part.count - first)
        rows = checkpoint.rows(part.source, first, count)
        yield part.columns_of(rows)


def _as_bytes(tensor: torch.Tensor, dtype: torch.dtype) -> memoryview:
    flat = tensor.to(dtype).contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data
