"""Engines by TensorRT for RTX around the real plugin library, for every tensor-parallel setting.

Without a GPU: the whole of `granikv build` for a small Llama, and two layers of Llama-3.1-8B's real
shape. The builder finds the plugin by name, configures it and writes it into the engine; only a
GPU could run one.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from granikv.bench.random_checkpoint import write_checkpoint
from granikv.bench.shapes import find_shape
from granikv.cli import app
from granikv.engines.build import BuildSettings, build, open_shards
from granikv.engines.builders import (
    RTX_COMPUTE_CAPABILITIES,
    BuildRequest,
    build_engine,
    check_network,
    profile_of,
)
from granikv.engines.export import export_rank
from granikv.engines.manifest import engine_io, load_manifest
from granikv.engines.records import RankRecord
from granikv.engines.sharding import Shard
from granikv.errors import EngineMismatch, Unavailable
from trtllm_plugin.table import ARCHITECTURES

CAPABILITIES = ("8.0", "8.6", "8.9", "12.0")
SHAPE = find_shape("llama-3.1-8b")
NUM_LAYERS = 2
pytestmark = pytest.mark.usefixtures("rtx")


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """The heads of the 8B shape, all else small."""
    changes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 97}
    folder = tmp_path_factory.mktemp("small")
    return write_checkpoint(folder, SHAPE, num_hidden_layers=NUM_LAYERS, **changes)


@pytest.fixture(scope="module")
def real_shaped(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("real")
    return write_checkpoint(folder, SHAPE, num_hidden_layers=NUM_LAYERS, vocab_size=512)


def settings(checkpoint: Path, out: Path, library: Path, tp_size: int) -> BuildSettings:
    return BuildSettings(
        checkpoint, out, tp_size, max_requests=32, max_tokens=64, max_seq_len=256,
        capacity_tokens=4096, builder="rtx", plugin=library, compute_capabilities=CAPABILITIES,
    )  # fmt: skip


def check(engine: Path, network: dict, io: dict, tp_size: int) -> None:
    """The engine names our plugins, and its network is the table's. io: of a manifest."""
    content = engine.read_bytes()
    assert content.count(b"HotColdAttention") >= NUM_LAYERS
    assert (content.count(b"AllReduce") >= 2 * NUM_LAYERS) == (tp_size > 1)
    for kind, types in (("inputs", {"int32": "INT32"}), ("outputs", {"float32": "FLOAT"})):
        described = [
            [x["name"], [-1 if isinstance(d, str) else d for d in x["dims"]], types[x["dtype"]]]
            for x in io[kind]
        ]
        assert network[kind] == described


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_a_small_llama(small, library, tmp_path, tp_size):
    wanted = settings(small, tmp_path, library, tp_size)
    made = build(wanted)
    assert (made.builder, made.compute_capabilities) == ("rtx", CAPABILITIES)
    assert load_manifest(tmp_path) == made and len(made.ranks) == tp_size
    engines = [made.file(tmp_path, rank) for rank in range(tp_size)]
    for rank, engine in enumerate(engines):
        check(engine, RankRecord(tmp_path, rank).notes("engine"), made.io, tp_size)
    times = [path.stat().st_mtime_ns for path in engines]
    assert build(wanted) == made
    assert times == [path.stat().st_mtime_ns for path in engines]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_two_layers_of_the_8b_shape(real_shaped, library, tmp_path, tp_size):
    """The last rank; the others differ in their weights only."""
    wanted = settings(real_shaped, tmp_path, library, tp_size)
    checkpoint, limits, shards = open_shards(wanted)
    assert (checkpoint.config.hidden_size, checkpoint.config.intermediate_size) == (4096, 14336)
    assert (checkpoint.config.num_qo_heads, checkpoint.config.num_kv_heads) == (32, 8)
    shard = shards[-1]
    export_rank(checkpoint, shard, limits, wanted.dtype, tmp_path)
    io, engine = engine_io(shard, limits, wanted.dtype), tmp_path / "engine"
    graph = str(tmp_path / f"rank{shard.rank}.onnx")
    request = BuildRequest(
        "rtx", graph, str(engine), str(library), profile_of(io), list(CAPABILITIES)
    )
    made = build_engine(request)
    assert made["compute_capabilities"] == list(CAPABILITIES)
    check(engine, made, io.describe(), tp_size)
    layer_bytes = 2 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336)
    assert engine.stat().st_size > NUM_LAYERS * layer_bytes // tp_size
    for path in (engine, tmp_path / f"rank{shard.rank}.weights"):
        path.unlink()  # gigabytes in all


def test_heads_that_the_library_lacks_are_named_with_those_it_has(small, library, tmp_path):
    match = "no engine: .*heads: expected one of .*32 query and 8 KV.*got 4 query and 1 KV heads"
    with pytest.raises(Unavailable, match=match) as caught:
        build(settings(small, tmp_path, library, 8))
    command = "build_plugin.py --arch 80,90,120 --models all"  # as it may be typed
    assert command in str(caught.value)
    assert not (tmp_path / "rank0.engine").exists() and not (tmp_path / "manifest.json").exists()


def test_another_network_than_the_tables_is_refused(small, library, tmp_path):
    made = build(settings(small, tmp_path, library, 1))
    table = engine_io(Shard(made.model), made.limits, made.dtype)
    network = RankRecord(tmp_path, 0).notes("engine")
    check_network(network, table)
    for kind, changed in (
        ("inputs", network["inputs"][:-1]),
        ("inputs", [["ids", *network["inputs"][0][1:]], *network["inputs"][1:]]),
        ("outputs", [["logits", [-1, 98], "FLOAT"]]),
        ("outputs", [["logits", [-1, 97], "HALF"]]),
    ):
        with pytest.raises(EngineMismatch, match=f"{kind} of the engine's network: expected"):
            check_network(network | {kind: changed}, table)


def test_the_capabilities_are_ones_that_rtx_builds_for():
    assert set(CAPABILITIES) < set(RTX_COMPUTE_CAPABILITIES)
    cubins = {"8" if arch == 80 else f"{arch / 10}" for arch in ARCHITECTURES}  # 80 serves 8.x
    for capability in RTX_COMPUTE_CAPABILITIES:  # others would build, and find no kernel later
        assert capability.startswith(tuple(cubins)), capability


def test_the_bench_compares_with_tensorrts_own_time(small, library, tmp_path):
    arguments = ["bench", "build", "--plugin", str(library), "--shape", str(small)]
    arguments += ["--layers", "1", "--vocab", "97", "--tp", "2", "--rounds", "1"]
    arguments += ["--compute-capability", "8.9", "--json", str(tmp_path / "out.json")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    (case,) = json.loads((tmp_path / "out.json").read_text())["cases"]
    ours, alone = case["metrics"], case["baseline_metrics"]
    assert case["params"]["tp"] == 2 and case["baseline"].startswith("rtx 1.")
    assert ours["total_s"] > ours["export_s"] + ours["engine_s"] > ours["engine_s"] > 0
    assert alone["total_s"] == pytest.approx(alone["parse_s"] + alone["build_s"], abs=2e-3)
    assert case["ratio"] == pytest.approx(alone["total_s"] / ours["total_s"], rel=0.05)
    assert ours["times_baseline"] == pytest.approx(1 / case["ratio"], abs=0.01)
