"""Messages between the Triton stub and the engine process: msgpack arrays over two local sockets.

The stub binds `<address>.in` (commands) and `<address>.out` (batches); the engine connects to
both. One message carries everything that gathered, so a step costs one send on each side. Times
are `time.monotonic()` seconds, which processes of one machine share.
"""

from __future__ import annotations

import msgspec

from granikv.metrics import Stats


class Add(msgspec.Struct, array_like=True, tag=0, frozen=True):
    """One request. `sampling` holds the fields of SamplingParams that differ from its defaults."""

    request_id: str
    prompt: str | list[int]
    sampling: dict
    bad_words: list[str] = []
    salt: str = ""
    prefix_id: str = ""
    shared_prefix_len: int = 0
    priority: int = 0


class Abort(msgspec.Struct, array_like=True, tag=1, frozen=True):
    request_id: str


class Shutdown(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """Abort what is left, close the engine and exit."""


class Output(msgspec.Struct, array_like=True):
    """RequestOutput on the wire; error_code is "" when there is no error."""

    request_id: str
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[float] = []
    cum_logprob: float = 0.0
    finished: bool = False
    finish_reason: str = ""
    error_code: str = ""
    error_text: str = ""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_hot_tokens: int = 0
    attention_path: str = ""
    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None

    def absorb(self, later: Output) -> None:
        """Append a later output of the same request: texts and ids join, the rest is replaced."""
        later.text = self.text + later.text
        later.token_ids = self.token_ids + later.token_ids
        later.logprobs = self.logprobs + later.logprobs
        for name in self.__struct_fields__:
            setattr(self, name, getattr(later, name))


class Batch(msgspec.Struct, array_like=True, tag=0):
    """What one step gave. stats is None when nothing is due (at most 5 a second)."""

    step: int
    outputs: list[Output]
    stats: Stats | None = None


class Heartbeat(msgspec.Struct, array_like=True, tag=1):
    """Sent every second by a thread of its own: step_s is the age of the step that runs now."""

    step: int
    step_s: float


class Ready(msgspec.Struct, array_like=True, tag=2):
    """The engine is loaded."""

    pid: int


class Failed(msgspec.Struct, array_like=True, tag=3):
    """The engine could not be made."""

    error_text: str


Command = Add | Abort | Shutdown
Report = Batch | Heartbeat | Ready | Failed

encode = msgspec.msgpack.Encoder().encode
decode_commands = msgspec.msgpack.Decoder(list[Command]).decode
decode_report = msgspec.msgpack.Decoder(Report).decode


def error_output(request_id: str, error: Exception) -> Output:
    """Final output of a request that failed with `error`."""
    return Output(
        request_id,
        finished=True,
        finish_reason="error",
        error_code=getattr(error, "code", "INTERNAL"),
        error_text=str(error) if hasattr(error, "code") else f"{type(error).__name__}: {error}",
    )
