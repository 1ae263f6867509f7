"""A checkpoint folder for `trtllm-build`: config.json and rank{r}.safetensors of every rank.

Weights are the ONNX route's, part by part, under the names of trtllm_plugin/trtllm_model.py. What
trtllm-build has no option for (limits, the whole model, the plugins' interface) is the key
`granikv` of config.json. It knows nothing of TensorRT-LLM's code.
Format of safetensors: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from granikv.config import ModelConfig
from granikv.engines import export
from granikv.engines.build import (
    WEIGHT_SOURCES,
    ExportSettings,
    Progress,
    no_progress,
    open_shards,
    require_space,
)
from granikv.engines.checkpoint import Checkpoint
from granikv.engines.graph import ELEMENT_BYTES, all_weights
from granikv.engines.io import BuildLimits, plugin_abi_hash
from granikv.engines.manifest import FileEntry
from granikv.engines.records import RankRecord, key_of, sole_writer
from granikv.engines.sharding import Shard, WeightSpec
from granikv.errors import EngineMismatch
from granikv.outputs import write_atomically

ARCHITECTURE = "GraniKVForCausalLM"  # the class of trtllm_model.py, in TensorRT-LLM's MODEL_MAP
CONFIG_NAME, OUR_KEY, FORMAT = "config.json", "granikv", 1
_CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}

_NAMES = {  # of the graph -> of the module's parameter
    "embedding": "transformer.vocab_embedding.weight",
    "final_norm": "transformer.ln_f.weight",
    "rope_cos": "transformer.rope_cos",
    "rope_sin": "transformer.rope_sin",
    "lm_head": "lm_head.weight",
}
_LAYER_NAMES = {
    "input_norm": "input_layernorm.weight",
    "qkv": "attention.qkv.weight",
    "qkv_bias": "attention.qkv.bias",
    "qk_norm": "attention.qk_layernorm.weight",
    "out": "attention.dense.weight",
    "post_norm": "post_layernorm.weight",
    "gate_up": "mlp.gate_up.weight",
    "down": "mlp.proj.weight",
}


def parameter_name(weight: str) -> str:
    """TensorRT-LLM's name of an initialiser of the ONNX graph."""
    if weight in _NAMES:
        return _NAMES[weight]
    _, layer, name = weight.split(".")
    return f"transformer.layers.{layer}.{_LAYER_NAMES[name]}"


def convert(settings: ExportSettings, progress: Progress = no_progress) -> dict[str, Any]:
    """Writes the folder settings.out; returns what config.json holds.

    Finished ranks are kept, config.json comes last. Raises InvalidArgument, ModelFileError,
    Unsupported (a model that is not served) or Unavailable (no space).
    """
    checkpoint, limits, shards = open_shards(settings)
    with sole_writer(settings.out):
        return _convert(settings, checkpoint, limits, shards, progress)


def _convert(
    settings: ExportSettings,
    checkpoint: Checkpoint,
    limits: BuildLimits,
    shards: list[Shard],
    progress: Progress,
) -> dict[str, Any]:
    config_file = settings.out / CONFIG_NAME
    source = key_of(checkpoint.fingerprint(), settings.dtype, limits.max_seq_len, _source_hash())
    for shard in shards:
        record, key = RankRecord(settings.out, shard.rank), key_of(source, shard.tp_size)
        if record.finished("weights", key) is not None:
            continue
        config_file.unlink(missing_ok=True)  # it would describe other files
        total = _weights_bytes(shard, limits, settings.dtype)
        require_space(settings.out, total)
        with progress(f"rank {shard.rank} of {shard.tp_size}: weights", total) as advance:
            written = write_rank(checkpoint, shard, limits, settings.dtype, settings.out, advance)
        record.store("weights", key, [FileEntry(written.name, written.size_bytes, written.sha256)])
    config = checkpoint_config(settings, checkpoint, limits)
    write_atomically(config_file, (json.dumps(config, indent=1) + "\n").encode())
    return config


def write_rank(
    checkpoint: Checkpoint,
    shard: Shard,
    limits: BuildLimits,
    dtype: str,
    folder: Path,
    advance: export.Advance = lambda num_bytes: None,
) -> export.WrittenFile:
    """Writes rank{r}.safetensors; one slice of one tensor is in memory at a time."""
    placed = _placed(shard, limits, dtype)

    def blocks() -> Iterator[memoryview]:
        yield memoryview(_header(placed))
        for spec, kind, _ in placed:
            yield from export.weight_blocks(checkpoint, shard, limits, spec, kind)

    path = folder / f"rank{shard.rank}.safetensors"
    return export.write_stream(path, blocks(), advance)


def _placed(shard: Shard, limits: BuildLimits, dtype: str) -> list[tuple[WeightSpec, str, int]]:
    """(weight, dtype, bytes) in the file's order: fp32 first, so that all of it is aligned."""
    placed = []
    for spec in all_weights(shard, limits.max_seq_len):
        kind = dtype if spec.dtype == "network" else spec.dtype
        placed.append((spec, kind, spec.num_elements * ELEMENT_BYTES[kind]))
    return sorted(placed, key=lambda item: item[1] != "float32")


def _header(placed: list[tuple[WeightSpec, str, int]]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for spec, kind, size_bytes in placed:
        entries[parameter_name(spec.name)] = {
            "dtype": _CODES[kind], "shape": spec.shape, "data_offsets": [at, at + size_bytes],
        }  # fmt: skip
        at += size_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _weights_bytes(shard: Shard, limits: BuildLimits, dtype: str) -> int:
    placed = _placed(shard, limits, dtype)
    return len(_header(placed)) + sum(size_bytes for _, _, size_bytes in placed)


def checkpoint_config(
    settings: ExportSettings, checkpoint: Checkpoint, limits: BuildLimits
) -> dict[str, Any]:
    """config.json: TensorRT-LLM's own keys, and what our model reads in the key `granikv`."""
    c, tp = checkpoint.config, settings.tp_size
    return {
        "architecture": ARCHITECTURE,
        "dtype": settings.dtype,
        "logits_dtype": "float32",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_qo_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_size": c.head_dim,
        "hidden_act": "silu",
        "norm_epsilon": c.rms_norm_eps,
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": c.max_position,
        "qk_layernorm": c.qk_norm,
        "mapping": {"world_size": tp, "tp_size": tp, "pp_size": 1},
        OUR_KEY: {
            "format": FORMAT,
            "model": asdict(c),
            "limits": asdict(limits),
            "plugin_abi_hash": plugin_abi_hash(),
            "checkpoint": checkpoint.fingerprint(),
        },
    }


def read_ours(ours: dict[str, Any]) -> tuple[ModelConfig, BuildLimits]:
    """The whole model and the limits of the key `granikv`. Raises EngineMismatch."""
    remedy = "convert the checkpoint again with build_scripts/convert_checkpoint.py"
    for name, expected in (("format", FORMAT), ("plugin_abi_hash", plugin_abi_hash())):
        if ours.get(name) != expected:
            raise EngineMismatch(
                f"{CONFIG_NAME}: {OUR_KEY}.{name}: expected {expected!r}, got "
                f"{ours.get(name)!r}; {remedy}"
            )
    model = ours["model"] | {"eos_token_ids": tuple(ours["model"]["eos_token_ids"])}
    return ModelConfig(**model), BuildLimits(**ours["limits"])


def _source_hash() -> str:
    """Of the modules that decide what a rank's file holds."""
    digest = hashlib.sha256()
    for file in (__file__, *(module.__file__ for module in WEIGHT_SOURCES)):
        digest.update(Path(str(file)).read_bytes())
    return digest.hexdigest()
