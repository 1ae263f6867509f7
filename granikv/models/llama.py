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
from granikv.models.weights import ModelWeights

# (layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, Hq * D]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Decoder:
    """One model, ready to run."""

    def __init__(self, config: ModelConfig, weights: ModelWeights):
        self.config = config
        self.weights = weights
        self.dtype = weights.embedding.dtype
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
        config, weights, eps = self.config, self.weights, self.config.rms_norm_eps
        num_rows, head_dim = token_ids.shape[0], config.head_dim
        num_q, num_k = config.num_qo_heads, config.num_kv_heads
        cos, sin = self.rotary.lookup(positions, self.dtype)
        last = len(weights.layers) - 1
        x = weights.embedding[token_ids]
        for index, layer in enumerate(weights.layers):
            normed = rms_norm(x, layer.input_norm, eps)
            qkv = F.linear(normed, layer.qkv, layer.qkv_bias).view(num_rows, -1, head_dim)
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
            x = x + F.linear(out, layer.out)
            normed = rms_norm(x, layer.post_norm, eps)
            gate, up = F.linear(normed, layer.gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate).mul_(up), layer.down)
        return F.linear(rms_norm(x, weights.final_norm, eps), weights.lm_head).float()
