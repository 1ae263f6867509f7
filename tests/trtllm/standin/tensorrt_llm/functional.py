"""Functions record one layer each, where the real ones may add several."""

from __future__ import annotations

from collections import OrderedDict

import tensorrt as trt
import torch

from tensorrt_llm._common import default_net, default_trtnet
from tensorrt_llm._utils import str_dtype_to_trt


class Tensor:
    def __init__(self, name=None, dtype=None, shape=None, dim_range=None, is_network_input=True,
                 location=trt.TensorLocation.DEVICE, network=None, trt_tensor=None):  # fmt: skip
        assert location is trt.TensorLocation.DEVICE and network is None and trt_tensor is None
        self.profiles = []
        if not is_network_input:
            return
        assert isinstance(dtype, trt.DataType) and isinstance(dim_range, OrderedDict)
        assert len(dim_range) == len(shape)
        self.profiles = [{dim: sizes[0] for dim, sizes in dim_range.items()}]
        for size, (name_of_dim, sizes) in zip(shape, dim_range.items(), strict=True):
            (only,) = sizes  # one optimisation profile
            assert (only == size) if size != -1 else (len(only) == 3), name_of_dim
        self.trt_tensor = default_trtnet().add_input(name=name, dtype=dtype, shape=shape)
        for index, dim in enumerate(dim_range):
            self.trt_tensor.set_dimension_name(index, dim)
        default_net().tensors.append(self)

    @property
    def dtype(self):
        return self.trt_tensor.dtype

    @property
    def shape(self):
        return self.trt_tensor.shape

    def mark_output(self, name=None, dtype=None):
        default_net()._mark_output(self, name, dtype)

    def __add__(self, b):
        return _binary("SUM", self, b, torch.add)

    def __mul__(self, b):
        return _binary("PROD", self, b, torch.mul)

    def __truediv__(self, b):
        return _binary("DIV", self, b, torch.div)

    def view(self, shape, zero_is_placeholder=True):
        assert zero_is_placeholder
        sizes = [self.shape[i] if n == 0 else n for i, n in enumerate(shape)]
        return _layer("SHUFFLE", [self], sizes, lambda x: x.reshape(
            [x.shape[i] if n == 0 else n for i, n in enumerate(shape)]))  # fmt: skip

    def mean(self, dim, keepdim=False):
        assert dim == -1 and keepdim
        return _layer("AVG", [self], [*self.shape[:-1], 1], lambda x: x.mean(-1, keepdim=True))

    def sqrt(self):
        return _layer("SQRT", [self], self.shape, torch.sqrt)

    def cast(self, dtype):
        dtype = str_dtype_to_trt(dtype) if isinstance(dtype, str) else dtype
        if dtype == self.dtype:
            return self
        return _layer("CAST", [self], self.shape, lambda x: x.to(trt._TORCH[dtype]), dtype)

    def split(self, split_size_or_sections, dim=0):
        sections = list(split_size_or_sections)
        assert sum(sections) == self.shape[dim], (sections, self.shape)
        parts = []
        for index, size in enumerate(sections):
            shape = [*self.shape[:dim], size, *self.shape[dim + 1 :]]
            parts.append(_layer(
                "SLICE", [self], shape,
                lambda x, index=index: x.split(sections, dim=dim)[index],
            ))  # fmt: skip
        return tuple(parts)


def _create_tensor(trt_tensor, producer):
    default_net()._set_layer_name(producer)
    tensor = Tensor(is_network_input=False)
    tensor.trt_tensor, tensor.producer = trt_tensor, producer
    return tensor


def _add_plugin_info(layer, plugin_creator, plugin_name, pfc):
    default_net().plugin_infos[layer.name] = (plugin_creator, plugin_name, pfc)


def _layer(kind, inputs, shape, compute, dtype=None):
    tensors = [x.trt_tensor for x in inputs]
    network = default_trtnet()
    value = None if network.feeds is None else compute(*(x.value for x in tensors))
    layer = network._add(kind, tensors, dtype or inputs[0].dtype, shape, value)
    return _create_tensor(layer.get_output(0), layer)


def _binary(kind, a, b, compute):
    if not isinstance(b, Tensor):
        return _layer(kind, [a], a.shape, lambda x: compute(x, b))
    assert a.dtype == b.dtype, f"{kind}: a strongly typed network has no {a.dtype} with {b.dtype}"
    long, short = sorted((a.shape, b.shape), key=len, reverse=True)
    padded = [1] * (len(long) - len(short)) + list(short)
    shape = [m if n == 1 else n for n, m in zip(long, padded, strict=True)]
    for n, m, size in zip(long, padded, shape, strict=True):
        assert n in (1, size) and m in (1, size), (a.shape, b.shape)
    return _layer(kind, [a, b], shape, compute)


def constant(ndarray, as_dtype=None, as_shape=None):
    """ndarray: here a torch tensor, as the stand-in's parameters are."""
    dtype = {v: k for k, v in trt._TORCH.items()}[ndarray.dtype]
    layer = default_trtnet()._add("CONSTANT", [], dtype, ndarray.shape, ndarray)
    return _create_tensor(layer.get_output(0), layer)


def matmul(input, mat2, transa=False, transb=False, use_fp32_acc=True):  # noqa: A002
    assert transb and not transa and input.dtype == mat2.dtype
    assert input.shape[-1] == mat2.shape[-1], (input.shape, mat2.shape)
    return _layer(
        "MATRIX_MULTIPLY", [input, mat2], [*input.shape[:-1], mat2.shape[0]],
        lambda x, w: (x.float() @ w.float().T).to(x.dtype),
    )  # fmt: skip


def embedding(input, weight, tp_size=1, tp_group=None, sharding_dim=0, tp_rank=None,  # noqa: A002
              per_token_scale=None, padding=None):  # fmt: skip
    assert (tp_size, tp_group, per_token_scale, padding) == (1, None, None, None)
    shape = [*input.shape, weight.shape[1]]
    return _layer("GATHER", [weight, input], shape, lambda w, ids: w[ids.long()])


def index_select(input, dim, index):  # noqa: A002
    assert dim == 0 and len(index.shape) == 1
    shape = [*index.shape, *input.shape[1:]]
    return _layer("GATHER", [input, index], shape, lambda x, rows: x[rows.long()])


def concat(inputs, dim=0):
    shape = list(inputs[0].shape)
    shape[dim] = sum(x.shape[dim] for x in inputs)
    assert len({x.dtype for x in inputs}) == 1
    return _layer("CONCATENATION", inputs, shape, lambda *xs: torch.cat(xs, dim=dim))


def silu(input):  # noqa: A002
    return _layer("SILU", [input], input.shape, lambda x: x * torch.sigmoid(x))
