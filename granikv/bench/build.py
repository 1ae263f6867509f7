"""Build time of engines against TensorRT's own time for the same network, per rank.

Ours is a whole `granikv build`: weights cut, written and hashed, the graph, a process for the
builder with the plugin library, the engine written and hashed, the manifest. The baseline is what
TensorRT's parser and builder take for the rank's network with its plugin nodes replaced by nodes
of TensorRT's own and its weights already in a file; starting its process is not counted.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import ModelProto, helper

from granikv.bench.harness import Case
from granikv.bench.random_checkpoint import write_checkpoint
from granikv.engines.build import BuildSettings, build, own_target
from granikv.engines.builders import (
    BuildRequest,
    build_engine,
    check_capabilities,
    choose_builder,
)
from granikv.engines.io import ALL_REDUCE_OP, ATTENTION_OP
from granikv.engines.manifest import Manifest
from granikv.errors import InvalidArgument

GOAL = 3.0  # most times the baseline that a build may take


@dataclass(frozen=True)
class BuildCase:
    """num_layers and vocab_size replace the shape's; shape: folder with a config.json."""

    name: str
    shape: Path
    num_layers: int
    vocab_size: int
    tp_size: int


def run_build_bench(
    cases: list[BuildCase],
    plugin: Path | None,
    builder: str,
    compute_capabilities: tuple[str, ...] = (),
    rounds: int = 3,
    say: Callable[[str], None] = lambda text: None,
) -> list[Case]:
    """One entry per case, medians of the rounds; ratio: the baseline's seconds over ours.

    Raises InvalidArgument without a plugin library, and what granikv.engines.build.build does; for
    builder and GPU before anything is written.
    """
    check_capabilities(builder, compute_capabilities)
    choose_builder(builder)
    if plugin is None or not plugin.is_file():
        expected = "GraniKV's plugin library with the shape's heads: build_scripts/build_plugin.py"
        raise InvalidArgument("plugin", str(plugin), expected)
    own_target(builder, compute_capabilities)
    return [_run_case(case, plugin, builder, compute_capabilities, rounds, say) for case in cases]


def _run_case(
    case: BuildCase,
    plugin: Path | None,
    builder: str,
    compute_capabilities: tuple[str, ...],
    rounds: int,
    say: Callable[[str], None],
) -> Case:
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="granikv_bench_") as place:
        changes = {"num_hidden_layers": case.num_layers, "vocab_size": case.vocab_size}
        checkpoint = write_checkpoint(Path(place, "checkpoint"), case.shape, **changes)
        for index in range(rounds):
            say(f"{case.name}, tp {case.tp_size}, round {index + 1} of {rounds}")
            with tempfile.TemporaryDirectory(dir=place) as out:
                settings = BuildSettings(
                    checkpoint, Path(out), case.tp_size, builder=builder, plugin=plugin,
                    compute_capabilities=compute_capabilities,
                )  # fmt: skip
                manifest, seconds = _timed_build(settings)
                ours.append({name: s / case.tp_size for name, s in seconds.items()})
                theirs.append(_tensorrt_alone(manifest, settings))
    metrics, baseline = _medians(ours), _medians(theirs)
    times = metrics["total_s"] / baseline["total_s"]
    params = {
        "model": case.shape.name,
        "tp": case.tp_size,
        "num_layers": case.num_layers,
        "vocab_size": case.vocab_size,
        "dtype": settings.dtype,
        "compute_capabilities": list(manifest.compute_capabilities),
        "weights_bytes": sum(x.weights.size_bytes for x in manifest.ranks if x.weights),
        "rounds": rounds,
        "goal_times_baseline": GOAL,
    }
    return Case(
        case.name,
        params,
        metrics | {"times_baseline": round(times, 2)},
        f"{builder} {manifest.tensorrt_version}, parser and builder alone",
        1 / times,
        baseline,
    )


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(r[name] for r in rounds), 3) for name in rounds[0]}


def _timed_build(settings: BuildSettings) -> tuple[Manifest, dict[str, float]]:
    """Seconds of all ranks: total_s, and of it export_s and engine_s."""
    seconds = {"export_s": 0.0, "engine_s": 0.0}

    @contextlib.contextmanager
    def progress(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
        begin = time.perf_counter()
        yield lambda num_bytes: None
        seconds["engine_s" if total is None else "export_s"] += time.perf_counter() - begin

    begin = time.perf_counter()
    manifest = build(settings, progress)
    return manifest, {"total_s": time.perf_counter() - begin, **seconds}


def _tensorrt_alone(manifest: Manifest, settings: BuildSettings) -> dict[str, float]:
    """Mean seconds of a rank: total_s = parse_s + build_s. Writes into the build's folder."""
    inputs = {entry["name"]: entry for entry in manifest.io["inputs"]}
    seconds = {"total_s": 0.0, "parse_s": 0.0, "build_s": 0.0}
    for rank in range(manifest.tp_size):
        graph = onnx.load(str(manifest.file(settings.out, rank, "graph")), load_external_data=False)
        path = settings.out / f"alone{rank}.onnx"
        path.write_bytes(without_plugins(graph).SerializeToString())
        profile = {
            value.name: {which: inputs[value.name][which] for which in ("min", "opt", "max")}
            for value in graph.graph.input
        }
        request = BuildRequest(
            manifest.builder, str(path), f"{path}.engine", "", profile,
            list(settings.compute_capabilities),
        )  # fmt: skip
        made = build_engine(request)
        for name in ("parse_s", "build_s"):
            seconds[name] += made[name] / manifest.tp_size
            seconds["total_s"] += made[name] / manifest.tp_size
    return seconds


def without_plugins(model: ModelProto) -> ModelProto:
    """The model, changed: attention gives its queries, an all-reduce its input.

    Shapes and all other nodes stay; inputs that nobody reads any more go.
    """
    graph = model.graph
    for node in graph.node:
        if node.op_type not in (ATTENTION_OP, ALL_REDUCE_OP):
            continue
        found = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        inputs, output = [node.input[0]], node.output[0]
        op = "Identity"
        if node.op_type == ATTENTION_OP:
            op, width = "Slice", found["num_qo_heads"] * found["head_dim"]
            for name, value in (("first", 0), ("end", width), ("axis", 1)):
                inputs.append(f"{output}/{name}")
                constant = helper.make_tensor(inputs[-1], onnx.TensorProto.INT64, [1], [value])
                graph.initializer.append(constant)
        node.CopyFrom(helper.make_node(op, inputs, [output], name=node.name))
    read = {name for node in graph.node for name in node.input}
    kept = [value for value in graph.input if value.name in read]
    weights = [tensor for tensor in graph.initializer if tensor.name in read]
    del graph.input[:], graph.initializer[:]
    graph.input.extend(kept)
    graph.initializer.extend(weights)
    return model
