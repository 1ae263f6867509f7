"""TensorRTRuntime itself, with stand-ins for the module tensorrt and for the plugin library."""

from __future__ import annotations

import _ctypes
import copy
import ctypes
import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_tensorrt import VERSION, Module, engine_file
from helpers import make_tiny_hf
from tiny_engine import tokens

from granikv.attention.plan_buffers import ADDRESS_ALIGNMENT_BYTES
from granikv.config import EngineConfig
from granikv.engine import Engine
from granikv.engines import runtime as runtime_module
from granikv.engines.build import BuildSettings, build
from granikv.engines.manifest import FileEntry, RankFiles
from granikv.engines.records import file_hash
from granikv.engines.runtime import ENTRY_POINTS, TensorRTRuntime
from granikv.errors import EngineMismatch, InvalidArgument, ModelFileError, Unavailable
from granikv.executor.ranks import start_tensorrt
from granikv.executor.tensorrt_executor import TensorRTExecutor
from granikv.sampling import Sampler
from granikv.sampling_params import SamplingParams

# tells `tell` of its calls; a number below 0 to any of them is refused
STUB = r"""
#include <cstdint>
#include <cstdio>
#include <cstring>
#define EXPORT extern "C"
static void (*tell)(char const*);
static int32_t said(char const* name, int64_t a, int64_t b, int64_t c, char const* text) {
    char line[256];
    std::snprintf(line, sizeof(line), "%s %ld %ld %ld %s", name, long(a), long(b), long(c), text);
    if (tell) tell(line);
    return a < 0 ? -1 : 0;
}
EXPORT void stubTell(void (*to)(char const*)) { tell = to; }
EXPORT char const* granikvLastError() { return "the stub's reason"; }
EXPORT int32_t granikvBindArenas(int32_t binding, int32_t, int32_t layers, int64_t const* places,
                                 int64_t capacity, int32_t qo, int32_t kv, int32_t dim,
                                 char const* element) {
    char text[200];
    int end = std::snprintf(text, sizeof(text), "%d/%d/%d %s", qo, kv, dim, element);
    for (int i = 0; i < 2 * layers; ++i)
        end += std::snprintf(text + end, sizeof(text) - end, " %ld", long(places[i]));
    return said("granikvBindArenas", binding, layers, capacity, text);
}
EXPORT int32_t granikvUnbindArenas(int32_t binding) { return said("granikvUnbindArenas", binding, 0, 0, ""); }
EXPORT int32_t granikvNcclUniqueId(void* bytes, int32_t size) {
    std::memset(bytes, 7, size);
    return said("granikvNcclUniqueId", size, 0, 0, "");
}
EXPORT int32_t granikvInitCommunicator(int32_t number, void const* id, int32_t size, int32_t rank) {
    return said("granikvInitCommunicator", number, size, rank, static_cast<char const*>(id)[127] == 7 ? "shared" : "other");
}
"""
LIMITS = {"max_requests": 4, "max_tokens": 16, "max_seq_len": 64, "capacity_tokens": 256}


