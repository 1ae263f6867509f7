"""The built library: what it exports and refuses, on a machine with neither GPU nor TensorRT."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from granikv.attention.variants import LAYOUTS
from granikv.core import PLAN_FIELDS, Count
from tests.kernels.support import ON_GPU
from tests.plugin.conftest import CACHE, OUT, ROOT, builder, programs
from tests.plugin.plugin_support import PLAN_INPUTS, prepared, run_host, write_step
from tests.plugin.test_aot import STEPS
from tests.plugin.test_launches import environment, known_kernels, step_of
from trtllm_plugin import native
from trtllm_plugin.native import BuildError, cuda_include, tensorrt_include

GOOD = {
    "layer": "i32:1",
    "num_qo_heads": "i32:9",
    "num_kv_heads": "i32:3",
    "head_dim": "i32:64",
    "max_partials": "i32:64",
}
HEADER = ROOT / "trtllm_plugin" / "src" / "plugin_io.h"
WITHOUT_GPU = pytest.mark.skipif(ON_GPU, reason="what happens without a GPU")


def create(host, library, name: str, fields: dict[str, str], *more: str) -> str:
    return run_host(host, library, "create", name, *(f"{k}={v}" for k, v in fields.items()), *more)


def test_creators_and_fields(host, library):
    lines = run_host(host, library, "creators").splitlines()
    assert lines == [
        "creator granikv::HotColdAttention version 1 fields layer:5 num_qo_heads:5 "
        "num_kv_heads:5 head_dim:5 max_partials:5 sm_scale:1",
        "creator granikv::AllReduce version 1 fields tp_size:5 tp_rank:5 communicator:5",
    ]


def test_only_entry_points_are_exported_and_no_cpp_library_is_needed(library):
    """Else a library of the process that exports its own std:: symbols takes the place of ours:
    seen with CUDA's, where the first string stream crashed."""
    table = subprocess.run(["nm", "-D", library], capture_output=True, text=True, check=True)
    symbols = [line.split()[-2:] for line in table.stdout.splitlines()]
    exported = {name for kind, name in symbols if kind not in "Uw"}
    entry = re.compile("getCreators|setLoggerFinder|initGraniKVPlugins|granikv[A-Z][A-Za-z]+")
    assert "getCreators" in exported and "granikvBindArenas" in exported
    assert [name for name in exported if not entry.fullmatch(name)] == []
    needed = {name for kind, name in symbols if kind in "Uw"}
    assert [name for name in needed if name.startswith(("_ZS", "_ZNS", "_ZNKS", "_ZT"))] == []


@pytest.mark.parametrize("extra", [{}, {"sm_scale": "f32:0.25"}])
def test_fields_survive_clone_and_serialisation(host, library, extra):
    fields = GOOD | {"num_kv_heads": "i64:3"} | extra
    lines = create(host, library, "HotColdAttention", fields, "plugin_version=i32:1").splitlines()
    values = " ".join(f"{k}={v.split(':')[1]}" for k, v in fields.items())
    assert lines[:2] == [f"fields {values}", f"reloaded {values}"]
    assert lines[2] == "core granikv::HotColdAttention version 1"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer": "i32:-1"}, "field layer: expected 0 to 4095, got -1"),
        ({"head_dim": "i32:512"}, "field head_dim: expected 16 to 256, got 512"),
        ({"max_partials": "i64:99999999999"}, "field max_partials: expected 1 to 16777216"),
        ({"num_kv_heads": None}, "field num_kv_heads: expected 1 to 1024, got no value"),
        ({"num_kv_heads": "f32:3"}, "field num_kv_heads: expected an int32 or int64"),
        ({"num_qo_heads": "i32:8"}, "field num_qo_heads: expected a multiple of num_kv_heads 3"),
        ({"sm_scale": "f32:0"}, "field sm_scale: expected a finite number above 0, got 0"),
        ({"sm_scale": "i32:1"}, "field sm_scale: expected a float32"),
        ({"heads": "i32:1"}, "field heads: expected one of layer, num_qo_heads, .* unknown"),
    ],
)
def test_a_bad_field_is_named_with_its_range(host, library, changes, message):
    fields = {k: v for k, v in (GOOD | changes).items() if v is not None}
    with pytest.raises(AssertionError, match=message):
        create(host, library, "HotColdAttention", fields)


