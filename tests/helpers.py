"""Shared helpers of the tests: tiny random models and dense reference attention."""

from __future__ import annotations

import importlib.util
import shutil
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import torch

TINY_VOCAB = 97
COLLECTIONS = (dict, list, set, deque)


def missing_triton() -> str:
    """Why no Triton server can be started here, and what to do; "" where one can."""
    if shutil.which("tritonserver") or importlib.util.find_spec("pytriton") is not None:
        return ""
    return "no Triton server: neither on PATH nor in the nvidia-pytriton wheel; `make setup` installs it"


def make_tiny_hf(path: str | Path, arch: str = "LlamaForCausalLM", seed: int = 0, **overrides) -> Path:  # fmt: skip
    """Saves a tiny random model of `arch` as a Hugging Face folder (no tokenizer); returns it."""
    import transformers

    config_class = getattr(transformers, arch.replace("ForCausalLM", "Config"))
    settings = {
        "vocab_size": TINY_VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "initializer_range": 0.3,
    }
    if arch == "Qwen2ForCausalLM":
        settings |= {"hidden_size": 64, "head_dim": None}  # Qwen2 takes hidden / heads
        settings.pop("head_dim")
    if arch == "MistralForCausalLM":
        settings["sliding_window"] = None
    torch.manual_seed(seed)
    model = getattr(transformers, arch)(config_class(**(settings | overrides)))
    with torch.no_grad():  # norms and biases start constant; make them matter
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                offset = 1.0 if "norm" in name else 0.0
                parameter.copy_(offset + 0.3 * torch.randn_like(parameter))
    model.save_pretrained(str(path))
    return Path(path)


def dense_attend(config, lengths: list[int] | None = None):
    """An `attend` with causal attention over the rows of one step, per sequence of `lengths`."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        outs, start = [], 0
        for length in lengths or [q.shape[0]]:
            rows = slice(start, start + length)
            out = torch.nn.functional.scaled_dot_product_attention(
                q[rows].transpose(0, 1)[None],
                k[rows].transpose(0, 1)[None],
                v[rows].transpose(0, 1)[None],
                is_causal=True,
                enable_gqa=True,
            )
            outs.append(out[0].transpose(0, 1).reshape(length, -1))
            start += length
        return torch.cat(outs)

    return attend


def map_sizes(name: str, root: object) -> dict[str, int]:
    """Length by shortest path ("engine.cache.tree.roots"). Only objects of granikv are walked.

    What a collection holds is not walked: it is counted.
    """
    sizes, seen, queue = {}, set(), deque([(name, root)])
    while queue:
        path, one = queue.popleft()
        if isinstance(one, COLLECTIONS):
            sizes[path] = len(one)
        elif type(one).__module__.startswith("granikv") and id(one) not in seen:
            seen.add(id(one))
            queue += [(f"{path}.{field}", value) for field, value in _fields(one)]
    return sizes


def _fields(one: object) -> Iterator[tuple[str, object]]:
    yield from getattr(one, "__dict__", {}).items()
    for kind in type(one).__mro__:
        for field in getattr(kind, "__slots__", ()):
            if hasattr(one, field):
                yield field, getattr(one, field)
