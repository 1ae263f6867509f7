from tensorrt_llm._common import default_net
from tensorrt_llm._utils import str_dtype_to_trt
from tensorrt_llm.functional import constant


class Parameter:
    def __init__(self, value=None, shape=None, dtype=None, is_buffer=False, prefer_managed=False):
        assert value is None and not is_buffer
        self.shape, self.dtype = tuple(shape), str_dtype_to_trt(dtype)
        self.prefer_managed, self._value = prefer_managed, None

    def is_inited(self):
        return self._value is not None

    @property
    def value(self):
        """One constant layer per network, however often it is used."""
        tensors = default_net().parameter_tensors
        if self not in tensors:
            tensors[self] = constant(self._value)
        return tensors[self]

    @value.setter
    def value(self, v):
        assert tuple(v.shape) == self.shape, (tuple(v.shape), self.shape)
        self._value = v
