"""Checkpoint tensors by slices of rows, so that exporting a model of any size takes little memory.

Files are read, not mapped: pages of a mapped file count as the process's own.
Format of safetensors: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import hashlib
import json
import operator
import struct
from collections.abc import Iterator
from io import RawIOBase
from pathlib import Path
from typing import Protocol

import torch

from granikv.config import ModelConfig
from granikv.engines.sharding import Part
from granikv.errors import ModelFileError, Unsupported
from granikv.models import find_model
from granikv.models.gguf_loader import GGUFFile, GGUFWeights, gguf_config
from granikv.models.kv_scales import read_kv_scales
from granikv.models.weights import read_hf_config, shard_paths

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_FP8_DTYPES = {"F8_E4M3": torch.float8_e4m3fn}
_MAX_HEADER_BYTES = 100 * 2**20  # the format's own limit


class Checkpoint(Protocol):
    config: ModelConfig
    rope_divisors: torch.Tensor | None  # float [D / 2], of a GGUF file

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises ModelFileError unless the tensor is there with this shape."""

    def rows(self, name: str, first: int, count: int) -> torch.Tensor:
        """Rows [first, first + count) in the file's dtype, or float32 for a GGUF file's."""

    def find(self, name: str) -> torch.Tensor | None:
        """A small tensor beside a weight, or None."""

    def part(self, part: Part) -> torch.Tensor:
        """Rows and columns of a tensor, as `rows` has them; a Hugging Face file is read there only."""

    def kv_scales(self) -> torch.Tensor | None:
        """fp32 [layers, 2] of FP8 K and V; None: none stored. Raises ModelFileError."""

    def fingerprint(self) -> str:
        """Hex digest that changes when the files do: names, sizes, times, headers."""


def open_checkpoint(path: str | Path | None, fp8: bool = False) -> Checkpoint:
    """A Hugging Face folder, a GGUF file, or (None) the embedded model.

    fp8: whether the caller knows what to do with FP8 weights. Raises ModelFileError (missing,
    truncated, corrupt) or Unsupported.
    """
    path = find_model(path)
    return HFCheckpoint(path, fp8) if path.is_dir() else GGUFCheckpoint(path)


