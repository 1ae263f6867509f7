"""Latency cases of steady decode: streams through the engine process, and the GPU's idle share."""

from __future__ import annotations

import statistics

from granikv.bench.gpu_idle import kernel_timeline
from granikv.bench.harness import Case
from granikv.bench.latency_session import Session, start_decoding
from granikv.bench.streams import EngineProcess, StreamRate
from granikv.bench.timed_engine import TimedEngine

AIM_STREAM_SHARE = 0.90  # of the tokens/s in this process, through the engine process
AIM_CLIENTS_STEP = 1.02  # step time with clients, of that without
AIM_IDLE_SHARE = 0.03
LEAST_IDLE_SHARE = 1e-4  # what a ratio takes for none
TRACED_STEPS = 64  # a trace of thousands of kernels takes seconds to read


def run_streams(session: Session) -> list[Case]:
    """This process, the engine process without clients, and with them, in turns."""
    steps, size = session.config.steps, session.config.streams
    prompts = session.prompts(size)
    timed = TimedEngine(session.ours.engine)
    rates: dict[str, list[StreamRate]] = {"in-process": [], "no-clients": [], "clients": []}
    session.progress("streams: starting the engine process")
    with EngineProcess(session.settings) as process:
        for index in range(-1, session.config.repeats):  # the round before the first compiles
            turns = list(rates.items())
            for name, found in turns if index % 2 else turns[::-1]:
                session.progress(f"streams {name}")
                if name == "in-process":
                    rate = decode_rate(timed, prompts, steps)
                else:
                    rate = process.measure(prompts, steps, with_clients=name == "clients")
                if index >= 0:
                    found.append(rate)
    metrics = {
        name: {
            "tokens_per_s": statistics.median(rate.tokens_per_s for rate in found),
            "step_ms": statistics.median(rate.step_ms for rate in found),
        }
        for name, found in rates.items()
    }
    ours = metrics["clients"]
    cases = []
    for name, metric, baseline, aim in (
        ("streams-tokens", "tokens_per_s", "in-process", AIM_STREAM_SHARE),
        ("streams-step", "step_ms", "no-clients", 1 / AIM_CLIENTS_STEP),
    ):
        other = metrics[baseline]
        ratio = ours[metric] / other[metric]
        if metric == "step_ms":
            ratio = 1 / ratio
        params = session.params(size, steps=steps, aim_ratio=aim)
        cases.append(Case(name, params, ours, baseline, ratio, other))
    return cases


def decode_rate(timed: TimedEngine, prompts: list[list[int]], num_steps: int) -> StreamRate:
    """Of all prompts decoding together in this process."""
    last = start_decoding(timed, prompts, num_steps)[-1]
    begin_s, before = last.token_s[-1], len(last.token_s)
    timed.run_steps(num_steps)
    step_s = (last.token_s[-1] - begin_s) / (len(last.token_s) - before)
    timed.clear()
    return StreamRate(1e3 * step_s, len(prompts) / step_s)


def run_idle(session: Session) -> list[Case]:
    session.progress("idle")
    timed, steps = TimedEngine(session.ours.engine), min(session.config.steps, TRACED_STEPS)
    prompts = session.prompts(session.config.streams)
    untraced = decode_rate(timed, prompts, steps)
    start_decoding(timed, prompts, steps)
    timed.run_steps(4)
    timeline = kernel_timeline(lambda: timed.run_steps(steps))
    timed.clear()
    metrics = {
        "idle_share": timeline.idle_share,
        "step_ms": untraced.step_ms,
        "traced_step_ms": timeline.span_us / 1e3 / steps,
        "busy_ms": timeline.busy_us / 1e3 / steps,
        "kernels_per_step": timeline.num_kernels / steps,
    }
    params = session.params(session.config.streams, steps=steps)
    ratio = AIM_IDLE_SHARE / max(timeline.idle_share, LEAST_IDLE_SHARE)
    return [Case("idle-share", params, metrics, "aim", ratio, {"idle_share": AIM_IDLE_SHARE})]
