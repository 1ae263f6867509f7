"""Decode steps end to end: GraniKV, uniform paging and transformers over the same prompts.

With tensor parallelism each engine has ranks, and weights, of its own on the same GPUs: they too
take turns, and a turn ends with its last step, so that only one of them has work at a time.
Every contender decodes a batch whose shared prefixes it has already cached; only steps in which
all requests decode are timed. In a round the engines, which share their weights, take TURN_STEPS
steps each in turns on a CPU, and on a GPU all of them at once, and transformers comes before or after them: a ratio is of neighbours in time.
A case reports medians and the spread over its rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from granikv.bench.decode_contenders import (
    Answers,
    Contender,
    EngineContender,
    TransformersContender,
)
from granikv.bench.harness import Case
from granikv.bench.vllm_contender import VLLM, vllm_step_ms
from granikv.config import EngineConfig
from granikv.config_check import check_engine, longest_request
from granikv.errors import InvalidArgument

EIGHT_GROUPS = (2048, 4096, 6144, 8192, 12288, 16384, 20480, 24576)  # tokens
TURN_STEPS = 4  # a turn ends when its last step has: little to a CPU, which has no queue to drain
FIXED = {"flat-extents": "flat", "no-dispatcher": "cascade"}  # name -> variant of FixedDispatcher
StepTimes = dict[str, list[float]]  # contender's name -> ms of each round
NEAR_TIE = 1e-3  # of the reference's logit range: a difference below is rounding


@dataclass(frozen=True)
class Workload:
    """Requests by group; a request's prompt is its group's prefixes in order, then its suffix.

    `paths` names, per request, the prefix segments it starts with: equal names, equal tokens.
    """

    name: str
    paths: tuple[tuple[str, ...], ...]
    segment_lens: dict[str, int]
    suffix_len: int
    steps_factor: int = 1  # short steps need more of them for a steady mean

    @property
    def batch(self) -> int:
        return len(self.paths)

    @property
    def is_uniform(self) -> bool:
        """All requests share one prefix: what a batched static cache can hold without padding."""
        return len(set(self.paths)) == 1

    def prefix_len(self, path: Sequence[str]) -> int:
        return sum(self.segment_lens[name] for name in path)

    def prompts(self, round_index: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
        """Token ids: prefixes are the same in every round, suffixes never."""
        low = min(1000, vocab_size // 2)  # ids below are often special tokens
        rng = np.random.default_rng(seed)
        segments = {
            name: rng.integers(low, vocab_size, length).tolist()
            for name, length in sorted(self.segment_lens.items())
        }
        rng = np.random.default_rng((seed, round_index + 1))
        return [
            [token for name in path for token in segments[name]]
            + rng.integers(low, vocab_size, self.suffix_len).tolist()
            for path in self.paths
        ]

    def params(
        self, model: str | None, num_steps: int, dtype: str = "float32", tp: int = 1
    ) -> dict:
        lens = [self.prefix_len(path) for path in self.paths]
        paths = sorted(set(self.paths), key=self.paths.index)
        return {
            "model": Path(model).name if model else "embedded",
            "tp": tp,
            "batch": self.batch,
            "prefix_len": lens[0] if len(set(lens)) == 1 else lens,
            "suffix_len": self.suffix_len,
            "group_sizes": [self.paths.count(path) for path in paths],
            "dtype": dtype,
            "steps": num_steps,
        }


def shared(
    batch: int, prefix_len: int, suffix_len: int, name: str = "", steps_factor: int = 1
) -> Workload:
    """One prefix for all."""
    path, lens = (("all",), {"all": prefix_len}) if prefix_len else ((), {})
    name = name or f"shared-{prefix_len}"
    return Workload(name, (path,) * batch, lens, suffix_len, steps_factor)


def standard_workloads() -> list[Workload]:
    """The cases that the project holds itself to on a CPU."""
    two_levels = Workload(
        "two-levels-2048-1024",
        tuple(("all", f"group{i // 4}") for i in range(16)),
        {"all": 2048, **{f"group{i}": 1024 for i in range(4)}},
        64,
    )
    four_groups = Workload(
        "four-groups-1024-4096",
        tuple((f"group{i // 4}",) for i in range(16)),
        {f"group{i}": 1024 * (i + 1) for i in range(4)},
        64,
    )
    small = [
        shared(batch, length, 64, steps_factor=factor)
        for length in (0, 64)
        for batch, factor in ((1, 4), (8, 2), (32, 1))
    ]
    return [shared(16, 4096, 64), two_levels, four_groups, *small]


def choose_workloads(workloads: Sequence[Workload], names: Sequence[str]) -> list[Workload]:
    """Those with one of the names; all if there are none. Raises InvalidArgument."""
    known = list(dict.fromkeys(workload.name for workload in workloads))
    for name in names:
        if name not in known:
            raise InvalidArgument("--case", name, f"one of {known}")
    return [workload for workload in workloads if not names or workload.name in names]


def gpu_workloads(tp: int = 1) -> list[Workload]:
    """The cases of the decode table for tp GPUs: suffix 128, up to 144 steps behind it."""
    groups = Workload(
        "eight-groups-2048-24576",
        tuple((f"group{i // 16}",) for i in range(128)),
        {f"group{i}": length for i, length in enumerate(EIGHT_GROUPS)},
        128,
    )
    batches = (8, 32, 64, 128, 256) if tp == 1 else (32, 128, 256)
    long = [shared(batch, 16384, 128) for batch in batches]
    return [*long, groups, shared(128, 512, 128)]


def run_decode_bench(
    workloads: Sequence[Workload],
    num_steps: int = 16,
    rounds: int = 7,
    model: str | None = None,
    with_transformers: bool = True,
    progress: Callable[[str], None] = lambda text: None,
    engine_settings: Mapping[str, Any] = MappingProxyType({}),
    others: Sequence[str] = (),
) -> list[Case]:
    """One case per workload and baseline; ratio is the median over rounds of step times.

    transformers takes part where all requests share one prefix (its batch has one length).
    others: of FIXED and VLLM, beside uniform paging; vLLM runs before, in a process of its own.
    progress is told of every measurement. engine_settings: fields of EngineConfig for both
    engines, such as random_weights.
    """
    if num_steps < 2:
        raise InvalidArgument("steps", num_steps, "at least 2")
    if rounds < 1:
        raise InvalidArgument("rounds", rounds, "at least 1")
    for name in others:
        if name not in (*FIXED, *VLLM):
            raise InvalidArgument("--contender", name, f"one of {[*FIXED, *VLLM]}")
    most = max(_unshared_tokens(w, num_steps * w.steps_factor) for w in workloads)
    needed = max(
        max(map(w.prefix_len, w.paths)) + w.suffix_len + 2 * num_steps * w.steps_factor
        for w in workloads
    )
    settings: dict[str, Any] = {"capacity_tokens": most, "model": model} | dict(engine_settings)
    limit = longest_request(*check_engine(EngineConfig(**settings, prefix_layout="uniform")))
    if needed > limit:
        expected = f"at most {limit} tokens: the model's context, or what the settings leave"
        raise InvalidArgument("prefix, suffix and 2 x steps", needed, expected)
    settings = {"max_seq_len": needed} | settings
    outside: list[StepTimes] = [{} for _ in workloads]
    for name in (name for name in others if name in VLLM):
        progress(name)
        found = vllm_step_ms(name, workloads, num_steps, rounds, EngineConfig(**settings))
        for times, of_workload in zip(outside, found, strict=True):
            times[name] = of_workload
    ours = EngineContender("granikv", prefix_layout="asymmetric", **settings)
    engines = [ours] + [
        EngineContender(name, ours, FIXED[name], prefix_layout="asymmetric", **settings)
        for name in others
        if name in FIXED
    ]
    engines.append(EngineContender("uniform-paging", ours, prefix_layout="uniform", **settings))
    reference = TransformersContender(model) if with_transformers else None
    cases = []
    for workload, times in zip(workloads, outside, strict=True):
        steps = num_steps * workload.steps_factor
        beside = reference if workload.is_uniform else None
        cases += _run_workload(workload, engines, beside, steps, rounds, model, progress, times)
    for engine in engines:
        engine.close()
    return cases


def _unshared_tokens(workload: Workload, num_steps: int) -> int:
    """Arena tokens that hold a workload's rounds without eviction of the prefixes."""
    stored = sum(workload.segment_lens.values())
    return 2 * stored + 8 * workload.batch * (workload.suffix_len + 2 * num_steps + 32) + 4096


