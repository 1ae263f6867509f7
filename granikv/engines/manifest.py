"""manifest.json beside the engines: what they were built from, for and with.

Loading reads this file alone, and refuses what cannot run here before anything is allocated.
It knows nothing of TensorRT.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from granikv.attention.plan_buffers import step_capacities
from granikv.config import ModelConfig
from granikv.engines.io import (
    DTYPES,
    BuildLimits,
    EngineIO,
    attention_shape_of,
    plugin_abi_hash,
)
from granikv.engines.sharding import Shard
from granikv.errors import EngineMismatch, InvalidArgument, ModelFileError

FILE_NAME, FORMAT = "manifest.json", 1


def engine_io(shard: Shard, limits: BuildLimits, dtype: str) -> EngineIO:
    """Inputs and outputs of a rank, with the buffer sizes that the executor will have."""
    shape = attention_shape_of(shard.rank_config, dtype)
    capacities = step_capacities(limits.max_requests, limits.max_tokens, shape)
    return EngineIO(limits, shard.rank_config, capacities, shard.vocab_shard)


@dataclass(frozen=True)
class FileEntry:
    name: str  # beside the manifest
    size_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or Path(self.name).name != self.name:
            raise InvalidArgument("file", self.name, "a name beside the manifest")


@dataclass(frozen=True)
class RankFiles:
    """None: not made; trtllm-build leaves engines only."""

    graph: FileEntry | None = None
    weights: FileEntry | None = None
    engine: FileEntry | None = None


@dataclass(frozen=True)
class RuntimeFacts:
    """What runs the engines here. None: unknown to the runtime, not compared."""

    tensorrt_version: str | None = None
    compute_capability: str | None = None  # "9.0"
    plugin_sha256: str | None = None  # of the plugin library's file


@dataclass(frozen=True)
class Manifest:
    model: ModelConfig  # of the whole model
    tp_size: int
    dtype: str  # a key of export.TORCH_TYPES
    limits: BuildLimits
    builder: str  # "none", "tensorrt", "rtx" or "trtllm-build"
    ranks: tuple[RankFiles, ...]
    io: dict[str, Any]  # EngineIO.describe()
    tensorrt_version: str | None = None
    compute_capabilities: tuple[str, ...] = ()
    plugin_abi_hash: str = ""
    plugin_sha256: str = ""  # of the library that the engines were built with
    checkpoint: str = ""  # fingerprint of the files it was exported from
    versions: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    def check(self, folder: Path, tp_size: int, facts: RuntimeFacts, kind: str = "engine") -> None:
        """Raises EngineMismatch with both values and the remedy, or InvalidArgument for a model
        that tp_size does not divide. kind: the file that the runtime needs of each rank.
        """
        where = folder / FILE_NAME
        rebuild = self._rebuild(folder)
        if self.tp_size != tp_size:
            raise EngineMismatch(
                f"{where}: tp: expected {tp_size}, got engines for {self.tp_size}; start with "
                f"tp={self.tp_size}, or {self._rebuild(folder, tp_size)}"
            )
        for rank in range(tp_size):
            Shard(self.model, tp_size, rank)
        if len(self.ranks) != tp_size:
            raise EngineMismatch(
                f"{where}: ranks: expected {tp_size}, got {len(self.ranks)}; {rebuild}"
            )
        if self.plugin_abi_hash != plugin_abi_hash():
            raise EngineMismatch(
                f"{where}: plugin interface: expected {plugin_abi_hash()} as the package has it, "
                f"got {self.plugin_abi_hash}; {rebuild}, or install what they were built with"
            )
        library = facts.plugin_sha256
        if library is not None and self.plugin_sha256 != library:
            raise EngineMismatch(
                f"{where}: plugin library: expected engines built with the given one, sha256 "
                f"{library}, got engines of {self.plugin_sha256 or 'none'}; give the library that "
                f"they were built with, or {self._rebuild(folder, library='LIBRARY')}"
            )
        version = facts.tensorrt_version
        if version is not None and self.tensorrt_version != version:
            raise EngineMismatch(
                f"{where}: TensorRT: expected {version}, which is installed, got engines of "
                f"{self.tensorrt_version or 'none'}; {rebuild} here"
            )
        capability = facts.compute_capability
        if capability is not None and capability not in self.compute_capabilities:
            built = ", ".join(self.compute_capabilities) or "none"
            raise EngineMismatch(
                f"{where}: compute capability: expected {capability}, this GPU's, got engines "
                f"for {built}; {rebuild} on this GPU"
            )
        own, built_for = _sizes(self.package_io()), _sizes(self.io)
        for name, key in own | built_for:
            expected, got = (sizes.get((name, key), "none") for sizes in (own, built_for))
            if got != expected:
                raise EngineMismatch(
                    f"{where}: {name}: {key}: expected {expected}, the size of this package's "
                    f"buffers, got {got}; {rebuild}"
                )
        for rank in range(tp_size):
            self.file(folder, rank, kind)

    def _rebuild(self, folder: Path, tp_size: int | None = None, library: str = "") -> str:
        """The command that makes other engines, by the route that made these."""
        if self.builder == "trtllm-build":
            variable = f"GRANIKV_PLUGIN={library} " if library else ""
            script = f"build_scripts/build_engines.sh CHECKPOINT OUT {tp_size or self.tp_size}"
            return f"build again with `{variable}{script}`"
        options = f" --tp {tp_size}" if tp_size else ""
        options += f" --plugin {library}" if library else ""
        return f"build again with `granikv build --out {folder}{options}`"

    def package_io(self) -> dict[str, Any]:
        """EngineIO.describe() with the buffers that the executor makes for these engines."""
        return engine_io(Shard(self.model, self.tp_size, 0), self.limits, self.dtype).describe()

    def file(self, folder: Path, rank: int, kind: str = "engine") -> Path:
        """Path of a rank's file, "engine", "graph" or "weights". Raises EngineMismatch."""
        entry = getattr(self.ranks[rank], kind)
        remedy = f"run `granikv build` for {folder} again, it makes what is missing"
        if self.builder == "trtllm-build":
            remedy = self._rebuild(folder)
        if entry is None:
            raise EngineMismatch(
                f"{folder}: rank {rank}: expected an {kind}, got a build with --builder "
                f"{self.builder}; {remedy}"
                + (" with --builder tensorrt" if self.builder == "none" else "")
            )
        path = folder / entry.name
        size = path.stat().st_size if path.is_file() else None
        if size != entry.size_bytes:
            found = "none" if size is None else f"{size} bytes"
            raise EngineMismatch(
                f"{path}: rank {rank}: expected a file of {entry.size_bytes} bytes, got {found}; "
                f"{remedy}"
            )
        return path


