"""GraniKV's decoder for `trtllm-build --model_cls_file`, with TensorRT-LLM 1.2.x.

The network is that of granikv/engines/graph.py: same inputs, output, plugin layers and weights.
It never ran on real TensorRT-LLM: tests/trtllm runs it on stand-ins that have the signatures of
tests/trtllm/api.json. It needs the checkpoint of build_scripts/convert_checkpoint.py and, in
GRANIKV_PLUGIN, the plugin library.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import tensorrt as trt
from tensorrt_llm._common import default_net, default_trtnet
from tensorrt_llm._utils import str_dtype_to_trt
from tensorrt_llm.functional import (
    Tensor,
    _add_plugin_info,
    _create_tensor,
    concat,
    embedding,
    index_select,
    silu,
)
from tensorrt_llm.layers import ColumnLinear, RowLinear
from tensorrt_llm.models import MODEL_MAP
from tensorrt_llm.models.modeling_utils import PretrainedConfig, PretrainedModel
from tensorrt_llm.module import Module, ModuleList
from tensorrt_llm.parameter import Parameter

from granikv import env
from granikv.engines.io import (
    ALL_REDUCE_OP,
    ATTENTION_OP,
    NETWORK_INPUTS,
    NETWORK_OUTPUTS,
    PLAN_INPUTS,
    PLUGIN_NAMESPACE,
    PLUGIN_VERSION,
    EngineIO,
    TensorSpec,
)
from granikv.engines.manifest import engine_io
from granikv.engines.sharding import Shard
from granikv.engines.trtllm_checkpoint import ARCHITECTURE, read_ours
from granikv.errors import InvalidArgument, Unavailable, Unsupported

# Constants, also under --fast_build: a managed weight would be one more input of the engine. No
# tp_group: with one, TensorRT-LLM adds collectives that need MPI; ours are plugin layers.
LINEAR = {"tp_group": None, "prefer_managed_weight": False}


class GraniKVConfig(PretrainedConfig):
    """config.json. granikv: the key that convert_checkpoint.py writes for this file."""

    def __init__(self, *, granikv: dict[str, Any] | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        if granikv is None:
            raise InvalidArgument(
                "config.json", "no key 'granikv'",
                "a checkpoint of build_scripts/convert_checkpoint.py",
            )  # fmt: skip
        self.granikv = granikv


class RmsNorm(Module):
    """x / rms(x) * weight over the last axis, in fp32. shape: of the weight."""

    def __init__(self, shape: tuple[int, ...], eps: float):
        super().__init__()
        self.eps = eps
        self.weight = Parameter(shape=shape, dtype="float32")

    def forward(self, x: Tensor) -> Tensor:
        wide = x.cast("float32")
        mean = (wide * wide).mean(-1, keepdim=True)
        normed = wide / (mean + self.eps).sqrt()
        return (normed * self.weight.value).cast(x.dtype)


class Table(Module):
    """The embedding, whole on every rank. tensorrt_llm.layers' own pads it to 8 rows."""

    def __init__(self, num_rows: int, width: int, dtype: str):
        super().__init__()
        self.weight = Parameter(shape=(num_rows, width), dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        return embedding(ids, self.weight.value)


class Attention(Module):
    """qkv, the norms of q and k where the model has them, HotColdAttention, out."""

    def __init__(self, shard: Shard, io: EngineIO, dtype: str, layer: int):
        super().__init__()
        c, own, tp = shard.config, shard.rank_config, shard.tp_size
        self.shard, self.io, self.layer = shard, io, layer
        self.num_normed = own.num_qo_heads + own.num_kv_heads
        self.width = (self.num_normed + own.num_kv_heads) * own.head_dim
        self.qkv = ColumnLinear(
            c.hidden_size, tp * self.width, bias=c.attention_bias, dtype=dtype, tp_size=tp,
            gather_output=False, **LINEAR,
        )  # fmt: skip
        if c.qk_norm:
            self.qk_layernorm = RmsNorm((self.num_normed, own.head_dim), c.rms_norm_eps)
        self.dense = RowLinear(
            c.num_qo_heads * c.head_dim, c.hidden_size, bias=False, dtype=dtype, tp_size=tp,
            **LINEAR,
        )  # fmt: skip

    def forward(
        self, x: Tensor, rope: list[Tensor], plan: dict[str, Tensor], sample_rows: Tensor | None
    ) -> Tensor:
        own = self.shard.rank_config
        qkv = self.qkv(x)
        if own.qk_norm:
            qkv = self._norm_heads(qkv)
        out = plugin_layer(
            ATTENTION_OP,
            [qkv, *rope, *(plan[spec.name] for spec in PLAN_INPUTS)],
            layer=self.layer,
            num_qo_heads=own.num_qo_heads,
            num_kv_heads=own.num_kv_heads,
            head_dim=own.head_dim,
            max_partials=self.io.capacities.max_partials,
        )
        if sample_rows is not None:
            out = index_select(out, 0, sample_rows)
        return all_reduce(self.dense(out), self.shard)

    def _norm_heads(self, qkv: Tensor) -> Tensor:
        own = self.shard.rank_config
        heads = qkv.view([0, self.num_normed + own.num_kv_heads, own.head_dim])
        qk, v = heads.split([self.num_normed, own.num_kv_heads], dim=1)
        return concat([self.qk_layernorm(qk), v], dim=1).view([0, self.width])


class MLP(Module):
    """down(silu(gate) * up), gate and up in one product."""

    def __init__(self, shard: Shard, dtype: str):
        super().__init__()
        c, tp = shard.config, shard.tp_size
        self.shard = shard
        self.gate_up = ColumnLinear(
            c.hidden_size, 2 * c.intermediate_size, bias=False, dtype=dtype, tp_size=tp,
            gather_output=False, **LINEAR,
        )  # fmt: skip
        self.proj = RowLinear(
            c.intermediate_size, c.hidden_size, bias=False, dtype=dtype, tp_size=tp, **LINEAR
        )

    def forward(self, x: Tensor) -> Tensor:
        size = self.shard.rank_config.intermediate_size
        gate, up = self.gate_up(x).split([size, size], dim=1)
        return all_reduce(self.proj(silu(gate) * up), self.shard)


class DecoderLayer(Module):
    def __init__(self, shard: Shard, io: EngineIO, dtype: str, layer: int):
        super().__init__()
        width, eps = (shard.config.hidden_size,), shard.config.rms_norm_eps
        self.input_layernorm = RmsNorm(width, eps)
        self.attention = Attention(shard, io, dtype, layer)
        self.post_layernorm = RmsNorm(width, eps)
        self.mlp = MLP(shard, dtype)

    def forward(
        self, x: Tensor, rope: list[Tensor], plan: dict[str, Tensor], sample_rows: Tensor | None
    ) -> Tensor:
        """sample_rows: of the last layer, whose other rows nobody reads."""
        out = self.attention(self.input_layernorm(x), rope, plan, sample_rows)
        if sample_rows is not None:
            x = index_select(x, 0, sample_rows)
        x = x + out
        return x + self.mlp(self.post_layernorm(x))


class Transformer(Module):
    """token_ids int32 [rows] -> hidden states [samples, hidden_size] after the last norm."""

    def __init__(self, shard: Shard, io: EngineIO, dtype: str):
        super().__init__()
        c = shard.config
        self.vocab_embedding = Table(c.vocab_size, c.hidden_size, dtype)
        table = (io.limits.max_seq_len, c.head_dim // 2)
        self.rope_cos = Parameter(shape=table, dtype="float32")
        self.rope_sin = Parameter(shape=table, dtype="float32")
        self.layers = ModuleList([DecoderLayer(shard, io, dtype, i) for i in range(c.num_layers)])
        self.ln_f = RmsNorm((c.hidden_size,), c.rms_norm_eps)

    def forward(self, token_ids: Tensor, sample_rows: Tensor, plan: dict[str, Tensor]) -> Tensor:
        x = self.vocab_embedding(token_ids)
        rope = [self.rope_cos.value, self.rope_sin.value]
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            x = layer(x, rope, plan, sample_rows if index == last else None)
        return self.ln_f(x)


class GraniKVForCausalLM(PretrainedModel):
    """One rank's network. Not a DecoderModelForCausalLM, whose constructor adds rope constants and
    whose forward wants the inputs of TensorRT-LLM's own attention.
    """

    config_class = GraniKVConfig

    def __init__(self, config: GraniKVConfig):
        super().__init__(config)
        model, limits = read_ours(config.granikv)
        mapping = config.mapping
        if mapping.world_size != mapping.tp_size:
            raise Unsupported(
                f"mapping: expected world_size = tp_size, got {mapping.world_size} ranks for "
                f"tp_size {mapping.tp_size}: pipeline and context parallelism have no code"
            )
        shard = Shard(model, mapping.tp_size, mapping.tp_rank)
        self.limits, self.io = limits, engine_io(shard, limits, config.dtype)
        self.transformer = Transformer(shard, self.io, config.dtype)
        share = self.transformer.vocab_embedding.weight if shard.shares_embedding else None
        self.lm_head = ColumnLinear(
            model.hidden_size, shard.tp_size * shard.vocab_shard, bias=False, dtype=config.dtype,
            tp_size=shard.tp_size, gather_output=False, share_weight=share, **LINEAR,
        )  # fmt: skip

    def prepare_inputs(
        self,
        max_batch_size: int,
        max_input_len: int,
        max_seq_len: int,
        max_num_tokens: int,
        use_cache: bool,
        max_beam_width: int = 1,
        opt_num_tokens: int | None = None,
        prompt_embedding_table_size: int = 0,
        max_draft_len: int = 0,
        speculative_decoding_draft_tokens_external: bool = False,
        gather_context_logits: bool = False,
        lora_target_modules: list[str] | None = None,
        **others: Any,
    ) -> dict[str, Tensor]:
        """The network's inputs by name, in the order and shapes of granikv/engines/io.py.

        The arguments are trtllm-build's. Shapes come from the checkpoint's limits, so an argument
        that asks for something else is refused (InvalidArgument). max_input_len and opt_num_tokens
        have no meaning here: a prompt is cut into steps, and the ranges name their own optimum.
        """
        tokens = min(self.limits.max_tokens, max_batch_size * max_seq_len)
        # trtllm-build raises a smaller number to the size of its own cache's blocks
        raised = max(tokens, default_net().plugin_config.tokens_per_block)
        for name, value, allowed in (
            ("max_batch_size", max_batch_size, (self.limits.max_requests,)),
            ("max_seq_len", max_seq_len, (self.limits.max_seq_len,)),
            ("max_num_tokens", max_num_tokens, (tokens, raised)),
            ("use_cache", use_cache, (True,)),
            ("max_beam_width", max_beam_width, (1,)),
            ("prompt_embedding_table_size", prompt_embedding_table_size, (0,)),
            ("max_draft_len", max_draft_len, (0,)),
            ("speculative_decoding_draft_tokens_external",
             speculative_decoding_draft_tokens_external, (False,)),
            ("gather_context_logits", gather_context_logits, (False,)),
            ("lora_target_modules", lora_target_modules or None, (None,)),
            ("further arguments", sorted(others), ([],)),
        ):  # fmt: skip
            if value not in allowed:
                wanted = " or ".join(str(x) for x in dict.fromkeys(map(str, allowed)))
                raise InvalidArgument(name, value, f"{wanted}, which the checkpoint was made for")
        return {spec.name: self._input(spec) for spec in NETWORK_INPUTS}

    def _input(self, spec: TensorSpec) -> Tensor:
        # dimensions of one name must agree, so fixed ones are named after their tensor
        ranges: OrderedDict[str, list] = OrderedDict()
        for axis, dim in enumerate(self.io.dims(spec)):
            if isinstance(dim, str):
                ranges[dim] = [self.io.ranges[dim]]
            else:
                ranges[f"{spec.name}_{axis}"] = [dim]
        shape = [-1 if isinstance(dim, str) else dim for dim in self.io.dims(spec)]
        return Tensor(
            name=spec.name, dtype=str_dtype_to_trt(spec.dtype), shape=shape, dim_range=ranges
        )

    def forward(self, token_ids: Tensor, sample_rows: Tensor, **plan: Tensor) -> Tensor:
        (output,) = NETWORK_OUTPUTS
        logits = self.lm_head(self.transformer(token_ids, sample_rows, plan))
        logits.mark_output(output.name, output.dtype)
        return logits


def all_reduce(x: Tensor, shard: Shard) -> Tensor:
    """x summed over the ranks; in which order is NCCL's."""
    if shard.tp_size == 1:
        return x
    return plugin_layer(ALL_REDUCE_OP, [x], tp_size=shard.tp_size, tp_rank=shard.rank)


def plugin_layer(op: str, inputs: list[Tensor], **fields: int) -> Tensor:
    """The first output of one of our plugins. Raises Unavailable without the library."""
    creator = plugin_creator(op)
    collection = trt.PluginFieldCollection(
        [
            trt.PluginField(name, np.array([value], np.int32), trt.PluginFieldType.INT32)
            for name, value in fields.items()
        ]
    )
    plugin = creator.create_plugin(op, collection, trt.TensorRTPhase.BUILD)
    if plugin is None:
        raise Unavailable(f"{op}: the plugin library refused the fields {fields}; its log says why")
    layer = default_trtnet().add_plugin_v3([x.trt_tensor for x in inputs], [], plugin)
    output = _create_tensor(layer.get_output(0), layer)
    # after the layer has its final name: TensorRT-LLM carries the note over for V2 plugins only
    _add_plugin_info(layer, creator, op, collection)
    return output


def plugin_creator(op: str) -> Any:
    registry = trt.get_plugin_registry()
    creator = registry.get_creator(op, PLUGIN_VERSION, PLUGIN_NAMESPACE)
    if creator is None:
        library = env.read("GRANIKV_PLUGIN")
        if library is None:
            raise Unavailable(
                f"plugin {op}: expected GraniKV's plugin library in GRANIKV_PLUGIN, got nothing; "
                "build it with build_scripts/build_plugin.py"
            )
        if registry.load_library(str(library)) is not None:
            creator = registry.get_creator(op, PLUGIN_VERSION, PLUGIN_NAMESPACE)
        if creator is None:
            raise Unavailable(
                f"plugin {op}: {library}: TensorRT's registry did not take it; build it again for "
                "this TensorRT with build_scripts/build_plugin.py"
            )
    return creator


MODEL_MAP[ARCHITECTURE] = GraniKVForCausalLM
