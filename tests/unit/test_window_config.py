"""Which sliding windows the readers of model files carry, drop or refuse."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import make_tiny_hf

from granikv.errors import ModelFileError, Unsupported
from granikv.models import load_config
from granikv.models.gguf_loader import GGUFFile, gguf_config

MISTRAL, QWEN2, QWEN3 = "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
SLIDES = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of models with 3 layers and a context of 256."""
    archs = ("LlamaForCausalLM", MISTRAL, QWEN2, QWEN3)
    return {arch: make_tiny_hf(tmp_path_factory.mktemp(arch), arch) for arch in archs}


def edited(folders, tmp_path, arch, changes):
    """The model's config.json alone, changed; a value ... removes the key."""
    raw = json.loads((folders[arch] / "config.json").read_text())
    raw.pop("layer_types", None)
    raw = {key: value for key, value in (raw | changes).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return tmp_path


@pytest.mark.parametrize(
    ("arch", "changes", "window"),
    [
        (MISTRAL, {"sliding_window": 64}, 64),
        (MISTRAL, {"sliding_window": None}, None),
        (MISTRAL, {"sliding_window": 0}, None),
        (MISTRAL, {"sliding_window": 256}, None),  # the whole context
        (MISTRAL, {"sliding_window": 255}, 255),
        (MISTRAL, {"sliding_window": ..., "max_position_embeddings": 8192}, 4096),
        (MISTRAL, {"sliding_window": 64, "layer_types": ["sliding_attention"] * 3}, 64),
        ("LlamaForCausalLM", {"sliding_window": 64}, None),  # transformers has none
        (QWEN2, SLIDES, 64),
        (QWEN3, SLIDES, 64),
        (QWEN2, SLIDES | {"use_sliding_window": False}, None),
        (QWEN2, SLIDES | {"max_window_layers": 3}, None),
        (QWEN2, SLIDES | {"max_window_layers": ...}, None),  # 28
        (QWEN2, SLIDES | {"max_window_layers": 3, "layer_types": ["sliding_attention"] * 3}, 64),
        (QWEN2, SLIDES | {"layer_types": ["full_attention"] * 3}, None),
        (QWEN2, SLIDES | {"sliding_window": 256, "max_window_layers": 1}, None),
    ],
)
def test_window_of_hugging_face_folders(folders, tmp_path, arch, changes, window):
    assert load_config(edited(folders, tmp_path, arch, changes)).sliding_window == window


@pytest.mark.parametrize(
    ("changes", "num_sliding"),
    [
        ({"max_window_layers": 2}, 1),
        ({"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}, 2),
    ],
)
def test_layers_that_differ_are_refused(folders, tmp_path, changes, num_sliding):
    folder = edited(folders, tmp_path, QWEN2, SLIDES | changes)
    with pytest.raises(Unsupported, match=f"sliding_window=64 in {num_sliding} of 3 layers.*mix"):
        load_config(folder)


@pytest.mark.parametrize("wrong", [-5, "64", 2.5])
def test_a_wrong_window_names_its_file(folders, tmp_path, wrong):
    with pytest.raises(ModelFileError, match=r"config\.json"):
        load_config(edited(folders, tmp_path, MISTRAL, {"sliding_window": wrong}))


def gguf_with(path, window, pattern=None):
    """A header as Mistral's files have it, with the embedding alone."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_embedding_length(48)
    writer.add_feed_forward_length(80)
    writer.add_head_count(4)
    writer.add_context_length(256)
    writer.add_layer_norm_rms_eps(1e-5)
    if window is not None:
        writer.add_sliding_window(window)
    if pattern is not None:
        writer.add_sliding_window_pattern(pattern)
    writer.add_tensor("token_embd.weight", np.zeros((97, 48), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


def test_window_of_gguf_files(tmp_path):
    path = tmp_path / "m.gguf"
    for stored, window in ((None, None), (0, None), (64, 64), (256, None)):
        assert gguf_config(gguf_with(path, stored)).sliding_window == window
    assert gguf_config(gguf_with(path, 256, 2)).sliding_window is None
    with pytest.raises(Unsupported, match="sliding_window_pattern.*sliding_window=64.*mix"):
        gguf_config(gguf_with(path, 64, 2))
