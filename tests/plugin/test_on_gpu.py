"""The plugin on a GPU against granikv.attention: outputs and arenas are equal bit for bit, and the
output is the torch twin's within the type's tolerance.

The test host drives the library's cubins through a whole life, eagerly and through a CUDA graph;
GpuAttention runs the same kernels just in time from the same inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from granikv.attention.variants import LAYOUTS
from granikv.core import Count
from tests.kernels.support import ON_GPU, Row, Step, compare
from tests.plugin.plugin_support import (
    LAYER,
    prepared,
    raw,
    read_out,
    run_host,
    run_rows,
    twin,
    whole_blocks,
    write_step,
    zero_rows,
)
from tests.plugin.test_aot import EVERYONE, STEPS, TOOLS

pytestmark = pytest.mark.skipif(not ON_GPU, reason="needs a GPU of a supported architecture")
SMALL, LARGE = ((9, 3), 64), ((32, 8), 128)
MANY = [Row([EVERYONE, TOOLS], 20 + 3 * i) for i in range(24)] + [Row([], 90)]
CROWD = [Row([EVERYONE], 20 + 3 * i) for i in range(24)]
MIXED = [*CROWD, Row([TOOLS], 17)]
LONG = (0, 8, 450)
# more than one tile of 128 stacked rows, rows that see a part of an item or nothing of it
DEEP = [Row([LONG], 5 + i) for i in range(35)] + [Row([LONG], 0, seen=n) for n in (1, 129, 300)]


@dataclass
class Wanted:
    """Of GpuAttention: the output [rows, Hq * D], and the bytes of all layers' K and V."""

    out: torch.Tensor
    k: bytes
    v: bytes


def write(step: Step, folder: Path, capture: bool = False, **changes: int) -> Wanted:
    """The step's files for the host, and what they must give."""
    folder.mkdir()
    attention = prepared(step, capture)
    write_step(step, folder, attention, **changes)
    out = run_rows(step, attention).cpu()
    assert torch.isnan(attention.k_arena[1 - LAYER]).all()
    return Wanted(out, raw(attention.k_arena), raw(attention.v_arena))


def compare_files(step: Step, folder: Path, want: Wanted, files: tuple[str, ...]) -> None:
    """Outputs and arenas bit for bit; padded rows are 0."""
    name, total = folder.name, int(step.plan.counts[Count.NUM_ROWS])
    for file in files:
        got = read_out(folder / file, step).view(want.out.shape)
        assert not torch.isnan(got).any(), f"{name}, {file}: rows were left unwritten"
        differs = (got != want.out).any(1).nonzero().flatten().tolist()
        assert not differs, f"{name}, {file}: rows {differs[:10]} of {len(got)} differ"
        assert not got[total:].any(), f"{name}, {file}: padded rows are not 0"
    assert (folder / "k_out.bin").read_bytes() == want.k, f"{name}: K differs"
    assert (folder / "v_out.bin").read_bytes() == want.v, f"{name}: V differs"


def compare_with_twin(step: Step, want: Wanted) -> None:
    """want: equal to the plugin's output."""
    expected = twin(step)
    compare(want.out[: len(expected)], expected, step.dtype)


def check(steps: dict[str, Step], folder, host, library, capture=False, **changes: int) -> None:
    """All steps in one process of the host, since loading kernels takes most of its time."""
    wanted = {name: write(step, folder / name, capture, **changes) for name, step in steps.items()}
    run_host(host, library, "run", *(folder / name for name in steps))
    for name, want in wanted.items():
        compare_files(steps[name], folder / name, want, ("out.bin", "out_graph.bin"))
        if not capture:  # the oracle takes longer than the GPU; its values are the same
            compare_with_twin(steps[name], want)


def step_of(rows: list[Row], heads, layout: str, dtype=torch.bfloat16, padding: int = 2) -> Step:
    made = LAYOUTS[layout]
    return Step(
        whole_blocks(rows, made), *heads, dtype, layout=made, padding=padding, num_sms=132,
        capacity=4096,
    )  # fmt: skip


