"""The plugin's enqueue against GpuAttention, launch by launch, through a driver that only records.

Which cubin, grid, stream, scalars, tensor maps, and to which buffer every pointer leads.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from granikv.attention.kernels.cold_gluon import cold_gluon_build
from granikv.attention.variants import LAYOUTS
from tests.kernels.support import ON_GPU, Row, Step
from tests.plugin.conftest import CACHE
from tests.plugin.plugin_support import LAYER, Launch, prepared, record, run_host, write_step
from tests.plugin.test_aot import EVERYONE, STEPS
from trtllm_plugin import aot
from trtllm_plugin.table import ARCHITECTURES, key_of

pytestmark = pytest.mark.skipif(ON_GPU, reason="the driver is a fake; see test_on_gpu.py")
HEADS, DIM = (9, 3), 64
MAIN, SIDE, FORK, JOIN = 1, 2, 3, 4  # handles in the order in which the fake driver makes them


@dataclass
class Traced:
    kernel: str
    keys: set[str]  # of its cubin; equal cubins have several
    grid: tuple[int, int]
    threads: int
    shared_bytes: int
    stream: int
    dependent: bool
    values: dict[str, bytes]


@dataclass
class Trace:
    allocations: list[tuple[int, int]] = field(default_factory=list)
    eager: list = field(default_factory=list)  # Traced, or the words of an event's line
    captured: list = field(default_factory=list)


def step_of(rows: list[Row], layout: str, padding: int = 2) -> Step:
    return Step(
        rows, HEADS, DIM, torch.bfloat16, layout=LAYOUTS[layout], padding=padding, capacity=1024
    )


def known_kernels(folder: Path) -> dict[int, tuple[set[str], list[str]]]:
    """Checksum -> (keys, names of the parameters); writes what the fake driver reads."""
    found: dict[int, tuple[set[str], list[str]]] = {}
    lines = []
    for described in sorted((CACHE / "kernels" / aot.source_hash()).glob("*.json")):
        content = described.with_suffix(".cubin").read_bytes()
        checksum = len(content) << 32 | zlib.adler32(content)
        parameters = json.loads(described.read_text())["parameters"]
        found.setdefault(checksum, (set(), [name for name, _ in parameters]))[0].add(described.stem)
        lines.append(f"{checksum} {' '.join(str(aot.SIZES[kind]) for _, kind in parameters)}")
    (folder / "kernels.txt").write_text("\n".join(dict.fromkeys(lines)))
    return found


def environment(folder: Path, fake_cuda: Path, capability: int, **more: str) -> dict[str, str]:
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(fake_cuda),
        "FAKE_CUDA_TRACE": str(folder / "trace.txt"),
        "FAKE_CUDA_KERNELS": str(folder / "kernels.txt"),
        "FAKE_CUDA_CAPABILITY": str(capability),
        "FAKE_CUDA_SHARED": str(ARCHITECTURES.get(capability, 99 * 1024)),
        **more,
    }


def read_trace(folder: Path, known: dict) -> Trace:
    trace = Trace()
    current = trace.eager
    for line in (folder / "trace.txt").read_text().splitlines():
        what, *words = line.split()
        if what == "alloc":
            trace.allocations.append((int(words[0]), int(words[1])))
        elif what == "capture":
            current = trace.captured
        elif what == "launch":
            keys, names = known[int(words[0])]
            x, y, threads, shared, stream, attributes = map(int, words[2:8])
            values = dict(zip(names, map(bytes.fromhex, words[8:]), strict=True))
            current.append(
                Traced(words[1], keys, (x, y), threads, shared, stream, attributes == 1, values)
            )
        else:
            current.append((what, *map(int, words)))
    assert len(trace.eager) == len(trace.captured)
    return trace


def traced(
    step: Step,
    folder: Path,
    host,
    library,
    fake_cuda,
    capability=90,
    capture=False,
    num_sms=132,
    **changes,
) -> Trace:
    known = known_kernels(folder)
    write_step(step, folder, prepared(step, capture, capability), **changes)
    env = environment(folder, fake_cuda, capability, FAKE_CUDA_SMS=str(num_sms))
    run_host(host, library, "run", folder, env=env)
    return read_trace(folder, known)


def pointers(step: Step, folder: Path, trace: Trace) -> dict[str, int]:
    """Address of every buffer, by a kernel's name for it; q_ptr is the rotated q."""
    lines = (folder / "manifest.txt").read_text().splitlines()
    tensors = [line.split() for line in lines if line.startswith("tensor")]
    addresses = [address for address, _ in trace.allocations]
    inputs = {int(words[1]): addresses.pop(0) for words in tensors if words[-1] != "-"}
    out, k, v, workspace = addresses
    offset = next((int(w[17:]) for w in lines if w.startswith("workspace_offset")), 0)
    base = (workspace + offset + 255) // 256 * 256
    states = prepared(step).o_partials.shape[0] * step.heads[0]
    layer_bytes = LAYER * step.k[0].numel() * 2
    align = lambda size: -(-size // 256) * 256  # noqa: E731
    rotated = base + align(states * step.dim * 4) + align(states * 4)
    names = "qkv cos sin request_slots counts row_request row_position slot_mapping hot_items hot_rows cold_items merge_indptr merge_partials qo_indptr extend_indptr extend_segments extend_tiles"
    found = {f"{name}_ptr": inputs.get(i, 0) for i, name in enumerate(names.split())}
    return found | {
        "q_ptr": rotated, "q_out_ptr": rotated, "out_ptr": out,
        "k_ptr": k + layer_bytes, "v_ptr": v + layer_bytes,
        "k_desc": k + layer_bytes, "v_desc": v + layer_bytes,
        "k_arena_ptr": k + layer_bytes, "v_arena_ptr": v + layer_bytes,
        "o_ptr": base, "lse_ptr": base + align(states * step.dim * 4),
        "global_scratch": 0, "profile_scratch": 0,
    }  # fmt: skip


def check_launch(got: Traced, want: Launch, places: dict[str, int], step: Step) -> None:
    """Grid, launch options, pointers, scalars and tensor maps of one launch."""
    assert got.kernel == want.build.name
    assert got.grid == (*want.grid, 1)[:2]
    assert got.threads == 32 * want.build.options["num_warps"]
    assert got.dependent == want.build.options.get("launch_pdl", False)
    q_width, width = (heads * step.dim for heads in step.heads)
    packed = q_width + 2 * width
    places = dict(places)
    expected = dict.fromkeys(["q_stride", "q_out_stride", "out_stride"], q_width)
    if want.build.name == "append_kernel":
        row = places["qkv_ptr"]
        places |= {"q_ptr": row, "k_ptr": row + q_width * 2}
        places["v_ptr"] = places["k_ptr"] + width * 2
        expected |= dict.fromkeys(["q_stride", "k_stride", "v_stride"], packed)
    for name, value in got.values.items():
        if len(value) == 128:
            spec = struct.unpack_from("<8Q", value)
            assert spec[:4] == (places[name], width, len(step.k[0]), width * 2), name
            assert spec[4:6] == (64, want.build.constants["BLOCK_N"]), name
        elif name in places:
            assert struct.unpack("<Q", value)[0] == places[name], name
        elif "_desc_" in name:
            part = name[7:]
            sizes = {"shape0": len(step.k[0]), "shape1": width, "stride0": width, "stride1": 1}
            assert int.from_bytes(value, "little") == sizes[part], name
        else:
            wanted = expected.get(name, want.arguments[name])
            kind = "<f" if want.build.types[name] == "fp32" else "<i"
            assert value == struct.pack(kind, wanted), name


@pytest.mark.parametrize("capture", [False, True], ids=["exact", "captured"])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_launches_are_those_of_gpu_attention(
    layout, capture, host, library, fake_cuda, tmp_path, monkeypatch
):
    for name, rows in STEPS.items():
        folder = tmp_path / name
        folder.mkdir()
        step = step_of(rows, layout)
        want = record(step, monkeypatch, capture)
        trace = traced(step, folder, host, library, fake_cuda, capture=capture)
        places = pointers(step, folder, trace)
        for events in (trace.eager, trace.captured):
            got = [x for x in events if isinstance(x, Traced)]
            assert len(got) == len(want)
            for each in got:
                (launch,) = [x for x in want if key_of(x.build, "bf16", 90) in each.keys]
                check_launch(each, launch, places, step)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_the_side_stream_forks_and_always_joins(layout, host, library, fake_cuda, tmp_path):
    trace = traced(step_of(STEPS["both"], layout), tmp_path, host, library, fake_cuda)
    words = [x if isinstance(x, tuple) else x.kernel for x in trace.eager]
    streams = {x.kernel: x.stream for x in trace.eager if isinstance(x, Traced)}
    if LAYOUTS[layout].one_launch:
        assert words == ["append_kernel", "small_kernel", "merge_kernel"]
        return
    hot = ["hot_kernel"] * (2 if LAYOUTS[layout].gemm else 1)
    begin = [("record", FORK, MAIN), ("wait", SIDE, FORK)]
    cold = ["cold_kernel", ("record", JOIN, SIDE)]
    body = [*cold, *hot] if LAYOUTS[layout].cold_first else [*hot, *cold]
    end = [("wait", MAIN, JOIN), "merge_kernel"]
    assert words == ["append_kernel", *begin, *body, *end]
    assert streams["cold_kernel"] == SIDE
    assert {streams[k] for k in streams if k != "cold_kernel"} == {MAIN}


def test_many_cold_blocks_beside_hot_take_the_gluon_kernel(
    host, library, fake_cuda, tmp_path, monkeypatch
):
    """From gluon_blocks_per_sm on, as GpuAttention does, with the portable kernel's arguments."""
    rows = [Row([EVERYONE], 9 + i) for i in range(8)]
    step = Step(rows, (8, 2), 128, torch.bfloat16, layout=LAYOUTS["large"], capacity=1024)
    attention = prepared(step, False, 90)
    (portable,) = [x for x in record(step, monkeypatch) if x.build.name == "cold_kernel"]
    gluon = Launch(cold_gluon_build(attention.shape), portable.grid, portable.arguments)
    blocks_per_sm = LAYOUTS["large"].gluon_blocks_per_sm
    assert blocks_per_sm is not None
    most = int(attention.cold_grid * 2 // blocks_per_sm)  # SMs that have enough blocks each
    for num_sms, want in ((most, gluon), (most + 1, portable)):
        folder = tmp_path / str(num_sms)
        folder.mkdir()
        trace = traced(step, folder, host, library, fake_cuda, num_sms=num_sms)
        for events in (trace.eager, trace.captured):
            launches = [x for x in events if isinstance(x, Traced)]
            (got,) = [x for x in launches if x.kernel.startswith("cold")]
            assert key_of(want.build, "bf16", 90) in got.keys and got.stream == SIDE
            check_launch(got, want, pointers(step, folder, trace), step)


def test_the_join_is_recorded_when_a_launch_fails(host, library, fake_cuda, tmp_path):
    known_kernels(tmp_path)
    step = step_of(STEPS["both"], "mid")
    write_step(step, tmp_path, prepared(step, False, 90))
    env = environment(tmp_path, fake_cuda, 90, FAKE_CUDA_REFUSE="cold_kernel")
    with pytest.raises(AssertionError, match="enqueue: .*cold_kernel: a fake error"):
        run_host(host, library, "run", tmp_path, env=env)
    events = (tmp_path / "trace.txt").read_text().splitlines()
    assert f"record {JOIN} {SIDE}" in events and f"wait {MAIN} {JOIN}" in events


@pytest.mark.parametrize("capability", [80, 89, 120])
def test_other_architectures(capability, host, library, fake_cuda, tmp_path, monkeypatch):
    """8.9 runs the cubins of 8.0; no dependent launches and no tensor maps below 9.0."""
    built = 80 if capability < 90 else capability
    for layout in ("large", "small"):
        folder = tmp_path / layout
        folder.mkdir()
        step = step_of(STEPS["extend"], layout)
        want = record(step, monkeypatch, capability=built)
        trace = traced(step, folder, host, library, fake_cuda, capability)
        got = [x for x in trace.eager if isinstance(x, Traced)]
        assert all(f"sm{built}-" in min(x.keys) for x in got)
        first, *others = got
        assert first.kernel == "append_kernel" and first.dependent == (built >= 90)
        assert any(x.dependent for x in others) == (built >= 90 and layout == "small")
        maps = any(len(value) == 128 for x in got for value in x.values.values())
        assert maps == (built >= 90 and layout == "large")
        assert len(got) == len(want)


def test_a_workspace_may_begin_anywhere(host, library, fake_cuda, tmp_path, monkeypatch):
    step = step_of(STEPS["both"], "small")
    want = record(step, monkeypatch)
    trace = traced(step, tmp_path, host, library, fake_cuda, workspace_offset=8)
    places = pointers(step, tmp_path, trace)
    for got, launch in zip(trace.eager, want, strict=True):
        check_launch(got, launch, places, step)


def test_padding_alone_is_merged_and_extend_alone_is_not(host, library, fake_cuda, tmp_path):
    extend = [Row([EVERYONE], 30, num_new=20)]
    for padding, kernels in ((0, ["append", "extend"]), (3, ["append", "merge", "extend"])):
        folder = tmp_path / str(padding)
        folder.mkdir()
        step = step_of(extend, "flat", padding)
        trace = traced(step, folder, host, library, fake_cuda)
        assert [x.kernel for x in trace.eager] == [f"{k}_kernel" for k in kernels]
