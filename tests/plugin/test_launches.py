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

from granikv.attention.plan_buffers import PlanBuffers
from granikv.attention.variants import LAYOUTS
from granikv.errors import InvalidArgument
from tests.kernels.support import ON_GPU, Row, Step
from tests.plugin.conftest import CACHE
from tests.plugin.plugin_support import (
    LAYER,
    Launch,
    prepared,
    record,
    run_host,
    whole_blocks,
    write_step,
)
from tests.plugin.test_aot import EVERYONE, STEPS
from trtllm_plugin import aot
from trtllm_plugin.table import ARCHITECTURES, key_of

pytestmark = pytest.mark.skipif(ON_GPU, reason="the driver is a fake; see test_on_gpu.py")
SMALL = (9, 3), 64
GLUON = (8, 2), 128  # in bf16 on 9.0
DEEP = [Row([(0, 8, 450)], 1 + i % 9) for i in range(36)] + [Row([(0, 8, 450)], 0, seen=200)]
TENSOR_MAP_BF16, SWIZZLE_128_BYTES = 9, 3  # the driver's numbers
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


def step_of(rows: list[Row], layout: str, padding: int = 2, heads=SMALL) -> Step:
    made = LAYOUTS[layout]
    return Step(
        whole_blocks(rows, made), *heads, torch.bfloat16, layout=made, padding=padding,
        capacity=1024,
    )  # fmt: skip


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
    write_step(step, folder, prepared(step, capture, capability, num_sms), **changes)
    env = environment(folder, fake_cuda, capability, FAKE_CUDA_SMS=str(num_sms))
    run_host(host, library, "run", folder, env=env)
    trace = read_trace(folder, known)
    assert len(trace.eager) == len(trace.captured)
    return trace


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
    # of hot_gluon_kernel: two warpgroups that multiply, and one for the warp that copies
    warps = 12 if got.kernel == "hot_gluon_kernel" else want.build.options["num_warps"]
    assert got.threads == 32 * warps
    assert got.stream == (SIDE if want.side else MAIN)
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
            described = want.arguments[name]
            assert list(described.shape) == [len(step.k[0]), width]
            assert spec[:4] == (places[name], width, len(step.k[0]), width * 2), name
            # the swizzle's 128 bytes are 64 elements; a wider head is copied in several
            assert spec[4:6] == (64, described.block_shape[0]), name
            assert spec[6:] == (TENSOR_MAP_BF16, SWIZZLE_128_BYTES), name
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


def check_trace(trace: Trace, want: list[Launch], folder: Path, step: Step, built: int) -> None:
    """The same launches in the same order, eagerly and captured."""
    places = pointers(step, folder, trace)
    for events in (trace.eager, trace.captured):
        got = [x for x in events if isinstance(x, Traced)]
        for each, launch in zip(got, want, strict=True):
            assert key_of(launch.build, "bf16", built) in each.keys
            check_launch(each, launch, places, step)


@pytest.mark.parametrize("capture", [False, True], ids=["exact", "captured"])
@pytest.mark.parametrize(
    ("layout", "heads"),
    [*((name, SMALL) for name in LAYOUTS), ("dense", GLUON), ("even", GLUON)],
    ids=lambda value: (
        value if isinstance(value, str) else f"{value[0][0]}x{value[0][1]}x{value[1]}"
    ),
)
def test_launches_are_those_of_gpu_attention(
    layout, heads, capture, host, library, fake_cuda, tmp_path, monkeypatch
):
    some = {name: STEPS[name] for name in ("runs", "hot", "cold", "extend")}
    rows = STEPS if heads is SMALL else {**some, "deep": DEEP}
    kernels = set()
    for name in rows:
        folder = tmp_path / name
        folder.mkdir()
        step = step_of(rows[name], layout, heads=heads)
        want = record(step, monkeypatch, capture)
        trace = traced(step, folder, host, library, fake_cuda, capture=capture)
        check_trace(trace, want, folder, step, 90)
        kernels |= {launch.build.name for launch in want}
    has_gluon = heads is GLUON and LAYOUTS[layout].hot_gluon is not None
    assert ("hot_gluon_kernel" in kernels) == has_gluon
    without = has_gluon or LAYOUTS[layout].one_launch or layout == "flat"  # HOT is runs there
    assert ("hot_kernel" in kernels) != without


