"""Latency cases with a long prefill: time to first token, its rate, and tokens made beside it."""

from __future__ import annotations

import statistics
from dataclasses import replace

import numpy as np

from granikv.bench.decode_contenders import EngineContender
from granikv.bench.harness import Case
from granikv.bench.latency_session import Session, release_gpu_memory, start_decoding
from granikv.bench.timed_engine import RequestTimes, TimedEngine
from granikv.config import ModelConfig
from granikv.errors import InvalidArgument

AIM_MATMUL_SHARE = 0.55  # of the measured matrix rate, by a 16K prefill
AIM_ITL_STEPS, AIM_ITL_MS = 3, 25.0  # p99 beside a prefill: so many decode steps, and so much
KINDS = ("cold", "shared-cold", "warm", "hot")  # hot: after another request has decoded behind it
DECODED_TOKENS = 16  # in which a prefix that came back is moved to an extent

Found = tuple[list[float], int]  # seconds of each request, tokens computed for all


def prefill_flops(model: ModelConfig, num_tokens: int) -> float:
    """Floating-point operations that a prompt of num_tokens needs; causal attention, one sample."""
    heads = model.num_qo_heads + model.num_kv_heads
    weights = 2 * model.hidden_size * heads * model.head_dim
    weights += 3 * model.hidden_size * model.intermediate_size
    pairs = num_tokens * (num_tokens + 1) / 2
    attention = 4 * model.num_qo_heads * model.head_dim * pairs
    logits = 2 * model.vocab_size * model.hidden_size
    return model.num_layers * (2.0 * weights * num_tokens + attention) + logits


def run_ttft(session: Session) -> list[Case]:
    """Against uniform paging, and the rate of the cold prefill against the aim."""
    settings = session.settings | {"prefix_layout": "uniform"}
    uniform = EngineContender("uniform-paging", session.ours, **settings)
    try:
        found = _ttft_rounds(session, [session.ours, uniform])
    finally:
        uniform.close()
        del uniform
        release_gpu_memory()
    cases = []
    for kind, batch in zip(KINDS, (1, session.config.together, 1, 1), strict=True):
        ours, other = (_ttft_metrics(kinds[kind]) for kinds in found.values())
        ratio = other["ttft_ms"] / ours["ttft_ms"]
        cases.append(
            Case(f"ttft-{kind}", session.params(batch), ours, "uniform-paging", ratio, other)
        )
    return [*cases, _prefill_rate(session, cases[0].metrics["ttft_ms"] / 1e3)]


def _ttft_rounds(
    session: Session, engines: list[EngineContender]
) -> dict[str, dict[str, list[Found]]]:
    """Contender's name -> kind -> what each round found; in turns."""
    found: dict[str, dict[str, list[Found]]] = {
        e.name: {kind: [] for kind in KINDS} for e in engines
    }
    for index in range(-1, session.config.repeats):  # the round before the first compiles
        first, second, third, last = session.prompts(4)
        group = session.prompts(session.config.together)
        for engine in engines if index % 2 else engines[::-1]:
            session.progress(f"ttft {engine.name}")
            for kind, prompts in zip(KINDS, ([first], group, [second], [last]), strict=True):
                if kind == "hot":
                    first_token_times(engine, [third], DECODED_TOKENS)
                times = first_token_times(engine, prompts)
                if index >= 0:
                    found[engine.name][kind].append(times)
    return found


def first_token_times(
    contender: EngineContender, prompts: list[list[int]], num_tokens: int = 1
) -> Found:
    """Of prompts that arrive together, of which each decodes to num_tokens."""
    timed = TimedEngine(contender.engine)
    counters = contender.engine.counters
    before = counters["cached_tokens"]
    requests = [timed.add(prompt, num_tokens) for prompt in prompts]
    timed.run_until(lambda: all(request.finished for request in requests))
    timed.clear()
    cached = counters["cached_tokens"] - before
    return [r.ttft_s for r in requests], sum(map(len, prompts)) - int(cached)


