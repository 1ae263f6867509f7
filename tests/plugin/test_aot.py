"""Ahead-of-time kernels are those of the JIT: every launch has its cubin, and PTX is the same."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import create_function_from_signature

from granikv.attention.variants import FP8_LAYOUTS, LAYOUTS
from granikv.config import ModelConfig
from granikv.engines.sharding import Shard
from granikv.errors import InvalidArgument
from tests.kernels.support import ON_GPU, Row, Step
from tests.plugin.conftest import CACHE
from tests.plugin.plugin_support import Launch, record, whole_blocks
from trtllm_plugin import aot, header
from trtllm_plugin.table import (
    ARCHITECTURES,
    MODELS,
    Heads,
    heads_of,
    key_of,
    program,
)

ROOT = Path(__file__).resolve().parents[2]
EVERYONE, TOOLS = (0, 8, 150), (1, 170, 61)
HOT_AND_COLD = [Row([EVERYONE, TOOLS], 37), Row([EVERYONE], 5), Row([], 64)]
STEPS = {
    "both": HOT_AND_COLD,
    "runs": [*HOT_AND_COLD, Row([EVERYONE], 40, flat=True)],
    "hot": [Row([EVERYONE], 0), Row([EVERYONE], 0)],
    "cold": [Row([], 50), Row([], 64)],
    "extend": [*HOT_AND_COLD, Row([EVERYONE], 30, num_new=20)],
}
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SMALL = Heads(9, 3, 64, "bf16")
GLUON = Heads(8, 2, 128, "bf16")  # on 9.0; their items in fp16 have the portable kernels
pytestmark = pytest.mark.skipif(ON_GPU, reason="imagines GPUs; on one, see test_on_gpu.py")


def step_of(name: str, layout: str, heads: Heads) -> Step:
    made = LAYOUTS[layout]
    return Step(
        whole_blocks(STEPS[name], made),
        (heads.num_qo_heads, heads.num_kv_heads),
        heads.head_dim,
        TYPES[heads.element],
        layout=made,
        padding=2,
    )


def as_jit_sees(launch: Launch, capability: int):
    """(ASTSource, options) that Triton's JIT derives from the launch's arguments."""
    kernel = launch.build.kernel
    backend = make_backend(GPUTarget("cuda", capability, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    named = {
        **launch.build.constants,
        **launch.build.options,
        "debug": kernel.debug or knobs.runtime.debug,
        "instrumentation_mode": knobs.compilation.instrumentation_mode,
    }
    bound, specialization, options = bind(*launch.arguments.values(), **named)
    options, signature, constants, attributes = kernel._pack_args(
        backend, named, bound, specialization, options
    )
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    return kind(kernel, signature, constants, attributes), options.__dict__


@pytest.mark.parametrize(
    ("layout", "heads", "capability"),
    [
        *((name, SMALL, capability) for name in LAYOUTS for capability in (80, 90)),
        *((name, GLUON, 90) for name in ("large", "dense", "even")),
        *((name, replace(GLUON, element="fp16"), 90) for name in ("dense", "even")),
    ],
    ids=str,
)
def test_every_launch_has_a_cubin_of_its_own_specialisation(layout, heads, capability, monkeypatch):
    made = program(heads, capability)
    known = {job.key: job for job in made.jobs()}
    for name in STEPS:
        launches = record(step_of(name, layout, heads), monkeypatch, capability=capability)
        for launch in launches:
            key = key_of(launch.build, heads.element, capability)
            assert key in known, f"{name}: {launch.build}"
            build = known[key].build()
            source, _ = as_jit_sees(launch, capability)
            assert source.signature == build.signature(heads.element)
            assert source.constants == build.indexed_constants()
            assert source.attrs == build.attributes()


def chosen(launches: list[Launch]) -> dict[str, Launch]:
    """One launch per kernel, HOT with and without descriptors."""
    return {f"{x.build.name}, TMA={x.build.constants.get('TMA', '-')}": x for x in launches}


def sections(cubin: bytes) -> dict[str, bytes]:
    """Contents of an ELF file's sections by name, without notes: they have temporary files' names."""
    (first,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, first + i * size) for i in range(count)]
    texts = cubin[headers[names][4] :]
    found = {
        texts[name : texts.index(b"\0", name)].decode(): cubin[at : at + length]
        for name, kind, _, _, at, length in headers
        if kind != 8  # SHT_NOBITS: no bytes in the file
    }
    return {name: content for name, content in found.items() if not name.startswith(".note")}


@pytest.mark.parametrize("capability", [80, 90])
def test_the_librarys_cubins_are_the_jits(capability, library, monkeypatch, tmp_path):
    """Machine code, constants and attributes of each kernel; of the first one the PTX as well."""
    launches = []
    for layout in ("small", "large", "many") if capability == 90 else ("large",):
        launches += record(step_of("extend", layout, SMALL), monkeypatch, capability=capability)
    picked = chosen(launches)
    assert len(picked) == (7 if capability == 90 else 5), sorted(picked)
    if capability == 90:
        beside = [
            x
            for x in record(step_of("both", "dense", GLUON), monkeypatch)
            if x.build.kernel.is_gluon()
        ]
        assert {x.build.name for x in beside} == {"hot_gluon_kernel", "cold_gluon_kernel"}
        picked |= chosen(beside)
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")  # as aot.py compiles
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "jit"))
    shipped = CACHE / "kernels" / aot.source_hash()
    for index, (name, launch) in enumerate(picked.items()):
        source, options = as_jit_sees(launch, capability)
        jit = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        key = key_of(launch.build, "bf16", capability)
        made = sections(jit.asm["cubin"])
        assert made == sections((shipped / f"{key}.cubin").read_bytes()), name
        assert len(made[f".text.{launch.build.name}"]) > 500
        assert f".target sm_{capability}" in jit.asm["ptx"]
        if index == 0:
            monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "aot"))
            jobs = {job.key: job for job in program(SMALL, capability).jobs()}
            assert aot.compile_job(jobs[key]).asm["ptx"] == jit.asm["ptx"], name
            monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "jit"))


@pytest.mark.parametrize("capability", [100, 103, 121])
def test_kernels_compile_for_later_architectures(capability, monkeypatch, tmp_path):
    """The one that an architecture changes most: 128 stacked rows with descriptors.

    `describe` compares its parameters and shared memory with what the plugin knows.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    made = program(Heads(32, 8, 128, "bf16"), capability)
    job = made.layouts[list(LAYOUTS).index("large")].hot[0]
    assert job is not None
    compiled = aot.compile_job(job)
    described = aot.describe(job, compiled)
    assert f".target sm_{capability}" in compiled.asm["ptx"]
    assert described["tensor_map"] is not None and described["scratch_bytes"] == 0


