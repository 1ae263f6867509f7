"""TorchExecutor that runs every plan through the exported graphs as well and compares logits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import standins
import torch

from granikv.attention.plan_buffers import PlanBuffers, attention_shape
from granikv.core import Count
from granikv.cost_model import CostModel
from granikv.engines.export import TORCH_TYPES, export_rank
from granikv.engines.io import NETWORK_INPUTS, BuildLimits
from granikv.engines.manifest import engine_io
from granikv.engines.sharding import Shard
from granikv.engines.step_inputs import StepInputs
from granikv.executor.step_setup import apply_moves
from granikv.executor.torch_executor import TorchExecutor


class RankGraph:
    """One rank: its session, its arenas and its input buffers. make_session: of standins."""

    def __init__(self, checkpoint, shard: Shard, limits: BuildLimits, folder, dtype, make_session):
        export_rank(checkpoint, shard, limits, dtype, folder)
        self.session = make_session(folder / f"rank{shard.rank}.onnx")
        own = shard.rank_config
        shape = (own.num_layers, limits.capacity_tokens, own.num_kv_heads, own.head_dim)
        self.arenas = tuple(
            torch.full(shape, float("nan"), dtype=TORCH_TYPES[dtype]) for _ in range(2)
        )
        standins.ARENAS[shard.rank] = self.arenas
        self.slots = torch.full(
            (limits.max_requests + 1, limits.max_seq_len), 2**30, dtype=torch.int32
        )
        io = engine_io(shard, limits, dtype)
        heads = attention_shape(own, TORCH_TYPES[dtype])
        self.buffers = PlanBuffers(heads, io.capacities, torch.device("cpu"), 1)
        self.inputs = StepInputs(io, self.buffers, self.slots, shard.rank)

    def step(self, plan, token_ids: np.ndarray, padding: int) -> np.ndarray:
        """Logits [S, vocab shard] of the plan's sample rows."""
        apply_moves(plan, self.arenas)
        writes = plan.slot_writes[: plan.counts[Count.NUM_SLOT_WRITES]]
        self.slots[writes[:, 0], writes[:, 1]] = torch.from_numpy(writes[:, 2])
        self.buffers.prepare(plan, capture=padding > 0)
        num_samples = int(plan.counts[Count.NUM_SAMPLE_ROWS])
        sample_rows = torch.from_numpy(plan.sample_rows[: max(1, num_samples)].astype(np.int64))
        if not num_samples:
            sample_rows = torch.zeros(1, dtype=torch.int64)
        padded = torch.from_numpy(np.pad(token_ids, (0, padding)))
        self.inputs.set_rows(padded, sample_rows)
        shapes = self.inputs.shapes(len(padded), len(sample_rows))
        feeds = {}
        for spec in NETWORK_INPUTS:
            tensor = self.inputs.tensors[spec.name]
            size = shapes.get(spec.name, tuple(tensor.shape))
            feeds[spec.name] = tensor.view(-1)[: int(np.prod(size))].view(size).numpy()
        return self.session.run(None, feeds)[0][:num_samples]


class SharesWherePossible(CostModel):
    """Takes HOT spans for any group, by either backend: short prefixes would be read flat."""

    def hot_us(self, variant, num_rows, kv_len):
        return 1.0 if (variant == "gemm") == (num_rows % 2 == 0) else 2.0

    def marginal_flat_us(self, num_rows, kv_len):
        return 1e6


@dataclass
class Seen:
    """Which kinds of steps were compared."""

    errors: list[float] = field(default_factory=list)
    prefills: int = 0
    decodes: int = 0
    hot: int = 0
    moves: int = 0


class LockstepExecutor(TorchExecutor):
    """checkpoint, folder: what is exported, and where to; padding: rows added to each decode step."""

    def __init__(
        self,
        config,
        decoder,
        sampler,
        checkpoint,
        tp_size,
        folder,
        padding=0,
        dtype="float32",
        make_session=standins.session,
    ):
        super().__init__(config, decoder, sampler)
        self.keep_logits = True
        limits = BuildLimits(
            config.max_requests, config.max_num_batched_tokens, config.max_seq_len,
            config.capacity_tokens,
        )  # fmt: skip
        shards = [Shard(checkpoint.config, tp_size, rank) for rank in range(tp_size)]
        self.ranks = [
            RankGraph(checkpoint, shard, limits, folder, dtype, make_session) for shard in shards
        ]
        standins.GROUPS[tp_size] = standins.Group(tp_size)
        self.seen, self.padding = Seen(), padding
        self._threads = ThreadPoolExecutor(tp_size)

    def _step(self, plan):
        num_rows, num_samples = (
            int(plan.counts[c]) for c in (Count.NUM_ROWS, Count.NUM_SAMPLE_ROWS)
        )
        tokens = plan.row_token[:num_rows]
        requests = torch.from_numpy(plan.row_request[:num_rows]).long()
        tokens = np.where(tokens < 0, self.last_sampled[requests].numpy(), tokens)
        is_decode = num_rows == plan.counts[Count.NUM_DECODE_ROWS]
        padding = self.padding if is_decode else 0
        runs = [self._threads.submit(rank.step, plan, tokens, padding) for rank in self.ranks]
        parts = [run.result() for run in runs]
        output = super()._step(plan)
        seen = self.seen
        seen.decodes += int(plan.counts[Count.NUM_DECODE_ROWS] > 0)
        seen.prefills += int(plan.counts[Count.NUM_EXTEND_REQUESTS] > 0)
        seen.hot += int(plan.counts[Count.NUM_HOT_ITEMS] > 0)
        seen.moves += len(plan.moves)
        if num_samples:
            got = np.concatenate(parts, axis=1)[:, : output.logits.shape[1]]
            error = np.abs(got - output.logits).max(-1) / np.abs(output.logits).max(-1)
            seen.errors += error.tolist()
        return output