@pytest.fixture(scope="module")
def stub(tmp_path_factory) -> Path:
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if not compiler:
        pytest.skip("a stand-in for the plugin library needs g++")
    folder = tmp_path_factory.mktemp("stub")
    (folder / "stub.cpp").write_text(STUB)
    command = [compiler, "-shared", "-fPIC", "-o", str(folder / "stub.so"), "stub.cpp"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "stub.so"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder of `granikv build` without engines, and its manifest."""
    folder = tmp_path_factory.mktemp("exported")
    model = make_tiny_hf(folder / "model", num_hidden_layers=2)
    return build(BuildSettings(model, folder, dtype="float32", builder="none", **LIMITS))


class Place:
    """Engines, their manifest, a library of their own file, and all calls in order."""

    def __init__(self, folder: Path, stub: Path, exported):
        self.folder, self.trt = folder, Module()
        self.calls = self.trt.calls
        self.plugin = Path(shutil.copy(stub, folder / "plugin.so"))
        self.engine = folder / "rank0.engine"
        engine_file(self.engine, exported.io)
        entry = FileEntry(self.engine.name, self.engine.stat().st_size, "")
        self.manifest = dataclasses.replace(
            exported, ranks=(RankFiles(engine=entry),), builder="tensorrt",
            tensorrt_version=VERSION, compute_capabilities=("9.0",),
            plugin_sha256=file_hash(self.plugin),
        )  # fmt: skip

    def listen(self) -> ctypes.CDLL:
        """The library, whose calls are then among `calls`."""
        library = ctypes.CDLL(str(self.plugin))
        self._tell = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(
            lambda line: self.calls.append(tuple(line.decode().split(maxsplit=4)))
        )
        library.stubTell(self._tell)
        return library

    def load(self) -> TensorRTRuntime:
        runtime = TensorRTRuntime(self.plugin)
        runtime.load(self.engine, self.manifest.io)
        return runtime

    def executor(self) -> TensorRTExecutor:
        sampler = Sampler(4, self.manifest.model.vocab_size, eos_token_ids=())
        settings = EngineConfig(
            capacity_tokens=256, max_requests=4, max_num_batched_tokens=16, max_seq_len=64,
            dtype="float32",
        )  # fmt: skip
        runtime = TensorRTRuntime(self.plugin)
        return TensorRTExecutor(settings, self.folder, self.manifest, runtime, sampler, "cpu")

    def is_loaded(self) -> bool:
        return str(self.plugin) in Path("/proc/self/maps").read_text()


@pytest.fixture
def place(tmp_path, stub, exported, monkeypatch) -> Place:
    made = Place(tmp_path, stub, exported)
    monkeypatch.setitem(sys.modules, "tensorrt", made.trt)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(runtime_module, "ADDRESS_ALIGNMENT_BYTES", 64)  # torch's on a CPU
    return made


def names(calls: list[tuple]) -> list[str]:
    """Of calls in order, repeated ones once."""
    return [x[0] for x, before in zip(calls, [("",), *calls], strict=False) if x[0] != before[0]]


def test_a_life_in_the_order_of_its_calls(place):
    place.listen()
    executor = place.executor()
    engine = Engine(executor.config, executor=executor)
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    engine.add_request("a", tokens(1, 9), params)
    ids = []
    while engine.has_work():
        for out in engine.step():
            ids += out.token_ids
    engine.close()
    assert ids == [0, 0, 0]  # nothing computes: the logits stay 0
    begin = ["Logger", "load_library", "Runtime", "deserialize_cuda_engine",
             "create_execution_context", "granikvBindArenas", "set_tensor_address"]  # fmt: skip
    steps = ["set_input_shape", "execute_async_v3"]
    assert names(place.calls)[:9] == begin + steps
    assert names(place.calls)[-2:] == ["execute_async_v3", "granikvUnbindArenas"]
    by_name = {call[0]: call for call in place.calls}
    assert by_name["load_library"] == ("load_library", str(place.plugin))
    arenas = [x[layer].data_ptr() for layer in (0, 1) for x in (executor.k_arena, executor.v_arena)]
    model = place.manifest.model
    heads = f"{model.num_qo_heads}/{model.num_kv_heads}/{model.head_dim}"
    assert by_name["granikvBindArenas"][1:] == (
        str(executor.binding), str(model.num_layers), "256", " ".join([heads, "fp32", *map(str, arenas)]),
    )  # fmt: skip
    places = {call[1]: call[2] for call in place.calls if call[0] == "set_tensor_address"}
    io = place.manifest.io
    assert places.keys() == {x["name"] for x in (*io["inputs"], *io["outputs"])}
    assert places["logits"] == executor.logits.data_ptr()
    assert places["counts"] == executor.buffers.plan["counts"].data_ptr()
    steps = [i for i, call in enumerate(place.calls) if call[0] == "execute_async_v3"]
    assert len(steps) == 3 and place.calls[steps[0]] == ("execute_async_v3", 0)


def test_another_library_is_refused_before_anything_of_it_is_loaded(place):
    """Both hashes and the way to build again."""
    with place.plugin.open("ab") as file:
        file.write(b"changed")
    for begin in (place.executor, lambda: start_ranks(place)):
        with pytest.raises(EngineMismatch) as caught:
            begin()
        built, given = place.manifest.plugin_sha256, file_hash(place.plugin)
        text = str(caught.value)
        assert built in text and given in text and built != given
        assert "granikv build --out" in text and "--plugin" in text
    assert not place.is_loaded() and {x[0] for x in place.calls} == {"Logger"}


def start_ranks(place: Place):
    """As the server starts it, with ranks: refused before one is started."""
    manifest = dataclasses.replace(place.manifest, tp_size=2, ranks=place.manifest.ranks * 2)
    settings = EngineConfig(
        engine_dir=place.folder, plugin=place.plugin, tp=2, executor="tensorrt", device="cuda"
    )
    return start_tensorrt(settings, manifest, Sampler(4, 97, eos_token_ids=()))


@pytest.mark.parametrize(
    ("version", "match"),
    [("10.15.0.1", r"TensorRT: expected 10\.15\.0\.1.*got engines of 10\.14"), (VERSION, None)],
)
def test_another_tensorrt_is_refused_before_the_library_is_loaded(place, version, match):
    place.trt.__version__ = version
    if match is None:
        place.executor().close()
        assert place.is_loaded()
        return
    with pytest.raises(EngineMismatch, match=match):
        place.executor()
    assert not place.is_loaded()


def test_another_gpu_is_refused(place, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    with pytest.raises(EngineMismatch, match=r"compute capability: expected 10\.0.*for 9\.0"):
        place.executor()


def test_files_that_tensorrt_refuses(place):
    engine_file(place.engine, place.manifest.io, version="10.13.0.35")
    with pytest.raises(ModelFileError, match=r"rank0\.engine: TensorRT refused it"):
        place.load()
    place.engine.write_bytes(b"no engine")
    with pytest.raises(ModelFileError, match="build it again"):
        place.load()


@pytest.mark.parametrize(
    ("side", "changes", "match"),
    [
        ("inputs", {"name": "ids"}, "token_ids: expected input INT32 .*, got no such tensor"),
        ("inputs", {"dtype": "float32"}, "token_ids: expected input INT32 .*got input FLOAT"),
        ("inputs", {"dims": ["rows", 1]}, r"token_ids: expected .*\[-1\].*got .*\[-1, 1\]"),
        ("inputs", {"dims": [16]}, r"token_ids: expected .*\[-1\].*got .*\[16\]"),
        ("outputs", {"name": "scores"}, "logits: expected output FLOAT .*, got no such tensor"),
        ("outputs", {"dims": ["samples", 5]}, r"logits: expected .*got output FLOAT \[-1, 5\]"),
    ],
)
def test_engines_with_other_tensors_than_the_manifests_are_refused(place, side, changes, match):
    io = copy.deepcopy(place.manifest.io)
    io[side][0].update(changes)
    engine_file(place.engine, io)
    with pytest.raises(EngineMismatch, match=f"rank0.engine: {match}.*build again"):
        place.load()
    assert "create_execution_context" not in names(place.calls)


def test_a_surplus_tensor_or_another_side_is_refused(place):
    inputs, outputs = place.manifest.io["inputs"], place.manifest.io["outputs"]
    engine_file(place.engine, {"inputs": [*inputs, inputs[0] | {"name": "x"}], "outputs": outputs})
    with pytest.raises(EngineMismatch, match="x: expected no such tensor.*got input INT32"):
        place.load()
    engine_file(place.engine, {"inputs": inputs[1:], "outputs": [*outputs, inputs[0]]})
    with pytest.raises(EngineMismatch, match="token_ids: expected input .*got output"):
        place.load()


def test_no_memory_for_a_context(place):
    place.trt.fail.add("create_execution_context")
    with pytest.raises(Unavailable, match="no memory on the GPU for the engine's activations"):
        place.load()


def test_what_the_context_refuses_is_told(place):
    runtime = place.load()
    assert runtime.set_tensor_address("counts", 512) is True
    assert runtime.set_tensor_address("nothing", 512) is False
    (most,) = place.manifest.io["inputs"][0]["max"]
    assert runtime.set_input_shape("token_ids", (most,)) is True
    for shape in ((most + 1,), (0,), (3, 1)):
        assert runtime.set_input_shape("token_ids", shape) is False
    assert runtime.set_input_shape("nothing", (1,)) is False
    assert runtime.execute_async_v3(5) is False  # most tensors have no address yet
    assert place.calls[-1] == ("execute_async_v3", 5)


def test_an_address_out_of_alignment_is_refused(place, monkeypatch):
    monkeypatch.setattr(runtime_module, "ADDRESS_ALIGNMENT_BYTES", ADDRESS_ALIGNMENT_BYTES)
    runtime = place.load()
    assert runtime.set_tensor_address("counts", 512)
    with pytest.raises(InvalidArgument, match="counts: .* of 256-byte alignment, got 528"):
        runtime.set_tensor_address("counts", 528)


def test_a_refused_step_fails_its_request(place):
    executor = place.executor()
    engine = Engine(executor.config, executor=executor)
    place.trt.fail.add("execute_async_v3")
    engine.add_request("a", tokens(1, 9), SamplingParams(max_tokens=2))
    outs = []
    while engine.has_work():
        outs += engine.step()
    assert "TensorRT did not take the step" in str(outs[-1].error)
    engine.close()


def test_a_library_without_our_entry_points_is_named_with_them(place):
    place.plugin = Path(_ctypes.__file__)
    with pytest.raises(Unavailable, match=f"{', '.join(ENTRY_POINTS)}.*build_plugin.py"):
        place.load()
    assert "load_library" not in names(place.calls)


def test_no_library_at_all(place, tmp_path):
    with pytest.raises(Unavailable, match="plugin: expected .*none.so: No such file.*build it"):
        TensorRTRuntime(tmp_path / "none.so")
    place.plugin = place.engine  # a file, but no library
    with pytest.raises(Unavailable, match=r"plugin: expected .*rank0.engine: .*build it"):
        place.load()


def test_a_process_registers_its_library_once(place):
    """TensorRT refuses plugins that it has; a second engine of the process needs them too."""
    place.load()
    place.load()
    assert [x[0] for x in place.calls].count("load_library") == 1


def test_a_registry_that_refuses_the_library(place):
    place.trt.fail.add("load_library")
    with pytest.raises(Unavailable, match="registry did not take it"):
        place.load()


def test_no_tensorrt_or_a_placeholder(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(Unavailable, match="expected TensorRT's Python package"):
        TensorRTRuntime(tmp_path)
    monkeypatch.delattr(Module, "OnnxParser")
    monkeypatch.setitem(sys.modules, "tensorrt", Module())
    with pytest.raises(Unavailable, match="placeholder package"):
        TensorRTRuntime(tmp_path)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_join_with_rank_0s_id(place, rank):
    place.listen()
    runtime, given = place.load(), []

    def share(content: bytes) -> bytes:
        given.append(content)
        return bytes([7]) * 128

    runtime.join_ranks(rank, 2, share)
    assert given == [bytes([7]) * 128 if rank == 0 else bytes(128)]
    made = [call[0] for call in place.calls if call[0].startswith("granikv")]
    assert made == ["granikvNcclUniqueId"] * (rank == 0) + ["granikvInitCommunicator"]
    assert place.calls[-1] == ("granikvInitCommunicator", "0", "2", str(rank), "shared")


def test_what_the_library_refuses_is_raised_with_its_reason(place):
    runtime = place.load()
    with pytest.raises(Unavailable, match="granikvUnbindArenas: the stub's reason"):
        runtime.unbind_arenas(-1)