@pytest.mark.parametrize("layout", ["small", "large", "many"])
def test_fp8_launches_are_what_their_builds_say(layout, monkeypatch):
    """No cubins are made for FP8 KV; this says that what is compiled in tests is what the JIT runs."""
    step = Step(
        STEPS["extend"], (4, 2), 64, torch.bfloat16, layout=FP8_LAYOUTS[layout],
        kv_scales=(0.5, 0.25),
    )  # fmt: skip
    launches = record(step, monkeypatch, capability=90)
    assert {"append_kernel", "merge_kernel", "extend_kernel"} < {x.build.name for x in launches}
    for launch in launches:
        source, _ = as_jit_sees(launch, 90)
        assert source.signature == launch.build.signature("bf16")
        assert source.constants == launch.build.indexed_constants()
        assert source.attrs == launch.build.attributes()


def test_the_table_covers_models_and_splits():
    found = heads_of(MODELS)
    assert {"llama-3.1-8b", "qwen2.5-7b", "qwen3-8b", "mistral-7b", "smollm2-135m"} <= set(MODELS)
    for tp in (1, 2, 4):
        assert Heads(32 // tp, 8 // tp, 128, "bf16") in found
        assert Heads(28 // tp, 4 // tp, 128, "fp16") in found
    assert Heads(9, 3, 64, "fp32") in found
    assert len(set(found)) == len(found)
    for heads in found:
        for capability in ARCHITECTURES:
            assert len(program(heads, capability).layouts) == len(LAYOUTS)


def rank_heads(model: str, tp: int) -> tuple[int, int]:
    """Query and KV heads of a rank, as engines are cut. Raises InvalidArgument."""
    qo, kv, dim, _ = MODELS[model]
    config = ModelConfig("LlamaForCausalLM", 1, 64, 16 * 7, qo, kv, dim, 32, 32)
    own = Shard(config, tp).rank_config
    return own.num_qo_heads, own.num_kv_heads


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_every_model_has_kernels_at_every_tp_that_cuts_it(tp):
    """With more ranks than KV heads, each of which then has one, too."""
    found, refused = heads_of(MODELS), set()
    for model, (qo, _, dim, types) in MODELS.items():
        try:
            heads = rank_heads(model, tp)
        except InvalidArgument:
            assert qo % tp, model
            refused.add(model)
            continue
        for element in types:
            assert Heads(*heads, dim, element) in found, (model, tp)
            assert Heads(*heads, dim, element) in heads_of([model], [element], [tp])
    wanted = {
        1: set(),
        2: {"smollm2-135m"},
        4: {"smollm2-135m", "qwen2.5-0.5b"},
        8: {"smollm2-135m", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b"},
    }
    assert refused == wanted[tp]


def test_replicated_kv_heads_are_in_the_table():
    assert heads_of(["llama-3.1-8b"], ["bf16"]) == [
        Heads(qo, kv, 128, "bf16") for qo, kv in ((32, 8), (16, 4), (8, 2), (4, 1), (2, 1))
    ]
    assert Heads(2, 1, 128, "fp16") in heads_of(["qwen2.5-3b"], None, [8])  # of 16 and 2
    assert rank_heads("qwen2.5-3b", 8) == (2, 1) and rank_heads("llama-3.1-8b", 16) == (2, 1)


def test_a_build_may_be_for_some_tp_sizes():
    made = header.programs_for("llama-3.1-8b", "bf16", "90", "1,8")
    assert [p.heads.num_qo_heads for p in made] == [32, 4]
    for tp, got in (("3", 3), ("two", 0), ("1,32", 32)):
        with pytest.raises(InvalidArgument, match=f"tp: expected one of 1, 2, .*, got {got}"):
            header.programs_for("llama-3.1-8b", "bf16", "90", tp)
    with pytest.raises(InvalidArgument, match="smollm2-135m.*at a tp of .2. that cuts it"):
        header.programs_for("smollm2-135m", "all", "90", "2")


@pytest.mark.parametrize(
    ("heads", "capability", "taken"),
    [
        (Heads(32, 8, 128, "bf16"), 90, True),
        (Heads(32, 8, 128, "fp16"), 90, False),  # GpuAttention takes them for bf16 only
        (Heads(32, 8, 64, "bf16"), 90, False),
        (Heads(32, 8, 128, "bf16"), 100, False),
    ],
)
def test_gluon_kernels_are_where_gpu_attention_takes_them(heads, capability, taken):
    made = program(heads, capability)
    cold = {part.layout.name for part in made.layouts if part.cold_gluon}
    hot = {part.layout.name for part in made.layouts if part.hot_gluon}
    assert (cold, hot) == (
        ({"large", "dense", "even"}, {"dense", "even"}) if taken else (set(), set())
    )
    for part in made.layouts:
        assert (part.hot == [None, None]) == (part.layout.one_launch or part.layout.name in hot)
    assert any(job.build().kernel.is_gluon() for job in made.jobs()) == taken


def test_unknown_names_are_refused_with_what_is_known():
    with pytest.raises(InvalidArgument, match="models: expected one of .*smollm2-135m.*'gpt-2'"):
        header.programs_for("gpt-2", "all", "90")
    with pytest.raises(InvalidArgument, match=r"arch: expected one of \[80, .*\], got 70"):
        header.programs_for("llama-3.1-8b", "bf16", "70")
    with pytest.raises(InvalidArgument, match="elements: expected a type of"):
        header.programs_for("llama-3.1-8b", "fp32", "90")


def test_triton_is_pinned_to_what_the_makefile_installs():
    pinned = re.search(r"^TRITON \?= triton==(\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert pinned is not None and pinned[1] == aot.PINNED_TRITON


def test_parameters_are_read_from_ptx():
    ptx = """.visible .entry hot_kernel(
	.param .u64 .ptr .global .align 1 hot_kernel_param_0,
	.param .align 64 .b8 hot_kernel_param_1[128],
	.param .u32 hot_kernel_param_2,
	.param .f32 hot_kernel_param_3
)
"""
    assert aot.ptx_sizes(ptx) == [8, 128, 4, 4]


def compiled(job, **changes) -> SimpleNamespace:
    """In the place of Triton's CompiledKernel: what `describe` reads of the job's."""
    meta = {
        "name": "append_kernel", "shared": 0, "num_warps": 4, "num_ctas": 1,
        "profile_scratch_size": 0, "global_scratch_size": 0, "global_scratch_align": 1,
    }  # fmt: skip
    kinds = {8: ".u64", 4: ".u32"}
    sizes = [aot.SIZES[kind] for _, kind in aot.parameters(job, [])]
    declared = ",\n".join(f"\t.param {kinds[n]} param_{i}" for i, n in enumerate(sizes))
    ptx = f".visible .entry append_kernel(\n{declared}\n)\n"
    return SimpleNamespace(metadata=SimpleNamespace(**meta | changes), asm={"ptx": ptx})


@pytest.mark.parametrize("capability", [80, 86, 90])
def test_a_kernel_may_fill_its_architectures_shared_memory_and_no_more(capability):
    job, limit = program(SMALL, capability).append, ARCHITECTURES[capability]
    assert aot.describe(job, compiled(job, shared=limit))["shared_bytes"] == limit
    with pytest.raises(
        aot.CompileError, match=f"{limit + 1} bytes of shared memory, limit {limit}"
    ):
        aot.describe(job, compiled(job, shared=limit + 1))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_ctas": 2},
        {"profile_scratch_size": 16},
        {"tensordesc_meta": [{"swizzle": 3}, {"swizzle": 2}]},
    ],
    ids=str,
)
def test_what_the_plugin_cannot_launch_is_refused(changes):
    job = program(SMALL, 90).append
    with pytest.raises(aot.CompileError, match="a cluster, a profile scratch or maps that differ"):
        aot.describe(job, compiled(job, **changes))


def test_other_parameters_than_declared_are_refused():
    job = program(SMALL, 90).append
    made = compiled(job)
    made.asm["ptx"] = made.asm["ptx"].replace(".u64", ".u32", 1)
    with pytest.raises(aot.CompileError, match="parameters are .4, .* bytes, expected .8, "):
        aot.describe(job, made)