def test_all_reduce_fields(host, library):
    lines = create(host, library, "AllReduce", {"tp_size": "i32:4", "tp_rank": "i32:3"})
    kept = "tp_size=4 tp_rank=3 communicator=0"
    assert lines.splitlines()[:2] == [f"fields {kept}", f"reloaded {kept}"]
    with pytest.raises(AssertionError, match="field tp_rank: expected 0 to 3, got 4"):
        create(host, library, "AllReduce", {"tp_size": "i32:4", "tp_rank": "i32:4"})
    with pytest.raises(AssertionError, match="field tp_size: expected 1 to 1024, got 0"):
        create(host, library, "AllReduce", {"tp_size": "i32:0", "tp_rank": "i32:0"})


@pytest.mark.parametrize(("element", "number"), [("fp16", 6), ("fp32", 7), ("bf16", 9)])
def test_all_reduce_sums_through_nccl(host, library, fake_nccl, element, number):
    """ncclSum of the whole tensor on TensorRT's stream; nothing in the build phase."""
    env = {**os.environ, "LD_LIBRARY_PATH": str(fake_nccl)}
    said = run_host(host, library, "reduce", element, 4, 4, 5, env=env)
    assert said.split() == ["256", "512", "160", str(number), "0", "4096", "8"]
    assert run_host(host, library, "reduce", element, 4, 4, 0, env=env) == ""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (0, "communicator: expected one given to granikvSetCommunicator .* got 3"),
        (2, "communicator: expected rank 1 of 4 as the engine was built for, got rank 1 of 2"),
    ],
)
def test_all_reduce_without_its_communicator(host, library, fake_nccl, given, message):
    env = {**os.environ, "LD_LIBRARY_PATH": str(fake_nccl)}
    with pytest.raises(AssertionError, match=message):
        run_host(host, library, "reduce", "bf16", 4, given, 5, env=env)


@pytest.fixture
def loaded(library):
    made = ctypes.CDLL(str(library))
    for name in ("granikvLastError", "granikvBuildSummary", "granikvCheckTable"):
        getattr(made, name).restype = ctypes.c_char_p
    made.initGraniKVPlugins.restype = ctypes.c_bool
    made.initGraniKVPlugins.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    made.granikvBindArenas.argtypes = [
        ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_int64),
        ctypes.c_int64, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, ctypes.c_char_p,
    ]  # fmt: skip
    return made


def test_the_library_accepts_its_own_table(loaded):
    assert loaded.granikvCheckTable() == b""
    summary = loaded.granikvBuildSummary().decode()
    assert re.search(r"^sources [0-9a-f]{16}\ntriton 3\.6\.0\ncapabilities ", summary)
    assert "9 query and 3 KV heads of 64 bf16" in summary


