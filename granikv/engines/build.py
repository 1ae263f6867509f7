"""`granikv build`: graphs, engines and the manifest of all ranks, whatever was made before.

A rank is finished when rank{r}.json records the key of its inputs and the hashes of its files; a
second run makes only what is missing or different. The manifest comes last.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from granikv.engines import checkpoint as checkpoint_module
from granikv.engines import export, graph, io, sharding
from granikv.engines.builders import (
    BuildRequest,
    build_engine,
    check_capabilities,
    check_network,
    choose_builder,
    own_capability,
    profile_of,
)
from granikv.engines.checkpoint import Checkpoint, open_checkpoint
from granikv.engines.io import DTYPES, BuildLimits, plugin_abi_hash
from granikv.engines.manifest import FILE_NAME, FileEntry, Manifest, RankFiles, engine_io
from granikv.engines.records import RankRecord, file_hash, key_of, sole_writer
from granikv.engines.sharding import Shard
from granikv.errors import InvalidArgument, Unavailable, Unsupported
from granikv.models import gguf_loader, layers
from granikv.outputs import write_atomically

DEFAULT_MAX_SEQ_LEN = 8192  # the model's context if that is shorter
# What decides the bytes of a rank's weights: GGUF blocks and the tables of rope are computed.
WEIGHT_SOURCES = (export, graph, sharding, checkpoint_module, gguf_loader, layers)

# what: of which rank; total: bytes, None where it is not known. Yields a function to advance by.
Progress = Callable[[str, int | None], contextlib.AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True)
class ExportSettings:
    """What weights and shapes come from. checkpoint: None for the embedded model.

    max_seq_len 0: DEFAULT_MAX_SEQ_LEN.
    """

    checkpoint: Path | None
    out: Path
    tp_size: int = 1
    dtype: str = "bfloat16"
    max_requests: int = 256
    max_tokens: int = 512
    max_seq_len: int = 0
    capacity_tokens: int = 65536


@dataclass(frozen=True)
class BuildSettings(ExportSettings):
    builder: str = "auto"
    plugin: Path | None = None  # shared library; needed by every builder but none
    compute_capabilities: tuple[str, ...] = ()  # rtx only; empty: this machine's GPU


@contextlib.contextmanager
def no_progress(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    yield lambda num_bytes: None


def build(settings: BuildSettings, progress: Progress = no_progress) -> Manifest:
    """Everything into settings.out. Raises InvalidArgument, ModelFileError, Unsupported (a model
    that is not served) or Unavailable (no builder, no GPU, no plugin, no space, TensorRT's refusal).
    """
    check_capabilities(settings.builder, settings.compute_capabilities)
    checkpoint, limits, shards = open_shards(settings)
    builder, builder_version = choose_builder(settings.builder)
    plugin = _plugin(settings, builder)
    own = own_target(builder, settings.compute_capabilities)
    with sole_writer(settings.out):
        return _build(
            settings, checkpoint, limits, shards, builder, builder_version, plugin, own, progress
        )


def _build(
    settings: BuildSettings,
    checkpoint: Checkpoint,
    limits: BuildLimits,
    shards: list[Shard],
    builder: str,
    builder_version: str | None,
    plugin: Path | None,
    own: str | None,
    progress: Progress,
) -> Manifest:
    described = engine_io(shards[0], limits, settings.dtype).describe()
    graph_key = key_of(checkpoint.fingerprint(), settings.dtype, asdict(limits), described,
                       _source_hash())  # fmt: skip
    library = file_hash(plugin) if plugin else ""
    engine_key = key_of(graph_key, builder, builder_version, library,
                      settings.compute_capabilities, own)  # fmt: skip
    ranks: list[RankFiles] = []
    made: dict = {}
    for shard in shards:
        record = RankRecord(settings.out, shard.rank)
        files = record.finished("graph", key_of(graph_key, shard.tp_size, shard.rank))
        if files is None:
            (settings.out / FILE_NAME).unlink(missing_ok=True)  # it would describe other files
            require_space(settings.out, export.planned_bytes(shard, limits, settings.dtype))
            files = _export(settings, checkpoint, shard, limits, progress)
            record.store("graph", key_of(graph_key, shard.tp_size, shard.rank), files)
        by_suffix = {Path(x.name).suffix: x for x in files}
        graph_file, weights_file = by_suffix[".onnx"], by_suffix[".weights"]
        found = RankFiles(graph_file, weights_file)
        if builder != "none":
            key = key_of(engine_key, graph_file.sha256, weights_file.sha256)
            engines = record.finished("engine", key)
            if engines is None:
                (settings.out / FILE_NAME).unlink(missing_ok=True)
                engines, made = _build_engine(settings, builder, plugin, shard, limits, progress)
                record.store("engine", key, engines, made)
            made = record.notes("engine")
            found = replace(found, engine=engines[0])
        ranks.append(found)
    manifest = Manifest(
        model=checkpoint.config,
        tp_size=settings.tp_size,
        dtype=settings.dtype,
        limits=limits,
        builder=builder,
        ranks=tuple(ranks),
        io=described,
        tensorrt_version=builder_version,
        compute_capabilities=tuple(made.get("compute_capabilities", ())),
        plugin_abi_hash=plugin_abi_hash(),
        plugin_sha256=library,
        checkpoint=checkpoint.fingerprint(),
        versions={name: _version(name) for name in ("granikv", "onnx", "torch")},
    )
    write_atomically(settings.out / FILE_NAME, manifest.to_json().encode())
    return manifest


def open_shards(settings: ExportSettings) -> tuple[Checkpoint, BuildLimits, list[Shard]]:
    """The checkpoint, checked against what every rank needs of it.

    Raises InvalidArgument, ModelFileError or Unsupported.
    """
    if settings.dtype not in DTYPES:
        raise InvalidArgument("dtype", settings.dtype, f"one of {DTYPES}")
    if settings.tp_size < 1:
        raise InvalidArgument("tp", settings.tp_size, "at least 1")
    checkpoint = open_checkpoint(settings.checkpoint)
    longest = checkpoint.config.max_position
    if settings.max_seq_len > longest:
        raise InvalidArgument("max-seq", settings.max_seq_len, f"at most the context of {longest}")
    max_seq_len = settings.max_seq_len or min(longest, DEFAULT_MAX_SEQ_LEN)
    window = checkpoint.config.sliding_window
    if window is not None and window < max_seq_len:
        raise Unsupported(
            f"sliding_window={window} is shorter than max-seq={max_seq_len}: engines attend to the "
            "whole context; lower max-seq to the window, or serve with executor='torch'"
        )
    limits = BuildLimits(
        settings.max_requests, settings.max_tokens, max_seq_len, settings.capacity_tokens
    )
    shards = [Shard(checkpoint.config, settings.tp_size, r) for r in range(settings.tp_size)]
    for shard in shards:
        export.check_weights(checkpoint, shard)
    return checkpoint, limits, shards


def own_target(builder: str, capabilities: Sequence[str]) -> str | None:
    """This machine's GPU, where an engine is for it: where none is named.

    Raises Unavailable without one, InvalidArgument for one that the builder does not serve.
    """
    if builder == "none" or capabilities:
        return None
    own = own_capability(builder)
    if builder == "rtx":
        check_capabilities(builder, [own])
    return own


def _plugin(settings: BuildSettings, builder: str) -> Path | None:
    if builder == "none":
        return None
    if settings.plugin is None or not settings.plugin.is_file():
        raise Unavailable(
            f"builder {builder}: expected --plugin with GraniKV's plugin library, got "
            f"{settings.plugin}; build it (trtllm_plugin/), or stop at ONNX with --builder none"
        )
    return settings.plugin


def _export(
    settings: BuildSettings,
    checkpoint: Checkpoint,
    shard: Shard,
    limits: BuildLimits,
    progress: Progress,
) -> list[FileEntry]:
    total = export.planned_bytes(shard, limits, settings.dtype)
    with progress(f"rank {shard.rank}: graph and weights", total) as advance:
        written = export.export_rank(
            checkpoint, shard, limits, settings.dtype, settings.out, advance
        )
    return [FileEntry(x.name, x.size_bytes, x.sha256) for x in written]


def _build_engine(
    settings: BuildSettings,
    builder: str,
    plugin: Path | None,
    shard: Shard,
    limits: BuildLimits,
    progress: Progress,
) -> tuple[list[FileEntry], dict]:
    path = settings.out / f"rank{shard.rank}.engine"
    capabilities = list(settings.compute_capabilities)
    table = engine_io(shard, limits, settings.dtype)
    graph_file = settings.out / f"rank{shard.rank}.onnx"
    request = BuildRequest(
        builder, str(graph_file), str(path), str(plugin), profile_of(table), capabilities
    )
    with progress(f"rank {shard.rank}: engine by {builder}", None):
        made = build_engine(request)
    check_network(made, table)
    return [FileEntry(path.name, path.stat().st_size, file_hash(path))], made


def require_space(folder: Path, size_bytes: int) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < size_bytes:
        raise Unavailable(
            f"{folder}: expected {size_bytes / 1e9:.1f} GB of free space for a rank's weights, "
            f"got {free_bytes / 1e9:.1f} GB; choose another --out"
        )


def _source_hash() -> str:
    """Of the modules that decide what a graph and its weights hold."""
    digest = hashlib.sha256(plugin_abi_hash().encode())
    for module in (*WEIGHT_SOURCES, io):
        digest.update(Path(str(module.__file__)).read_bytes())
    return digest.hexdigest()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"
