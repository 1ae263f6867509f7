"""One plugin over several steps and contexts, its workspace and formats; without a GPU."""

from __future__ import annotations

import json
import re

import pytest

from granikv.attention.variants import LAYOUTS
from granikv.bench.harness import result_record, write_json
from granikv.core import Count
from tests.kernels.support import ON_GPU, Step
from tests.plugin import enqueue_times
from tests.plugin.plugin_support import (
    ELEMENTS,
    prepared,
    read_out,
    record,
    run_host,
    write_step,
    zero_rows,
)
from tests.plugin.test_aot import STEPS
from tests.plugin.test_launches import (
    FORK,
    JOIN,
    MAIN,
    SIDE,
    SMALL,
    Traced,
    environment,
    known_kernels,
    pointers,
    read_trace,
    step_of,
)
from tests.plugin.test_library import HEADER_INPUTS

OTHER = {SIDE: 5, FORK: 6, JOIN: 7}  # what the second context makes of its own
WITHOUT_GPU = pytest.mark.skipif(ON_GPU, reason="the driver is a fake; see test_on_gpu.py")
LINEAR = 0  # of TensorFormat
TYPES = {"fp32": 0, "fp16": 1, "int32": 3, "bf16": 7}  # of DataType


def live(steps: dict[str, Step], folder, host, library, fake_cuda):
    """The trace of all steps in one life."""
    known = known_kernels(folder)
    for name, step in steps.items():
        (folder / name).mkdir()
        write_step(step, folder / name, prepared(step, False, 90))
    env = environment(folder, fake_cuda, 90)
    run_host(host, library, "life", *(folder / name for name in steps), env=env)
    return read_trace(folder, known)


@WITHOUT_GPU
def test_every_context_has_streams_and_events_of_its_own(
    host, library, fake_cuda, tmp_path, monkeypatch
):
    """Two contexts of an engine may run at once: what they shared would order or mix them."""
    steps = {
        "two-streams": step_of(STEPS["both"], "mid"),
        "other-shape": step_of(STEPS["extend"], "large", padding=5),
        "one-launch": step_of(STEPS["runs"], "small"),
    }
    trace = live(steps, tmp_path, host, library, fake_cuda)
    events = list(trace.eager)
    for name, step in steps.items():
        want = record(step, monkeypatch)
        both = step.plan.counts[Count.NUM_HOT_ITEMS] and step.plan.counts[Count.NUM_COLD_ITEMS]
        marks = 4 if both and not step.layout.one_launch else 0
        contexts = []
        for _ in range(2):
            contexts.append(events[: len(want) + marks])
            del events[: len(want) + marks]
        first, second = contexts
        for got, of_clone in zip(first, second, strict=True):
            if isinstance(got, Traced):
                assert of_clone.stream == OTHER.get(got.stream, got.stream), name
                assert (got.kernel, got.grid, got.values) == (
                    of_clone.kernel, of_clone.grid, of_clone.values
                )  # fmt: skip
            else:
                what, *handles = got
                assert of_clone == (what, *(OTHER.get(x, x) for x in handles)), name
        streams = {x.stream for x in first if isinstance(x, Traced)}
        assert streams == ({MAIN, SIDE} if marks else {MAIN}), name
        launches = [x for x in first if isinstance(x, Traced)]
        assert [x.kernel for x in launches] == [x.build.name for x in want], name
    assert not events


@WITHOUT_GPU
def test_a_step_without_attention_rows(host, library, fake_cuda, tmp_path):
    """Padding alone gives zeros by a merge; no rows at all launch nothing, and break nothing."""
    steps = {
        "before": step_of(STEPS["both"], "mid"),
        "padding": step_of([], "mid", padding=3),
        "none": step_of(STEPS["both"], "mid"),
        "after": step_of(STEPS["both"], "mid"),
    }
    known = known_kernels(tmp_path)
    for name, step in steps.items():
        (tmp_path / name).mkdir()
        write_step(step, tmp_path / name, prepared(step, False, 90))
    zero_rows(tmp_path / "none")
    env = environment(tmp_path, fake_cuda, 90)
    run_host(host, library, "life", *(tmp_path / name for name in steps), env=env)
    kernels = [x.kernel for x in read_trace(tmp_path, known).eager if isinstance(x, Traced)]
    whole = ["append_kernel", "hot_kernel", "cold_kernel", "merge_kernel"]
    assert kernels == [*whole * 2, *["append_kernel", "merge_kernel"] * 2, *whole * 2]
    assert (tmp_path / "none" / "out.bin").read_bytes() == b""
    for file in ("k", "v"):
        before, after = (tmp_path / "none" / f"{file}{x}.bin" for x in ("", "_out"))
        assert before.read_bytes() == after.read_bytes()
    assert len(read_out(tmp_path / "padding" / "out.bin", steps["padding"])) == 3 * 9 * 64


