"""The plugin on a GPU against granikv.attention: outputs and arenas are equal bit for bit.

The test host drives the library's cubins through a whole life, eagerly and through a CUDA graph;
GpuAttention runs the same kernels just in time from the same inputs.
"""

from __future__ import annotations

import pytest
import torch

from granikv.attention.variants import LAYOUTS
from tests.kernels.support import ON_GPU, Row, Step
from tests.plugin.plugin_support import (
    LAYER,
    prepared,
    raw,
    read_out,
    run_host,
    run_rows,
    write_step,
)
from tests.plugin.test_aot import EVERYONE, STEPS, TOOLS

pytestmark = pytest.mark.skipif(not ON_GPU, reason="needs a GPU of a supported architecture")
SMALL, LARGE = ((9, 3), 64), ((32, 8), 128)
MANY = [Row([EVERYONE, TOOLS], 20 + 3 * i) for i in range(24)] + [Row([], 90)]
CROWD = [Row([EVERYONE], 20 + 3 * i) for i in range(24)]
MIXED = [*CROWD, Row([TOOLS], 17)]


def check(step: Step, folder, host, library, capture: bool, **changes: int) -> None:
    attention = prepared(step, capture)
    write_step(step, folder, attention, **changes)
    want = run_rows(step, attention).cpu()
    run_host(host, library, "run", folder)
    for name in ("out.bin", "out_graph.bin"):
        got = read_out(folder / name, step).view(want.shape)
        assert not torch.isnan(got).any(), f"{name}: rows were left unwritten"
        differs = (got != want).any(1).nonzero().flatten().tolist()
        assert not differs, f"{name}: rows {differs[:10]} of {len(want)} differ"
    for name, arena in (("k_out.bin", attention.k_arena), ("v_out.bin", attention.v_arena)):
        assert (folder / name).read_bytes() == raw(arena), name
    assert torch.isnan(attention.k_arena[1 - LAYER]).all()


@pytest.mark.parametrize("capture", [False, True], ids=["exact", "captured"])
@pytest.mark.parametrize("heads", [SMALL, LARGE], ids=["9x3x64", "32x8x128"])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_every_layout(layout, heads, capture, host, library, tmp_path):
    for name, rows in {**STEPS, "many": MANY, "mixed": MIXED}.items():
        folder = tmp_path / name
        folder.mkdir()
        step = Step(
            rows, *heads, torch.bfloat16, layout=LAYOUTS[layout], padding=2, num_sms=132,
            capacity=4096,
        )  # fmt: skip
        check(step, folder, host, library, capture)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
def test_other_types(dtype, host, library, tmp_path):
    for name in ("runs", "extend"):
        folder = tmp_path / name
        folder.mkdir()
        step = Step(STEPS[name], *SMALL, dtype, layout=LAYOUTS["mid"], padding=1, num_sms=132)
        check(step, folder, host, library, False)


def test_a_workspace_may_begin_anywhere(host, library, tmp_path):
    step = Step(STEPS["both"], *LARGE, torch.bfloat16, layout=LAYOUTS["large"], num_sms=132)
    check(step, tmp_path, host, library, False, workspace_offset=8)


def test_repeated_runs_are_equal(host, library, tmp_path):
    """Dependent launches and two streams: any race would show as a difference between runs."""
    for i in range(8):
        folder = tmp_path / str(i)
        folder.mkdir()
        layout = LAYOUTS["small" if i % 2 else "large"]
        step = Step(MANY, *LARGE, torch.bfloat16, layout=layout, num_sms=132, capacity=4096)
        check(step, folder, host, library, True)
