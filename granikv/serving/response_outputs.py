"""From engine outputs to the named arrays of a Triton response, first dimension the batch of one.

It knows nothing of Triton's objects: the adapter turns each (name, array) into a tensor.
"""

from __future__ import annotations

import numpy as np

from granikv.serving.request_inputs import Row
from granikv.serving.wire import Output


def _nanoseconds(seconds: float | None) -> int:
    return 0 if seconds is None else int(seconds * 1e9)


def response_arrays(
    output: Output, row: Row, row_index: int, streaming: bool
) -> dict[str, np.ndarray]:
    """Arrays [1, n] of one response. What belongs to the whole request comes with the last one."""
    text = output.text if streaming or not row.echo else row.text + output.text
    arrays: dict[str, np.ndarray] = {
        "text_output": np.array([[text.encode("utf-8", "replace")]], dtype=object)
    }

    def put(name: str, value: float, dtype: type) -> None:
        arrays[name] = np.array([[value]], dtype=dtype)

    def is_due(name: str) -> bool:
        asked = row.returns.get(name)
        return output.finished if asked is None else asked

    put("batch_index", row_index, np.int32)
    put("sequence_index", 0, np.int32)
    if is_due("num_input_tokens"):
        put("num_input_tokens", output.num_prompt_tokens, np.int32)
    if is_due("num_output_tokens"):
        put("num_output_tokens", output.num_output_tokens, np.int32)
    if row.returns.get("log_probs"):
        put("cum_log_probs", output.cum_logprob, np.float32)
        logprobs = np.array(output.logprobs, dtype=np.float32)
        arrays["output_log_probs"] = logprobs.reshape(1, 1, -1)
    if not output.finished:
        return arrays
    if is_due("finish_reason"):
        reason = output.finish_reason.encode()
        arrays["finish_reason"] = np.array([[reason]], dtype=object)
    put("cached_tokens", output.num_cached_tokens, np.int32)
    put("hot_tokens", output.num_hot_tokens, np.int32)
    path = output.attention_path.encode()
    arrays["attention_path"] = np.array([[path]], dtype=object)
    if row.returns.get("perf_metrics"):
        total = output.num_prompt_tokens + output.num_output_tokens
        put("kv_cache_alloc_new_blocks", total - output.num_cached_tokens, np.int32)
        put("kv_cache_reused_blocks", output.num_cached_tokens, np.int32)
        put("kv_cache_alloc_total_blocks", total, np.int32)
        put("arrival_time_ns", _nanoseconds(output.arrival_time), np.int64)
        put("first_scheduled_time_ns", _nanoseconds(output.first_scheduled_time), np.int64)
        put("first_token_time_ns", _nanoseconds(output.first_token_time), np.int64)
        put("last_token_time_ns", _nanoseconds(output.last_token_time), np.int64)
    return arrays