@pytest.mark.parametrize("capture", [False, True], ids=["exact", "captured"])
@pytest.mark.parametrize("heads", [SMALL, LARGE], ids=["9x3x64", "32x8x128"])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_every_layout(layout, heads, capture, host, library, tmp_path):
    """On compute capability 9.0 the Gluon kernels among them, in layouts with hot_gluon."""
    rows = {**STEPS, "many": MANY, "mixed": MIXED, "deep": DEEP}
    steps = {name: step_of(rows[name], heads, layout) for name in rows}
    if torch.cuda.get_device_capability() == (9, 0) and heads is LARGE:
        attention = prepared(steps["deep"])
        assert attention.gluon and attention.cold_grid
        assert bool(attention.hot_grid) == (layout != "flat")  # where each row reads HOT for itself
    check(steps, tmp_path, host, library, capture)


@pytest.mark.parametrize(
    ("heads", "layouts"),
    [
        ((28, 4), ("small", "even")),  # groups of 7, 5, 8 and 2
        ((40, 8), ("large", "dense")),
        ((64, 8), ("even", "many")),
        ((16, 8), ("small", "dense")),
    ],
    ids=str,
)
def test_other_heads(heads, layouts, host, library, tmp_path):
    """Of 128, in bf16. On compute capability 9.0 with Gluon kernels in `even` and `dense`."""
    rows = {**STEPS, "many": MANY, "deep": DEEP}
    steps = {
        f"{name}-{layout}": step_of(rows[name], (heads, 128), layout)
        for layout in layouts
        for name in rows
    }
    check(steps, tmp_path, host, library)


@pytest.mark.parametrize("heads", [SMALL, LARGE], ids=["9x3x64", "32x8x128"])
def test_one_life_of_several_shapes_and_a_clone(heads, host, library, tmp_path):
    """One plugin, a context of it and one of its clone; among the steps one of padding alone, and
    one whose qkv has no rows."""
    steps = {
        "two-streams": step_of(STEPS["both"], heads, "mid"),
        "more-rows": step_of(MANY, heads, "large", padding=7),
        "padding": step_of([], heads, "mid", padding=3),
        "none": step_of(STEPS["hot"], heads, "mid"),
        "extend": step_of(STEPS["extend"], heads, "small", padding=0),
        "two-streams-again": step_of(STEPS["both"], heads, "mid"),
    }
    wanted = {name: write(step, tmp_path / name) for name, step in steps.items()}
    zero_rows(tmp_path / "none")
    run_host(host, library, "life", *(tmp_path / name for name in steps))
    for name, want in wanted.items():
        if name != "none":
            compare_files(steps[name], tmp_path / name, want, ("out.bin", "out_clone.bin"))
            compare_with_twin(steps[name], want)
    for file in ("out.bin", "out_clone.bin"):
        assert (tmp_path / "none" / file).read_bytes() == b""
    for arena in ("k", "v"):
        given, left = (tmp_path / "none" / f"{arena}{x}.bin" for x in ("", "_out"))
        assert given.read_bytes() == left.read_bytes()


@pytest.mark.parametrize(
    ("dtype", "heads"),
    [(torch.float16, SMALL), (torch.float32, SMALL), (torch.float16, LARGE)],
    ids=["fp16", "fp32", "fp16-wide"],
)
def test_other_types(dtype, heads, host, library, tmp_path):
    """Without the Gluon kernels, also in the layouts that have them."""
    steps = {
        f"{name}-{layout}": step_of(STEPS[name], heads, layout, dtype)
        for name in ("runs", "extend")
        for layout in ("mid", "small", "dense", "even")
    }
    check(steps, tmp_path, host, library)


def test_cold_blocks_enough_for_the_gluon_kernel(host, library, tmp_path):
    """On compute capability 9.0; elsewhere the portable kernel serves them."""
    step = step_of([Row([EVERYONE], 9 + i % 30) for i in range(140)], LARGE, "large")
    attention = prepared(step)
    blocks_per_sm = LAYOUTS["large"].gluon_blocks_per_sm
    assert blocks_per_sm is not None
    assert attention.cold_grid * LARGE[0][1] >= blocks_per_sm * attention.num_sms
    check({"crowd": step}, tmp_path, host, library)


def test_a_workspace_may_begin_anywhere(host, library, tmp_path):
    steps = {"both": step_of(STEPS["both"], LARGE, "large")}
    check(steps, tmp_path, host, library, workspace_offset=8)


def test_repeated_runs_are_equal(host, library, tmp_path):
    """Dependent launches and two streams: any race would show as a difference between runs."""
    layouts = ("large", "small", "dense", "even")
    steps = {str(i): step_of(MANY, LARGE, layouts[i % 4]) for i in range(16)}
    check(steps, tmp_path, host, library, True)