def _run_workload(
    workload: Workload,
    engines: list[EngineContender],
    reference: TransformersContender | None,
    num_steps: int,
    rounds: int,
    model: str | None,
    progress: Callable[[str], None],
    outside: StepTimes,
) -> list[Case]:
    """outside: step times of those that ran elsewhere before, of each round."""
    vocab_size = engines[0].vocab_size
    prefix_len = workload.prefix_len(workload.paths[0]) if workload.is_uniform else 0
    contenders: list[Contender] = [*engines]
    if reference is not None:
        contenders.append(reference)
    step_ms: StepTimes = {c.name: [] for c in contenders}
    matched = dict.fromkeys(step_ms, 0)
    near_ties = dict.fromkeys(step_ms, 0)
    step_facts: dict[str, dict] = {}
    for round_index in range(-1, rounds):  # the round before the first fills caches
        prompts = workload.prompts(round_index, vocab_size)

        def tell(name: str) -> None:
            progress(f"{workload.name} B={workload.batch} {name}")

        turn = max(round_index, 0) % 2
        results = {}
        if reference is not None and turn:
            tell(reference.name)
            results[reference.name] = reference.decode(prompts, prefix_len, num_steps)
        results |= _in_turns(engines, prompts, num_steps, turn, tell)
        for engine in engines:
            step_facts[engine.name] = engine.step_facts
        if reference is not None and not turn:
            tell(reference.name)
            results[reference.name] = reference.decode(prompts, prefix_len, num_steps)
        if round_index < 0:
            continue
        for name, (step_s, _) in results.items():
            step_ms[name].append(step_s * 1e3)
        judge = contenders[-1]
        for name, (_, ids) in results.items():
            for prompt, got, expected in zip(prompts, ids, results[judge.name][1], strict=True):
                equal = got == expected
                matched[name] += equal
                if not equal and judge.near_tie(prompt, prefix_len, got, expected, NEAR_TIE):
                    near_ties[name] += 1
    count = rounds * workload.batch
    answers_checked = {
        name: {"same_tokens": matched[name], "near_ties": near_ties[name], "answers": count}
        for name in step_ms
    }
    metrics = {
        n: _metrics(t, workload.batch) | answers_checked[n] | step_facts.get(n, {})
        for n, t in step_ms.items()
    }
    params = workload.params(model, num_steps, engines[0].dtype, engines[0].tp)
    first = contenders[0].name
    cases = [
        _case(workload.name, params, metrics, step_ms, first, other.name)
        for other in contenders[1:]
    ]
    if reference is not None:  # the baseline must stand on its own beside transformers
        name = f"{workload.name} (baseline itself)"
        cases.append(_case(name, params, metrics, step_ms, engines[-1].name, reference.name))
    metrics |= {name: _metrics(times, workload.batch) for name, times in outside.items()}
    cases += [
        _case(workload.name, params, metrics, step_ms | outside, first, name) for name in outside
    ]
    return cases


