"""The torch executor cut over tensor-parallel ranks: each reads its slices and runs its heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from granikv.config import EngineConfig, ModelConfig
from granikv.engines.checkpoint import Checkpoint, open_checkpoint
from granikv.engines.sharding import Part, Shard, WeightSpec
from granikv.executor.cuda_executor import CudaExecutor
from granikv.executor.group import RankSteps, all_reduce
from granikv.executor.ranks import LeaderSteps, settings_of, start_group
from granikv.models import Decoder
from granikv.models.fp8 import Fp8Weight, Weight, is_product, join_rows, quantizing
from granikv.models.fp8_checkpoint import read_fp8_weight
from granikv.models.random_weights import random_tensors, read_shape
from granikv.models.weights import LayerWeights, ModelWeights
from granikv.sampling import Sampler

ReadPart = Callable[[Part], Weight]


class TorchRank(RankSteps, CudaExecutor):
    """One rank of a group that `join` has set up; rank 0's is the one the engine sees."""

    def __init__(
        self, engine_config: EngineConfig, sampler: Sampler, device: torch.device, rank: int
    ):
        model, decoder = load_rank(engine_config, rank, device)
        self.rank, self.vocab_size = rank, model.vocab_size
        super().__init__(engine_config, decoder, sampler, device)

    def _forward(
        self, rows: dict[str, torch.Tensor], num_rows: int, sample_rows: torch.Tensor | None
    ) -> torch.Tensor:
        return self.gather_logits(super()._forward(rows, num_rows, sample_rows))


class TorchLeader(LeaderSteps, TorchRank):
    """Rank 0."""


def start_torch(config: EngineConfig, sampler: Sampler) -> TorchLeader:
    """Executor of config.model on config.tp ranks, a process each. Raises Unavailable."""
    return start_group(settings_of(config), lambda device: TorchLeader(config, sampler, device, 0))


def load_rank(config: EngineConfig, rank: int, device: torch.device) -> tuple[ModelConfig, Decoder]:
    """The whole model's shape, and the part of one rank, its sums reduced over all ranks."""
    dtype = getattr(torch, config.dtype)
    divisors = None
    if config.random_weights:
        model = read_shape(str(config.model))
        read = random_reader(dtype, device, config.quantization)
    else:
        checkpoint = open_checkpoint(config.model, fp8=True)
        model, divisors = checkpoint.config, checkpoint.rope_divisors
        read = checkpoint_reader(checkpoint, dtype, device, config.quantization)
    shard = Shard(model, config.tp, rank)
    decoder = Decoder(shard.rank_config, rank_weights(shard, read, divisors), device)
    decoder.reduce = all_reduce
    return model, decoder


def random_reader(
    dtype: torch.dtype, device: torch.device, quantization: str | None = None
) -> ReadPart:
    """Cuts parts of random tensors, which are the same on every rank."""
    get = quantizing(random_tensors(dtype, device), quantization, device)
    return lambda part: _cut(get(part.source, part.shape), part, 0)


def checkpoint_reader(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    quantization: str | None = None,
) -> ReadPart:
    """Reads a part's rows, and all of a tensor only when it gets one scale.

    Rows are quantised before their columns are cut: scales do not depend on the number of ranks.
    Raises ModelFileError or Unsupported.
    """

    def read(part: Part) -> Weight:
        checkpoint.check(part.source, part.shape)
        first, count = part.first, part.count
        if quantization == "fp8_per_tensor" and is_product(part.source):
            first, count = 0, part.shape[0]

        def get(name: str, shape: tuple[int, ...]) -> Weight:
            rows = checkpoint.rows(name, first, count)
            if rows.dtype.itemsize == 1:
                return read_fp8_weight(name, rows, first, shape[0], checkpoint.find)
            return rows.to(dtype)

        whole = quantizing(get, quantization, device)(part.source, part.shape)
        return _cut(whole, part, first)

    return read


def _cut(rows: Weight, part: Part, first: int) -> Weight:
    """A copy of what the part takes of a tensor's rows from `first` on."""
    begin = part.first - first
    if isinstance(rows, Fp8Weight):
        return rows.cut(begin, part.count, part.columns)
    return part.columns_of(rows[begin : begin + part.count]).clone()


def rank_weights(
    shard: Shard, read: ReadPart, rope_divisors: torch.Tensor | None = None
) -> ModelWeights:
    """Fused weights of one rank; lm_head [vocab_shard, N] has zeros behind the vocabulary."""
    specs = {spec.name: spec for spec in shard.weights()}

    def make(name: str) -> Any:
        return _join(specs[name], [read(part) for part in specs[name].parts])

    layers = []
    for index in range(shard.config.num_layers):
        prefix = f"layers.{index}."
        fields: dict[str, Any] = dict.fromkeys(("qkv_bias", "qk_norm"))
        for field in LayerWeights.__annotations__:
            if prefix + field in specs:
                fields[field] = make(prefix + field)
        layers.append(LayerWeights(**fields))
    embedding = make("embedding")
    lm_head = embedding if shard.shares_embedding else make("lm_head")
    return ModelWeights(embedding, layers, make("final_norm"), lm_head, rope_divisors)


def _join(spec: WeightSpec, parts: Sequence[Weight]) -> Weight:
    """Parts one after another, then zeros, in the spec's shape."""
    if any(isinstance(part, Fp8Weight) for part in parts):
        return join_rows(spec.name, parts)
    flat = torch.cat([part.reshape(-1) for part in parts if isinstance(part, torch.Tensor)])
    if flat.numel() < spec.num_elements:
        flat = torch.cat([flat, flat.new_zeros(spec.num_elements - flat.numel())])
    return flat.view(spec.shape)
