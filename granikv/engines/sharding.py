"""How a model is cut over tensor-parallel ranks, and what a rank reads of each checkpoint tensor.

    column-parallel  qkv (whole heads), gate_up, lm_head: a range of the weight's rows
    row-parallel     out, down: a range of its columns; an all-reduce follows
    replicated       embedding, norms; KV heads too, when there are more ranks than KV heads

It reads no file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from granikv.config import ModelConfig
from granikv.errors import InvalidArgument


@dataclass(frozen=True)
class Part:
    """Rows [first, first + count) of a checkpoint tensor, and of these the columns `columns`."""

    source: str  # Hugging Face name
    shape: tuple[int, ...]  # of the whole tensor
    first: int
    count: int
    columns: tuple[int, int] | None = None  # half-open; None: all

    def columns_of(self, rows: torch.Tensor) -> torch.Tensor:
        """What the part takes of some of the tensor's rows; a view."""
        return rows if self.columns is None else rows[:, self.columns[0] : self.columns[1]]

    @property
    def num_elements(self) -> int:
        if len(self.shape) == 1:
            return self.count
        first, last = self.columns or (0, self.shape[1])
        return self.count * (last - first)


@dataclass(frozen=True)
class WeightSpec:
    """An initialiser of the graph: its parts one after another, then zeros up to its shape."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # "network" or "float32"
    parts: tuple[Part, ...]

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class Shard:
    """Rank `rank` of `tp_size`. Raises InvalidArgument when the model does not divide."""

    config: ModelConfig  # of the whole model
    tp_size: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        c, tp = self.config, self.tp_size
        if not 0 <= self.rank < tp:
            raise InvalidArgument("rank", self.rank, f"0 to {tp - 1}")
        for name, size in (
            ("num_qo_heads", c.num_qo_heads),
            ("intermediate_size", c.intermediate_size),
        ):
            if size % tp:
                raise InvalidArgument(
                    name, size, f"a multiple of tp={tp}; build with a tp that divides it"
                )
        if c.num_kv_heads % tp and tp % c.num_kv_heads:
            raise InvalidArgument(
                "num_kv_heads", c.num_kv_heads,
                f"a multiple or a divisor of tp={tp}; build with another tp",
            )  # fmt: skip

    @property
    def rank_config(self) -> ModelConfig:
        """The model as this rank computes it: its heads and its part of the MLP."""
        c, tp = self.config, self.tp_size
        return replace(
            c,
            num_qo_heads=c.num_qo_heads // tp,
            num_kv_heads=max(1, c.num_kv_heads // tp),
            intermediate_size=c.intermediate_size // tp,
        )

    @property
    def vocab_shard(self) -> int:
        """Rows of lm_head per rank; the last rank's are padded with zeros."""
        return -(-self.config.vocab_size // self.tp_size)

    @property
    def first_kv_head(self) -> int:
        return self.rank * self.config.num_kv_heads // self.tp_size

    def weights(self) -> list[WeightSpec]:
        """Every initialiser that comes from the checkpoint, in the order of the graph."""
        c, n = self.config, self.config.hidden_size
        specs = [self._whole("embedding", "model.embed_tokens.weight", (c.vocab_size, n))]
        for layer in range(c.num_layers):
            specs += self._layer(layer)
        specs.append(self._norm("final_norm", "model.norm.weight", n))
        if not self.shares_embedding:
            specs.append(self._lm_head())
        return specs

    @property
    def shares_embedding(self) -> bool:
        """lm_head is the embedding itself: tied, and not cut."""
        return self.config.tie_embeddings and self.tp_size == 1

    def _lm_head(self) -> WeightSpec:
        c, rows = self.config, self.vocab_shard
        source = "model.embed_tokens.weight" if c.tie_embeddings else "lm_head.weight"
        first = min(self.rank * rows, c.vocab_size)
        count = min(rows, c.vocab_size - first)
        part = Part(source, (c.vocab_size, c.hidden_size), first, count)
        return WeightSpec("lm_head", (rows, c.hidden_size), "network", (part,))

    def _layer(self, layer: int) -> list[WeightSpec]:
        c, own = self.config, self.rank_config
        n, d, f = c.hidden_size, c.head_dim, own.intermediate_size
        to, source = f"layers.{layer}.", f"model.layers.{layer}."
        attn, mlp = source + "self_attn.", source + "mlp."
        qkv = (  # name, heads of the model, first head and heads of this rank
            ("q", c.num_qo_heads, self.rank * own.num_qo_heads, own.num_qo_heads),
            ("k", c.num_kv_heads, self.first_kv_head, own.num_kv_heads),
            ("v", c.num_kv_heads, self.first_kv_head, own.num_kv_heads),
        )
        width = (own.num_qo_heads + 2 * own.num_kv_heads) * d
        specs = [self._norm(to + "input_norm", source + "input_layernorm.weight", n)]
        specs.append(
            WeightSpec(
                to + "qkv", (width, n), "network",
                tuple(
                    Part(f"{attn}{x}_proj.weight", (heads * d, n), first * d, count * d)
                    for x, heads, first, count in qkv
                ),
            )
        )  # fmt: skip
        if c.attention_bias:
            parts = tuple(
                Part(f"{attn}{x}_proj.bias", (heads * d,), first * d, count * d)
                for x, heads, first, count in qkv
            )
            specs.append(WeightSpec(to + "qkv_bias", (width,), "network", parts))
        if c.qk_norm:
            parts = tuple(
                Part(f"{attn}{x}_norm.weight", (d,), 0, d)
                for x, count in (("q", own.num_qo_heads), ("k", own.num_kv_heads))
                for _ in range(count)
            )
            heads = own.num_qo_heads + own.num_kv_heads
            specs.append(WeightSpec(to + "qk_norm", (heads, d), "float32", parts))
        columns = (self.rank * own.num_qo_heads * d, (self.rank + 1) * own.num_qo_heads * d)
        out = Part(attn + "o_proj.weight", (n, c.num_qo_heads * d), 0, n, columns)
        specs.append(WeightSpec(to + "out", (n, columns[1] - columns[0]), "network", (out,)))
        specs.append(self._norm(to + "post_norm", source + "post_attention_layernorm.weight", n))
        gate_up = tuple(
            Part(f"{mlp}{x}_proj.weight", (c.intermediate_size, n), self.rank * f, f)
            for x in ("gate", "up")
        )
        specs.append(WeightSpec(to + "gate_up", (2 * f, n), "network", gate_up))
        columns = (self.rank * f, (self.rank + 1) * f)
        down = Part(mlp + "down_proj.weight", (n, c.intermediate_size), 0, n, columns)
        specs.append(WeightSpec(to + "down", (n, f), "network", (down,)))
        return specs

    def _whole(self, name: str, source: str, shape: tuple[int, ...]) -> WeightSpec:
        return WeightSpec(name, shape, "network", (Part(source, shape, 0, shape[0]),))

    def _norm(self, name: str, source: str, width: int) -> WeightSpec:
        return WeightSpec(name, (width,), "float32", (Part(source, (width,), 0, width),))