def _in_turns(
    engines: Sequence[EngineContender],
    prompts: list[list[int]],
    num_steps: int,
    first: int,
    tell: Callable[[str], None],
) -> dict[str, tuple[float, Answers]]:
    """name -> (seconds per step, answers): a few steps of one engine, then of the next."""
    for engine in engines:
        tell(engine.name)
        engine.start(prompts, num_steps)
    elapsed_s = {engine.name: 0.0 for engine in engines}
    left, turn = num_steps - 1, first
    while left:
        steps = left if engines[0].on_gpu else min(TURN_STEPS, left)
        for i in range(len(engines)):
            engine = engines[(i + turn) % len(engines)]
            elapsed_s[engine.name] += engine.run(steps)
        left, turn = left - steps, turn + 1
    for engine in engines:
        engine.profile(min(TURN_STEPS, num_steps // 2 - 1))
    return {e.name: (elapsed_s[e.name] / (num_steps - 1), e.finish(num_steps)) for e in engines}


def _case(
    name: str, params: dict, metrics: dict, step_ms: dict, contender: str, baseline: str
) -> Case:
    pairs = sorted(b / a for a, b in zip(step_ms[contender], step_ms[baseline], strict=True))
    spread = {"ratio_min": pairs[0], "ratio_max": pairs[-1], "pairs": len(pairs)}
    ratio = statistics.median(pairs)
    own = metrics[contender] | spread | {"contender": contender}
    return Case(name, params, own, baseline, ratio, metrics[baseline])


def _metrics(times_ms: list[float], batch: int) -> dict:
    median = statistics.median(times_ms)
    return {
        "step_ms": median,
        "step_ms_min": min(times_ms),
        "step_ms_max": max(times_ms),
        "tokens_per_s": batch / median * 1e3,
    }