class HFCheckpoint:
    def __init__(self, folder: Path, fp8: bool = False):
        self.folder, self.config = folder, read_hf_config(folder)
        self._dtypes = _DTYPES | (_FP8_DTYPES if fp8 else {})
        self.rope_divisors: torch.Tensor | None = None
        self._paths = shard_paths(folder)
        self._digest = hashlib.sha256((folder / "config.json").read_bytes())
        # name -> (path, dtype, shape, first byte in the file)
        self._entries: dict[str, tuple[Path, torch.dtype, tuple[int, ...], int]] = {}
        for path in self._paths:
            self._read_header(path)

    def _read_header(self, path: Path) -> None:
        stat = path.stat()
        truncated = f"{path}: expected a complete safetensors file (truncated or corrupt?)"
        with path.open("rb") as file:
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else stat.st_size
            if length > min(_MAX_HEADER_BYTES, stat.st_size - 8):
                raise ModelFileError(truncated)
            raw = file.read(length)
        self._digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}".encode() + raw)
        try:
            header = json.loads(raw)
            header.pop("__metadata__", None)
            for name, entry in header.items():
                first, last = map(operator.index, entry["data_offsets"])
                dtype = self._dtypes.get(entry["dtype"])
                shape = tuple(entry["shape"])
                if dtype is None:
                    raise Unsupported(
                        f"{path}: {name}: expected one of {sorted(self._dtypes)}, got "
                        f"{entry['dtype']}; start from a checkpoint that is not quantised"
                    )
                if last - first != torch.Size(shape).numel() * dtype.itemsize:
                    raise ModelFileError(f"{truncated}: {name}: {last - first} bytes")
                if first < 0 or 8 + length + last > stat.st_size:
                    raise ModelFileError(f"{truncated}: {name} lies outside of the data")
                self._entries[name] = (path, dtype, shape, 8 + length + first)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ModelFileError(f"{truncated}: {error}") from error

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._entries:
            raise ModelFileError(
                f"{self.folder}: expected the tensor {name} {list(shape)}: missing"
            )
        path, _, found, _ = self._entries[name]
        if found != shape:
            raise ModelFileError(f"{path}: {name}: expected shape {list(shape)}, got {list(found)}")

    def rows(self, name: str, first: int, count: int) -> torch.Tensor:
        path, dtype, shape, start = self._entries[name]
        row_bytes = torch.Size(shape[1:]).numel() * dtype.itemsize
        buffer = bytearray(count * row_bytes)
        with path.open("rb", buffering=0) as file:
            _read(file, start + first * row_bytes, memoryview(buffer), f"{path}: {name}")
        return torch.frombuffer(buffer, dtype=dtype).view(count, *shape[1:])

    def find(self, name: str) -> torch.Tensor | None:
        if name not in self._entries:
            return None
        shape = self._entries[name][2]
        return self.rows(name, 0, shape[0] if shape else 1)

    def part(self, part: Part) -> torch.Tensor:
        if part.columns is None:
            return self.rows(part.source, part.first, part.count)
        path, dtype, shape, start = self._entries[part.source]
        row_bytes, (first, last) = shape[1] * dtype.itemsize, part.columns
        size = (last - first) * dtype.itemsize
        start += part.first * row_bytes + first * dtype.itemsize
        buffer = bytearray(part.count * size)
        with path.open("rb", buffering=0) as file:
            for row, view in enumerate(_cut(memoryview(buffer), size)):
                _read(file, start + row * row_bytes, view, f"{path}: {part.source}")
        return torch.frombuffer(buffer, dtype=dtype).view(part.count, last - first)

    def kv_scales(self) -> torch.Tensor | None:
        return read_kv_scales(self._entries, self._scalar, self.config.num_layers)

    def _scalar(self, name: str) -> float:
        path, dtype, shape, start = self._entries[name]
        if torch.Size(shape).numel() != 1:
            raise ModelFileError(f"{path}: {name}: expected one value, got {list(shape)}")
        buffer = bytearray(dtype.itemsize)
        with path.open("rb", buffering=0) as file:
            _read(file, start, memoryview(buffer), f"{path}: {name}")
        return float(torch.frombuffer(buffer, dtype=dtype))

    def fingerprint(self) -> str:
        return self._digest.hexdigest()


class GGUFCheckpoint:
    def __init__(self, path: Path):
        file = GGUFFile(path)
        self.path, self.config = path, gguf_config(file)
        self._weights = GGUFWeights(file, self.config)
        self.rope_divisors = self._weights.rope_divisors()

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        self._weights.check(name, shape)

    def rows(self, name: str, first: int, count: int) -> torch.Tensor:
        return self._weights.rows(name, first, count)

    def find(self, name: str) -> torch.Tensor | None:
        return None  # what is quantised in this format has its scales in its blocks

    def part(self, part: Part) -> torch.Tensor:
        return part.columns_of(self.rows(part.source, part.first, part.count))

    def kv_scales(self) -> torch.Tensor | None:
        return None

    def fingerprint(self) -> str:
        stat = self.path.stat()
        digest = hashlib.sha256(f"{self.path.name} {stat.st_size} {stat.st_mtime_ns}".encode())
        with self.path.open("rb") as file:
            digest.update(file.read(2**20))
        return digest.hexdigest()


def _cut(view: memoryview, size: int) -> Iterator[memoryview]:
    for first in range(0, len(view), size):
        yield view[first : first + size]


def _read(file: RawIOBase, first: int, view: memoryview, what: str) -> None:
    """Fills view with the bytes from `first` on. Raises ModelFileError naming `what`."""
    file.seek(first)
    done = 0
    while done < len(view):  # one read gives at most 2 GiB
        got = file.readinto(view[done:])
        if not got:
            raise ModelFileError(f"{what}: the file ends within it")
        done += got