@WITHOUT_GPU
def test_without_a_driver_or_tensorrt_it_says_so(loaded):
    addresses = (ctypes.c_int64 * 2)(4096, 8192)
    assert loaded.granikvBindArenas(0, 0, 1, addresses, 64, 9, 3, 64, b"bf16") == -1
    assert b"libcuda.so.1: expected the CUDA driver" in loaded.granikvLastError()
    code = (
        f"import ctypes; l = ctypes.CDLL({loaded._name!r}); print(l.initGraniKVPlugins(None, b''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "0" and "expected a loaded libnvinfer" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 0, 1, 4096, 64, b"bf16"), b"binding: expected 0 or more, got -1"),
        ((0, 0, 0, 4096, 64, b"bf16"), b"num_layers: expected 1 to 4096, got 0"),
        ((0, 0, 4097, 4096, 64, b"bf16"), b"num_layers: expected 1 to 4096, got 4097"),
        ((0, 0, 2**30, 4096, 64, b"bf16"), b"num_layers: expected 1 to 4096, got 1073741824"),
        ((0, 0, 1, 4097, 64, b"bf16"), b"expected device addresses of 16-byte alignment, got 4097"),
        ((0, 0, 1, 4096, 0, b"bf16"), b"capacity: expected 1 to 2147483647 tokens, got 0"),
        ((0, 0, 1, 4096, 64, b"int8"), b"element: expected bf16, fp16 or fp32, got int8"),
    ],
)
def test_bad_arenas_are_refused(loaded, arguments, message):
    binding, device, layers, address, capacity, element = arguments
    addresses = (ctypes.c_int64 * 2)(address, 8192)
    result = loaded.granikvBindArenas(
        binding, device, layers, addresses, capacity, 9, 3, 64, element
    )
    assert result == -1
    assert message in loaded.granikvLastError()


BIND_TWICE = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.granikvLastError.restype = ctypes.c_char_p
addresses = (ctypes.c_int64 * 2)(4096, 8192)
bind = lambda: library.granikvBindArenas(
    0, 0, 1, addresses, ctypes.c_int64(64), 9, 3, 64, b"bf16")
print(bind(), bind(), library.granikvLastError().decode())
print(library.granikvUnbindArenas(0), bind(), library.granikvUnbindArenas(0))
"""


@WITHOUT_GPU
def test_a_bound_number_is_refused_until_it_is_unbound(library, fake_cuda, tmp_path):
    known_kernels(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", BIND_TWICE, str(library)],
        capture_output=True, text=True, env=environment(tmp_path, fake_cuda, 90),
    )  # fmt: skip
    first, second = done.stdout.splitlines()
    assert first.startswith("0 -1 ") and first.endswith(
        "binding: expected a number that is not bound, got 0; take another, or call "
        "granikvUnbindArenas first"
    )
    assert second == "0 0 0"


def test_null_pointers_are_refused(library):
    """In a process of its own, which would crash."""
    calls = {
        "granikvInitCommunicator(0, None, 2, 0)": "unique_id: expected the 128 bytes .* got null",
        "granikvNcclUniqueId(None, 128)": "bytes: expected room for 128, got null",
        "granikvBindArenas(0, 0, 1, None, ctypes.c_int64(64), 9, 3, 64, b'bf16')": (
            "k_and_v_addresses: expected an array"
        ),
        "granikvBindArenas(0, 0, 1, None, ctypes.c_int64(64), 9, 3, 64, None)": (
            "element: expected bf16, fp16 or fp32, got nothing"
        ),
    }
    for call, message in calls.items():
        code = f"import ctypes; print(ctypes.CDLL({str(library)!r}).{call})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout.strip() == "-1" and re.search(message, done.stderr), (call, done)


def test_communicators(loaded):
    numbers = [ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32]
    loaded.granikvSetCommunicator.argtypes = numbers
    assert loaded.granikvSetCommunicator(5, 4096, 2, 1) == 0
    assert loaded.granikvSetCommunicator(5, None, 0, 0) == 0
    assert loaded.granikvSetCommunicator(5000, 4096, 2, 0) == -1
    assert loaded.granikvLastError().endswith(b"communicator: expected 0 to 1023, got 5000")
    assert loaded.granikvUnbindArenas(99) == -1
    assert loaded.granikvLastError().endswith(b"binding: expected a bound one, got 99")


@WITHOUT_GPU
@pytest.mark.parametrize(
    ("capability", "more", "message"),
    [
        (75, {}, r"compute capability: expected one of 8\.0, 9\.0, 12\.0 \(as built\), got 7\.5"),
        (100, {}, r"got 10\.0; rebuild with: python build_scripts/build_plugin\.py --arch 100"),
        (121, {}, r"got 12\.1"),  # nor does 12.0 serve it
        (86, {"FAKE_CUDA_SHARED": "32768"}, r"expected at most 32768 bytes of shared memory"),
    ],
)
def test_another_gpu_gets_the_built_ones_and_the_command(
    host, library, fake_cuda, tmp_path, capability, more, message
):
    known_kernels(tmp_path)
    step = step_of(STEPS["both"], "flat")
    write_step(step, tmp_path, prepared(step))
    with pytest.raises(AssertionError, match=message):
        env = environment(tmp_path, fake_cuda, capability, **more)
        run_host(host, library, "run", tmp_path, env=env)


@WITHOUT_GPU
def test_a_step_without_arenas_fails_at_run_time_only(host, library, fake_cuda, tmp_path):
    """The host's build-phase enqueue with null pointers passes; the step names the binding."""
    known_kernels(tmp_path)
    step = step_of(STEPS["both"], "flat")
    write_step(step, tmp_path, prepared(step), bind=False)
    with pytest.raises(
        AssertionError, match="expected a binding made with granikvBindArenas, got 7"
    ):
        run_host(host, library, "run", tmp_path, env=environment(tmp_path, fake_cuda, 90))
    assert "launch" not in (tmp_path / "trace.txt").read_text()