def _ttft_metrics(rounds: list[Found]) -> dict:
    """Of the median request and of the last one, medians over rounds."""
    return {
        "ttft_ms": 1e3 * statistics.median(statistics.median(times) for times, _ in rounds),
        "ttft_last_ms": 1e3 * statistics.median(max(times) for times, _ in rounds),
        "computed_tokens": max(computed for _, computed in rounds),
    }


def _prefill_rate(session: Session, cold_s: float) -> Case:
    flops = prefill_flops(session.model, session.config.prompt_len)
    limit = session.probe()["matmul_tflop_per_s"]
    rate = flops / cold_s / 1e12
    metrics = {
        "matmul_share": rate / limit,
        "tflop_per_s": rate,
        "tokens_per_s": session.config.prompt_len / cold_s,
        "ttft_ms": 1e3 * cold_s,
        "prefill_tflop": flops / 1e12,
    }
    aim = {"matmul_share": AIM_MATMUL_SHARE, "tflop_per_s": AIM_MATMUL_SHARE * limit}
    ratio = metrics["matmul_share"] / AIM_MATMUL_SHARE
    return Case("prefill-rate", session.params(1), metrics, "aim", ratio, aim)


def run_itl(session: Session) -> list[Case]:
    """A case for each size of the prefill's pieces."""
    own = session.ours.engine.config.max_num_batched_tokens
    return [_itl_case(session, chunk) for chunk in session.config.chunks or (own,)]


def _itl_case(session: Session, chunk: int) -> Case:
    """chunk: rows of a step at most, decode rows included."""
    session.progress(f"itl, {chunk} rows a step")
    config, engine = session.config, session.ours.engine
    own = engine.config
    engine.scheduler.config = replace(own, max_num_batched_tokens=chunk)
    steady: list[float] = []
    beside: list[float] = []
    ttfts: list[float] = []
    try:
        timed, prompts = TimedEngine(engine), session.prompts(config.batch)
        for index in range(-1, config.repeats):  # the round before the first compiles
            decoding = start_decoding(timed, prompts, config.steps)
            begin_s = decoding[0].token_s[-1]
            timed.run_steps(config.steps)
            until_s = decoding[0].token_s[-1]
            newcomer = _prefill(timed, session.prompts(1)[0])
            if any(request.finished for request in decoding):
                raise InvalidArgument("chunk", chunk, "enough rows: decoding ended before prefill")
            if index >= 0:
                steady += [gap for r in decoding for gap in r.gaps_s(begin_s, until_s)]
                beside += [gap for r in decoding for gap in r.gaps_s(until_s, newcomer.token_s[0])]
                ttfts.append(newcomer.ttft_s)
            timed.clear()
    finally:
        engine.scheduler.config = own
    step_ms = 1e3 * statistics.median(steady)
    limit_ms = AIM_ITL_STEPS * step_ms + AIM_ITL_MS
    ttft_s = statistics.median(ttfts)
    rate = prefill_flops(session.model, config.prompt_len) / ttft_s / 1e12
    metrics = {
        "itl_p99_ms": 1e3 * float(np.percentile(beside, 99)),
        "itl_p50_ms": 1e3 * statistics.median(beside),
        "itl_max_ms": 1e3 * max(beside),
        "step_ms": step_ms,
        "steady_itl_p99_ms": 1e3 * float(np.percentile(steady, 99)),
        "ttft_ms": 1e3 * ttft_s,
        "tflop_per_s": rate,
        "matmul_share": rate / session.probe()["matmul_tflop_per_s"],
        "gaps": len(beside),
    }
    params = session.params(config.batch, steps=config.steps) | {"max_num_batched_tokens": chunk}
    ratio = limit_ms / metrics["itl_p99_ms"]
    return Case("itl-beside-prefill", params, metrics, "aim", ratio, {"itl_p99_ms": limit_ms})


def _prefill(timed: TimedEngine, prompt: list[int]) -> RequestTimes:
    request = timed.add(prompt, 2)
    timed.run_until(lambda: bool(request.token_s))
    return request
