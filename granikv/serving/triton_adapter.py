"""What the Triton stub does with requests: validate, hand to the engine process, answer.

One request (a Call) carries one row or more; each row is an engine request. Threads: Triton's
execute thread submits; the client's socket thread answers; a watcher polls cancellation and
deadlines and writes metrics. A sender is touched only under its Call's lock and never after FINAL.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from granikv.errors import AlreadyExists, Unavailable
from granikv.metrics import PROBE_PREFIX, Stats
from granikv.serving import wire
from granikv.serving.engine_client import EngineClient
from granikv.serving.request_inputs import (
    Row,
    is_stop,
    missing,
    read_id,
    read_row,
    read_tensors,
)
from granikv.serving.response_outputs import response_arrays
from granikv.serving.settings import ServingSettings
from granikv.serving.triton_metrics import TritonMetrics

logger = logging.getLogger(__name__)
WATCH_PERIOD_S = 0.02


@dataclass
class Call:
    """A Triton request that is not answered in full."""

    call_id: str
    sender: Any
    lock: threading.Lock = field(default_factory=threading.Lock)
    rows: dict[str, tuple[int, Row]] = field(default_factory=dict)  # engine id -> unanswered row
    held: dict[str, wire.Output] = field(default_factory=dict)  # rows that are not streamed
    streaming: bool = False
    deadline: float | None = None
    override: Exception | None = None  # answers instead of the engine's end
    closed: bool = False


class TritonAdapter:
    """Serves requests of one Python-backend instance. pb_utils: Triton's module, or a double."""

    def __init__(self, pb_utils: Any, settings: ServingSettings):
        self.pb_utils, self.settings = pb_utils, settings
        self.lock = threading.Lock()
        self.calls: dict[str, Call] = {}  # by the client's id
        self.owners: dict[str, Call] = {}  # by engine id
        self.finished: deque[wire.Output] = deque()
        self.stats: Stats | None = None
        self.stopping = False
        self.metrics = TritonMetrics(pb_utils)
        self.client = EngineClient(settings, self.on_outputs, self.on_stats, self.on_death)
        self.watcher = threading.Thread(target=self._watch, name="granikv-watch", daemon=True)
        self.watcher.start()

    # --- requests

    def submit(self, request: Any) -> None:
        """Take one request. Whatever is wrong with it is answered, nothing is raised."""
        sender = request.get_response_sender()
        try:
            call_id, tensors = read_id(request), read_tensors(request)
            if is_stop(tensors):
                self.stop(call_id, sender)
                return
            self._submit(call_id, sender, tensors)
        except Exception as error:
            self._send(sender, error=error, final=True)

    def stop(self, call_id: str, sender: Any) -> None:
        """End the live request of that id, if there is one; answer with an empty FINAL."""
        self._abort(self.calls.get(call_id))
        self._send(sender, final=True)

    def _submit(self, call_id: str, sender: Any, tensors: dict[str, np.ndarray]) -> None:
        prompts = tensors.get("text_input")
        if prompts is None or prompts.size == 0:
            raise missing("text_input")
        if self.client.dead_reason or self.stopping:
            raise Unavailable(self.client.dead_reason or "the server is shutting down")
        call_id = call_id or uuid.uuid4().hex
        call = Call(call_id, sender)
        commands, errors = [], []
        for index in range(prompts.shape[0]):
            engine_id = call_id if prompts.shape[0] == 1 else f"{call_id}#{index}"
            try:
                row = read_row(tensors, index, self.settings.exclude_input_in_output)
            except Exception as error:
                errors.append(error)
                continue
            call.rows[engine_id] = (index, row)
            call.streaming = row.stream
            if row.timeout_ms:
                call.deadline = time.monotonic() + row.timeout_ms / 1e3
            commands.append(
                wire.Add(
                    engine_id,
                    row.text,
                    row.sampling,
                    row.bad_words,
                    row.salt,
                    row.prefix_id,
                    row.shared_prefix_len,
                    row.priority,
                )
            )
        with call.lock:  # who finds the call can abort it only once the engine knows its rows
            if commands:
                self._register(call)
            for refusal in errors:
                self._send(sender, error=refusal, final=not commands and refusal is errors[-1])
            for command in commands:
                self.client.send(command)
        if self.client.dead_reason:
            self.on_death(self.client.dead_reason)

    def _register(self, call: Call) -> None:
        with self.lock:
            taken = [i for i in (call.call_id, *call.rows) if i in self.calls or i in self.owners]
            if taken:
                raise AlreadyExists(taken[0])
            self.calls[call.call_id] = call
            self.owners.update(dict.fromkeys(call.rows, call))

    def _abort(self, call: Call | None, override: Exception | None = None) -> None:
        if call is None:
            return
        with call.lock:
            call.override = call.override or override
            for engine_id in list(call.rows):
                self.client.send(wire.Abort(engine_id))

    # --- answers, on the client's socket thread

    def on_outputs(self, outputs: list[wire.Output]) -> None:
        for output in outputs:
            call = self.owners.get(output.request_id)
            if call is not None:
                with call.lock:
                    self._answer(call, output)

    def _answer(self, call: Call, output: wire.Output) -> None:
        engine_id = output.request_id
        if call.closed or engine_id not in call.rows:
            return
        if output.finished:
            self._release(call, engine_id)
        row_index, row = call.rows[engine_id]
        if output.finished:
            del call.rows[engine_id]
            self.finished.append(output)
        is_last = not call.rows
        if not row.stream and not output.error_code:
            held = call.held.setdefault(engine_id, output)
            if held is not output:
                held.absorb(output)
            if not output.finished:
                return
            output = call.held.pop(engine_id)
        error: Exception | None = None
        if output.finished and call.override is not None:
            error = call.override
        elif output.error_code:
            error = WireError(output.error_code, output.error_text)
        if error is not None:
            self._send(call.sender, error=error, final=is_last)
        else:
            arrays = response_arrays(output, row, row_index, row.stream)
            self._send(call.sender, arrays, final=is_last and not row.stream)
            if is_last and row.stream:
                self._send(call.sender, final=True)
        call.closed = is_last

    def _release(self, call: Call, engine_id: str) -> None:
        """Forget ids before the last answer leaves, so that the client may use them again."""
        with self.lock:
            self.owners.pop(engine_id, None)
            if len(call.rows) == 1:
                self.calls.pop(call.call_id, None)

    def _send(
        self,
        sender: Any,
        arrays: dict[str, np.ndarray] | None = None,
        error: Exception | None = None,
        final: bool = False,
    ) -> None:
        """One response. A sender whose client is gone only leaves a line in the log."""
        pb = self.pb_utils
        flags = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        try:
            if error is not None:
                response = pb.InferenceResponse(error=self._triton_error(error))
                sender.send(response, flags)
            elif arrays is not None:
                tensors = [pb.Tensor(name, array) for name, array in arrays.items()]
                sender.send(pb.InferenceResponse(output_tensors=tensors), flags)
            else:
                sender.send(flags=flags)
        except Exception as problem:
            logger.warning("a response could not be sent: %s", problem)

    def _triton_error(self, error: Exception) -> Any:
        """The code is also the text's first word: gRPC streams carry the text only."""
        code = getattr(error, "code", "INTERNAL")
        text = str(error) if hasattr(error, "code") else f"{type(error).__name__}: {error}"
        codes = self.pb_utils.TritonError
        return codes(f"{code}: {text}", getattr(codes, code, codes.INTERNAL))

    def on_stats(self, stats: Stats) -> None:
        self.stats = stats

    def on_death(self, reason: str) -> None:
        logger.error("%s", reason)
        self._fail_all(f"{reason}; the service restarts")

    def _fail_all(self, reason: str) -> None:
        for engine_id, call in list(self.owners.items()):
            with call.lock:
                self._answer(call, wire.error_output(engine_id, Unavailable(reason)))

    # --- watcher

    def _watch(self) -> None:
        while not self.stopping:
            time.sleep(WATCH_PERIOD_S)
            self._watch_calls()
            try:
                self._write_metrics()
            except Exception:
                logger.exception("metrics could not be written")

    def _watch_calls(self) -> None:
        """Not inlined in the loop: a variable left there would keep the last sender alive, and
        with it the model when the server unloads it."""
        for call in list(self.calls.values()):
            if call.override is None:
                self._watch_call(call)

    def _watch_call(self, call: Call) -> None:
        if call.deadline is not None and time.monotonic() > call.deadline:
            self._abort(call, Unavailable("timeout_ms passed before the request was done"))
            return
        with call.lock:
            try:
                cancelled = not call.closed and call.sender.is_cancelled()
            except Exception:
                cancelled = True
        if cancelled:
            self._abort(call, WireError("CANCELLED", "the client cancelled the request"))

    def _write_metrics(self) -> None:
        while self.finished:
            output = self.finished.popleft()
            if not output.error_code and not output.request_id.startswith(PROBE_PREFIX):
                self.metrics.observe_finished(output)
        stats, self.stats = self.stats, None
        if stats is not None:
            stats.gauges |= {
                "serving_live_calls": len(self.calls),
                "serving_live_rows": len(self.owners),
                "engine_step_age_seconds": self.client.heartbeat.step_s,
            }
            self.metrics.set_stats(stats)

    def close(self) -> None:
        """Answer what is in flight with UNAVAILABLE and end the engine process."""
        self.stopping = True
        self._fail_all("the server is shutting down")
        self.client.close()
        self.watcher.join(1.0)


class WireError(Exception):
    """An error with a code of the serving contract."""

    def __init__(self, code: str, text: str):
        super().__init__(text)
        self.code = code