@WITHOUT_GPU
@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("tensor 4 1 16 ", "tensor 4 1 12 ", r"input counts: expected \[16\], got \[12\]"),
        (
            "tensor 17 6 0 0 ",
            f"tensor 17 6 0 {len(LAYOUTS)} ",
            r"input launch_dims: expected \[0, layout,",
        ),
        ("tensor 17 6 0 ", "tensor 17 6 1 ", r"input launch_dims: expected \[0, layout,"),
        (
            "num_kv_heads i32:3",
            "num_kv_heads i32:9",
            "heads: expected one of .* got 9 query and 9 KV",
        ),
        ("field max_partials i32:4096", "field max_partials i32:1", "at most max_partials = 1"),
    ],
)
def test_wrong_shapes_are_named(host, library, fake_cuda, tmp_path, before, after, message):
    known_kernels(tmp_path)
    step = step_of(STEPS["both"], "flat")
    write_step(step, tmp_path, prepared(step))
    manifest = tmp_path / "manifest.txt"
    text = manifest.read_text()
    assert before in text
    manifest.write_text(text.replace(before, after))
    with pytest.raises(AssertionError, match=message):
        run_host(host, library, "run", tmp_path, env=environment(tmp_path, fake_cuda, 90))


@WITHOUT_GPU
@pytest.mark.parametrize("tensor", ["input qkv", "output out"])
def test_addresses_out_of_alignment_are_named(host, library, fake_cuda, tmp_path, tensor):
    """16 bytes are enough: what TensorRT asks of a network's inputs (256) is the executor's."""
    known_kernels(tmp_path)
    step = step_of(STEPS["both"], "flat")
    env = environment(tmp_path, fake_cuda, 90)
    offset = f"{tensor.split()[1]}_offset"
    write_step(step, tmp_path, prepared(step), **{offset: 16})
    run_host(host, library, "run", tmp_path, env=env)
    write_step(step, tmp_path, prepared(step), **{offset: 8})
    wanted = rf"enqueue: .*{tensor}: expected an address of 16-byte alignment, got \d+"
    with pytest.raises(AssertionError, match=wanted):
        run_host(host, library, "run", tmp_path, env=env)


@WITHOUT_GPU
def test_a_cubin_with_other_parameters_than_the_table_is_refused(
    host, library, fake_cuda, tmp_path
):
    known_kernels(tmp_path)
    step = step_of(STEPS["both"], "flat")
    write_step(step, tmp_path, prepared(step))
    kernels = tmp_path / "kernels.txt"
    kernels.write_text("\n".join(f"{line} 8" for line in kernels.read_text().splitlines()))
    with pytest.raises(
        AssertionError, match=r"_kernel: parameter \d+ is 8 bytes, expected 0; build"
    ):
        run_host(host, library, "run", tmp_path, env=environment(tmp_path, fake_cuda, 90))


