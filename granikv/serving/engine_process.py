"""The engine loop in a process of its own: `python -m granikv.serving.engine_process`.

One turn: take the commands that arrived, for a short time when requests run, step once, send one
batch. Idle, it sleeps on the socket. It dies with its parent, and SIGTERM makes it drain: nothing new is accepted, what runs
may finish within --drain-s, the rest is answered UNAVAILABLE. It knows nothing of Triton.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from pathlib import Path

import zmq

from granikv.config import EngineConfig
from granikv.core import FinishReason, RequestOutput
from granikv.errors import InvalidArgument, Unavailable, Unsupported
from granikv.processes import die_with_parent
from granikv.sampling_params import SamplingParams
from granikv.serving import wire
from granikv.serving.request_inputs import in_client_words
from granikv.serving.run_dir import end_with_launcher
from granikv.serving.settings import DEFAULT_ENGINE_CLASS, parse_engine_config

STATS_PERIOD_S = 0.2
ADMISSION_S = 0.03  # per step, while requests run: a prompt's encoding takes 0.4 us a byte
MAX_FAILED_STEPS = 3  # in a row, without an output: the engine is beyond help


def load_class(path: str) -> type:
    """The class that `module:Class` names. Raises InvalidArgument."""
    module_name, colon, class_name = path.partition(":")
    if not colon:
        raise InvalidArgument("engine_class", path, "'module:Class'")
    return getattr(importlib.import_module(module_name), class_name)


def to_wire(output: RequestOutput) -> wire.Output:
    if output.error is not None:
        return wire.error_output(output.request_id, output.error)
    reason = output.finish_reason
    return wire.Output(
        output.request_id,
        output.text,
        [int(token) for token in output.token_ids],
        [float(logprob) for logprob in output.logprobs],
        float(output.cum_logprob),
        output.finished,
        FinishReason(reason).value if reason else "",
        num_prompt_tokens=int(output.num_prompt_tokens),
        num_output_tokens=int(output.num_output_tokens),
        num_cached_tokens=int(output.num_cached_tokens),
        num_hot_tokens=int(output.num_hot_tokens),
        attention_path=output.attention_path,
        arrival_time=output.arrival_time,
        first_scheduled_time=output.first_scheduled_time,
        first_token_time=output.first_token_time,
        last_token_time=output.last_token_time,
    )


class EngineLoop:
    """Owns the engine and both sockets; `run` returns when told to shut down."""

    def __init__(self, address: str, drain_s: float, drained_file: Path | None = None):
        self.address, self.drain_s, self.drained_file = address, drain_s, drained_file
        self.context = zmq.Context()
        self.commands = self.context.socket(zmq.PULL)
        self.reports = self.context.socket(zmq.PUSH)
        for socket, suffix in ((self.commands, ".in"), (self.reports, ".out")):
            socket.set(zmq.LINGER, 1000)
            socket.set_hwm(0)
            socket.connect(address + suffix)
        self.live: set[str] = set()
        self.waiting: deque[wire.Add | wire.Abort] = deque()  # received, in their order
        self.step_count = self.failed_steps = 0
        self.step_started: float | None = None
        self.stats_due = 0.0
        self.drain_deadline: float | None = None
        self.stopping = False

    def load(self, engine_class: str, config: EngineConfig) -> None:
        self.engine = load_class(engine_class)(config)

    def send_heartbeats(self) -> None:
        socket = self.context.socket(zmq.PUSH)
        socket.set(zmq.LINGER, 0)
        socket.connect(self.address + ".out")
        while not self.stopping:
            started = self.step_started
            age_s = 0.0 if started is None else time.monotonic() - started
            socket.send(wire.encode(wire.Heartbeat(self.step_count, age_s)))
            time.sleep(1.0)
        socket.close()

    def begin_drain(self, *_: object) -> None:
        if self.drain_deadline is None:
            self.drain_deadline = time.monotonic() + self.drain_s

    def run(self) -> None:
        self.heartbeats = threading.Thread(target=self.send_heartbeats, daemon=True)
        self.heartbeats.start()
        while not self.stopping:
            outputs = self.take_commands()
            outputs += self.drain_if_due()
            if self.engine.has_work() and not self.stopping:
                outputs += self.step()
            self.send(outputs)
            self.end_with_executor()
            is_drained = self.drain_deadline is not None and not self.live and not self.waiting
            if is_drained and self.drained_file:
                self.drained_file.touch()  # the launcher waits for it before it stops the server
                self.drained_file = None
        self.engine.close()

    def end_with_executor(self) -> None:
        """Raises what ended a part of the engine, such as a rank, once every request has it."""
        failure = getattr(self.engine, "failure", lambda: None)()
        if failure is not None:
            waiting = [c.request_id for c in self.waiting if isinstance(c, wire.Add)]
            self.send([wire.error_output(i, failure) for i in [*self.live, *waiting]])
            raise failure

    def close(self) -> None:
        """What was answered leaves before this process does."""
        self.stopping = True
        self.heartbeats.join()
        self.context.destroy(linger=1000)

    def take_commands(self) -> list[wire.Output]:
        """Serve the commands that arrived, new requests for ADMISSION_S at most while others run,
        the rest at the next turn. Waits for one (0.2 s at most) only when idle."""
        if not self.engine.has_work() and not self.waiting:
            self.commands.poll(200)
        self.receive()
        refused: list[wire.Output] = []
        deadline = time.monotonic() + ADMISSION_S
        while self.waiting and not self.stopping:
            command = self.waiting.popleft()
            if isinstance(command, wire.Abort):
                self.abort(command)
            else:
                refused += self.try_to_add(command)
            if self.engine.has_work() and time.monotonic() > deadline:
                break
        return refused

    def receive(self) -> None:
        """What need not wait is served at once: a shutdown, and the abort of a request that the
        engine has, whose Add can therefore not be waiting."""
        while True:
            try:
                commands = wire.decode_commands(self.commands.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            for command in commands:
                if isinstance(command, wire.Shutdown):
                    self.stopping = True
                elif isinstance(command, wire.Abort) and command.request_id in self.live:
                    self.abort(command)
                else:
                    self.waiting.append(command)

    def abort(self, command: wire.Abort) -> None:
        if command.request_id in self.live:
            self.engine.abort(command.request_id)

    def try_to_add(self, command: wire.Add) -> list[wire.Output]:
        """Its refusal, if the engine does not take it."""
        try:
            self.add(command)
        except InvalidArgument as error:
            named = in_client_words(error, command.prompt)
            return [wire.error_output(command.request_id, named)]
        except Exception as error:
            return [wire.error_output(command.request_id, error)]
        return []

    def add(self, command: wire.Add) -> None:
        if self.drain_deadline is not None:
            raise Unavailable("the server is shutting down")
        sampling = dict(command.sampling)
        if command.bad_words:
            sampling["bad_words_ids"] = self.encode_words(command.bad_words)
        self.engine.add_request(
            command.request_id,
            command.prompt,
            SamplingParams(**sampling),
            salt=command.salt,
            prefix_id=command.prefix_id,
            shared_prefix_len=command.shared_prefix_len,
            priority=command.priority,
        )
        self.live.add(command.request_id)

    def encode_words(self, words: list[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences of each word, at the start of a text and after a space."""
        tokenizer = getattr(self.engine, "tokenizer", None)
        if tokenizer is None:
            raise Unsupported("bad_words: this engine has no tokenizer")
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word, " " + word):
                try:
                    ids = tokenizer.encode(text, add_special_tokens=False)
                except TypeError:
                    ids = tokenizer.encode(text)
                sequences[tuple(int(i) for i in getattr(ids, "ids", ids))] = None
        return tuple(sequences)

    def step(self) -> list[wire.Output]:
        self.step_started = time.monotonic()
        try:
            outputs = [to_wire(output) for output in self.engine.step()]
            self.failed_steps = 0
        except Exception as error:
            traceback.print_exc()
            self.failed_steps += 1
            if self.failed_steps >= MAX_FAILED_STEPS:
                self.send([wire.error_output(i, Unavailable(str(error))) for i in self.live])
                raise
            outputs = [wire.error_output(request_id, error) for request_id in self.live]
            for request_id in self.live:
                with contextlib.suppress(Exception):
                    self.engine.abort(request_id)
        self.step_started = None
        self.step_count += 1
        return outputs

    def drain_if_due(self) -> list[wire.Output]:
        if self.drain_deadline is None or time.monotonic() < self.drain_deadline:
            return []
        for request_id in self.live:
            self.engine.abort(request_id)
        error = Unavailable("the server is shutting down")
        return [wire.error_output(request_id, error) for request_id in self.live]

    def send(self, outputs: list[wire.Output]) -> None:
        """One message; outputs of requests that were already answered are dropped."""
        outputs = [o for o in outputs if o.request_id in self.live or o.error_code]
        self.live.difference_update(o.request_id for o in outputs if o.finished)
        now = time.monotonic()
        stats = None
        if now >= self.stats_due:
            self.stats_due = now + STATS_PERIOD_S
            stats = self.engine.metrics()
        if outputs or stats is not None:
            self.reports.send(wire.encode(wire.Batch(self.step_count, outputs, stats)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", required=True, help="ipc:// address of the client")
    parser.add_argument("--config", default="{}", help="EngineConfig fields, JSON")
    parser.add_argument("--engine-class", default=DEFAULT_ENGINE_CLASS)
    parser.add_argument("--parent-pid", type=int, default=os.getppid())
    parser.add_argument("--pid-file", type=Path)
    parser.add_argument("--drain-s", type=float, default=5.0)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent_pid)
    end_with_launcher()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pid_file = arguments.pid_file
    drained_file = pid_file.with_suffix(".drained") if pid_file else None
    loop = EngineLoop(arguments.socket, arguments.drain_s, drained_file)
    signal.signal(signal.SIGTERM, loop.begin_drain)
    if pid_file:
        pid_file.write_text(f"{os.getpid()}\n")
    try:
        fields = parse_engine_config(arguments.config, "--config")
        loop.load(arguments.engine_class, EngineConfig(**fields))
    except Exception as error:
        traceback.print_exc()
        loop.reports.send(wire.encode(wire.Failed(f"{type(error).__name__}: {error}")))
        loop.context.destroy(linger=1000)
        return 1
    loop.reports.send(wire.encode(wire.Ready(os.getpid())))
    try:
        loop.run()
        loop.reports.close()
        loop.commands.close()
        return 0
    except Exception:
        traceback.print_exc()
        loop.close()
        return 1


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
