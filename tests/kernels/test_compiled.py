"""The kernels of the large layout compile for sm_90 without a GPU, within their register budget.

A HOT block of 168 registers and one-warp COLD blocks of 20 KB share an SM; a spill or a larger
block would cost that overlap without failing anywhere else. The Gluon COLD kernel is held to five.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from granikv.attention.kernels.append import append_build
from granikv.attention.kernels.build import KernelBuild
from granikv.attention.kernels.cold import cold_build
from granikv.attention.kernels.cold_gluon import cold_gluon_build
from granikv.attention.kernels.extend import extend_build
from granikv.attention.kernels.hot import hot_build
from granikv.attention.kernels.hot_gluon import hot_gluon_build
from granikv.attention.kernels.merge import merge_build
from granikv.attention.kernels.small import small_build
from granikv.attention.variants import FP8_LAYOUTS, LAYOUTS, AttentionShape, extend_tile
from granikv.models import fused_kernels, rank_sums

SHAPE = AttentionShape(32, 8, 128, 2)
FP8_SHAPE = AttentionShape(32, 8, 128, 2, fp8_kv=True)
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def usage(source: ASTSource, options: dict, folder: Path) -> tuple[int, int, int]:
    """(registers, stack bytes, shared bytes) of a kernel for sm_90."""
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    printed = subprocess.run(
        [CUOBJDUMP, "-res-usage", cubin], capture_output=True, text=True, check=True
    ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", printed)
    assert found, printed
    return int(found[1]), int(found[2]), kernel.metadata.shared


def compiled(build: KernelBuild, folder: Path) -> tuple[int, int, int]:
    """(registers, stack bytes, shared bytes) of a kernel for sm_90."""
    kind = GluonASTSource if build.kernel.is_gluon() else ASTSource
    source = kind(
        build.kernel, build.signature("bf16"), build.indexed_constants(), build.attributes()
    )
    return usage(source, dict(build.options), folder)


def spills_in_loops(cubin: Path) -> list[str]:
    """Accesses of local memory from the first matrix instruction on to the last."""
    printed = subprocess.run(
        [CUOBJDUMP, "-sass", cubin], capture_output=True, text=True, check=True
    )
    lines = printed.stdout.splitlines()
    products = [i for i, line in enumerate(lines) if re.search(r"\b[HQ]G?MMA\.", line)]
    assert products, "no matrix instruction found"
    return [x for x in lines[products[0] : products[-1]] if re.search(r"\b(STL|LDL)\b", x)]


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="needs Triton's NVIDIA tools")
def test_large_layout_shares_an_sm(tmp_path):
    layout = LAYOUTS["large"]
    tile = layout.hot
    registers, stack, hot_shared = compiled(hot_build(SHAPE, tile, True, False), tmp_path)
    assert (registers <= 168, stack) == (True, 0), (registers, stack)
    cold_registers, stack, cold_shared = compiled(
        cold_build(SHAPE, layout.cold, False, False), tmp_path
    )
    assert stack == 0
    left = 65536 - registers * 32 * tile.num_warps
    assert left // (cold_registers * 32 * layout.cold.num_warps) >= 4, cold_registers
    assert hot_shared + 4 * cold_shared + 5 * 1024 <= 228 * 1024, (hot_shared, cold_shared)


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="needs Triton's NVIDIA tools")
def test_five_gluon_cold_blocks_share_an_sm_with_hot(tmp_path):
    tile = LAYOUTS["large"].hot
    registers, _, hot_shared = compiled(hot_build(SHAPE, tile, True, False), tmp_path)
    cold_registers, stack, cold_shared = compiled(cold_gluon_build(SHAPE), tmp_path)
    assert stack == 0
    left = 65536 - registers * 32 * tile.num_warps
    assert left // (cold_registers * 32) >= 5, cold_registers
    assert hot_shared + 5 * cold_shared + 6 * 1024 <= 228 * 1024, (hot_shared, cold_shared)


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="needs Triton's NVIDIA tools")
@pytest.mark.parametrize("name", ["dense", "even"])
def test_gluon_hot_leaves_each_quarter_sm_a_cold_warp(name, tmp_path):
    """Registers belong to quarters of an SM: three warps of HOT and one of COLD in each."""
    layout = LAYOUTS[name]
    registers, stack, hot_shared = compiled(hot_gluon_build(SHAPE, layout.hot_gluon), tmp_path)
    assert (registers, stack <= 64) == (layout.hot_gluon.launch_registers, True), (registers, stack)
    build = cold_gluon_build(SHAPE, layout.gluon_registers)
    cold_registers, stack, cold_shared = compiled(build, tmp_path)
    assert stack == 0
    assert 3 * registers + cold_registers <= 65536 // 4 // 32, (registers, cold_registers)
    assert hot_shared + 4 * cold_shared + 5 * 1024 <= 228 * 1024, (hot_shared, cold_shared)


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="needs Triton's NVIDIA tools")
@pytest.mark.parametrize("heads", [(5, 1), (8, 1), (16, 1)])
def test_gluon_cold_compiles_for_every_group_size(tmp_path, heads):
    compiled(cold_gluon_build(AttentionShape(*heads, 128, 2)), tmp_path)


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="needs Triton's NVIDIA tools")
def test_merge_does_not_spill(tmp_path):
    build = merge_build(SHAPE, LAYOUTS["large"].merge, False)
    assert compiled(build, tmp_path)[1] == 0


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="needs Triton's NVIDIA tools")
@pytest.mark.parametrize("window", [0, 4096])
def test_extend_does_not_spill(window, tmp_path):
    build = extend_build(SHAPE, extend_tile(SHAPE), window)
    assert compiled(build, tmp_path)[1] == 0


def fp8_builds() -> dict[str, KernelBuild]:
    shape, layouts = FP8_SHAPE, FP8_LAYOUTS
    small = layouts["small"]
    return {
        "append": append_build(shape, True, True),
        "groups": hot_build(shape, layouts["groups"].hot, True, False),
        "large": hot_build(shape, layouts["large"].hot, True, False),
        "many": hot_build(shape, layouts["many"].hot, False, False),
        "cold slots": cold_build(shape, layouts["flat"].cold, False, True),
        "cold beside groups": cold_build(shape, layouts["groups"].cold, False, False),
        "cold runs": cold_build(shape, layouts["short"].cold, True, False),
        "small": small_build(shape, small.hot, small.cold.block_n, False, True),
        "merge": merge_build(shape, small.merge, True),
        "extend": extend_build(shape, extend_tile(shape)),
        "extend window": extend_build(shape, extend_tile(shape), 4096),
    }


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="needs Triton's NVIDIA tools")
@pytest.mark.parametrize("name", fp8_builds())
def test_fp8_kernels_do_not_spill_in_their_loops(name, tmp_path):
    """Making a pair of e4m3 of the queries wants more registers than the loops do."""
    _, stack, shared = compiled(fp8_builds()[name], tmp_path)
    assert stack == 0 or not spills_in_loops(tmp_path / "kernel.cubin")
    assert shared <= FP8_SHAPE.shared_memory_bytes


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="needs Triton's NVIDIA tools")
@pytest.mark.parametrize("dim", [16, 32])
def test_fp8_kernels_compile_for_the_heads_of_tiny_models(dim, tmp_path):
    """FP8's product sums 32 columns at a time."""
    shape = AttentionShape(4, 2, dim, 2, fp8_kv=True)
    tile = FP8_LAYOUTS["groups"].hot
    assert tile.takes_pairs(shape) == (dim == 32)
    compiled(hot_build(shape, tile, True, False), tmp_path)
    compiled(extend_build(shape, extend_tile(shape)), tmp_path)


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="needs Triton's NVIDIA tools")
@pytest.mark.parametrize("width", [14336, 28672])
def test_mlp_rows_become_fp8_in_registers(width, tmp_path):
    """Of Llama-3.1-8B and, the widest, of 70B: a row is one block's."""
    kernel, block = fused_kernels.silu_mul_kernel, triton.next_power_of_2(width)
    pointers = {"gate_up_ptr": "*bf16", "out_ptr": "*fp8e4nv", "scales_ptr": "*fp32"}
    constants = {
        "fixed_scale": None, "fixed_inverse": None, "F": width, "BLOCK_F": block, "FP8": True,
        "PDL": True, "INTERPRET": False,
    }  # fmt: skip
    source = ASTSource(
        kernel,
        {name: pointers.get(name, "constexpr") for name in kernel.arg_names},
        {(kernel.arg_names.index(name),): value for name, value in constants.items()},
    )
    options = {"num_warps": fused_kernels.silu_warps(block), "launch_pdl": True}
    assert usage(source, options, tmp_path)[1] == 0


