"""Host time of a decode step without a model: schedule, plan, launch bookkeeping, commit.

The executor is null: it makes token ids up, so that all that is left is what the host does. Two
prefix lengths show that nothing grows with the tokens; "churn" ends one request and admits another
before every step, so that no step can reuse the grouping of the one before; "full" starts with an
arena full of what other requests left, so that decode lives on eviction.
It knows nothing of devices: the executor's own preparation of a plan is not in these times.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from granikv.bench.harness import Case, result_record, write_json
from granikv.bench.report import print_cases
from granikv.config import EngineConfig, ModelConfig
from granikv.core import Count, StepOutput, StepPlan
from granikv.engine import Engine
from granikv.errors import InvalidArgument
from granikv.outputs import check_output_file
from granikv.sampling_params import SamplingParams

BUDGET_US = 2000.0  # of schedule, plan and commit at 256 requests in 64 groups
WARMUP_STEPS = 20
CACHED_LEN = 128
STAGES = ("schedule", "plan", "launch", "commit")
MODEL = ModelConfig("llama", 16, 2048, 8192, 32, 8, 64, 32000, 131072)


class NullExecutor:
    """An Executor that runs nothing; its token ids depend on step and row only."""

    def __init__(self, model: ModelConfig = MODEL):
        self.decoder = SimpleNamespace(config=model)

    def launch(self, plan: StepPlan) -> StepPlan:
        return plan

    def wait(self, handle: StepPlan) -> StepOutput:
        ids = np.arange(int(handle.counts[Count.NUM_SAMPLE_ROWS]), dtype=np.int32)
        return StepOutput((ids + 7 * handle.step_id) % self.decoder.config.vocab_size)

    def close(self) -> None:
        pass


class StageClock:
    """Times of an engine's stages per step; `launch` is without schedule and plan.

    `host` is schedule, plan and commit together, in wall and in processor time: the second does
    not count what other processes took from this one.
    """

    def __init__(self, engine: Engine):
        self._us: dict[str, list[float]] = {}
        self.steps: list[dict[str, float]] = []
        for owner, method, name in (
            (engine.scheduler, "schedule", "schedule"),
            (engine.dispatcher, "plan", "plan"),
            (engine, "_launch", "launch"),
            (engine, "_commit", "commit"),
        ):
            setattr(owner, method, self._timed(getattr(owner, method), name))

    def _timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            cpu, wall = time.process_time_ns(), time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                wall = time.perf_counter_ns() - wall
                cpu = time.process_time_ns() - cpu
                times = self._us.setdefault(name, [0.0, 0.0])
                times[0] += wall / 1e3
                times[1] += cpu / 1e3

        return call

    def end_step(self) -> None:
        """Close the step's record and start the next one."""
        wall, cpu = ({n: self._us.get(n, (0.0, 0.0))[i] for n in STAGES} for i in (0, 1))
        self.steps.append(
            {f"{name}_us": us for name, us in wall.items()}
            | {"launch_us": wall["launch"] - wall["schedule"] - wall["plan"]}
            | {
                f"host_{unit}": times["schedule"] + times["plan"] + times["commit"]
                for unit, times in (("us", wall), ("cpu_us", cpu))
            }
        )
        self._us = {}

    def summary(self) -> dict[str, float]:
        """Median and 99th percentile of every stage, in us."""
        out = {}
        for key in self.steps[0]:
            values = [step[key] for step in self.steps]
            out[f"{key}_median"] = round(float(np.median(values)), 1)
            out[f"{key}_p99"] = round(float(np.percentile(values, 99)), 1)
        return out


def group_prompt(group: int, member: int, root_len: int, prefix_len: int, suffix_len: int):
    """int32 [prefix_len + suffix_len]; the first root_len tokens are everyone's."""
    vocab = MODEL.vocab_size
    everyone = np.random.default_rng(1).integers(0, vocab, root_len)
    own = np.random.default_rng([2, group]).integers(0, vocab, prefix_len - root_len)
    rest = np.random.default_rng([3, group, member]).integers(0, vocab, suffix_len)
    return np.concatenate([everyone, own, rest]).astype(np.int32)


