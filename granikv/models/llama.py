"""The decoder: Llama, Mistral, Qwen2 and Qwen3 in one forward pass.

Attention is a callback, so the same pass serves a dense reference, the HOT/COLD engine or a
recorder. It knows nothing of the cache, of requests or of where the weights came from.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from granikv.config import ModelConfig
from granikv.models.layers import RotaryTable, apply_rope, rms_norm
from granikv.models.linear import Linear
from granikv.models.weights import LayerWeights, ModelWeights

# (layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, Hq * D]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class DecoderLayer:
    """One layer's weights, its products ready to run."""

    def __init__(self, weights: LayerWeights):
        self.input_norm, self.post_norm = weights.input_norm, weights.post_norm
        self.qk_norm = weights.qk_norm
        self.qkv = Linear(weights.qkv, weights.qkv_bias)
        self.out = Linear(weights.out)
        self.gate_up = Linear(weights.gate_up)
        self.down = Linear(weights.down)


class Decoder:
    """One model, ready to run. Takes the layers out of `weights`, so that none is held twice."""

    def __init__(self, config: ModelConfig, weights: ModelWeights):
        self.config = config
        self.embedding, self.final_norm = weights.embedding, weights.final_norm
        self.dtype = weights.embedding.dtype
        self.lm_head = Linear(weights.lm_head)
        self.layers: list[DecoderLayer] = []
        while weights.layers:
            self.layers.append(DecoderLayer(weights.layers.pop(0)))
        self.rotary = RotaryTable(
            config.head_dim,
            config.max_position,
            config.rope_theta,
            config.rope_scaling,
            weights.rope_divisors,
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
        attend gets contiguous q, k (both after rope) and v, and returns [T, Hq * D].
        Returns logits float32 [S, vocab].
        """
        config, eps = self.config, self.config.rms_norm_eps
        num_rows, head_dim = token_ids.shape[0], config.head_dim
        num_q, num_k = config.num_qo_heads, config.num_kv_heads
        cos, sin = self.rotary.lookup(positions, self.dtype)
        last = len(self.layers) - 1
        x = self.embedding[token_ids]
        for index, layer in enumerate(self.layers):
            normed = rms_norm(x, layer.input_norm, eps)
            qkv = layer.qkv(normed).view(num_rows, -1, head_dim)
            qk = qkv[:, : num_q + num_k]
            if layer.qk_norm is not None:
                qk = F.rms_norm(qk, (head_dim,), None, eps) * layer.qk_norm
            qk = apply_rope(qk, cos, sin)
            out = attend(
                index,
                qk[:, :num_q].contiguous(),
                qk[:, num_q:].contiguous(),
                qkv[:, num_q + num_k :].contiguous(),
            )
            if index == last and sample_rows is not None:  # nobody reads the other rows any more
                x, out = x[sample_rows], out[sample_rows]
            x = x + layer.out(out)
            normed = rms_norm(x, layer.post_norm, eps)
            gate, up = layer.gate_up(normed).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate).mul_(up))
        return self.lm_head(rms_norm(x, self.final_norm, eps)).float()
