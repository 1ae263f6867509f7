"""Drives the workload over Triton's gRPC streaming and measures what a client sees.

One server per run: GraniKV's layout, then uniform paging. All agents of a round start together.
"""

from __future__ import annotations

import queue
import re
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from granikv.demo.workload import Conversation, conversations
from granikv.errors import Unavailable

MODEL = "granikv"
LAYOUTS = ("asymmetric", "uniform")
METRIC = re.compile(r"^(nv_granikv_\w+)(?:\{.*\})?\s+(\S+)$", re.MULTILINE)
COUNTER = re.compile(r"^# TYPE (nv_granikv_\w+) counter$", re.MULTILINE)


@dataclass
class Response:
    """One answer. Times in seconds after the request was sent."""

    agent: str
    round_index: int
    prompt: str
    text: str = ""
    error: str = ""
    piece_times_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.piece_times_s[0] if self.piece_times_s else float("nan")

    @property
    def itl_s(self) -> float | None:
        """Mean gap between tokens; None for answers of one token."""
        if self.num_output_tokens < 2 or len(self.piece_times_s) < 2:
            return None
        return (self.piece_times_s[-1] - self.piece_times_s[0]) / (self.num_output_tokens - 1)


@dataclass
class RunResult:
    layout: str
    responses: list[Response]
    elapsed_s: float
    start_s: float
    metrics: dict[str, float]  # counters nv_granikv_*, summed over labels, what this run added

    @property
    def output_tokens(self) -> int:
        return sum(r.num_output_tokens for r in self.responses)

    @property
    def kv_bytes_read(self) -> float | None:
        """KV bytes that attention read, as the server counted them; None: not reported."""
        found = [v for name, v in self.metrics.items() if name.endswith("bytes_read")]
        return sum(found) if found else None


def read_counters(url: str) -> dict[str, float]:
    """Counters nv_granikv_* of a server, summed over labels, without the buckets of histograms."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        return counters_of(answer.read().decode())


def counters_of(text: str) -> dict[str, float]:
    counters = {name for name in COUNTER.findall(text) if not name.endswith("_bucket")}
    totals = dict.fromkeys(sorted(counters), 0.0)
    for name, value in METRIC.findall(text):
        if name in counters:
            totals[name] += float(value)
    return totals


def stream(
    grpc_url: str,
    prompt: str,
    max_tokens: int,
    on_piece: Callable[[str], None] | None = None,
    timeout_s: float = 600.0,
    request_id: str = "",
) -> Response:
    """One greedy request; `on_piece` sees the text as it arrives. Errors are in the response."""
    import tritonclient.grpc as triton

    response = Response("", 0, prompt)
    inputs = []
    for name, dtype, value in (
        ("text_input", "BYTES", prompt.encode()),
        ("max_tokens", "INT32", max_tokens),
        ("temperature", "FP32", 0.0),
        ("stream", "BOOL", True),
        ("exclude_input_in_output", "BOOL", True),
        ("return_num_input_tokens", "BOOL", True),
        ("return_num_output_tokens", "BOOL", True),
    ):
        tensor = triton.InferInput(name, [1, 1], dtype)
        numpy_type = triton_numpy_type(dtype)
        tensor.set_data_from_numpy(np.array([[value]], dtype=numpy_type))
        inputs.append(tensor)
    answers: queue.Queue = queue.Queue()
    client = triton.InferenceServerClient(grpc_url)
    start = time.perf_counter()
    deadline = start + timeout_s
    pieces = []
    try:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer(
            MODEL, inputs, request_id=request_id, enable_empty_final_response=True
        )
        while True:
            result, error = answers.get(timeout=max(0.1, deadline - time.perf_counter()))
            if error is not None:
                response.error = str(error)
                break
            output = result.as_numpy("text_output")
            if output is not None and output.size:
                text = output.reshape(-1)[0].decode("utf-8", "replace")
                if text or not response.piece_times_s:
                    response.piece_times_s.append(time.perf_counter() - start)
                pieces.append(text)
                if on_piece is not None and text:
                    on_piece(text)
            for name, attribute in (
                ("num_input_tokens", "num_prompt_tokens"),
                ("num_output_tokens", "num_output_tokens"),
                ("cached_tokens", "num_cached_tokens"),
            ):
                values = result.as_numpy(name)
                if values is not None and values.size:
                    setattr(response, attribute, int(values.reshape(-1)[0]))
            if result.get_response().parameters["triton_final_response"].bool_param:
                break
    except queue.Empty:
        response.error = f"no answer within {timeout_s:.0f} s"
    except triton.InferenceServerException as error:
        response.error = str(error)
    finally:
        client.stop_stream(cancel_requests=bool(response.error))
        client.close()
    response.text = "".join(pieces)
    return response


def triton_numpy_type(dtype: str) -> type:
    types: dict[str, type] = {
        "BYTES": np.object_,
        "INT32": np.int32,
        "FP32": np.float32,
        "BOOL": np.bool_,
    }
    return types[dtype]


def drive(
    grpc_url: str, agents: list[Conversation], num_rounds: int, progress: Progress, label: str
) -> list[Response]:
    """All rounds of all agents; the agents of a round run at once."""
    responses: list[Response] = []
    bar = progress.add_task(label, total=len(agents) * num_rounds, status="")
    num_pieces = 0

    def run_one(index: int, round_index: int) -> Response:
        conversation = agents[index]
        prompt = conversation.ask(round_index)

        def show(_: str) -> None:
            nonlocal num_pieces
            num_pieces += 1
            progress.update(bar, status=f"{num_pieces} pieces, {conversation.agent.name}")

        request_id = f"{conversation.agent.name}-{round_index}"
        response = stream(
            grpc_url, prompt, conversation.agent.max_tokens, show, request_id=request_id
        )
        response.agent, response.round_index = conversation.agent.name, round_index
        conversation.answer(response.text)
        progress.advance(bar)
        return response

    pool = ThreadPoolExecutor(len(agents))
    try:
        for round_index in range(num_rounds):
            rounds = [round_index] * len(agents)
            responses += pool.map(run_one, range(len(agents)), rounds)
    except BaseException:  # the streams end with the server, which the caller stops now
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()
    return responses


def run_layout(
    layout: str,
    num_agents: int,
    num_rounds: int,
    console: Console,
    log_folder: Path,
    model: str | None = None,
) -> RunResult:
    """Start a server with `layout`, drive the workload, stop it. Raises Unavailable."""
    from granikv.serving.launcher import running_server

    log_folder.mkdir(parents=True, exist_ok=True)
    log_path = log_folder / f"server-{layout}.log"
    log_path.unlink(missing_ok=True)
    config = {"prefix_layout": layout} | ({"model": model} if model else {})
    begin = time.perf_counter()
    console.print(f"Starting Triton with prefix_layout={layout} (log: {log_path})")
    with running_server(config, supervised=False, log_path=log_path) as server:
        start_s = time.perf_counter() - begin
        before = read_counters(server.address.metrics_url)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[status]}"),
        )
        with Progress(*columns, console=console) as progress:
            begin = time.perf_counter()
            agents = conversations(num_agents)
            responses = drive(server.address.grpc_url, agents, num_rounds, progress, layout)
            elapsed_s = time.perf_counter() - begin
        time.sleep(0.5)  # the stub publishes counters a moment after the last step
        after = read_counters(server.address.metrics_url)
    if not responses:
        raise Unavailable(f"no response from the server; see {log_path}")
    added = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return RunResult(layout, responses, elapsed_s, start_s, added)