def _sizes(io: dict[str, Any]) -> dict[tuple[str, str], Any]:
    """What engine and executor must agree on: {(input or output, "dims"): its dimensions}."""
    return {
        (f"{side} {entry['name']}", key): entry[key]
        for side, entries in (("input", io["inputs"]), ("output", io["outputs"]))
        for entry in entries
        for key in ("dtype", "dims", "min", "max")
    }


def load_manifest(folder: Path) -> Manifest:
    """Raises ModelFileError for a folder without a readable manifest of this format."""
    path = Path(folder) / FILE_NAME
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFileError(
            f"{path}: expected a folder that `granikv build` wrote: {error.strerror}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: expected valid JSON: {error}; build again") from error
    found = raw.get("format") if isinstance(raw, dict) else None
    if found != FORMAT:
        raise ModelFileError(f"{path}: format: expected {FORMAT}, got {found!r}; build again")
    try:
        return _parse(raw)
    except (TypeError, KeyError, AttributeError, ValueError, InvalidArgument) as error:
        raise ModelFileError(
            f"{path}: expected a manifest of `granikv build`: {error}; build again"
        ) from error


def _parse(raw: dict) -> Manifest:
    if raw["dtype"] not in DTYPES:
        raise InvalidArgument("dtype", raw["dtype"], f"one of {DTYPES}")
    _sizes(raw["io"])
    model = raw["model"] | {"eos_token_ids": tuple(raw["model"]["eos_token_ids"])}
    ranks = tuple(
        RankFiles(**{kind: FileEntry(**entry) for kind, entry in files.items() if entry})
        for files in raw["ranks"]
    )
    return Manifest(
        **raw
        | {
            "model": ModelConfig(**model),
            "limits": BuildLimits(**raw["limits"]),
            "ranks": ranks,
            "compute_capabilities": tuple(raw["compute_capabilities"]),
        }
    )