@pytest.mark.parametrize(
    ("layout", "heads"),
    [*((name, SMALL) for name in LAYOUTS if name != "flat"), ("dense", GLUON), ("even", GLUON)],
)
def test_the_side_stream_forks_and_always_joins(layout, heads, host, library, fake_cuda, tmp_path):
    step = step_of(STEPS["both"], layout, heads=heads)
    trace = traced(step, tmp_path, host, library, fake_cuda)
    words = [x if isinstance(x, tuple) else x.kernel for x in trace.eager]
    streams = {x.kernel: x.stream for x in trace.eager if isinstance(x, Traced)}
    if LAYOUTS[layout].one_launch:
        assert words == ["append_kernel", "small_kernel", "merge_kernel"]
        return
    gluon = "_gluon" if heads is GLUON else ""
    hot = [f"hot{gluon}_kernel"]
    begin = [("record", FORK, MAIN), ("wait", SIDE, FORK)]
    cold = [f"cold{gluon}_kernel", ("record", JOIN, SIDE)]
    body = [*cold, *hot] if LAYOUTS[layout].cold_first else [*hot, *cold]
    end = [("wait", MAIN, JOIN), "merge_kernel"]
    assert words == ["append_kernel", *begin, *body, *end]
    assert streams.pop(cold[0]) == SIDE
    assert set(streams.values()) == {MAIN}


def test_many_cold_blocks_beside_hot_take_the_gluon_kernel(
    host, library, fake_cuda, tmp_path, monkeypatch
):
    """From gluon_blocks_per_sm on, as GpuAttention does."""
    step = step_of([Row([EVERYONE], 9 + i) for i in range(9)], "large", heads=GLUON)
    blocks_per_sm = LAYOUTS["large"].gluon_blocks_per_sm
    assert blocks_per_sm is not None
    blocks = prepared(step, False, 90).cold_grid * 2
    assert blocks % blocks_per_sm == 0  # the limit itself is reached
    most = int(blocks // blocks_per_sm)  # SMs that have enough blocks each
    for num_sms, kernel in ((most, "cold_gluon_kernel"), (most + 1, "cold_kernel")):
        folder = tmp_path / str(num_sms)
        folder.mkdir()
        want = record(step, monkeypatch, num_sms=num_sms)
        assert [x.build.name for x in want if x.side] == [kernel]
        trace = traced(step, folder, host, library, fake_cuda, num_sms=num_sms)
        check_trace(trace, want, folder, step, 90)


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
    for layout in ("large", "dense", "even", "small"):
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
        assert maps == (built >= 90 and layout != "small")
        check_trace(trace, want, folder, step, built)


@pytest.mark.parametrize("layout", ["dense", "even"])
def test_gluon_layouts_without_its_kernels(layout, host, library, fake_cuda, tmp_path, monkeypatch):
    """Heads of 128 on another GPU, with spans that are shorter than a Gluon block."""
    short = [Row([(0, 8, 50)], 5), Row([(0, 8, 50)], 37)]
    step = Step(short, (16, 4), 128, torch.bfloat16, layout=LAYOUTS[layout], capacity=1024)
    want = record(step, monkeypatch, capability=80)
    assert {x.build.name for x in want} > {"hot_kernel", "cold_kernel"}
    trace = traced(step, tmp_path, host, library, fake_cuda, 80)
    check_trace(trace, want, tmp_path, step, 80)


@pytest.mark.parametrize("layout", ["dense", "even"])
def test_items_below_a_gluon_block_are_refused_before_any_launch(layout):
    """By GpuAttention, and by the buffers whose plans an engine is given."""
    tile = LAYOUTS[layout].hot_gluon
    assert tile is not None
    block, short = (
        Step([Row([(0, 8, n)], 9)], *GLUON, torch.bfloat16, layout=LAYOUTS[layout])
        for n in (tile.block_n, tile.block_n - 1)
    )
    attention = prepared(block, False, 90)
    buffers = PlanBuffers(attention.shape, block.capacities(), torch.device("cpu"), 132)
    buffers.prepare(short.plan, short.split.layout)
    buffers.gluon = True
    buffers.prepare(block.plan, block.split.layout)
    wanted = f"kv_len: expected at least {tile.block_n} in layout {layout}, got {tile.block_n - 1}"
    for each in (attention, buffers):
        with pytest.raises(InvalidArgument, match=wanted):
            each.prepare(short.plan, short.split.layout)


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