def steady_engine(
    num_requests: int,
    num_groups: int,
    prefix_len: int,
    root_len: int,
    suffix_len: int,
    max_tokens: int,
    async_depth: int,
    full: bool = False,
) -> Engine:
    """An engine whose requests are all in decode, in groups of equal size.

    full: no slot is free that is not another request's cached context.
    """
    per_request = suffix_len + max_tokens + 2
    config = EngineConfig(
        capacity_tokens=num_groups * prefix_len + 2 * num_requests * per_request,
        max_requests=num_requests,
        max_num_batched_tokens=max(16384, num_requests),
        max_seq_len=prefix_len + per_request,
        async_depth=async_depth,
        profile="default",
    )
    engine = Engine(config, executor=NullExecutor())  # type: ignore[arg-type]
    if full:
        _fill(engine)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    for i in range(num_requests):
        group, member = i % num_groups, i // num_groups
        prompt = group_prompt(group, member, root_len, prefix_len, suffix_len)
        engine.add_request(f"{group}/{member}", prompt, params)
    while not all(r.output_token_ids for r in engine.requests.values()):
        engine.step()
    return engine


def _fill(engine: Engine) -> None:
    """Leave contexts of CACHED_LEN tokens of ended requests in the whole arena."""
    vocab = MODEL.vocab_size
    for i in range(engine.config.arena_tokens // CACHED_LEN):
        prompt = np.random.default_rng([4, i]).integers(0, vocab, CACHED_LEN)
        engine.add_request(f"cached/{i}", prompt, SamplingParams(max_tokens=1))
        if i % engine.config.max_requests == 0:
            engine.step()
    while engine.has_work():
        engine.step()


def run_host_bench(
    num_requests: int = 256,
    num_groups: int = 64,
    prefix_lens: tuple[int, ...] = (1024, 8192),
    root_len: int = 512,
    suffix_len: int = 32,
    num_steps: int = 300,
    async_depth: int = 1,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Case]:
    """Cases "steady-N", "churn-N" and "full-N" for each prefix length N.

    A ratio above 1 is a median under BUDGET_US. progress is told of every case.

    Lengths in tokens; root_len, the head of the prefix that all groups share, may be 0.
    """
    if not 1 <= num_groups <= num_requests:
        expected = f"1 to {num_requests}: a request for each group"
        raise InvalidArgument("num_groups", num_groups, expected)
    cases = []
    for prefix_len in prefix_lens:
        for kind in ("steady", "churn", "full"):
            progress(f"{kind}, prefixes of {prefix_len} tokens")
            # prefill takes some steps, during which the first requests decode already
            prefill_steps = 64 + 2 * num_groups * prefix_len // 16384
            engine = steady_engine(
                num_requests,
                num_groups,
                prefix_len,
                root_len,
                suffix_len,
                num_steps + WARMUP_STEPS + prefill_steps,
                async_depth,
                full=kind == "full",
            )
            churn_groups = num_groups if kind == "churn" else 0
            metrics = _measure(engine, num_steps, churn_groups, root_len, suffix_len)
            engine.close()
            params = {
                "batch": num_requests,
                "num_groups": num_groups,
                "group_sizes": [num_requests // num_groups],
                "prefix_len": prefix_len,
                "root_len": root_len,
                "suffix_len": suffix_len,
                "num_steps": num_steps,
                "async_depth": async_depth,
            }
            ratio = BUDGET_US / metrics["host_us_median"]
            budget = {"host_us_median": BUDGET_US}
            cases.append(Case(f"{kind}-{prefix_len}", params, metrics, "budget", ratio, budget))
    return cases


def _measure(
    engine: Engine, num_steps: int, churn_groups: int, root_len: int, suffix_len: int
) -> dict[str, float]:
    """churn_groups: 0, or the number of groups whose members are replaced in turn."""
    clock = StageClock(engine)
    some = next(iter(engine.requests.values()))
    prefix_len, params = some.prompt_len - suffix_len, some.params
    batch = len(engine.requests)
    for step in range(WARMUP_STEPS + num_steps):
        if churn_groups:
            engine.abort(next(iter(engine.requests)))
            group, member = step % churn_groups, 10**6 + step
            prompt = group_prompt(group, member, root_len, prefix_len, suffix_len)
            engine.add_request(f"{group}/{member}", prompt, params)
        engine.step()
        if step == WARMUP_STEPS - 1:
            clock.steps.clear()
        else:
            clock.end_step()
    assert len(engine.requests) == batch, "a request ended inside the measurement"
    return clock.summary()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", metavar="F", help="write the result file here")
    parser.add_argument("--num-requests", type=int, default=256)
    parser.add_argument("--num-groups", type=int, default=64)
    parser.add_argument("--num-steps", type=int, default=300)
    args = parser.parse_args()
    if args.json:
        check_output_file("--json", Path(args.json))
    cases = run_host_bench(args.num_requests, args.num_groups, num_steps=args.num_steps)
    print_cases(cases, "Host time of a decode step, us")
    if args.json:
        write_json(args.json, result_record(cases, with_probe=False))


if __name__ == "__main__":
    main()
