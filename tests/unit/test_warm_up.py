"""The warm-up's rehearsal covers every launch that plans lead to, on an executor that plays an H200.

Launches are noted, not made: neither a GPU nor the interpreter is needed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[1]))
import gpu_double
from gpu_double import MODEL, FakeSums, driver_double, make_executor, pretend_h200

from granikv.attention.kernels import launch
from granikv.attention.kernels.launch import Launcher
from granikv.attention.rehearsal import Rehearsal, rehearsing
from granikv.attention.variants import LAYOUTS, layouts_of
from granikv.config import EngineConfig, ModelConfig
from granikv.core import Choice, ColdItem, Count, HotItem, HotVariant, SpanKind, StepPlan
from granikv.engine import Engine
from granikv.executor import cuda_executor
from granikv.executor import make_executor as executor_of
from granikv.executor.warm_up import attention_plans, compile_launches, extend_plan
from granikv.sampling_params import SamplingParams
from granikv.serving.settings import parse_assignments

FP8_KV = {"kv_cache_dtype": "fp8"}
FP8_WEIGHTS = {"quantization": "fp8"}
ONE_GROUP = ModelConfig("qwen2", 2, 512, 1024, 16, 1, 64, 97, 512, attention_bias=True)


def config(**settings) -> EngineConfig:
    values = {
        "dtype": "bfloat16", "capacity_tokens": 4096, "max_requests": 96, "max_seq_len": 512,
        "max_num_batched_tokens": 160, "min_extent_tokens": 16, "profile": "default",
    }  # fmt: skip
    return EngineConfig(**values | settings)


def keys(rehearsal: Rehearsal) -> set[tuple]:
    """What tells compiled kernels apart, whichever launcher object holds them."""
    return {
        (one.name, one.key, repr(sorted(one.constants.items())), repr(sorted(one.options.items())))
        for one in rehearsal.launches.values()
    }


def hot_spans(rng, num_decodes: int) -> Iterator[tuple[np.ndarray, int, int]]:
    """(rows, len, position) of random groups, some below another: a tree of one or two levels."""
    if num_decodes == 0 or rng.random() < 0.1:
        return
    num_groups = int(rng.choice([1, 1, 2, 4, 12, num_decodes]))
    cuts = np.sort(rng.integers(0, num_decodes, num_groups - 1))  # unequal sizes
    if rng.random() < 0.5:
        cuts = np.arange(1, num_groups) * num_decodes // num_groups
    for rows in np.split(rng.permutation(num_decodes), cuts):
        if not len(rows):
            continue
        length = int(rng.choice([20, 70, 300, 5000, 20_000, 60_000]))
        yield rows, length, 0
        if rng.random() < 0.4:
            yield rows[: rng.integers(1, len(rows) + 1)], int(rng.choice([16, 128, 4000])), length


def random_plan(executor, rng) -> StepPlan:
    """Decode rows of groups, flat runs and suffixes, cut for the executor; and extends."""
    settings = executor.config
    most = settings.max_requests
    num_decodes = int(rng.choice([0, 1, 2, 7, rng.integers(1, most + 1), most]))
    if rng.random() < 0.1:  # rows of extends that decode count as well
        num_decodes = settings.max_num_batched_tokens
    spans = list(hot_spans(rng, num_decodes))
    hot, cold = np.zeros((len(spans), 8), np.int32), []
    for item, (rows, length, position) in zip(hot, spans, strict=True):
        item[[HotItem.NUM_ROWS, HotItem.KV_LEN, HotItem.POSITION]] = len(rows), length, position
    has_runs, suffix = rng.random() < 0.4, int(10 ** rng.uniform(0, 4.5))
    for row in range(num_decodes):
        if not spans or rng.random() < 0.9:
            cold.append((row, SpanKind.SLOTS, 0, suffix, 0, 0, 0, 0))
        if has_runs and rng.random() < 0.5:
            cold.append((row, SpanKind.RUN, 0, 300, 0, 0, 0, 0))
    if spans and rng.random() < 0.2:
        cold = []  # every row ends where its prefix does
    hot[:, HotItem.VARIANT] = HotVariant.CASCADE
    hot_rows = np.concatenate([rows for rows, _, _ in spans] or [[]]).astype(np.int32)
    cold_items = np.array(cold, np.int32).reshape(-1, 8)
    cutter = executor.plan_cutter
    if rng.random() < 0.7:  # also what another cost model would take
        names = [name for name in LAYOUTS if name != "flat"]
        layout = layouts_of(cutter.shape)[names[rng.integers(len(names))]]
        tile = layout.hot_gluon
        if tile is None or hot[:, HotItem.KV_LEN].min(initial=tile.block_n) >= tile.block_n:
            cutter = replace(cutter, hot_layout=layout)
    made = cutter.cut(hot, hot_rows, cold_items, num_decodes)
    extends = rng.integers(1, 40, rng.integers(0, 4)) if rng.random() < 0.5 else np.zeros(0, int)
    if num_decodes == 0 and not len(extends):
        extends = np.array([5])
    extends = extends[np.cumsum(extends) + num_decodes <= settings.max_num_batched_tokens]
    qo_indptr = np.concatenate([[num_decodes], num_decodes + np.cumsum(extends)]).astype(np.int32)
    num_rows = int(qo_indptr[-1])
    drops = rng.random() < 0.1  # rows that nobody samples
    sampled = np.arange(num_decodes - int(drops and num_decodes > 0), dtype=np.int32)
    sampled = np.concatenate([sampled, qo_indptr[1:][rng.random(len(extends)) < 0.5] - 1])
    plan = replace(
        extend_plan(max(1, num_rows)),
        layout=made.layout.name,
        hot_items=made.hot_items,
        hot_rows=made.hot_rows,
        cold_items=made.cold_items,
        merge_indptr=made.merge_indptr,
        merge_partials=made.merge_partials,
        qo_indptr=qo_indptr,
        extend_indptr=np.arange(len(extends) + 1, dtype=np.int32),
        extend_segments=np.zeros((len(extends), 8), np.int32),
        sample_rows=sampled.astype(np.int32),
    )
    plan.counts[:] = 0
    plan.counts[: Count.NUM_SLOT_WRITES] = (
        num_rows, num_decodes, len(extends), len(made.hot_items), len(made.hot_rows),
        len(made.cold_items), len(extends), made.num_partials, len(sampled),
    )  # fmt: skip
    return plan


@pytest.fixture(autouse=True)
def one_thread():
    """Torch's operators are tiny here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


