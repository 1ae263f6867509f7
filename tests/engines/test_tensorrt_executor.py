"""TensorRTExecutor under the whole engine, with a double in TensorRT's place, on a CPU."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from engine_double import EngineDouble
from helpers import make_tiny_hf
from reference_logits import record_logits, relative_errors
from tiny_engine import ARCHS, run, three_levels, tokens

from granikv.config import EngineConfig
from granikv.engine import Engine
from granikv.engines.build import BuildSettings, build
from granikv.engines.io import MAX_BINDINGS
from granikv.engines.manifest import RuntimeFacts, load_manifest
from granikv.engines.runtime import BINDINGS, BindingNumbers
from granikv.errors import EngineMismatch, InvalidArgument, ModelFileError, Unavailable
from granikv.executor.device_executor import DeviceExecutor
from granikv.executor.tensorrt_executor import TensorRTExecutor
from granikv.executor.torch_executor import TorchExecutor
from granikv.models import load_model
from granikv.sampling import Sampler
from granikv.sampling_params import SamplingParams

LIMITS = {
    "max_requests": 12, "max_tokens": 64, "max_seq_len": 160, "capacity_tokens": 1024,
}  # fmt: skip


def config(**changes):
    settings = {
        "capacity_tokens": 1024, "max_requests": 10, "min_extent_tokens": 16, "dtype": "float32",
        "max_num_batched_tokens": 48, "max_seq_len": 160, "debug_checks": True,
    }  # fmt: skip
    return EngineConfig(**(settings | changes))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Per architecture: the model's folder, the engines' folder and the manifest."""
    made = {}
    for arch in ARCHS:
        folder = tmp_path_factory.mktemp(arch)
        path = make_tiny_hf(folder / "model", arch, seed=3)
        out = folder / "out"
        settings = BuildSettings(path, out, dtype="float32", builder="none", **LIMITS)
        made[arch] = (path, out, build(settings))
    return made


def make_executor(built, arch=ARCHS[0], runtime=None, settings=None, **options):
    _, out, manifest = built[arch]
    runtime = runtime or EngineDouble(manifest.io)
    settings = settings or config()
    sampler = Sampler(settings.max_requests, manifest.model.vocab_size, eos_token_ids=())
    return TensorRTExecutor(settings, out, manifest, runtime, sampler, device="cpu", **options)


def make_engine(executor, settings=None):
    engine = Engine(settings or config(), executor=executor)
    engine.recorded_logits = record_logits(engine)
    return engine


def torch_engine(built, arch):
    settings = config(profile="default")
    decoder = load_model(built[arch][0])
    sampler = Sampler(settings.max_requests, decoder.config.vocab_size, eos_token_ids=())
    return make_engine(TorchExecutor(settings, decoder, sampler), settings)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("async_depth", [0, 1])
def test_tokens_are_the_torch_executors(built, arch, async_depth):
    reference = torch_engine(built, arch)
    engine = make_engine(make_executor(built, arch), config(async_depth=async_depth))
    for _ in range(2):  # cold, then warm
        want, _ = run(reference, three_levels(), max_tokens=6)
        got, _ = run(engine, three_levels(), max_tokens=6)
        assert got == want
        for a, b in zip(got, want, strict=True):
            assert float(relative_errors(a.logits, torch.stack(b.logits)).max()) < 1e-4
    assert engine.cache.counters["extents"] >= 2
    executor = engine.executor
    assert executor.buffers.gluon  # the plugin may have those kernels: short items are refused
    assert executor.runtime.num_shape_calls < 13 * executor.runtime.num_runs
    binding = executor.binding
    assert executor.runtime.bound == {binding}
    engine.close()
    reference.close()
    assert not executor.runtime.bound


SAMPLED = [
    {"temperature": 0.9, "logprobs": 2, "repetition_penalty": 1.2},
    {"temperature": 0.0, "frequency_penalty": 2.0, "logprobs": 0},
    {"temperature": 0.7, "top_p": 0.8, "presence_penalty": 1.5},
    {"temperature": 0.0, "bad_words_ids": tuple((i,) for i in range(20, 90))},
    {"temperature": 1.0, "top_k": 5, "min_tokens": 4, "stop_token_ids": tuple(range(50))},
    {"temperature": 0.0},
]


