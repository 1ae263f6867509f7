import tensorrt as trt

_TYPES = {
    "float32": trt.DataType.FLOAT,
    "float16": trt.DataType.HALF,
    "bfloat16": trt.DataType.BF16,
    "int32": trt.DataType.INT32,
    "int64": trt.DataType.INT64,
}


def str_dtype_to_trt(dtype):
    return _TYPES[dtype]