CASES = {
    "bf16": ({}, MODEL, None),
    "FP8 KV": (FP8_KV, MODEL, None),
    "FP8 weights": (FP8_WEIGHTS, MODEL, None),
    "two ranks": ({}, MODEL, (96, 40)),
    "two ranks, FP8": (FP8_WEIGHTS | FP8_KV, MODEL, (96, 96)),
    "many heads of 64": ({}, ONE_GROUP, None),
    "few requests": ({"max_requests": 3}, MODEL, None),
}


@pytest.mark.parametrize("name", CASES)
def test_random_plans_launch_nothing_that_was_not_rehearsed(name, monkeypatch):
    settings, model, sums = CASES[name]
    pretend_h200(monkeypatch)
    executor = make_executor(config(**settings), model, FakeSums(*sums) if sums else None)
    covered, rng = keys(executor.rehearse()), np.random.default_rng(1)
    prepare, layouts, launched = executor.buffers.prepare, set(), set()
    for index in range(400):
        plan = random_plan(executor, rng)
        layouts.add(plan.layout)
        # as graphs want it, too: grids are classes then
        captured = bool(index % 2)
        monkeypatch.setattr(
            executor.buffers, "prepare", lambda p, capture=False, c=captured: prepare(p, capture=c)
        )
        with rehearsing() as noted:
            executor._run_model(plan)
        missing = keys(noted) - covered
        assert not missing, (plan.layout, plan.counts, missing)
        launched |= keys(noted)
    assert launched
    if executor.config.max_requests > 3:
        assert layouts == set(LAYOUTS)
        kernels = {key[0] for key in launched}
        assert {"extend_kernel", "small_kernel", "cold_kernel", "hot_kernel"} <= kernels
        assert ("hot_gluon_kernel" in kernels) == executor.attention.gluon
        unused = {key[:2] for key in covered} - {key[:2] for key in launched}
        assert not unused, "rehearsed without need, or these plans are too tame"


