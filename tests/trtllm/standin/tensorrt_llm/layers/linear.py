from tensorrt_llm.functional import matmul
from tensorrt_llm.module import Module
from tensorrt_llm.parameter import Parameter


class _Linear(Module):
    def _make(self, rows, columns, bias, dtype, tp_group, share_weight, prefer_managed_weight):
        assert tp_group is None, "with a group, a collective of TensorRT-LLM's follows"
        assert not prefer_managed_weight, "a managed weight is an input of the network"
        self.weight = share_weight or Parameter(shape=(rows, columns), dtype=dtype)
        self.register_parameter("bias", Parameter(shape=(rows,), dtype=dtype) if bias else None)

    def forward(self, x, lora_runtime_params=None, lora_hidden_state=None, **kwargs):
        x = matmul(x, self.weight.value, transb=True)
        return x if self.bias is None else x + self.bias.value


class Linear(_Linear):
    def __init__(self, in_features, out_features, bias=True, dtype=None, tp_group=None, tp_size=1,
                 gather_output=True, share_weight=None, strict_dtype=False, pad_lda=0,
                 prefer_managed_weight=True, is_qkv=False):  # fmt: skip
        super().__init__()
        self._make(
            out_features // tp_size, in_features, bias, dtype, tp_group, share_weight,
            prefer_managed_weight,
        )  # fmt: skip


ColumnLinear = Linear


class RowLinear(_Linear):
    def __init__(self, in_features, out_features, bias=True, dtype=None, tp_group=None, tp_size=1,
                 strict_dtype=False, pad_lda=0, prefer_managed_weight=True):  # fmt: skip
        super().__init__()
        self._make(
            out_features, in_features // tp_size, bias, dtype, tp_group, None,
            prefer_managed_weight,
        )  # fmt: skip
