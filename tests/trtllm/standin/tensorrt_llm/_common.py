import threading
from types import SimpleNamespace

from tensorrt_llm._utils import str_dtype_to_trt


class Network:
    """The wrapper around TensorRT's network. plugin_infos: layer name -> what was noted of it."""

    def __init__(self, trt_network):
        self.trt_network = trt_network
        self.plugin_config = SimpleNamespace(tokens_per_block=32)
        self.tensors, self.plugin_infos, self.parameter_tensors = [], {}, {}

    def _set_layer_name(self, layer):
        layer.name = f"{layer.kind}_{len(self.trt_network.layers)}"
        layer.get_output(0).name = f"{layer.name}_output_0"

    def _mark_output(self, tensor, name, dtype):
        tensor = tensor.cast(str_dtype_to_trt(dtype) if isinstance(dtype, str) else dtype)
        tensor.trt_tensor.name = name
        self.trt_network.mark_output(tensor.trt_tensor)


_current = threading.local()  # the real one is a global; here ranks are threads


def default_net():
    assert getattr(_current, "net", None) is not None, "no network is being built"
    return _current.net


def default_trtnet():
    return default_net().trt_network


def set_network(network):
    _current.net = network