@pytest.mark.parametrize("name", ["bf16", "two ranks, FP8"])
def test_a_key_is_one_kernel_to_triton(name, monkeypatch):
    """Whatever the numbers and addresses of a launch are: else what was rehearsed would not serve."""
    settings, model, sums = CASES[name]
    pretend_h200(monkeypatch)
    executor = make_executor(config(**settings), model, FakeSums(*sums) if sums else None)
    kinds: dict[tuple, set[str]] = {}

    def note(rehearsal, one):
        *_, binder = one.launcher.kernel.device_caches[0]
        _, specialization, options = binder(*one.arguments, **one.constants, **one.options)
        kinds.setdefault((one.name, one.launcher, one.key), set()).add(
            f"{specialization} {options}"
        )

    monkeypatch.setattr(Rehearsal, "note", note)
    rng = np.random.default_rng(2)
    with driver_double():
        executor.rehearse()
        for _ in range(40):
            with rehearsing():
                executor._run_model(random_plan(executor, rng))
    assert len(kinds) > 20
    assert not {key[::2]: found for key, found in kinds.items() if len(found) > 1}


def test_an_engine_launches_nothing_that_was_not_rehearsed(monkeypatch):
    """Requests of three levels that come, decode, are cancelled and come again."""
    pretend_h200(monkeypatch)
    settings = config(max_requests=48, capacity_tokens=8192)
    engine = Engine(settings, executor=make_executor(settings))
    covered, rng = keys(engine.executor.rehearse()), np.random.default_rng(0)
    draw = lambda count: rng.integers(3, MODEL.vocab_size, count).tolist()  # noqa: E731
    everyone, groups = draw(64), [draw(n) for n in (16, 40, 130)]
    prefixes = [[], everyone, *(everyone + group for group in groups)]
    layouts = set()

    def watched(*arguments):
        engine.dispatcher.cutter = replace(cutter, hot_layout=hot[rng.integers(len(hot))])
        made = plan(*arguments)
        layouts.add(made.layout)
        return made

    cutter = engine.dispatcher.cutter
    # the others do not take extents so short
    hot = [
        layout for layout in LAYOUTS.values() if layout.hot_gluon is None and layout.name != "flat"
    ]
    plan, engine.dispatcher.plan = engine.dispatcher.plan, watched
    # prefixes so short would be read flat
    engine.dispatcher._cheapest = lambda *group: Choice(*group, "cascade", "as the test wants", 0.0)
    with rehearsing() as noted:
        for index in range(70):
            prompt = prefixes[rng.integers(len(prefixes))] + draw(int(rng.integers(1, 30)))
            params = SamplingParams(max_tokens=int(rng.integers(1, 25)), temperature=0.0)
            engine.add_request(f"r{index}", prompt, params)
            for _ in range(int(rng.choice([0, 0, 1, 3]))):
                assert not [out.error for out in engine.step() if out.error]
            if index % 9 == 0:
                engine.abort(f"r{index - 4}")
        while engine.has_work():
            assert not [out.error for out in engine.step() if out.error]
    assert not keys(noted) - covered
    assert layouts == {"flat", *(layout.name for layout in hot)}
    engine.close()


def test_every_layout_is_rehearsed_with_and_without_each_kind_of_item(monkeypatch):
    pretend_h200(monkeypatch)
    executor = make_executor(config())
    seen = set()
    for plan in attention_plans(executor.capacities):
        counts = plan.counts
        assert counts[Count.NUM_PARTIALS] <= executor.capacities.max_partials
        runs = plan.cold_items[: counts[Count.NUM_COLD_ITEMS], ColdItem.KIND] == SpanKind.RUN
        seen.add((plan.layout, bool(counts[Count.NUM_HOT_ITEMS]), len(runs) > 0, bool(runs.any())))
    hot = {(n, True, *c) for n in LAYOUTS if n != "flat" for c in ((0, 0), (1, 0), (1, 1))}
    assert seen == {("flat", False, True, False), ("flat", False, True, True)} | hot


