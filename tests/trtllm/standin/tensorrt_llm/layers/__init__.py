from tensorrt_llm.layers.linear import ColumnLinear, RowLinear

__all__ = ["ColumnLinear", "RowLinear"]
