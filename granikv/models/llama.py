"""The decoder: Llama, Mistral, Qwen2 and Qwen3 in one forward pass.

Attention is a callback, so the same pass serves a dense reference, the HOT/COLD engine or a
recorder. It knows nothing of the cache, of requests or of where the weights came from.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from granikv.config import ModelConfig
from granikv.models.fp8_linear import make_product
from granikv.models.fused import add_rms_norm, silu_mul
from granikv.models.layers import RotaryTable, apply_rope
from granikv.models.linear import Linear
from granikv.models.weights import LayerWeights, ModelWeights

# (layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, Hq * D]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class RankSums(Protocol):
    """What the ranks' products sum to."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""

    def fuses(self, num_rows: int) -> bool:
        """Whether add_rms_norm serves a decode step of so many rows."""

    def add_rms_norm(self, turn: int, *arguments: Any) -> tuple[Any, torch.Tensor]:
        """fused.add_rms_norm of the sum of all ranks' delta; turns alternate: 0, 1, 0, 1."""


class DecoderLayer:
    """One layer's weights, its products ready to run."""

    def __init__(self, weights: LayerWeights, device: torch.device, dtype: torch.dtype):
        def move(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(device)

        self.input_norm = weights.input_norm.to(device)
        self.post_norm = weights.post_norm.to(device)
        self.qk_norm = move(weights.qk_norm)
        self.qkv = make_product(weights.qkv.to(device), move(weights.qkv_bias), dtype)
        self.out = make_product(weights.out.to(device), None, dtype)
        self.gate_up = make_product(weights.gate_up.to(device), None, dtype)
        self.down = make_product(weights.down.to(device), None, dtype)


class Decoder:
    """One model, ready to run. Takes the layers out of `weights`, so that none is held twice."""

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, device: torch.device | str = "cpu"
    ):
        self.config, self.device = config, torch.device(device)
        self.embedding = weights.embedding.to(self.device)
        self.final_norm = weights.final_norm.to(self.device)
        self.dtype = weights.embedding.dtype
        tied = weights.lm_head is weights.embedding
        head = self.embedding if tied else weights.lm_head.to(self.device)
        self.lm_head = Linear(head, held=tied)
        self.layers: list[DecoderLayer] = []
        while weights.layers:
            self.layers.append(DecoderLayer(weights.layers.pop(0), self.device, self.dtype))
        self.reduce: RankSums | None = None  # of tensor-parallel ranks
        self.kv_scales = weights.kv_scales
        self.rope_in_attend = False  # attend rotates q and k itself, as it stores them
        self.rotary = RotaryTable(
            config.head_dim,
            config.max_position,
            config.rope_theta,
            config.rope_scaling,
            weights.rope_divisors,
            self.device,
        )

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        sample_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One step over T rows of any mix of requests.

        token_ids int64 [T]; positions int64 [T]; sample_rows int64 [S] (None: all rows).
        attend gets q, k (both after rope, unless `rope_in_attend`) and v, heads contiguous within
        a row, and returns [T, Hq * D]. Returns logits float32 [S, vocab].
        """
        config, eps = self.config, self.config.rms_norm_eps
        num_rows, head_dim = token_ids.shape[0], config.head_dim
        num_q, num_k = config.num_qo_heads, config.num_kv_heads
        cos_sin = None if self.rope_in_attend else self.rotary.lookup(positions, self.dtype)
        last = len(self.layers) - 1
        is_decode = sample_rows is None  # each row is sampled
        # the norm sums what ranks, or parts of a product, have made
        sums_later = is_decode and (self.reduce is None or self.reduce.fuses(num_rows))
        norm: Any = add_rms_norm  # of the embedding, which is whole on every rank
        attention_end, layer_end = self._norms(sums_later)
        delta, x = self.embedding[token_ids], None
        for index, layer in enumerate(self.layers):
            normed, x = norm(delta, x, layer.input_norm, eps, layer.qkv.fp8_input)
            qkv = layer.qkv(normed).view(num_rows, -1, head_dim)
            qk, v = qkv[:, : num_q + num_k], qkv[:, num_q + num_k :]
            if layer.qk_norm is not None:
                qk = F.rms_norm(qk, (head_dim,), None, eps) * layer.qk_norm
            if cos_sin is not None:
                qk = apply_rope(qk, *cos_sin)
                out = attend(
                    index,
                    qk[:, :num_q].contiguous(),
                    qk[:, num_q:].contiguous(),
                    v.contiguous(),
                )
            else:
                out = attend(index, qk[:, :num_q], qk[:, num_q:], v)
            if index == last and sample_rows is not None:  # nobody reads the other rows any more
                x, out = x[sample_rows], out[sample_rows]
            delta = layer.out.partial_sums(out) if sums_later else self._sum(layer.out(out))
            normed, x = attention_end(delta, x, layer.post_norm, eps, layer.gate_up.fp8_input)
            if is_decode:
                activated = layer.gate_up.gated(normed, layer.down.fp8_input)
            else:
                activated = silu_mul(layer.gate_up(normed), layer.down.fp8_input)
            down = layer.down
            delta = down.partial_sums(activated) if sums_later else self._sum(down(activated))
            norm = layer_end
        normed, _ = norm(delta, x, self.final_norm, eps)
        return self.lm_head.in_fp32(normed)

    def _sum(self, part: torch.Tensor) -> torch.Tensor:
        return part if self.reduce is None else self.reduce(part)

    def _norms(self, sums_later: bool) -> tuple[Any, Any]:
        """add_rms_norm after attention and at a layer's end, with the ranks' sum or without."""
        if self.reduce is None or not sums_later:
            return add_rms_norm, add_rms_norm
        return partial(self.reduce.add_rms_norm, 0), partial(self.reduce.add_rms_norm, 1)
