"""`granikv build` without TensorRT, and with TensorRT for RTX where it is installed."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import onnx
import pytest
from helpers import make_tiny_hf
from typer.testing import CliRunner

from granikv.cli import app
from granikv.engines import build as build_module
from granikv.engines import build_worker
from granikv.engines import manifest as manifest_module
from granikv.engines.build import BuildSettings, build
from granikv.engines.builders import (
    BuildRequest,
    build_engine,
    choose_builder,
    own_capability,
    profile_of,
)
from granikv.engines.checkpoint import open_checkpoint
from granikv.engines.export import export_rank
from granikv.engines.io import BuildLimits
from granikv.engines.manifest import RuntimeFacts, engine_io, load_manifest
from granikv.engines.records import sole_writer
from granikv.engines.sharding import Shard
from granikv.errors import EngineMismatch, InvalidArgument, ModelFileError, Unavailable

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"max_requests": 4, "max_tokens": 16, "max_seq_len": 64, "capacity_tokens": 256}


@pytest.fixture
def model(tmp_path):
    return make_tiny_hf(tmp_path / "model", num_hidden_layers=2)


def settings(model, out, **changes):
    return BuildSettings(model, out, **(SMALL | {"tp_size": 2, "builder": "none"} | changes))


@pytest.fixture
def standin(tmp_path, monkeypatch):
    """In place of TensorRT and of a GPU; `built` names the ranks of the engines that it made."""
    it = SimpleNamespace(capability="8.0", version="10.13", built=[], plugin=tmp_path / "plugin.so")
    it.plugin.write_bytes(b"plugin")

    def build_engine(request):
        graph = onnx.load(request.onnx, load_external_data=False).graph
        it.built.append(int(Path(request.engine).stem.removeprefix("rank")))
        Path(request.engine).write_bytes(b"engine for " + it.capability.encode())
        return {
            "compute_capabilities": request.compute_capabilities or [it.capability],
            "inputs": [_as_tensorrt(x) for x in graph.input],
            "outputs": [_as_tensorrt(x) for x in graph.output],
        }

    monkeypatch.setattr(build_module, "choose_builder", lambda name: (name, it.version))
    monkeypatch.setattr(build_module, "own_capability", lambda builder: it.capability)
    monkeypatch.setattr(build_module, "build_engine", build_engine)
    return it


def _as_tensorrt(value):
    tensor = value.type.tensor_type
    dims = [-1 if x.HasField("dim_param") else x.dim_value for x in tensor.shape.dim]
    return [value.name, dims, {1: "FLOAT", 6: "INT32"}[tensor.elem_type]]


def test_manifest_describes_what_was_built(model, tmp_path):
    out = tmp_path / "out"
    made = build(settings(model, out))
    assert load_manifest(out) == made
    assert made.tp_size == 2 and made.builder == "none" and made.tensorrt_version is None
    names = {path.name for path in out.iterdir()}
    assert names == {"manifest.json"} | {
        f"rank{rank}.{suffix}" for rank in range(2) for suffix in ("onnx", "weights", "json")
    }
    inputs = {entry["name"]: entry for entry in made.io["inputs"]}
    assert inputs["token_ids"]["max"] == [20] and inputs["request_slots"]["max"] == [5, 64]
    assert inputs["launch_dims"]["min"] == [0, 0, 0, 0, 0, 0]
    assert made.io["outputs"][0]["max"] == [4, 49]


def test_a_second_run_makes_only_what_is_missing(model, tmp_path, monkeypatch):
    out = tmp_path / "out"
    exported = []
    original = build_module.export.export_rank

    def counting(checkpoint, shard, *rest):
        exported.append(shard.rank)
        return original(checkpoint, shard, *rest)

    monkeypatch.setattr(build_module.export, "export_rank", counting)
    first = build(settings(model, out))
    assert exported == [0, 1]
    assert build(settings(model, out)) == first and exported == [0, 1]
    with (out / "rank1.weights").open("r+b") as file:  # same size, other content
        file.seek(5000)
        file.write(b"\xff\x00")
    (out / "manifest.json").unlink()
    assert build(settings(model, out)) == first and exported == [0, 1, 1]
    (out / "rank0.onnx").unlink()
    build(settings(model, out))
    assert exported == [0, 1, 1, 0]
    build(settings(model, out, dtype="float16"))
    assert exported == [0, 1, 1, 0, 0, 1]
    os.utime(model / "model.safetensors")
    build(settings(model, out, dtype="float16"))
    assert exported == [0, 1, 1, 0, 0, 1, 0, 1]


@pytest.mark.parametrize("name", ["export", "graph", "io", "sharding", "plugin_abi_hash"])
def test_other_source_makes_other_graphs(model, tmp_path, monkeypatch, name):
    out = tmp_path / "out"
    build(settings(model, out))
    times = [(out / f"rank{rank}.onnx").stat().st_mtime_ns for rank in range(2)]
    if name == "plugin_abi_hash":
        monkeypatch.setattr(build_module, name, lambda: "0" * 16)
    else:
        module = getattr(build_module, name)
        changed = tmp_path / "changed.py"
        changed.write_text(Path(module.__file__).read_text() + "# changed\n")
        monkeypatch.setattr(module, "__file__", str(changed))
    build(settings(model, out))
    for rank, time_ns in enumerate(times):
        assert (out / f"rank{rank}.onnx").stat().st_mtime_ns > time_ns


def test_other_buffer_sizes_make_other_graphs(model, tmp_path, monkeypatch):
    out = tmp_path / "out"
    build(settings(model, out))
    sizes = manifest_module.step_capacities

    def larger(*args):
        return replace(sizes(*args), max_partials=5000)

    monkeypatch.setattr(manifest_module, "step_capacities", larger)
    made = build(settings(model, out))
    (described,) = (x["max"] for x in made.io["inputs"] if x["name"] == "merge_partials")
    graph = onnx.load(str(out / "rank1.onnx"), load_external_data=False).graph
    (value,) = (x for x in graph.input if x.name == "merge_partials")
    sizes_in_graph = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
    assert sizes_in_graph == described == [5000]


def test_an_interrupted_run_leaves_no_half_files_and_no_manifest(model, tmp_path, monkeypatch):
    out = tmp_path / "out"
    build(settings(model, out))
    original = build_module.export._as_bytes
    calls = []

    def failing(tensor, dtype):
        calls.append(1)
        if len(calls) == 20:
            raise KeyboardInterrupt
        return original(tensor, dtype)

    monkeypatch.setattr(build_module.export, "_as_bytes", failing)
    with pytest.raises(KeyboardInterrupt):
        build(settings(model, out, dtype="float32"))
    assert not list(out.glob("*.partial")) and not (out / "manifest.json").exists()
    with pytest.raises(ModelFileError, match="granikv build"):
        load_manifest(out)
    monkeypatch.undo()
    assert build(settings(model, out, dtype="float32")).dtype == "float32"


def test_what_a_killed_build_left_goes_with_the_next(model, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "rank0.weights.4711.partial").write_bytes(b"half")
    build(settings(model, out))
    assert not list(out.glob("*.partial"))


def test_a_folder_takes_one_build_at_a_time(model, tmp_path):
    out = tmp_path / "out"
    with sole_writer(out), pytest.raises(Unavailable, match="another build"):
        build(settings(model, out))
    build(settings(model, out))


def test_a_full_disk_is_one_clear_error(model, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(build_module.export, "export_rank", full)
    with pytest.raises(Unavailable, match=r"out: No space left"):
        build(settings(model, tmp_path / "out"))


def test_wrong_settings_are_refused(model, tmp_path, monkeypatch):
    out = tmp_path / "out"
    for changes, match in (
        ({"dtype": "int8"}, "dtype.*int8"),
        ({"tp_size": 3}, "num_qo_heads.*multiple of tp=3.*got 4"),
        ({"max_seq_len": 257}, "max-seq.*context of 256.*got 257"),
        ({"builder": "onnx"}, "builder.*auto"),
        ({"max_requests": 0}, "max_requests"),
        ({"max_requests": 10**9}, "max_requests.*1 to 65536"),
        ({"capacity_tokens": 10**12}, "capacity_tokens"),
        ({"max_tokens": 2**21}, "max_tokens"),
        (
            {"builder": "tensorrt", "compute_capabilities": ("12.0",)},
            "compute-capability: expected none with --builder tensorrt.*rtx, got .'12.0'.",
        ),
        ({"compute_capabilities": ("banana",)}, "compute-capability: .*--builder none.*banana"),
        (
            {"builder": "auto", "compute_capabilities": ("8.9",)},
            "compute-capability: .*--builder auto",
        ),
    ):
        with pytest.raises(InvalidArgument, match=match):
            build(settings(model, out, **changes))
    assert not out.exists()
    usage = type("Usage", (), {"free": 1000})()
    monkeypatch.setattr(build_module.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(Unavailable, match="free space"):
        build(settings(model, out))


@pytest.mark.parametrize("capability", ["9.0", "banana", "8.9.0", "89", ""])
def test_what_rtx_does_not_serve_is_refused_before_anything_is_written(
    model, tmp_path, monkeypatch, capability
):
    monkeypatch.setattr(build_module, "choose_builder", lambda name: (name, "1.7"))
    plugin = tmp_path / "plugin.so"
    plugin.touch()
    changes = {"builder": "rtx", "plugin": plugin, "compute_capabilities": ("8.9", capability)}
    match = f"compute-capability: expected one that rtx serves .*8.9.*, got '{capability}'"
    with pytest.raises(InvalidArgument, match=match):
        build(settings(model, tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()


def test_rtx_on_a_gpu_that_it_does_not_serve_is_refused_before_anything_is_written(
    model, tmp_path, standin
):
    standin.capability = "9.0"
    match = "compute-capability: expected one that rtx serves .*--builder tensorrt.*got '9.0'"
    with pytest.raises(InvalidArgument, match=match):
        build(settings(model, tmp_path / "out", builder="rtx", plugin=standin.plugin))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("builder", ["tensorrt", "rtx"])
def test_engines_are_built_again_for_another_gpu(model, tmp_path, standin, builder):
    wanted = settings(model, tmp_path / "out", builder=builder, plugin=standin.plugin)
    assert build(wanted).compute_capabilities == ("8.0",)
    assert build(wanted).compute_capabilities == ("8.0",) and standin.built == [0, 1]
    standin.capability = "8.9"
    made = build(wanted)
    assert made.compute_capabilities == ("8.9",) and standin.built == [0, 1, 0, 1]
    made.check(wanted.out, 2, RuntimeFacts(compute_capability="8.9"))


def test_engines_are_built_again_for_another_plugin_or_tensorrt(model, tmp_path, standin):
    wanted = settings(model, tmp_path / "out", tp_size=1, builder="tensorrt", plugin=standin.plugin)
    build(wanted)
    graph_time = (wanted.out / "rank0.onnx").stat().st_mtime_ns
    os.utime(standin.plugin)
    build(wanted)
    assert standin.built == [0]
    standin.plugin.write_bytes(b"plugiN")
    library = hashlib.sha256(b"plugiN").hexdigest()
    made = build(wanted)
    assert made.plugin_sha256 == library
    made.check(wanted.out, 1, RuntimeFacts(plugin_sha256=library))
    assert standin.built == [0, 0]
    standin.version = "10.14"
    assert build(wanted).tensorrt_version == "10.14" and standin.built == [0, 0, 0]
    assert (wanted.out / "rank0.onnx").stat().st_mtime_ns == graph_time


def test_another_network_than_the_tables_is_not_kept(model, tmp_path, standin, monkeypatch):
    made_by = build_module.build_engine

    def without_an_input(request):
        made = made_by(request)
        return made | {"inputs": made["inputs"][:-1]}

    wanted = settings(model, tmp_path / "out", builder="tensorrt", plugin=standin.plugin)
    with monkeypatch.context() as patch:
        patch.setattr(build_module, "build_engine", without_an_input)
        for _ in range(2):  # nor taken for finished
            with pytest.raises(EngineMismatch, match="inputs of the engine's network.*got None"):
                build(wanted)
    assert standin.built == [0, 0] and not (wanted.out / "manifest.json").exists()
    assert build(wanted).builder == "tensorrt"


def test_named_capabilities_need_no_gpu(model, tmp_path, standin, monkeypatch):
    monkeypatch.setattr(build_module, "own_capability", None)
    changes = {"builder": "rtx", "plugin": standin.plugin, "compute_capabilities": ("8.6", "12.0")}
    assert build(settings(model, tmp_path / "out", **changes)).builder == "rtx"
    assert build(settings(model, tmp_path / "none")).compute_capabilities == ()


def test_the_gpu_is_asked_for_in_a_process_of_its_own(tmp_path, monkeypatch):
    compiler = shutil.which("cc") or pytest.skip("no C compiler for the driver's double")
    source = tmp_path / "cuda.c"
    source.write_text(
        "int cuInit(unsigned f) { return 0; }\n"
        "int cuDeviceGet(int* d, int n) { *d = 7; return n; }\n"
        "int cuDeviceGetAttribute(int* v, int a, int d)"
        " { *v = a == 75 ? 12 : a == 76 ? 1 : -1; return d != 7; }\n"
    )
    library = tmp_path / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert own_capability("tensorrt") == "12.1"
    library.write_bytes(b"")
    for builder, remedy in (("tensorrt", "run on the GPU"), ("rtx", "--compute-capability")):
        match = f"builder {builder}: expected a GPU.*no GPU driver.*{remedy}.*--builder none"
        with pytest.raises(Unavailable, match=match):
            own_capability(builder)


def test_full_tensorrts_engine_is_recorded_for_the_gpu_that_it_was_built_on(tmp_path, monkeypatch):
    """The worker with a stand-in for TensorRT, asked for another capability."""
    trt = MagicMock(ILogger=object, __version__="10.13")
    trt.Builder.return_value.build_serialized_network.return_value = b"engine"
    network = trt.Builder.return_value.create_network.return_value
    network.num_inputs = network.num_outputs = 0
    monkeypatch.setattr(build_worker, "load_tensorrt", lambda builder: trt)
    monkeypatch.setattr(build_worker, "own_capability", lambda: "9.0")
    request = BuildRequest("tensorrt", "graph", str(tmp_path / "engine"), "", {}, ["12.0"])
    assert build_worker.build(asdict(request))["compute_capabilities"] == ["9.0"]


@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt") is not None, reason="full TensorRT is installed"
)
def test_a_missing_builder_says_what_to_do(model, tmp_path):
    assert choose_builder("auto") == ("none", None)
    with pytest.raises(Unavailable, match="tensorrt.*install it.*--builder none"):
        build(settings(model, tmp_path / "out", builder="tensorrt"))


def test_the_command_prints_what_it_made(model, tmp_path):
    arguments = ["build", "--checkpoint", str(model), "--tp", "2", "--builder", "none"]
    arguments += ["--out", str(tmp_path / "out"), "--max-seq", "64"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "rank1.onnx" in result.output and "LlamaForCausalLM" in result.output
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["tp_size"] == 2
    result = CliRunner().invoke(app, [*arguments, "--tp", "3"])
    assert result.exit_code == 2
    result = CliRunner().invoke(app, [*arguments, "--compute-capability", "banana"])
    assert result.exit_code == 2 and "compute-capability" in result.stderr


needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx_bindings") is None,
    reason="tensorrt_rtx_bindings (tensorrt-rtx-cu13-libs and -bindings 1.7.1.116) is missing",
)


@needs_rtx
@pytest.mark.parametrize("arch", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_rtx_builds_the_graph_with_twins_of_the_plugins(tmp_path, monkeypatch, arch, tp_size):
    """Parser, types, shape rules and profile; the twins have no kernels.

    Llama's graph is built around the library itself, in tests/plugin/test_engines.py.
    """
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{Path(__file__).parent}")
    path = make_tiny_hf(tmp_path / "model", arch, num_hidden_layers=2)
    checkpoint = open_checkpoint(path)
    limits = BuildLimits(**SMALL)
    shard = Shard(checkpoint.config, tp_size, tp_size - 1)
    export_rank(checkpoint, shard, limits, "bfloat16", tmp_path)
    names = [str(tmp_path / f"rank{shard.rank}.{suffix}") for suffix in ("onnx", "engine")]
    profile = profile_of(engine_io(shard, limits, "bfloat16"))
    made = build_engine(BuildRequest("rtx", *names, "plugin_twin:register", profile, ["8.9"]))
    assert made["compute_capabilities"] == ["8.9"] and made["version"].startswith("1.")
    assert Path(names[1]).stat().st_size > 10_000 and not list(tmp_path.glob("*.partial"))
    with pytest.raises(Unavailable, match="9.0 is not one"):
        build_engine(BuildRequest("rtx", *names, "plugin_twin:register", profile, ["9.0"]))