@pytest.mark.parametrize("wanted", [True, False])
def test_the_setting_decides_at_the_start_of_a_gpu_engine(wanted, monkeypatch):
    warmed = []
    double = SimpleNamespace(warm_up=lambda: warmed.append(1))
    monkeypatch.setattr(cuda_executor, "CudaExecutor", lambda *arguments: double)
    settings = EngineConfig(device="cuda", **parse_assignments([f"warm_up={str(wanted).lower()}"]))
    assert executor_of(settings, None, None) is double
    assert bool(warmed) == wanted


class Kernel:
    """In a JITFunction's place; counts compilations and launches."""

    __name__ = "made_up_kernel"
    arg_names = ("x", "N")

    def __init__(self):
        self.compiled, self.ran = 0, 0

    def __getitem__(self, grid):
        def run(*arguments, **constants):
            self.compiled += 1
            self.ran += 1
            return self

        return run

    def warmup(self, *arguments, grid, **constants):
        self.compiled += 1
        return SimpleNamespace(_init_handles=lambda: None, __getitem__=None)


def test_a_kernel_that_was_not_rehearsed_is_counted_and_named(monkeypatch, caplog):
    executor = make_executor(config(dtype="float32"), ModelConfig("llama", 1, 64, 64, 4, 2, 16, 97, 512))  # fmt: skip
    kernel = Kernel()
    made_up = Launcher(kernel)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=gpu_double.DriverDouble()))
    monkeypatch.setattr(
        executor, "_step", lambda plan, handle: made_up("key", (1,), (0,), {"N": 1}, {})
    )
    executor.is_warm = True
    plan = replace(extend_plan(1), sample_rows=np.zeros(0, np.int32))
    with caplog.at_level(logging.WARNING):
        output = executor.wait(executor.launch(plan))
    assert (output.num_compilations, kernel.compiled) == (1, 1)
    assert "made_up_kernel" in caplog.text and "waited" in caplog.text
    engine = Engine(executor.config, executor=executor)
    engine.add_request("a", [5, 6], SamplingParams(max_tokens=1))
    monkeypatch.setattr(executor, "wait", lambda handle: replace(output, token_ids=np.array([3])))
    engine.step()
    engine.step()
    assert engine.stats()["kernels_compiled_after_start"] == 1


def test_what_a_rehearsal_noted_is_compiled_once_and_runs_never(monkeypatch):
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=gpu_double.DriverDouble()))
    kernel = Kernel()
    made_up = Launcher(kernel)
    with rehearsing() as noted:
        for key in ("a", "b", "a"):
            made_up(key, (1,), (0,), {"N": 1}, {})
    assert (kernel.compiled, len(noted.launches)) == (0, 2)
    for _ in range(2):
        assert compile_launches(list(noted.launches.values()), 2, lambda: None, False) == 2
    assert (kernel.compiled, kernel.ran) == (2, 0)


def test_kernels_compile_side_by_side_and_one_that_cannot_is_named(monkeypatch, caplog):
    """Triton's compiler for sm_90, as the GPU's driver would call it."""
    pretend_h200(monkeypatch)
    noted = make_executor(config(max_requests=2)).rehearse()
    wanted = ("append_kernel", "merge_kernel", "silu_mul_kernel")
    chosen = {one.name: one for one in noted.launches.values() if one.name in wanted}
    bad = replace(chosen["merge_kernel"], constants={}, key="bad")
    with driver_double() as driver, caplog.at_level(logging.WARNING):
        assert compile_launches([*chosen.values(), bad], 2, lambda: None, False) == len(wanted)
    assert sorted(driver.loaded) == sorted(wanted)
    assert "merge_kernel: does not compile here" in caplog.text
