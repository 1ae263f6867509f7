"""From the tensors of one Triton request to engine commands: names, defaults and refusals.

Defaults follow the tensorrtllm_backend: without temperature, top_k and top_p a request is greedy.
An input that is known but not served is refused by name when it would change the result. It knows
nothing of response senders or of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from granikv.errors import InvalidArgument, Quantity, Unsupported, shown
from granikv.sampling_params import SamplingParams

MAX_WORDS = 256  # stop_words, and bad_words
MAX_NAME_BYTES = 1024  # id, cache_salt, prefix_id: they are kept
MAX_WORD_BYTES = 1024
MAX_WORDS_BYTES = 16384  # of all words: 10 ms to encode, 1 ms a token to look for
RETURN_FLAGS = ("log_probs", "perf_metrics", "num_input_tokens", "num_output_tokens")


def _is_nonempty(values: np.ndarray) -> bool:
    return any(v not in (b"", "") for v in values) if values.dtype == object else values.size > 0


def _is_true(values: np.ndarray) -> bool:
    return bool(np.any(values))


def _differs_from_one(values: np.ndarray) -> bool:
    return bool(np.any(values != 1))


# input name -> does its value change the result?
UNSERVED: dict[str, Callable[[np.ndarray], bool]] = {
    "num_return_sequences": _differs_from_one,
    "beam_width": _differs_from_one,
    "embedding_bias_words": _is_nonempty,
    "embedding_bias_weights": _is_nonempty,
    "guided_decoding_guide_type": _is_nonempty,
    "guided_decoding_guide": _is_nonempty,
    "prompt_embedding_table": _is_nonempty,
    "prompt_vocab_size": _is_true,
    "prompt_table_extra_ids": _is_nonempty,
    "lora_task_id": _is_true,
    "lora_weights": _is_nonempty,
    "lora_config": _is_nonempty,
    "image_input": _is_nonempty,
    "decoder_text_input": _is_nonempty,
    "return_context_logits": _is_true,
    "return_generation_logits": _is_true,
    "retention_token_range_starts": _is_nonempty,
    "retention_token_range_ends": _is_nonempty,
    "retention_token_range_priorities": _is_nonempty,
    "retention_token_range_durations_ms": _is_nonempty,
    "retention_decode_priority": _is_nonempty,
    "retention_decode_duration_ms": _is_nonempty,
}

COUNTS = ("num_return_sequences", "beam_width")  # above 1 not served, below 1 nonsense
# what the engine calls a field -> the input that the client set
INPUT_NAMES = {
    "prompt": "text_input",
    "prompt token id": "input_ids",
    "stop_token_ids": "end_id",
    "bad_words_ids": "bad_words",
    "stop": "stop_words",
    "logprobs": "return_log_probs",
}


def in_client_words(error: InvalidArgument, prompt: str | list[int]) -> InvalidArgument:
    """The engine's refusal with the name of the input that the client set."""
    name = INPUT_NAMES.get(error.name, error.name)
    if error.name == "prompt" and not isinstance(prompt, str):
        name = "input_ids"
    return InvalidArgument(name, error.got, error.expected)


def missing(name: str) -> InvalidArgument:
    return InvalidArgument(name, None, "a value: this input is required")


@dataclass
class Row:
    """One prompt of a request. sampling: SamplingParams fields that were given, checked."""

    text: str
    sampling: dict
    bad_words: list[str] = field(default_factory=list)
    salt: str = ""
    prefix_id: str = ""
    shared_prefix_len: int = 0
    priority: int = 0
    timeout_ms: int = 0  # 0: none
    stream: bool = False
    echo: bool = False  # the text of a response that is not streamed starts with the prompt
    returns: dict[str, bool | None] = field(default_factory=dict)  # None: the request did not say


class RowReader:
    """Values of one batch row. tensors: name -> array with the batch as first dimension."""

    def __init__(self, tensors: Mapping[str, np.ndarray], row: int):
        self.tensors, self.row = tensors, row

    def values(self, name: str) -> np.ndarray | None:
        """The row's elements [n]; None when the input is absent or empty."""
        tensor = self.tensors.get(name)
        if tensor is None or tensor.size == 0:
            return None
        return tensor.reshape(tensor.shape[0], -1)[self.row]

    def scalar(self, name: str):
        values = self.values(name)
        if values is None:
            return None
        if len(values) != 1:
            raise InvalidArgument(name, f"{len(values)} values", "one value")
        return values[0].item() if hasattr(values[0], "item") else values[0]

    def text(self, name: str) -> str | None:
        value = self.scalar(name)
        return None if value is None else decode(name, value)

    def texts(self, name: str) -> list[str]:
        values = self.values(name)
        if values is None:
            return []
        words = [decode(name, value) for value in values]
        return [word for word in words if word]

    def flag(self, name: str) -> bool | None:
        value = self.scalar(name)
        return None if value is None else bool(value)


