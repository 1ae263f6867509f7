"""manifest.json beside the engines that `trtllm-build` made, so that our executor loads them.

    python -m granikv.engines.trtllm_manifest CHECKPOINT ENGINES PLUGIN [COMPUTE_CAPABILITY]

CHECKPOINT: folder of convert_checkpoint.py; ENGINES: trtllm-build's --output_dir; PLUGIN: the
library that it loaded.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

from granikv.engines.build_worker import MODULES
from granikv.engines.io import plugin_abi_hash
from granikv.engines.manifest import FILE_NAME, FileEntry, Manifest, RankFiles, engine_io
from granikv.engines.records import file_hash
from granikv.engines.sharding import Shard
from granikv.engines.trtllm_checkpoint import ARCHITECTURE, CONFIG_NAME, OUR_KEY, read_ours
from granikv.errors import (
    EngineMismatch,
    GraniKVError,
    InvalidArgument,
    ModelFileError,
    Unavailable,
)
from granikv.outputs import write_atomically


def write_manifest(
    checkpoint: Path, engines: Path, plugin: Path, tensorrt_version: str, compute_capability: str
) -> Manifest:
    """Raises ModelFileError for a missing file, EngineMismatch for engines of something else."""
    if not re.fullmatch(r"[1-9]\d*\.\d", compute_capability):
        raise InvalidArgument("compute_capability", compute_capability, "one like 9.0")
    config = _read(checkpoint / CONFIG_NAME)
    if OUR_KEY not in config:
        raise EngineMismatch(
            f"{checkpoint / CONFIG_NAME}: {OUR_KEY}: expected a checkpoint of "
            "build_scripts/convert_checkpoint.py, got none of its settings"
        )
    model, limits = read_ours(config[OUR_KEY])
    built = _read(engines / CONFIG_NAME)
    found = built.get("pretrained_config", {}).get(OUR_KEY)
    if found != config[OUR_KEY]:
        raise EngineMismatch(
            f"{engines / CONFIG_NAME}: {OUR_KEY}: expected that of {checkpoint}, got another "
            f"(architecture {built.get('pretrained_config', {}).get('architecture')!r}, ours is "
            f"{ARCHITECTURE!r}); run trtllm-build on this checkpoint"
        )
    tp_size = config["mapping"]["tp_size"]
    ranks = tuple(RankFiles(engine=_entry(engines, rank)) for rank in range(tp_size))
    manifest = Manifest(
        model=model,
        tp_size=tp_size,
        dtype=config["dtype"],
        limits=limits,
        builder="trtllm-build",
        ranks=ranks,
        io=engine_io(Shard(model, tp_size, 0), limits, config["dtype"]).describe(),
        tensorrt_version=tensorrt_version,
        compute_capabilities=(compute_capability,),
        plugin_abi_hash=plugin_abi_hash(),
        plugin_sha256=_hash(plugin),
        checkpoint=config[OUR_KEY]["checkpoint"],
        versions={"tensorrt_llm": str(built.get("version", "unknown"))},
    )
    write_atomically(engines / FILE_NAME, manifest.to_json().encode())
    return manifest


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path}: expected a readable JSON file: {error}") from error


def _hash(plugin: Path) -> str:
    try:
        return file_hash(plugin)
    except OSError as error:
        raise ModelFileError(f"{plugin}: expected the plugin library: {error.strerror}") from error


def _entry(engines: Path, rank: int) -> FileEntry:
    path = engines / f"rank{rank}.engine"
    if not path.is_file():
        raise ModelFileError(f"{path}: expected an engine of trtllm-build, got no file")
    return FileEntry(path.name, path.stat().st_size, file_hash(path))


def main(arguments: list[str]) -> None:
    if not 3 <= len(arguments) <= 4:
        sys.exit(f"trtllm_manifest: expected 3 or 4 arguments, got {len(arguments)}\n{__doc__}")
    checkpoint, engines, plugin, *given = arguments
    try:
        if not given and not torch.cuda.is_available():
            raise Unavailable(
                "compute capability: expected a GPU, or the engines' capability as the fourth "
                "argument, got neither"
            )
        capability = given[0] if given else "{}.{}".format(*torch.cuda.get_device_capability())
        try:
            version = importlib.import_module(MODULES["tensorrt"]).__version__
        except ImportError as error:
            raise Unavailable(f"tensorrt: expected what built the engines ({error})") from None
        write_manifest(Path(checkpoint), Path(engines), Path(plugin), version, capability)
    except GraniKVError as error:
        sys.exit(f"trtllm_manifest: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
