"""The plugins behind TensorRT's stand-in: shapes always, values when the network has inputs."""

from __future__ import annotations

import standins
import torch

from granikv.engines.io import (
    ALL_REDUCE_ATTRIBUTES,
    ALL_REDUCE_OP,
    ATTENTION_ATTRIBUTES,
    ATTENTION_OP,
    PLUGIN_INPUTS,
    PLUGIN_NAMESPACE,
    PLUGIN_VERSION,
)


class Attention:
    attributes = ATTENTION_ATTRIBUTES

    def __init__(self, fields):
        self.fields = fields

    def _output(self, inputs, values):
        assert len(inputs) == len(PLUGIN_INPUTS)
        qkv, width = inputs[0], self.fields["num_qo_heads"] * self.fields["head_dim"]
        value = None
        if values is not None:
            arrays = [x.float().numpy() if x.is_floating_point() else x.numpy() for x in values]
            out = standins.attention(arrays, **self.fields)
            value = torch.from_numpy(out).to(values[0].dtype)
        return qkv.dtype, [qkv.shape[0], width], value


class AllReduce:
    attributes = ALL_REDUCE_ATTRIBUTES

    def __init__(self, fields):
        self.fields = fields

    def _output(self, inputs, values):
        (x,) = inputs
        value = None
        if values is not None:
            group = standins.GROUPS[self.fields["tp_size"]]
            value = torch.from_numpy(group.sum(values[0].numpy(), self.fields["tp_rank"]))
        return x.dtype, x.shape, value


def creators(trt):
    """(name, version, namespace) -> creator, of one library."""

    def maker(kind):
        def make(**fields):
            return kind(fields) if tuple(fields) == kind.attributes else None

        return make

    return {
        (name, PLUGIN_VERSION, PLUGIN_NAMESPACE): trt.IPluginCreatorV3One(name, maker(kind))
        for name, kind in ((ATTENTION_OP, Attention), (ALL_REDUCE_OP, AllReduce))
    }