def decode(name: str, value: bytes | str) -> str:
    """UTF-8 text. Raises InvalidArgument naming the input and the first bad byte."""
    if isinstance(value, str):
        return value
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        expected = f"valid UTF-8 (byte {error.start} is not)"
        raise InvalidArgument(name, value, expected) from None


def check_name(name: str, value: str) -> str:
    """`value` itself. Raises InvalidArgument for a long one."""
    size = len(value.encode(errors="replace"))
    if size > MAX_NAME_BYTES:
        raise InvalidArgument(name, Quantity(f"{size} bytes"), f"at most {MAX_NAME_BYTES} bytes")
    return value


def read_id(request: Any) -> str:
    """The client's id of a Triton request; "" for none. Raises InvalidArgument."""
    try:
        return check_name("id", request.request_id())
    except UnicodeDecodeError as error:
        return decode("id", error.object)


def read_tensors(request: Any) -> dict[str, np.ndarray]:
    """Name -> array with the batch as first dimension. Raises InvalidArgument.

    Triton 2.51 lets a batch of no rows pass and gives it without that dimension."""
    tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
    for name, tensor in tensors.items():
        if tensor.ndim < 2:
            raise InvalidArgument(name, Quantity("none"), "a batch of at least 1 row")
    return tensors


def is_stop(tensors: Mapping[str, np.ndarray]) -> bool:
    """Whether the request ends the live one of its id, which it does for all its rows."""
    stops = tensors.get("stop")
    if stops is not None and np.any(stops) and not np.all(stops):
        raise InvalidArgument("stop", stops.reshape(-1).tolist(), "the same in every row")
    return stops is not None and bool(np.any(stops))


def read_row(tensors: Mapping[str, np.ndarray], index: int, exclude_by_default: bool) -> Row:
    """Raises InvalidArgument or Unsupported, naming the input, its value and the limit."""
    read = RowReader(tensors, index)
    text = read.text("text_input")
    if text is None:
        raise missing("text_input")
    if not text:
        raise InvalidArgument("text_input", text, "a non-empty prompt")
    for name, changes_result in UNSERVED.items():
        values = read.values(name)
        if values is not None and name in COUNTS and np.any(values < 1):
            raise InvalidArgument(name, int(values.min()), "1: one sequence per request")
        if values is not None and changes_result(values):
            raise Unsupported(f"{name}={shown(values.tolist())}: this build does not serve it")
    sampling = read_sampling(read)
    SamplingParams(**sampling)
    priority = read.scalar("priority") or 0
    timeout_ms = read.scalar("timeout_ms") or 0
    shared_prefix_len = read.scalar("shared_prefix_len") or 0
    for name, value in (("timeout_ms", timeout_ms), ("shared_prefix_len", shared_prefix_len)):
        if value < 0:
            raise InvalidArgument(name, value, "at least 0")
    excluded = read.flag("exclude_input_in_output")
    returns = {n: read.flag(f"return_{n}") for n in (*RETURN_FLAGS, "finish_reason")}
    return Row(
        text,
        sampling,
        read_words(read, "bad_words"),
        check_name("cache_salt", read.text("cache_salt") or ""),
        check_name("prefix_id", read.text("prefix_id") or ""),
        shared_prefix_len,
        priority,
        timeout_ms,
        bool(read.flag("stream")),
        not (exclude_by_default if excluded is None else excluded),
        returns,
    )


def read_words(read: RowReader, name: str) -> list[str]:
    """A list of words, bounded: each costs time in which no other request goes on."""
    words = read.texts(name)
    if len(words) > MAX_WORDS:
        raise InvalidArgument(name, len(words), f"at most {MAX_WORDS} words")
    sizes = [len(word.encode(errors="replace")) for word in words]
    for size, limit, where in (
        (max(sizes, default=0), MAX_WORD_BYTES, "in a word"),
        (sum(sizes), MAX_WORDS_BYTES, "in all words"),
    ):
        if size > limit:
            raise InvalidArgument(name, Quantity(f"{size} bytes"), f"at most {limit} bytes {where}")
    return words


def read_sampling(read: RowReader) -> dict:
    """SamplingParams fields that the request sets."""
    max_tokens = read.scalar("max_tokens")
    if max_tokens is None:
        raise missing("max_tokens")
    sampling: dict = {"max_tokens": max_tokens}
    for name in (
        "min_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "seed",
    ):
        value = read.scalar(name)
        if value is not None:
            sampling[name] = value
    if not sampling.keys() & {"temperature", "top_k", "top_p", "min_p"}:
        sampling["temperature"] = 0.0
    stop_words = read_words(read, "stop_words")
    if stop_words:
        sampling["stop"] = stop_words
    end_id = read.scalar("end_id")
    if end_id is not None and end_id < -1:
        raise InvalidArgument("end_id", end_id, "a token id, or -1 for none")
    if end_id == -1:
        sampling["ignore_eos"] = True
    elif end_id is not None:
        sampling["stop_token_ids"] = [end_id]
    if read.flag("return_log_probs"):
        sampling["logprobs"] = 0
    return sampling
