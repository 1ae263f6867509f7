"""A small gRPC streaming client for the tests: tensors from keywords, responses into a queue."""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass, field

import numpy as np
import tritonclient.grpc as grpcclient

DTYPES = {
    "text_input": "BYTES", "stop_words": "BYTES", "bad_words": "BYTES", "cache_salt": "BYTES",
    "guided_decoding_guide_type": "BYTES", "guided_decoding_guide": "BYTES",
    "embedding_bias_words": "BYTES", "prefix_id": "BYTES",
    "temperature": "FP32", "top_p": "FP32", "min_p": "FP32", "repetition_penalty": "FP32",
    "presence_penalty": "FP32", "frequency_penalty": "FP32",
    "stream": "BOOL", "stop": "BOOL", "exclude_input_in_output": "BOOL",
    "return_log_probs": "BOOL", "return_perf_metrics": "BOOL", "return_finish_reason": "BOOL",
    "return_num_input_tokens": "BOOL", "return_num_output_tokens": "BOOL",
    "seed": "UINT64", "lora_task_id": "UINT64",
}  # fmt: skip
NUMPY = {"BYTES": object, "FP32": np.float32, "BOOL": bool, "UINT64": np.uint64, "INT32": np.int32}


def tensors(**values) -> list[grpcclient.InferInput]:
    """One input per keyword, shape [1, n]; a 2-D array is sent as it is."""
    inputs = []
    for name, value in values.items():
        dtype = DTYPES.get(name, "INT32")
        array = np.array(value, dtype=NUMPY[dtype])
        if array.ndim < 2:
            array = array.reshape(1, -1)
        tensor = grpcclient.InferInput(name, list(array.shape), dtype)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


@dataclass
class Answer:
    """All that came for one request id."""

    texts: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    outputs: list[dict] = field(default_factory=list)
    is_final: bool = False

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def last(self) -> dict:
        return self.outputs[-1]


class Stream:
    """One gRPC stream. `send` then `wait`; `close(cancel=True)` drops what runs."""

    def __init__(self, url: str):
        self.client = grpcclient.InferenceServerClient(url)
        self.arrivals: queue.Queue = queue.Queue()
        self.client.start_stream(lambda result, error: self.arrivals.put((result, error)))
        self.answers: dict[str, Answer] = {}

    def send(self, request_id: str, **values) -> None:
        self.client.async_stream_infer(
            "granikv",
            tensors(**values),
            request_id=request_id,
            enable_empty_final_response=True,
        )

    def receive(self, timeout_s: float = 10.0) -> tuple[str, Answer]:
        """The next response, put into the answer of its id; an error without id under ""."""
        result, error = self.arrivals.get(timeout=timeout_s)
        if error is not None:
            answer = self.answers.setdefault("", Answer())
            answer.errors.append(str(error))
            return "", answer
        response = result.get_response()
        answer = self.answers.setdefault(response.id, Answer())
        names = [output.name for output in response.outputs]
        if names:
            arrays = {name: result.as_numpy(name) for name in names}
            answer.outputs.append(arrays)
            answer.texts.append(arrays["text_output"].reshape(-1)[0].decode())
        if response.parameters["triton_final_response"].bool_param:
            assert not answer.is_final, f"two finals for {response.id!r}"
            answer.is_final = True
        return response.id, answer

    def wait(self, request_id: str, timeout_s: float = 10.0) -> Answer:
        """Until the request's final response, or an error on the stream."""
        deadline = time.monotonic() + timeout_s
        while True:
            answer = self.answers.get(request_id)
            if answer is not None and answer.is_final:
                return answer
            got, answer = self.receive(max(0.01, deadline - time.monotonic()))
            if got == "":
                return answer

    def ask(self, request_id: str, timeout_s: float = 10.0, **values) -> Answer:
        self.send(request_id, **values)
        return self.wait(request_id, timeout_s)

    def close(self, cancel: bool = False) -> None:
        self.client.stop_stream(cancel_requests=cancel)
        self.client.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(cancel=True)


def ask(url: str, timeout_s: float = 10.0, **values) -> Answer:
    """One request on a stream of its own."""
    with Stream(url) as stream:
        return stream.ask("one", timeout_s, **values)
