"""The kernels of the large layout compile for sm_90 without a GPU, within their register budget.

A HOT block of 168 registers and one-warp COLD blocks of 20 KB share an SM; a spill or a larger
block would cost that overlap without failing anywhere else.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from granikv.attention.kernels import cold, hot, merge
from granikv.attention.variants import LAYOUTS, AttentionShape

SHAPE = AttentionShape(32, 8, 128, 2)
HEADS = {"G": 4, "HKV": 8, "D": 128, "BLOCK_D": 128, "PDL": False, "INTERPRET": False}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
KV_POINTERS = ("q_ptr", "k_ptr", "v_ptr", "out_ptr")


def compiled(function, constants: dict, tile, folder: Path) -> tuple[int, int, int]:
    """(registers, stack bytes, shared bytes) of a kernel for sm_90, pointers 16-byte aligned."""
    signature, aligned = {}, {}
    for index, name in enumerate(function.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_desc"):
            signature[name] = f"tensordesc<bf16[{constants['BLOCK_N']}, {SHAPE.block_d}]>"
        elif name.endswith("_ptr"):
            kind = (
                "bf16" if name in KV_POINTERS else "fp32" if name in ("o_ptr", "lse_ptr") else "i32"
            )
            signature[name] = f"*{kind}"
            aligned[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name == "scale_log2" else "i32"
    values = {(function.arg_names.index(name),): value for name, value in constants.items()}
    options = {
        "num_warps": tile.num_warps,
        "num_stages": getattr(tile, "num_stages", 3),
        "maxnreg": getattr(tile, "max_registers", None),
    }
    source = ASTSource(function, signature, values, aligned)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    usage = subprocess.run(
        [CUOBJDUMP, "-res-usage", cubin], capture_output=True, text=True, check=True
    ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return int(found[1]), int(found[2]), kernel.metadata.shared


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="needs Triton's NVIDIA tools")
def test_large_layout_shares_an_sm(tmp_path):
    layout = LAYOUTS["large"]
    tile = layout.hot
    constants = HEADS | {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "TAIL_N": 32,
        "PREFETCH": tile.prefetch_tokens,
        "ELEMENT_BYTES": 2,
        "TMA": True,
    }
    registers, stack, hot_shared = compiled(hot.hot_kernel, constants, tile, tmp_path)
    assert (registers <= 168, stack) == (True, 0), (registers, stack)
    constants = HEADS | {"BLOCK_N": layout.cold.block_n, "RUN_STAGES": 0}
    cold_registers, stack, cold_shared = compiled(
        cold.cold_kernel, constants, layout.cold, tmp_path
    )
    assert stack == 0
    left = 65536 - registers * 32 * tile.num_warps
    assert left // (cold_registers * 32 * layout.cold.num_warps) >= 4, cold_registers
    assert hot_shared + 4 * cold_shared + 5 * 1024 <= 228 * 1024, (hot_shared, cold_shared)


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="needs Triton's NVIDIA tools")
def test_merge_does_not_spill(tmp_path):
    tile = LAYOUTS["large"].merge
    constants = {"HQ": 32, "D": 128, "BLOCK_D": 128, "PDL": False}
    constants |= {"BLOCK_H": tile.block_h, "BLOCK_P": tile.block_p}
    assert compiled(merge.merge_kernel, constants, tile, tmp_path)[1] == 0