def test_sampling_is_the_torch_executors_at_any_depth_and_through_preemptions(built):
    """Penalties, masks and log probabilities of the sampler on the device, one step ahead or not.

    In a small arena requests are preempted, and come back on other rows.
    """
    results, preemptions = [], []
    for depth, capacity in ((0, 1024), (1, 1024), (1, 130)):
        settings = config(async_depth=depth, capacity_tokens=capacity)
        if depth:
            engine = make_engine(make_executor(built, settings=settings), settings)
        else:
            engine = torch_engine(built, ARCHS[0])
        made, logprobs = {}, []
        for i, kind in enumerate(SAMPLED):
            params = SamplingParams(max_tokens=7, seed=i, ignore_eos=True, **kind)
            engine.add_request(f"r{i}", tokens(40 + i, 20), params)
        while engine.has_work():
            for out in engine.step():
                made.setdefault(out.request_id, []).extend(out.token_ids)
                logprobs += [(out.request_id, x) for x in out.logprobs]
        results.append((made, sorted(logprobs)))
        preemptions.append(engine.scheduler.num_preemptions)
        engine.close()
    want, want_logprobs = results[0]
    assert len(want_logprobs) == 14 and len(set(want["r1"])) == len(want["r1"]) == 7
    assert not set(range(20, 90)) & set(want["r3"]) and len(want["r4"]) >= 4
    assert preemptions[:2] == [0, 0] and preemptions[2] > 0
    for made, logprobs in results:
        assert made == want
        for (got_id, got), (want_id, value) in zip(logprobs, want_logprobs, strict=True):
            assert got_id == want_id and got == pytest.approx(value, abs=1e-4)


def test_a_capture_sets_no_shape(built, monkeypatch):
    """TensorRT settles a new shape in the first run with it, which no capture may hold."""
    reference = torch_engine(built, ARCHS[0])
    engine = make_engine(make_executor(built))
    executor = engine.executor
    captured, captures, set_shape = [], [], executor.runtime.set_input_shape

    def capture(self, rows, bucket):
        captures.append(bucket)
        executor.runtime.set_input_shape = lambda name, shape: False
        logits = self._forward(rows, bucket, None)
        executor.runtime.set_input_shape = set_shape
        again = SimpleNamespace(replay=lambda: captured.append(self._forward(rows, bucket, None)))
        return SimpleNamespace(graph=again, logits=logits)

    monkeypatch.setattr(DeviceExecutor, "_capture", capture)
    executor.use_graphs = True
    for size in (2, 5, 2, 5, 2, 5):  # one decode step each: a key's second run has new shapes
        prompts = [tokens(i, 12) for i in range(size)]
        want, _ = run(reference, prompts, max_tokens=2)
        got, _ = run(engine, prompts, max_tokens=2)
        assert got == want
    assert set(captures) == {2, 8} and len(captured) >= 2
    engine.close()
    reference.close()


def test_decode_rows_are_padded_to_buckets(built):
    engine = make_engine(make_executor(built))
    sizes = []
    shapes = engine.executor.inputs.shapes
    engine.executor.inputs.shapes = lambda rows, samples: (
        sizes.append((rows, engine.executor.buffers.num_rows)) or shapes(rows, samples)
    )
    run(engine, [tokens(i, 12) for i in range(3)], max_tokens=4)
    assert (4, 3) in sizes
    engine.close()


def test_misfits_are_refused_before_anything_is_allocated(built, monkeypatch):
    _, out, manifest = built[ARCHS[0]]
    monkeypatch.setattr(torch, "empty", None)  # the arenas' allocation
    monkeypatch.setattr(torch, "zeros", None)
    facts = RuntimeFacts("10.15.0.1", "9.0")
    runtime = EngineDouble(manifest.io, facts)
    monkeypatch.setattr(
        "test_tensorrt_executor.Sampler", lambda *args, **options: None, raising=False
    )
    with pytest.raises(EngineMismatch, match=r"10\.15\.0\.1"):
        make_executor(built, runtime=runtime)
    with pytest.raises(EngineMismatch, match="tp: expected 2"):
        make_executor(built, tp_size=2)
    for change in (
        {"max_requests": 13}, {"max_num_batched_tokens": 65}, {"max_seq_len": 161},
        {"capacity_tokens": 1025},
    ):  # fmt: skip
        (name,) = change
        with pytest.raises(InvalidArgument, match=f"{name}.*built for"):
            make_executor(built, settings=config(**change))
    with pytest.raises(InvalidArgument, match="dtype.*bfloat16"):
        make_executor(built, settings=config(dtype="bfloat16"))
    assert runtime.loaded is None


def changed(manifest, side, name, /, **changes):
    """The manifest, as of a package with other buffers."""
    entries = [entry | changes if entry["name"] == name else entry for entry in manifest.io[side]]
    return dataclasses.replace(manifest, io=manifest.io | {side: entries})


@pytest.mark.parametrize(
    "side,name,key,step",
    [
        ("inputs", "merge_indptr", "max", 1),
        ("inputs", "hot_items", "max", -1),
        ("inputs", "request_slots", "dims", 1),
        ("outputs", "logits", "max", 1),
    ],
)
def test_engines_of_other_buffer_sizes_are_refused(built, monkeypatch, side, name, key, step):
    """With both values, before an engine is loaded or anything is allocated."""
    _, out, manifest = built[ARCHS[0]]
    (entry,) = (x for x in manifest.io[side] if x["name"] == name)
    sizes = [entry[key][0] + step, *entry[key][1:]]
    monkeypatch.setitem(built, "other", (None, out, changed(manifest, side, name, **{key: sizes})))
    monkeypatch.setattr(DeviceExecutor, "__init__", None)
    runtime = EngineDouble(manifest.io)
    with pytest.raises(EngineMismatch) as caught:
        make_executor(built, "other", runtime=runtime)
    parts = (f"{side[:-1]} {name}: {key}: expected {entry[key]}", f"got {sizes}", "granikv build")
    assert all(part in str(caught.value) for part in parts), caught.value
    assert runtime.loaded is None


