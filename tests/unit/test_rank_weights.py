"""What a tensor-parallel rank reads of a checkpoint: its slices, to the byte. No processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import make_tiny_hf

from granikv.config import EngineConfig
from granikv.engines import checkpoint
from granikv.engines.sharding import Shard
from granikv.executor.torch_ranks import load_rank

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Eight query heads, two KV heads; scales of an FP8 KV cache."""
    path = make_tiny_hf(
        tmp_path_factory.mktemp("model"), "Qwen2ForCausalLM", seed=3, num_attention_heads=8
    )
    file = path / "model.safetensors"
    scales = {
        f"model.layers.{i}.self_attn.{x}_scale": torch.tensor(0.5 + i + 0.25 * (x == "v"))
        for i in range(3)
        for x in "kv"
    }
    save_file(load_file(file) | scales, file, metadata={"format": "pt"})
    return path


@pytest.fixture
def read(monkeypatch):
    """(first, last) of every read of a tensor's bytes, in order."""
    ranges: list[tuple[int, int]] = []
    plain = checkpoint._read

    def noted(file, first, view, what):
        ranges.append((first, first + len(view)))
        plain(file, first, view, what)

    monkeypatch.setattr(checkpoint, "_read", noted)
    return ranges


def config(folder, tp) -> EngineConfig:
    return EngineConfig(model=str(folder), tp=tp, device="cpu", dtype="float32")


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_a_rank_reads_its_slices_and_no_more(folder, read, tp):
    whole_bytes = (folder / "model.safetensors").stat().st_size
    totals = []
    for rank in range(tp):
        read.clear()
        model, decoder = load_rank(config(folder, tp), rank, CPU)
        parts = {
            (part.source, part.first, part.columns): part.num_elements
            for spec in Shard(model, tp, rank).weights()
            for part in spec.parts
        }
        num_scales = 2 * model.num_layers
        totals.append(sum(last - first for first, last in read))
        assert totals[-1] == 4 * (sum(parts.values()) + num_scales)
        assert len(set(read)) == len(read), "bytes were read twice"
        assert decoder.layers[1].down.weight.shape == (64, 80 // tp)
    embedding_bytes = 4 * 97 * 64  # every rank has it
    assert max(totals) < embedding_bytes + 0.7 * (whole_bytes - embedding_bytes)


def test_ranks_have_the_parts_of_the_whole_in_their_order(folder):
    """Row-parallel weights by columns, KV heads shared by ranks beyond them, scales on every rank."""
    whole = load_file(folder / "model.safetensors")
    ranks = [load_rank(config(folder, 4), rank, CPU)[1] for rank in range(4)]
    for name, place in (("o_proj", "out"), ("down_proj", "down")):
        kind = "self_attn" if name == "o_proj" else "mlp"
        joined = torch.cat([getattr(rank.layers[2], place).weight for rank in ranks], dim=1)
        assert torch.equal(joined, whole[f"model.layers.2.{kind}.{name}.weight"])
    v = whole["model.layers.0.self_attn.v_proj.weight"]
    for index, rank in enumerate(ranks):
        assert torch.equal(rank.layers[0].qkv.weight[-8:], v[index // 2 * 8 :][:8])
        assert torch.equal(rank.kv_scales, torch.tensor([[0.5, 0.75], [1.5, 1.75], [2.5, 2.75]]))
