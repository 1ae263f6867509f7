"""Reader of GGUF files: header, configuration and dequantised weights.

The header is parsed here (the gguf package's reader takes seconds for a vocabulary of 49K strings,
which start-up would pay twice); block formats are the gguf package's.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from granikv.config import ModelConfig
from granikv.errors import InvalidArgument, ModelFileError, Unsupported
from granikv.models.fp8 import quantizing
from granikv.models.weights import ARCHITECTURES, ModelWeights, build_weights, effective_window

GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",  # Mistral too: its files say llama
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True)
class TensorEntry:
    shape: tuple[int, ...]  # rows first, as torch has it
    kind: GGMLQuantizationType
    start_bytes: int  # in the file
    size_bytes: int


class GGUFFile:
    """Metadata and tensors of one file. Raises ModelFileError for anything but a whole GGUF file."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self._bytes = np.memmap(path, dtype=np.uint8, mode="r")
        except FileNotFoundError:
            expected = "a GGUF file or a folder with config.json and *.safetensors"
            raise ModelFileError(f"{path}: expected {expected}, found nothing") from None
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise ModelFileError(f"{path}: expected a GGUF file: {error}") from error
        self._view, self._at = self._bytes.data, 0
        if bytes(self._view[:4]) != b"GGUF":
            raise ModelFileError(
                f"{path}: expected the magic b'GGUF', got {bytes(self._view[:4])!r}"
            )
        self._at = 4
        try:
            version, num_tensors, num_fields = self._unpack("IQQ")
            if version not in (2, 3):
                raise ModelFileError(f"{path}: expected GGUF version 2 or 3, got {version}")
            self.metadata: dict[str, Any] = {}
            for _ in range(num_fields):
                name = self._string()
                self.metadata[name] = self._value(*self._unpack("I"))
            self.tensors = self._entries(num_tensors)
        except (struct.error, UnicodeDecodeError, KeyError, ValueError, OverflowError) as error:
            raise ModelFileError(
                f"{path}: expected a whole GGUF header (truncated or corrupt at byte {self._at}): "
                f"{error}"
            ) from error

    def _unpack(self, codes: str) -> tuple:
        values = struct.unpack_from("<" + codes, self._view, self._at)
        self._at += struct.calcsize("<" + codes)
        return values

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        end = self._at + length
        if end > len(self._view):
            raise ValueError(f"a string of {length} bytes passes the end of the file")
        text = str(self._view[self._at : end], "utf-8")
        self._at = end
        return text

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._unpack(_SCALARS[kind])[0]
        item, length = self._unpack("IQ")
        if length > len(self._view) - self._at:
            raise ValueError(f"an array of {length} entries passes the end of the file")
        if item in (_STRING, _ARRAY):
            return [self._value(item) for _ in range(length)]
        return list(self._unpack(f"{length}{_SCALARS[item]}"))

    def _entries(self, num_tensors: int) -> dict[str, TensorEntry]:
        raw = []
        for _ in range(num_tensors):
            name = self._string()
            (num_dims,) = self._unpack("I")
            if num_dims > _MAX_DIMS:
                raise ValueError(f"tensor {name} has {num_dims} dimensions")
            dims = self._unpack(f"{num_dims}Q")
            raw.append((name, dims, *self._unpack("IQ")))
        align = int(self.metadata.get("general.alignment", 32))
        base = -(-self._at // align) * align
        entries = {}
        for name, dims, kind_id, offset in raw:
            kind = GGMLQuantizationType(kind_id)
            block, block_bytes = GGML_QUANT_SIZES[kind]
            count = 1
            for size in dims:
                count *= size
            size_bytes = count // block * block_bytes
            if base + offset + size_bytes > len(self._view):
                raise ModelFileError(
                    f"{self.path}: tensor {name} ends at byte {base + offset + size_bytes}, the "
                    f"file has {len(self._view)}: truncated; download it again"
                )
            entries[name] = TensorEntry(tuple(reversed(dims)), kind, base + offset, size_bytes)
        return entries

    def tensor(self, name: str, first: int = 0, count: int | None = None) -> torch.Tensor:
        """Dequantised rows [first, first + count) of a tensor, float32; count None: to its end.

        Raises ModelFileError or Unsupported.
        """
        if name not in self.tensors:
            raise ModelFileError(f"{self.path}: expected the tensor {name}, which is missing")
        entry = self.tensors[name]
        count = entry.shape[0] - first if count is None else count
        row_bytes = entry.size_bytes // entry.shape[0]  # blocks never cross a row
        start = entry.start_bytes + first * row_bytes
        raw = self._bytes[start : start + count * row_bytes]
        try:
            if entry.kind == GGMLQuantizationType.F32:
                values = raw.view(np.float32)
            elif entry.kind == GGMLQuantizationType.F16:
                values = raw.view(np.float16)
            else:
                values = dequantize(np.asarray(raw).reshape(count, -1), entry.kind)
        except NotImplementedError as error:
            raise Unsupported(
                f"{self.path}: {name}: block format {entry.kind.name} is not served"
            ) from error
        rows = np.array(values, dtype=np.float32).reshape(count, *entry.shape[1:])
        return torch.from_numpy(rows)


def unpermute_rows(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows [H * D, ...] from interleaved rotation pairs (0,1)(2,3).. to half-split (0,D/2).."""
    pairs = weight.shape[0] // num_heads // 2
    grouped = weight.reshape(num_heads, pairs, 2, *weight.shape[1:])
    return grouped.transpose(1, 2).reshape(weight.shape)


def gguf_config(file: GGUFFile) -> ModelConfig:
    """ModelConfig of a GGUF file. Raises ModelFileError or Unsupported."""
    arch = file.metadata.get("general.architecture")
    if arch not in GGUF_ARCHITECTURES:
        raise ModelFileError(
            f"{file.path}: general.architecture: expected one of {', '.join(GGUF_ARCHITECTURES)} "
            f"({', '.join(ARCHITECTURES)}), got {arch!r}"
        )

    def field(name: str, default: Any = None) -> Any:
        return file.metadata.get(f"{arch}.{name}", default)

    def needed(name: str) -> Any:
        if field(name) is None:
            raise ModelFileError(f"{file.path}: expected the field {arch}.{name}, it is missing")
        return field(name)

    heads, hidden = needed("attention.head_count"), needed("embedding_length")
    head_dim = field("attention.key_length") or hidden // heads
    if field("expert_count", 0):
        raise Unsupported(f"{file.path}: mixture of experts is not served")
    if field("rope.dimension_count", head_dim) != head_dim:
        raise Unsupported(f"{file.path}: rotation of a part of the head is not served")
    scaling = None
    kind = field("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise Unsupported(f"{file.path}: rope scaling: expected none or linear, got {kind!r}")
    if kind == "linear":
        scaling = {"rope_type": "linear", "factor": float(needed("rope.scaling.factor"))}
    eos = [file.metadata.get(f"tokenizer.ggml.{x}_token_id") for x in ("eos", "eot")]
    window = effective_window(field("attention.sliding_window"), needed("context_length"))
    if window is not None and field("attention.sliding_window_pattern") is not None:
        raise Unsupported(
            f"{file.path}: attention.sliding_window_pattern beside sliding_window={window}: "
            "models that mix sliding and full attention are not served"
        )
    vocab = file.tensors.get("token_embd.weight")
    if vocab is None:
        raise ModelFileError(f"{file.path}: expected the tensor token_embd.weight, it is missing")
    try:
        config = ModelConfig(
            architecture=GGUF_ARCHITECTURES[arch],
            num_layers=needed("block_count"),
            hidden_size=hidden,
            intermediate_size=needed("feed_forward_length"),
            num_qo_heads=heads,
            num_kv_heads=field("attention.head_count_kv", heads),
            head_dim=head_dim,
            vocab_size=vocab.shape[0],
            max_position=needed("context_length"),
            rms_norm_eps=float(needed("attention.layer_norm_rms_epsilon")),
            rope_theta=float(field("rope.freq_base", 10000.0)),
            rope_scaling=scaling,
            tie_embeddings="output.weight" not in file.tensors,
            attention_bias=arch == "qwen2",
            qk_norm=arch == "qwen3",
            bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_ids=tuple(dict.fromkeys(x for x in eos if x is not None)),
            sliding_window=window,
        )
    except (TypeError, ZeroDivisionError, InvalidArgument) as error:
        raise ModelFileError(f"{file.path}: expected a decoder's fields: {error}") from error
    return config


class GGUFWeights:
    """Tensors of a file by Hugging Face name, rows in half-split order."""

    def __init__(self, file: GGUFFile, config: ModelConfig):
        self.file = file
        self._permuted: dict[str, int] = {}  # stem -> heads, where pairs are interleaved
        if file.metadata["general.architecture"] == "llama":
            self._permuted = {"attn_q": config.num_qo_heads, "attn_k": config.num_kv_heads}

    def _short(self, name: str) -> tuple[str, str]:
        """Name in the file, and its stem within a layer."""
        if name in _NAMES:
            return _NAMES[name], ""
        layer, rest = name.removeprefix("model.layers.").split(".", 1)
        stem, suffix = rest.rsplit(".", 1)
        stem = _LAYER_NAMES[stem]
        return f"blk.{layer}.{stem}.{suffix}", stem

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises ModelFileError unless the tensor is there with this shape."""
        short, _ = self._short(name)
        if short not in self.file.tensors:
            raise ModelFileError(f"{self.file.path}: expected the tensor {short}, it is missing")
        found = self.file.tensors[short].shape
        if found != shape:
            raise ModelFileError(
                f"{self.file.path}: {short}: expected shape {list(shape)}, got {list(found)}"
            )

    def rows(self, name: str, first: int = 0, count: int | None = None) -> torch.Tensor:
        """Rows [first, first + count) of a tensor, float32; count None: to its end."""
        short, stem = self._short(name)
        if stem not in self._permuted:
            return self.file.tensor(short, first, count)
        whole = unpermute_rows(self.file.tensor(short), self._permuted[stem])
        return whole[first:] if count is None else whole[first : first + count]

    def rope_divisors(self) -> torch.Tensor | None:
        """float32 [D / 2], where the file has them."""
        if "rope_freqs.weight" not in self.file.tensors:
            return None
        return self.file.tensor("rope_freqs.weight")


def load_gguf(
    path: Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    quantization: str | None = None,
) -> tuple[ModelConfig, ModelWeights]:
    """Configuration and dequantised weights of a GGUF file; quantization: see load_model.

    Raises ModelFileError (missing, truncated, wrong shape) or Unsupported.
    """
    file = GGUFFile(path)
    config = gguf_config(file)
    source = GGUFWeights(file, config)

    def get(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        source.check(name, shape)
        return source.rows(name).to(dtype)

    weights = build_weights(config, quantizing(get, quantization, device))
    weights.rope_divisors = source.rope_divisors()
    return config, weights
