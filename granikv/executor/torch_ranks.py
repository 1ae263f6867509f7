"""The torch executor cut over tensor-parallel ranks: each reads its slices and runs its heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from granikv.config import EngineConfig, ModelConfig
from granikv.config_check import model_shape
from granikv.engines.checkpoint import Checkpoint, open_checkpoint
from granikv.engines.sharding import Part, Shard, WeightSpec
from granikv.executor.all_reduce import MAX_FUSED_ROWS, GlooAllReduce, GpuAllReduce
from granikv.executor.group import RankSteps
from granikv.executor.torch_executor import TorchExecutor
from granikv.models import Decoder
from granikv.models.fp8 import Fp8Weight, Weight, is_product, join_rows, quantizing
from granikv.models.fp8_checkpoint import read_fp8_weight
from granikv.models.random_weights import random_tensors, read_shape
from granikv.models.weights import LayerWeights, ModelWeights
from granikv.sampling import Sampler

ReadPart = Callable[[Part], Weight]


class CpuRank(RankSteps, TorchExecutor):
    """One rank on a CPU, of a group that its process has joined."""

    def __init__(
        self,
        config: EngineConfig,
        decoder: Decoder,
        sampler: Sampler,
        reduce: GlooAllReduce,
        rank: int,
        vocab_size: int,
    ):
        self.rank, self.vocab_size = rank, vocab_size
        super().__init__(config, decoder, sampler)
        self.reduce, self._profiled_s = reduce, 0.0
        decoder.reduce = reduce

    def _logits(self, *arguments: torch.Tensor) -> torch.Tensor:
        return self.gather_logits(super()._logits(*arguments))

    def profile(self, begin: bool) -> float:
        """Seconds of all-reduces between profile(True) and profile(False)."""
        now_s, since_s = self.reduce.elapsed_s, self._profiled_s
        self._profiled_s = now_s
        return 0.0 if begin else now_s - since_s


def make_torch_rank(
    config: EngineConfig, make_sampler: Callable[[int], Sampler], device: torch.device, rank: int
) -> Any:
    """The executor of one rank. make_sampler gets the size of the vocabulary."""
    if device.type == "cpu":
        model, decoder = load_rank(config, rank, device)
        sampler = make_sampler(model.vocab_size)
        return CpuRank(config, decoder, sampler, GlooAllReduce(), rank, model.vocab_size)
    from granikv.executor.device_executor import row_bucket
    from granikv.executor.gpu_rank import GpuRank  # needs triton

    # before the weights: its measurement needs memory for a moment
    width, rows = model_shape(config).hidden_size, row_bucket(config.max_requests)
    dtype = getattr(torch, config.dtype)
    reduce = GpuAllReduce(config.all_reduce, device, dtype, width, min(rows, MAX_FUSED_ROWS))
    model, decoder = load_rank(config, rank, device)
    decoder.reduce = reduce
    sampler = make_sampler(model.vocab_size)
    executor = GpuRank(config, decoder, sampler, device, rank, model.vocab_size)
    if config.warm_up:
        executor.warm_up()
    return executor


def load_rank(config: EngineConfig, rank: int, device: torch.device) -> tuple[ModelConfig, Decoder]:
    """The whole model's shape, and the part of one rank."""
    dtype = getattr(torch, config.dtype)
    if config.random_weights:
        model = read_shape(str(config.model))
        shard = Shard(model, config.tp, rank)
        weights = rank_weights(shard, random_reader(dtype, device, config.quantization))
    else:
        checkpoint = open_checkpoint(config.model, fp8=True)
        model = checkpoint.config
        shard = Shard(model, config.tp, rank)
        read = checkpoint_reader(checkpoint, dtype, device, config.quantization)
        weights = rank_weights(shard, read)
        weights.rope_divisors = checkpoint.rope_divisors
        weights.kv_scales = checkpoint.kv_scales()  # per layer: all ranks have the same
    return model, Decoder(shard.rank_config, weights, device)


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
    """Reads a part and nothing else, but for FP8: its rows, and all of a tensor that gets one scale.

    Rows are quantised before their columns are cut: scales do not depend on the number of ranks.
    Raises ModelFileError or Unsupported.
    """

    def read(part: Part) -> Weight:
        checkpoint.check(part.source, part.shape)
        if quantization is None:
            cut = checkpoint.part(part)
            if cut.dtype.itemsize > 1:
                return cut.to(dtype, copy=True)
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


def rank_weights(shard: Shard, read: ReadPart) -> ModelWeights:
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
    return ModelWeights(embedding, layers, make("final_norm"), lm_head)


def _join(spec: WeightSpec, parts: Sequence[Weight]) -> Weight:
    """Parts one after another, then zeros, in the spec's shape."""
    if any(isinstance(part, Fp8Weight) for part in parts):
        return join_rows(spec.name, parts)
    flat = torch.cat([part.reshape(-1) for part in parts if isinstance(part, torch.Tensor)])
    if flat.numel() < spec.num_elements:
        flat = torch.cat([flat, flat.new_zeros(spec.num_elements - flat.numel())])
    return flat.view(spec.shape)
