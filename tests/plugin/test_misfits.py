"""Steps that are not those of the plugin's layer: named before anything is launched."""

from __future__ import annotations

import re

import pytest

from tests.kernels.support import ON_GPU
from tests.plugin.plugin_support import LAYER, prepared, run_host, write_step
from tests.plugin.test_aot import STEPS
from tests.plugin.test_launches import environment, known_kernels, step_of

pytestmark = pytest.mark.skipif(ON_GPU, reason="the driver is a fake; see test_on_gpu.py")


def refused(host, library, fake_cuda, folder, changes: dict[str, str], message: str) -> None:
    """The step `both`, with changes of its manifest (patterns of lines), ends unlaunched."""
    known_kernels(folder)
    step = step_of(STEPS["both"], "flat")
    write_step(step, folder, prepared(step))
    manifest = folder / "manifest.txt"
    text = manifest.read_text()
    for pattern, line in changes.items():
        text, count = re.subn(rf"^{pattern}$", line, text, flags=re.MULTILINE)
        assert count == 1, pattern
    manifest.write_text(text)
    with pytest.raises(AssertionError, match=message):
        run_host(host, library, "run", folder, env=environment(folder, fake_cuda, 90))
    assert "launch" not in (folder / "trace.txt").read_text()


ROW_INPUTS = ((5, "row_request"), (6, "row_position"), (7, "slot_mapping"))


@pytest.mark.parametrize("index,name", ROW_INPUTS)
def test_plans_of_fewer_rows(host, library, fake_cuda, tmp_path, index, name):
    rows = len(step_of(STEPS["both"], "flat").q)
    wrong = {rf"tensor {index} 1 .*": f"tensor {index} 1 {rows - 1} -"}
    message = rf"input {name}: expected at least {rows} rows, got \[{rows - 1}\]"
    refused(host, library, fake_cuda, tmp_path, wrong, message)


def test_a_layer_that_the_arenas_lack(host, library, fake_cuda, tmp_path):
    wrong = {f"field layer i32:{LAYER}": "field layer i32:9"}
    message = r"binding 7: expected layer 9 of 9 query and 3 KV heads.*got \d layers of 9 query"
    refused(host, library, fake_cuda, tmp_path, wrong, message)


def test_arenas_of_other_heads(host, library, fake_cuda, tmp_path):
    bound = "bind 1\nbound_num_qo_heads 8\nbound_num_kv_heads 2\nbound_head_dim 128"
    message = r"expected layer 1 of 9 query and 3 KV heads.*layers of 8 query and 2 KV"
    refused(host, library, fake_cuda, tmp_path, {"bind 1": bound}, message)


@pytest.mark.parametrize("flags", ["2 1", "1 2"])
def test_flags_are_0_or_1(host, library, fake_cuda, tmp_path, flags):
    """has runs, has decode."""
    wrong = {r"(tensor 17 6 0 \d+ \d+) \d \d (.*)": rf"\1 {flags} \2"}
    message = "input launch_dims: expected .*has runs, has decode"
    refused(host, library, fake_cuda, tmp_path, wrong, message)