def test_engines_with_another_input_are_refused(built):
    _, out, manifest = built[ARCHS[0]]
    other = changed(manifest, "inputs", "token_ids", name="token_numbers")
    with pytest.raises(EngineMismatch, match="input token_ids: dtype: expected int32.*got none"):
        other.check(out, 1, RuntimeFacts(), "graph")
    # the words of a description, and what a build tunes for, are free
    changed(manifest, "inputs", "token_ids", meaning="", opt=[1]).check(
        out, 1, RuntimeFacts(), "graph"
    )


def test_a_manifest_without_sizes_is_refused(built, tmp_path):
    manifest = built[ARCHS[0]][2]
    for io in ({}, {"inputs": [{"name": "token_ids"}], "outputs": []}, []):
        other = dataclasses.replace(manifest, io=io)
        (tmp_path / "manifest.json").write_text(other.to_json())
        with pytest.raises(ModelFileError, match="build again"):
            load_manifest(tmp_path)


def test_the_weights_are_loaded_before_the_arenas_are_planned(built, monkeypatch):
    _, _, manifest = built[ARCHS[0]]
    runtime, begin, loaded = EngineDouble(manifest.io), DeviceExecutor.__init__, []

    def init(*args, **options):
        loaded.append(runtime.loaded)
        begin(*args, **options)

    monkeypatch.setattr(DeviceExecutor, "__init__", init)
    make_executor(built, runtime=runtime).close()
    assert loaded == [runtime.loaded] and runtime.loaded is not None


def test_two_executors_of_a_process_keep_to_their_arenas(built):
    """One is closed, twice, while the other goes on; then its number is free."""
    first, second = (make_engine(make_executor(built, arch), config()) for arch in ARCHS[:2])
    wanted = []
    for arch in ARCHS[:2]:
        reference = torch_engine(built, arch)
        wanted.append(run(reference, three_levels(), max_tokens=6)[0])
        reference.close()
    numbers = [engine.executor.binding for engine in (first, second)]
    assert numbers[0] != numbers[1]
    for want, engine in zip(wanted, (first, second), strict=True):
        assert run(engine, three_levels(), max_tokens=6)[0] == want
    first.executor.close()
    first.close()
    third = make_executor(built)
    assert third.binding == numbers[0]
    first.executor.close()  # it is the third's now
    assert third.runtime.bound == {numbers[0]}
    assert run(second, three_levels(), max_tokens=6)[0] == wanted[1]
    third.close()
    second.close()


def test_a_start_that_fails_frees_its_number(built):
    executor = make_executor(built)
    number, runtime = executor.binding, EngineDouble(built[ARCHS[0]][2].io)
    executor.close()
    runtime.set_tensor_address = lambda name, address: False
    with pytest.raises(Unavailable, match="build it again"):
        make_executor(built, runtime=runtime)
    assert not runtime.bound and BINDINGS.take() == number
    BINDINGS.release(number)


def test_a_number_more_than_the_engine_knows_is_refused():
    numbers = BindingNumbers()
    assert [numbers.take() for _ in range(MAX_BINDINGS)] == list(range(MAX_BINDINGS))
    with pytest.raises(Unavailable, match=f"binding: expected at most {MAX_BINDINGS}.*close one"):
        numbers.take()
    numbers.release(5)
    assert numbers.take() == 5


def test_a_refused_step_fails_its_requests(built):
    engine = make_engine(make_executor(built))
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    engine.executor.runtime.execute_async_v3 = lambda stream: False
    engine.add_request("a", tokens(1, 20), params)
    outs = []
    while engine.has_work():
        outs += engine.step()
    assert outs[-1].error is not None and "TensorRT" in str(outs[-1].error)
    engine.close()


def test_tensors_lie_on_the_alignment_that_tensorrt_asks_for(built):
    """Offsets in their allocations, of which a GPU's begin on 512 bytes."""
    executor = make_executor(built)
    tensors = [*executor.inputs.tensors.values(), executor.logits]
    offsets = {x.storage_offset() * x.element_size() for x in tensors}
    assert len(offsets) > 10 and all(offset % 256 == 0 for offset in offsets), sorted(offsets)
    executor.close()


def test_the_largest_layout_of_a_plan_fits_the_engine(built):
    """Every capacity that the planner may use is one the engine was built for."""
    executor = make_executor(built)
    io = executor.inputs.io
    assert io.capacities == executor.capacities
    assert dataclasses.asdict(io.limits) == dataclasses.asdict(built[ARCHS[0]][2].limits)
    executor.close()
