"""Latencies of an engine: first token of a long prompt, tokens beside a prefill, streams, idle GPU.

    ttft     cold, shared cold (requests that arrive together), warm and hot, against uniform paging;
             the prefill's rate as a share of the matrix rate measured in the same run
    itl      inter-token latency of decoding requests while one long prompt is prefilled
    streams  decoding requests through the engine process and its sender, against this process
    idle     share of a steady decode step in which the GPU runs no kernel

Limits are "aim" baselines: a ratio above 1 keeps within them. A case reports medians.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from granikv.bench.harness import Case
from granikv.bench.latency_decode import run_idle, run_streams
from granikv.bench.latency_prefill import run_itl, run_ttft
from granikv.bench.latency_session import LatencyConfig, Session
from granikv.config import EngineConfig
from granikv.config_check import check_engine, longest_request
from granikv.errors import InvalidArgument, Unavailable

CASES: dict[str, Callable[[Session], list[Case]]] = {
    "ttft": run_ttft,
    "itl": run_itl,
    "streams": run_streams,
    "idle": run_idle,
}


def run_latency_bench(
    config: LatencyConfig,
    cases: Sequence[str] = (),
    model: str | None = None,
    engine_settings: dict[str, Any] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[list[Case], dict]:
    """The cases, and the machine's probe in the middle of them.

    cases: of CASES; without any all that this machine can measure. engine_settings: fields of
    EngineConfig. Raises InvalidArgument, and Unavailable for "idle" without a CUDA device.
    """
    on_gpu = torch.cuda.is_available()
    chosen = list(cases) or [name for name in CASES if name != "idle" or on_gpu]
    settings = {
        "model": model,
        "capacity_tokens": config.capacity_tokens,
        "max_requests": max(256, config.streams),
    } | (engine_settings or {})
    _check(config, chosen, settings, on_gpu)
    session = Session(config, {"max_seq_len": config.max_seq_len} | settings, progress)
    try:
        results = [case for name in CASES if name in chosen for case in CASES[name](session)]
        return results, session.probe()
    finally:
        session.close()


def _check(config: LatencyConfig, cases: list[str], settings: dict, on_gpu: bool) -> None:
    for name in cases:
        if name not in CASES:
            raise InvalidArgument("--case", name, f"one of {list(CASES)}")
    if "idle" in cases and not on_gpu:
        raise Unavailable("--case idle: no CUDA device here, and it looks at GPU kernels")
    for name, lowest in (
        ("suffix_len", 1), ("together", 2), ("batch", 1), ("streams", 1), ("steps", 2),
        ("repeats", 1),
    ):  # fmt: skip
        if getattr(config, name) < lowest:
            raise InvalidArgument(name, getattr(config, name), f"at least {lowest}")
    if config.prefix_len < 1:
        expected = f"more than the suffix of {config.suffix_len} tokens"
        raise InvalidArgument("prompt_len", config.prompt_len, expected)
    engine = EngineConfig(**settings)
    limit = longest_request(*check_engine(engine))
    if config.max_seq_len > limit:
        expected = f"at most {limit} tokens: the model's context, or what the settings leave"
        raise InvalidArgument("prompt_len and what is decoded", config.max_seq_len, expected)
    rows = min(engine.max_requests, engine.max_num_batched_tokens)
    for name, asked in (
        ("streams", config.streams), ("batch", config.batch + 1), ("together", config.together),
    ):  # fmt: skip
        if asked > rows:
            expected = f"at most {rows}: max_requests and max_num_batched_tokens"
            raise InvalidArgument(name, asked, expected)
    for chunk in config.chunks:
        if not config.batch < chunk <= engine.max_num_batched_tokens:
            expected = f"{config.batch + 1} to max_num_batched_tokens"
            raise InvalidArgument("chunk", chunk, f"{expected}={engine.max_num_batched_tokens}")