# (name, shape, type) of each input in plugin_io.h
HEADER_INPUTS = re.findall(
    r'X\(k\w+,\s*"(\w+)",\s*"([^"]+)",\s*(k\w+)\)',
    HEADER.read_text().split("GRANIKV_ATTENTION_OUTPUTS")[0],
)


def test_the_header_lists_the_plan():
    names = [name for name, _, _ in HEADER_INPUTS]
    assert names[:4] == ["qkv", "rope_cos", "rope_sin", "request_slots"]
    assert tuple(names[4:-1]) == PLAN_INPUTS
    assert names[-1] == "launch_dims" and len(names) == 18
    planned = {f.name for f in PLAN_FIELDS if f.where == "device"}
    assert set(PLAN_INPUTS) - {"extend_tiles"} <= planned
    assert HEADER_INPUTS[4][:2] == ("counts", "[16]") and max(Count) < 16


def test_the_header_is_the_table_of_the_export():
    if importlib.util.find_spec("granikv.engines") is None or (
        importlib.util.find_spec("granikv.engines.io") is None
    ):
        pytest.skip("granikv/engines/io.py is not there yet")
    from granikv.engines import io

    assert [name for name, _, _ in HEADER_INPUTS] == [spec.name for spec in io.PLUGIN_INPUTS]
    types = {"kElement": "network", "kFloat": "float32", "kInt32": "int32"}
    for (name, shape, kind), spec in zip(HEADER_INPUTS, io.PLUGIN_INPUTS, strict=True):
        assert (types[kind], shape.count(",") + 1) == (spec.dtype, len(spec.dims)), name
    assert (io.ATTENTION_OP, io.ALL_REDUCE_OP) == ("HotColdAttention", "AllReduce")
    assert (io.PLUGIN_VERSION, io.PLUGIN_NAMESPACE) == ("1", "granikv")
    assert set(io.ATTENTION_ATTRIBUTES) == set(GOOD)
    assert set(io.ALL_REDUCE_ATTRIBUTES) == {"tp_size", "tp_rank"}


def test_headers_are_found_or_asked_for(tmp_path, monkeypatch):
    with pytest.raises(BuildError, match="--tensorrt-include: expected a folder"):
        tensorrt_include(tmp_path, tmp_path)
    with pytest.raises(BuildError, match="give --cuda-include"):
        cuda_include(tmp_path)
    assert (cuda_include(None) / "cuda_runtime_api.h").is_file()
    container = tmp_path / "container"
    container.mkdir()
    (container / "NvInferRuntime.h").touch()
    monkeypatch.setattr(native, "TENSORRT_FOLDERS", (str(tmp_path), str(container)))
    assert tensorrt_include(None, tmp_path) == container


def test_a_second_build_does_nothing_and_one_elsewhere_gives_the_same_file(library, tmp_path):
    """By whose hash engines know their library."""
    if not (library.parent / "generated").exists():
        pytest.skip("the library was built elsewhere")
    before = library.stat().st_mtime_ns
    builder().build(programs(), OUT, cache=CACHE, progress=False)
    assert library.stat().st_mtime_ns == before
    again = builder().build(programs(), tmp_path, cache=CACHE, progress=False)
    assert again != library and again.read_bytes() == library.read_bytes()


def test_tensorrt_rtx_registers_the_creators(library, rtx):
    """In a process of its own."""
    script = Path(__file__).parent / "rtx_registry.py"
    done = subprocess.run(
        [sys.executable, str(script), str(library)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "passed"
    assert "field head_dim: expected 16 to 256, got 7" in done.stdout + done.stderr