def align(size: int) -> int:
    return -(-size // 256) * 256


@WITHOUT_GPU
@pytest.mark.parametrize("padding", [0, 40])
@pytest.mark.parametrize("offset", [0, 8, 255])
def test_the_workspace_holds_all_that_is_put_there(
    host, library, fake_cuda, tmp_path, padding, offset
):
    """Partial states and the rotated q of the profile's largest rows, from any address on."""
    step = step_of(STEPS["extend"], "mid", padding=padding)
    known = known_kernels(tmp_path)
    write_step(step, tmp_path, prepared(step, False, 90), workspace_offset=offset)
    env = environment(tmp_path, fake_cuda, 90)
    said = run_host(host, library, "run", tmp_path, env=env)
    (size,) = map(int, re.findall(r"^workspace (\d+)$", said, re.MULTILINE))
    trace = read_trace(tmp_path, known)
    (workspace, allocated) = trace.allocations[-1]
    assert allocated == size
    places = pointers(step, tmp_path, trace)
    (heads, _), dim = step.heads, step.dim
    states = prepared(step).o_partials.shape[0] * heads
    rows = len(step.q) + 5  # max_rows of the profile
    ends = {
        "o_ptr": states * dim * 4, "lse_ptr": states * 4, "q_out_ptr": rows * heads * dim * 2,
    }  # fmt: skip
    spans = sorted((places[name], places[name] + length) for name, length in ends.items())
    assert all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:], strict=False))
    begin = workspace + offset
    assert begin <= spans[0][0] and spans[-1][1] <= begin + size


def test_formats_that_are_taken(host, library):
    """Of every type and format at every place, for every type of qkv; linear ones alone."""
    found: dict[str, set[tuple[int, ...]]] = {"HotColdAttention": set(), "AllReduce": set()}
    for line in run_host(host, library, "formats").splitlines():
        what, plugin, *numbers = line.split()
        assert what == "accepts" and "with" not in numbers, line
        found[plugin].add(tuple(map(int, numbers)))
    elements = [TYPES[name] for name in ELEMENTS.values()]
    kinds = {"kFloat": [TYPES["fp32"]], "kInt32": [TYPES["int32"]], "kElement": elements}
    wanted = {(first, 0, first, LINEAR) for first in elements}
    for first in range(12):  # places behind qkv are judged by themselves
        for place, (_, _, kind) in enumerate(HEADER_INPUTS[1:], 1):
            wanted |= {(first, place, each, LINEAR) for each in kinds[kind]}
        wanted.add((first, len(HEADER_INPUTS), first, LINEAR))
    assert found["HotColdAttention"] == wanted
    assert found["AllReduce"] == {(x, place, x, LINEAR) for x in elements for place in (0, 1)}


@WITHOUT_GPU
def test_enqueue_times_become_a_result_file(host, library, fake_cuda, tmp_path):
    """Of the library's own work: the driver does nothing but write launches down."""
    known_kernels(tmp_path)
    env = environment(tmp_path, fake_cuda, 90)
    cases = enqueue_times.measure(host, library, 20, *SMALL, env=env)
    write_json(tmp_path / "out.json", result_record(cases, with_probe=False))
    record = json.loads((tmp_path / "out.json").read_text())
    assert [case["params"]["layout"] for case in record["cases"]] == list(LAYOUTS)
    for case in record["cases"]:
        median_us = case["metrics"]["enqueue_us"]
        assert 0 < median_us <= case["metrics"]["p90_us"]
        assert case["ratio"] == pytest.approx(15 / median_us, rel=0.01)
        assert case["baseline_metrics"] == {"enqueue_us": 15.0}
    launched = (tmp_path / "trace.txt").read_text().splitlines()
    appends = sum(" append_kernel " in line for line in launched)
    assert appends == len(LAYOUTS) * (2 + 20)  # eager, captured, timed
