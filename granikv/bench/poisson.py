"""Poisson arrivals of agents with shared prefixes, through the engine in this process.

Saturation is the rate at which a list is served whose requests all wait from the start; the loads
are shares of it. Uniform paging, and vLLM where asked for, are sent the same list at the same times.
Prefixes are cached before anything counts, suffixes never.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from granikv.bench.arrivals import ArrivalList
from granikv.bench.decode_contenders import EngineContender
from granikv.bench.harness import Case
from granikv.bench.latency_session import release_gpu_memory
from granikv.bench.timed_engine import RequestTimes, TimedEngine
from granikv.bench.vllm_contender import VLLM, engine_spec, run_worker
from granikv.config import EngineConfig
from granikv.config_check import check_engine, longest_request
from granikv.errors import InvalidArgument

SATURATION = "saturation"
Runs = dict[str, list[RequestTimes]]  # name of the load -> its requests


@dataclass(frozen=True)
class PoissonConfig:
    """slo_ttft_ms, slo_itl_ms: a request counts as good when it keeps both; itl is its mean."""

    loads: tuple[float, ...] = (0.5, 0.8, 0.95)  # shares of saturation
    slo_ttft_ms: float = 1000.0
    slo_itl_ms: float = 50.0


def run_poisson_bench(
    arrivals: ArrivalList,
    config: PoissonConfig,
    model: str | None = None,
    engine_settings: dict[str, Any] | None = None,
    others: Sequence[str] = (),
    progress: Callable[[str], None] = lambda text: None,
) -> list[Case]:
    """A case per load and baseline: ratio of the median request's time from arrival to its last
    token; at saturation of tokens per second.

    others: of VLLM. Raises InvalidArgument, and what run_worker raises.
    """
    settings = {"model": model, **_defaults(arrivals), **(engine_settings or {})}
    _check(arrivals, config, settings, others)
    settings = {"max_seq_len": arrivals.longest + 1} | settings
    ours = EngineContender("granikv", prefix_layout="asymmetric", **settings)
    uniform = EngineContender("uniform-paging", ours, prefix_layout="uniform", **settings)
    rates: dict[str, float] = {}
    runs: dict[str, Runs] = {engine.name: {} for engine in (ours, uniform)}
    engines = (ours, uniform)
    for index, name in enumerate(["warm-up", SATURATION, *map(load_name, config.loads)]):
        rates[name] = math.inf
        if index > 1:
            rates[name] = config.loads[index - 2] * _request_rate(runs[ours.name][SATURATION])
        for engine in engines if index % 2 else engines[::-1]:
            progress(f"{name} {engine.name}")
            prompts = arrivals.prompts(engine.vocab_size, index)
            runs[engine.name][name] = serve(engine, arrivals, prompts, rates[name])
    params = _params(ours, arrivals, config)
    for engine in engines:
        engine.close()
    del ours, uniform, engine, engines
    release_gpu_memory()
    for name in others:
        progress(name)
        runs[name] = _vllm_runs(name, arrivals, rates, EngineConfig(**settings))
    return _cases(runs, rates, params, config)


def load_name(share: float) -> str:
    return f"load-{100 * share:g}"


def _defaults(arrivals: ArrivalList) -> dict:
    """Settings under which no prefix has to go."""
    rows = min(256, len(arrivals.arrivals))
    own = max(a.suffix_len + a.output_len for a in arrivals.arrivals)
    capacity = 2 * sum(arrivals.prefix_lens) + 2 * rows * (own + 32) + 4096
    return {"capacity_tokens": capacity}


def _check(
    arrivals: ArrivalList, config: PoissonConfig, settings: dict, others: Sequence[str]
) -> None:
    for name in others:
        if name not in VLLM:
            raise InvalidArgument("--contender", name, f"one of {list(VLLM)}")
    if not config.loads or not all(0 < load < math.inf for load in config.loads):
        raise InvalidArgument("load", config.loads, "shares of saturation above 0")
    engine = EngineConfig(**settings)
    limit = longest_request(*check_engine(engine))
    if arrivals.longest > limit:
        expected = f"at most {limit} tokens: the model's context, or what the settings leave"
        raise InvalidArgument("prompt and output", arrivals.longest, expected)
    if len(arrivals.arrivals) > engine.max_queued_requests:
        expected = f"at most max_queued_requests={engine.max_queued_requests}"
        raise InvalidArgument("requests", len(arrivals.arrivals), expected)


def serve(
    contender: EngineContender, arrivals: ArrivalList, prompts: list[list[int]], rate: float
) -> list[RequestTimes]:
    """Send each prompt when it is due and step until all have ended."""
    timed = TimedEngine(contender.engine)
    waiting = list(zip(arrivals.due_s(rate), prompts, arrivals.arrivals, strict=True))[::-1]
    requests = []
    begin_s = time.perf_counter()
    while waiting or contender.engine.has_work():
        now_s = time.perf_counter() - begin_s
        while waiting and waiting[-1][0] <= now_s:
            due_s, prompt, arrival = waiting.pop()
            requests.append(timed.add(prompt, arrival.output_len, begin_s + due_s))
        if contender.engine.has_work():
            timed.step()
        elif waiting:
            time.sleep(max(0.0, begin_s + waiting[-1][0] - time.perf_counter()))
    return requests


def _vllm_runs(
    name: str, arrivals: ArrivalList, rates: dict[str, float], config: EngineConfig
) -> Runs:
    spec = engine_spec(name, config, config.max_requests) | {
        "task": "serve",
        "arrivals": asdict(arrivals),
        "rates": [None if math.isinf(rate) else rate for rate in rates.values()],
    }
    found = run_worker(spec)["runs"]
    return {
        run: [RequestTimes(r["arrival_s"], r["prompt_len"], r["token_s"], True) for r in requests]
        for run, requests in zip(rates, found, strict=True)
    }


def _duration_s(requests: list[RequestTimes]) -> float:
    """From the first arrival to the last token."""
    return max(r.token_s[-1] for r in requests) - min(r.arrival_s for r in requests)


def _request_rate(requests: list[RequestTimes]) -> float:
    return len(requests) / _duration_s(requests)


def serving_metrics(requests: list[RequestTimes], config: PoissonConfig) -> dict:
    """Times in ms; goodput is requests per second that kept both limits."""
    ttft = [1e3 * r.ttft_s for r in requests]
    itl = [1e3 * gap for r in requests for gap in r.gaps_s()] or [0.0]
    total = [1e3 * (r.token_s[-1] - r.arrival_s) for r in requests]
    good = sum(
        first <= config.slo_ttft_ms and _mean_gap_ms(r) <= config.slo_itl_ms
        for first, r in zip(ttft, requests, strict=True)
    )
    duration_s = _duration_s(requests)
    percentiles = {
        f"{name}_p{q}_ms": float(np.percentile(values, q))
        for name, values in (("ttft", ttft), ("itl", itl), ("latency", total))
        for q in (50, 99)
    }
    return percentiles | {
        "tokens_per_s": sum(len(r.token_s) for r in requests) / duration_s,
        "requests_per_s": len(requests) / duration_s,
        "goodput_requests_per_s": good / duration_s,
        "good_share": good / len(requests),
    }


def _mean_gap_ms(request: RequestTimes) -> float:
    gaps = len(request.token_s) - 1
    return 1e3 * (request.token_s[-1] - request.token_s[0]) / gaps if gaps else 0.0


def _params(ours: EngineContender, arrivals: ArrivalList, config: PoissonConfig) -> dict:
    engine = ours.engine.config
    groups = [arrival.group for arrival in arrivals.arrivals]
    return {
        "model": Path(engine.model).name if engine.model else "embedded",
        "tp": engine.tp,
        "batch": len(groups),
        "prefix_len": list(arrivals.prefix_lens),
        "suffix_len": [a.suffix_len for a in arrivals.arrivals],
        "output_len": [a.output_len for a in arrivals.arrivals],
        "group_sizes": [groups.count(group) for group in range(len(arrivals.prefix_lens))],
        "dtype": engine.dtype,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "seed": arrivals.seed,
        "slo_ttft_ms": config.slo_ttft_ms,
        "slo_itl_ms": config.slo_itl_ms,
    }


def _cases(
    runs: dict[str, Runs], rates: dict[str, float], params: dict, config: PoissonConfig
) -> list[Case]:
    first, *baselines = runs
    cases = []
    for load, rate in rates.items():
        if load == "warm-up":
            continue
        ours = serving_metrics(runs[first][load], config)
        at = params | ({} if load == SATURATION else {"request_rate": rate})
        for name in baselines:
            other = serving_metrics(runs[name][load], config)
            ratio = other["latency_p50_ms"] / ours["latency_p50_ms"]
            if load == SATURATION:
                ratio = ours["tokens_per_s"] / other["tokens_per_s"]
            cases.append(Case(load, at, ours, name, ratio, other))
    return cases
