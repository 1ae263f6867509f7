import json
import os

from safetensors.torch import load_file

from tensorrt_llm.mapping import Mapping
from tensorrt_llm.module import Module


class PretrainedConfig:
    def __init__(self, *, architecture, dtype, hidden_size, num_hidden_layers, num_attention_heads,
                 vocab_size=None, hidden_act="gelu", logits_dtype="float32", norm_epsilon=1e-5,
                 position_embedding_type="learned_absolute", max_position_embeddings=None,
                 rotary_embedding_dim=None, num_key_value_heads=None, intermediate_size=None,
                 mapping=None, quantization=None, use_parallel_embedding=False,
                 embedding_sharding_dim=0, head_size=None, qk_layernorm=False,
                 runtime_defaults=None, **kwargs):  # fmt: skip
        self.architecture, self.dtype = architecture, dtype
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.mapping = Mapping(**(mapping or {}))
        for key, value in kwargs.items():
            setattr(self, key, value)

    @classmethod
    def from_dict(cls, config):
        from tensorrt_llm.models import MODEL_MAP

        return getattr(MODEL_MAP[config["architecture"]], "config_class", cls)(**config)

    @classmethod
    def from_json_file(cls, config_file):
        with open(config_file) as f:
            return cls.from_dict(json.load(f))

    def set_rank(self, rank):
        self.mapping.rank = rank


class PretrainedModel(Module):
    def __init__(self, config):
        super().__init__()
        self.config = config

    @classmethod
    def from_checkpoint(cls, ckpt_dir, rank=None, config=None, *, preprocess_weights_hook=None):
        weights = load_file(os.path.join(ckpt_dir, f"rank{config.mapping.rank}.safetensors"))
        model = cls(config)
        model.load(weights)
        return model

    def load(self, weights, from_pruned=False):
        """Stricter than the real one, which warns of names and types that do not fit."""
        import tensorrt as trt

        parameters = dict(self.named_parameters())
        assert parameters.keys() == weights.keys(), parameters.keys() ^ weights.keys()
        for name, parameter in parameters.items():
            assert trt._TORCH[parameter.dtype] == weights[name].dtype, name
            parameter.value = weights[name]