def test_rows_travel_between_gpus_in_vectors():
    """Behind an address of unknown alignment every number would be a store of its own."""
    kernel = rank_sums.rank_sum_norm_kernel
    pointers = dict.fromkeys(
        ["x_ptr", "weight_ptr", "normed_ptr", "total_ptr", "scales_ptr"], "*bf16"
    )
    types: dict = pointers | {
        "delta_ptr": "*fp32", "places": ("*i16", "*i16"), "eps": "fp32", "delta_stride": "i32",
        "part_stride": "i32",
    }  # fmt: skip
    constants = {
        "fixed_scale": None, "fixed_inverse": None, "TURN": 1, "RANK": 0, "RANKS": 2,
        "MAX_ROWS": 256, "N": 5120, "BLOCK_N": 8192, "PARTS": 2, "FP8": False, "PDL": True,
        "INTERPRET": False,
    }  # fmt: skip
    names = kernel.arg_names
    aligned = [["tt.divisibility", 16]]
    attributes = {(i,): aligned for i, n in enumerate(names) if n.endswith(("_ptr", "_stride"))}
    attributes |= {(names.index("places"), rank): aligned for rank in range(2)}
    source = ASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        attributes,
    )
    options = {"num_warps": 8, "launch_pdl": True}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    assert "ld.volatile.global.v4.b32" in ptx and "st.global.v4.b32" in ptx
    assert not re.search(r"(ld\.volatile|st)\.global\.b(8|16|32) ", ptx)
