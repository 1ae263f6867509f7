"""Many streams through the engine process, as the Triton stub holds them: who receives, how fast.

    engine process --one message a step--> EngineClient --one send per stream--> clients

A stream is a local socket: the client's socket thread sends each output that gathered, encoded, and
one thread reads all of them. Without clients the same requests run and their outputs are dropped.
Step times are by the engine's own clock; tokens per second are what the clients read.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

import msgspec

from granikv.errors import Unavailable
from granikv.serving import wire
from granikv.serving.engine_client import EngineClient
from granikv.serving.settings import ServingSettings, default_python

WAIT_S = 300.0  # for all streams to decode, and for the measured tokens
READ_BYTES = 65536
LENGTH_BYTES = 4  # before each message of a stream


@dataclass(frozen=True)
class StreamRate:
    step_ms: float  # between a stream's tokens, by the engine's clock
    tokens_per_s: float  # of all streams; as received where there are clients, else as made


class StreamClients:
    """A socket per stream and one thread that reads all of them and counts tokens.

    marks: (time in s, tokens of all streams so far) at each output of the last stream, which is
    also the last of a step; num_read: that stream's tokens so far.
    """

    def __init__(self, names: Sequence[str]):
        self.marks: list[tuple[float, int]] = []
        self.num_read = 0
        self._last_name, self._num_tokens = names[-1], 0
        self._decode = msgspec.msgpack.Decoder(wire.Output).decode
        self._selector = selectors.DefaultSelector()
        self._senders: dict[str, socket.socket] = {}
        self._readers: list[socket.socket] = []
        for name in names:
            sender, reader = socket.socketpair()
            self._senders[name] = sender
            self._readers.append(reader)
            self._selector.register(reader, selectors.EVENT_READ, bytearray())
        self._stopping = False
        self._thread = threading.Thread(target=self._read, name="bench-clients", daemon=True)
        self._thread.start()

    def send(self, output: wire.Output) -> None:
        message = wire.encode(output)
        header = len(message).to_bytes(LENGTH_BYTES, "little")
        self._senders[output.request_id].sendall(header + message)

    def _read(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select(0.1):
                assert isinstance(key.fileobj, socket.socket)
                self._take(key.data, key.fileobj.recv(READ_BYTES))

    def _take(self, buffer: bytearray, received: bytes) -> None:
        buffer += received
        while len(buffer) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(buffer[:LENGTH_BYTES], "little")
            if len(buffer) < end:
                return
            output = self._decode(bytes(buffer[LENGTH_BYTES:end]))
            del buffer[:end]
            self._num_tokens += len(output.token_ids)
            if output.request_id == self._last_name:
                self.num_read = output.num_output_tokens
                self.marks.append((time.perf_counter(), self._num_tokens))

    def tokens_per_s(self, first_mark: int) -> float:
        """Since marks[first_mark]."""
        (begin_s, before), (end_s, after) = self.marks[first_mark], self.marks[-1]
        return (after - before) / (end_s - begin_s)

    def close(self) -> None:
        self._stopping = True
        self._thread.join()
        self._selector.close()
        for end in (*self._senders.values(), *self._readers):
            end.close()


class EngineProcess:
    """An engine in a process of its own; use it as a context.

    engine_config: fields of EngineConfig. Raises Unavailable when the engine does not start.
    """

    def __init__(self, engine_config: dict):
        self._folder = tempfile.TemporaryDirectory(prefix="granikv_bench_")
        settings = ServingSettings(
            engine_config, python=default_python(), run_dir=self._folder.name
        )
        self._last: dict[str, wire.Output] = {}  # of each live request, the latest output
        self._clients: StreamClients | None = None
        self._num_rounds = 0
        self._death = ""
        try:
            self._client = EngineClient(
                settings, self._on_outputs, lambda stats: None, self._on_death
            )
        except BaseException:
            self._folder.cleanup()
            raise

    def _on_outputs(self, outputs: list[wire.Output]) -> None:
        for output in outputs:
            self._last[output.request_id] = output
            if self._clients is not None:
                self._clients.send(output)

    def _on_death(self, reason: str) -> None:
        self._death = reason

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._client.close()
        self._folder.cleanup()

    def measure(
        self, prompts: Sequence[Sequence[int]], num_steps: int, with_clients: bool
    ) -> StreamRate:
        """All prompts decode together for num_steps steps.

        Raises Unavailable when the process dies, a request fails or nothing comes for WAIT_S.
        """
        self._num_rounds += 1
        names = [f"stream-{self._num_rounds}-{i}" for i in range(len(prompts))]
        clients = StreamClients(names)
        self._last, self._clients = {}, clients if with_clients else None
        try:
            self._add(names, prompts, num_steps)
            self._wait(lambda: all(name in self._last for name in names))
            first, first_mark = self._last[names[0]], len(clients.marks)
            until = first.num_output_tokens + num_steps
            self._wait(lambda: self._last[names[0]].num_output_tokens >= until)
            if with_clients:  # all that was made is read, in more than one piece
                made = self._last[names[-1]].num_output_tokens
                self._wait(lambda: clients.num_read >= made and len(clients.marks) > first_mark + 1)
            last = self._last[names[0]]
            step_s = _seconds_per_token(first, last)
            rate = clients.tokens_per_s(first_mark) if with_clients else len(prompts) / step_s
            return StreamRate(1e3 * step_s, rate)
        finally:
            self._end(names)
            clients.close()

    def _add(self, names: Sequence[str], prompts: Sequence[Sequence[int]], num_steps: int) -> None:
        sampling = {"max_tokens": tokens_needed(num_steps), "temperature": 0.0, "ignore_eos": True}
        for name, prompt in zip(names, prompts, strict=True):
            self._client.send(wire.Add(name, list(prompt), sampling))

    def _end(self, names: Sequence[str]) -> None:
        for name in names:
            self._client.send(wire.Abort(name))
        with contextlib.suppress(Unavailable):  # said already
            self._wait(lambda: all(n in self._last and self._last[n].finished for n in names))

    def _wait(self, is_done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not is_done():
            failed = [o.error_text for o in list(self._last.values()) if o.error_code]
            if self._death or failed:
                raise Unavailable(f"engine process: {self._death or failed[0]}")
            if time.monotonic() > deadline:
                raise Unavailable(f"engine process: expected tokens within {WAIT_S} s, got none")
            time.sleep(1e-3)


def _seconds_per_token(first: wire.Output, last: wire.Output) -> float:
    assert first.last_token_time is not None and last.last_token_time is not None
    num_tokens = last.num_output_tokens - first.num_output_tokens
    return (last.last_token_time - first.last_token_time) / num_tokens


def tokens_needed(num_steps: int) -> int:
    """max_tokens that no stream reaches: the first one decodes while the others are prefilled."""
    return 4 * num_steps + 512
