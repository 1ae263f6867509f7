"""The compiled CPU kernel against float64, its build and what happens without a compiler."""

import ctypes
import logging
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from granikv import native
from granikv.models.layers import RotaryTable
from granikv.native import Heads, Rows, RowShape, Span, Spans, build
from granikv.processes import process_state

needs_compiler = pytest.mark.skipif(
    native.library() is None, reason="no C++ compiler found: install g++ to build the CPU kernel"
)


@pytest.fixture
def fresh_library(monkeypatch, tmp_path):
    """library() starts anew, with an empty home; the process's own kernel stays loaded."""
    monkeypatch.setenv("HOME", str(tmp_path))
    native.library.cache_clear()
    yield tmp_path
    native.library.cache_clear()


def state(q, k, v, scale):
    """float64 (o, natural lse) of q [D] over k, v [N, D]."""
    scores = k.double() @ q.double() * scale
    return scores.softmax(0) @ v.double(), torch.logsumexp(scores, 0)


@needs_compiler
@pytest.mark.parametrize(
    "num_kv_heads, group, dim", [(3, 3, 64), (1, 1, 16), (2, 5, 20), (1, 16, 96), (2, 7, 128), (1, 2, 256)]
)  # fmt: skip
@pytest.mark.parametrize("num_rows", [1, 2, 5, 11, 17])
def test_spans_equal_float64(num_kv_heads, group, dim, num_rows):
    rng = np.random.default_rng(num_rows)
    generator = torch.Generator().manual_seed(num_rows)
    heads = num_kv_heads * group
    k = torch.full((400, num_kv_heads, dim), float("nan"))  # whatever a span does not name
    v = k.clone()
    rows = rng.permutation(num_rows + 3)[:num_rows]
    q = torch.randn(num_rows + 3, heads, dim, generator=generator)
    own = rng.permutation(np.arange(200, 400))
    spans, parts, at = [], [], 0
    for length, splits in ((1, 1), (31, 1), (66, 2), (97, 1)):
        spans.append(Span(rows, length, at, start=3, num_splits=splits))
        for i in range(splits):
            piece = length // splits
            slots = np.arange(3 + i * piece, 3 + (i + 1) * piece)
            parts += [(row, slots) for row in rows]
        at += splits * num_rows
    for row, length in zip(rows, (1, 7, 8, 40, 33) * 4, strict=False):
        slots, own = own[: min(length, len(own))], own[length:]
        if len(slots):
            spans.append(Span(np.array([row]), len(slots), at, slots=slots))
            parts.append((row, slots))
            at += 1
    for _, slots in parts:
        for x in (k, v):
            x[slots] = torch.randn(len(slots), num_kv_heads, dim, generator=generator)
    o, lse = torch.full((at + 1, heads, dim), 7.0), torch.full((at + 1, heads), 7.0)
    library, scale = native.library(), 0.3 / dim**0.5
    Spans(library, Heads(num_kv_heads, group, dim, scale), spans).run(q, k, v, o, lse)
    for part, (row, slots) in enumerate(parts):
        for head in range(heads):
            kv = head // group
            want_o, want_lse = state(q[row, head], k[slots, kv], v[slots, kv], scale)
            assert (o[part, head] - want_o).abs().max() < 5e-6, (part, head)
            assert (lse[part, head] - want_lse).abs() < 5e-6, (part, head)
    assert (o[at] == 7.0).all() and (lse[at] == 7.0).all(), "a part that no span has was written"


@needs_compiler
def test_scores_far_apart_do_not_overflow():
    k = torch.zeros(40, 1, 16)
    k[:, 0, 0] = torch.linspace(-3e4, 3e4, 40)
    v = torch.arange(40.0).view(40, 1, 1).expand(40, 1, 16).contiguous()
    q = torch.zeros(2, 1, 16)
    q[0, 0, 0], q[1, 0, 0] = 1.0, -1.0
    o, lse = torch.empty(2, 1, 16), torch.empty(2, 1)
    span = Span(np.arange(2), 40, 0)
    Spans(native.library(), Heads(1, 1, 16, 1.0), [span]).run(q, k, v, o, lse)
    assert torch.equal(o[0, 0], torch.full((16,), 39.0))
    assert o[1, 0].abs().max() < 1e-30
    assert torch.equal(lse[:, 0], torch.tensor([3e4, 3e4]))


@needs_compiler
@pytest.mark.parametrize("num_rows", [1, 5, 200])
@pytest.mark.parametrize("num_kv_heads, group, dim", [(3, 3, 64), (1, 1, 20), (2, 7, 128)])
def test_append_rotates_and_writes_only_its_slots(num_kv_heads, group, dim, num_rows):
    generator, rng = torch.Generator().manual_seed(num_rows), np.random.default_rng(num_rows)
    heads, capacity = num_kv_heads * group, 300
    packed = torch.randn(num_rows, heads + 2 * num_kv_heads, dim, generator=generator)
    q, k, v = packed.split([heads, num_kv_heads, num_kv_heads], 1)
    slots = rng.permutation(capacity)[:num_rows]
    table = RotaryTable(dim, 1000, 1e4)
    positions = torch.from_numpy(rng.integers(0, 1000, num_rows))
    cos, sin = (x.double().unsqueeze(1) for x in (table.cos[positions], table.sin[positions]))

    def rotated(x):
        a, b = x.double().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    for angles in (None, (table.cos[positions], table.sin[positions])):
        arenas = torch.full((2, capacity, num_kv_heads, dim), float("nan"))
        shape = RowShape(heads, num_kv_heads, dim)
        got = Rows(native.library(), shape, slots, angles).append(q, k, v, *arenas)
        turn = rotated if angles else torch.Tensor.double
        assert (got - turn(q)).abs().max() < 1e-6
        assert (arenas[0, slots] - turn(k)).abs().max() < 1e-6
        assert torch.equal(arenas[1, slots], v)
        others = np.setdiff1d(np.arange(capacity), slots)
        assert torch.isnan(arenas[:, others]).all()


@needs_compiler
@pytest.mark.parametrize("heads, dim, num_rows", [(9, 64, 16), (1, 20, 3), (32, 128, 40)])
def test_merge_equals_float64(heads, dim, num_rows):
    """Rows of one to four parts; unused places name the identity, an empty row its sentinel."""
    generator, rng = torch.Generator().manual_seed(heads), np.random.default_rng(heads)
    num_parts = 4 * num_rows
    o = torch.randn(num_parts + 2, heads, dim, generator=generator)
    lse = torch.randn(num_parts + 2, heads, generator=generator) * 30
    lse[7], o[7] = float("-inf"), float("nan")  # a part without keys holds anything
    lse[num_parts], lse[num_parts + 1] = float("-inf"), 0.0
    o[num_parts:] = 0.0
    index = torch.full((num_rows, 4), num_parts)
    for row in range(num_rows):
        named = rng.permutation(num_parts)[: 1 + row % 4]
        index[row, : len(named)] = torch.from_numpy(named)
    index[0], index[0, 0] = num_parts, num_parts + 1
    index[1, :2] = torch.tensor([7, 8])
    rows = Rows(native.library(), RowShape(heads, 1, dim), np.zeros(1), None)
    got = rows.merge(o, lse, index)
    weight = lse.double()[index].softmax(1).unsqueeze(-1)
    want = (o.double().nan_to_num()[index] * weight).sum(1)
    assert (got - want).abs().max() < 1e-5
    assert torch.equal(got[0], torch.zeros(heads, dim))
    one_part = index[:, 1] == num_parts
    assert torch.equal(got[one_part], o[index[one_part, 0]])


@needs_compiler
@pytest.mark.parametrize("o, lse", [(float("nan"), float("nan")), (1.0, float("nan")), (1.0, float("inf")), (float("nan"), 0.0)])  # fmt: skip
def test_merge_does_not_hide_what_is_no_number(o, lse):
    """Of one part of three; a part without keys beside it stays unread."""
    parts, sums = torch.ones(4, 1, 16), torch.tensor([[0.5], [lse], [0.25], [float("-inf")]])
    parts[1], parts[3] = o, float("nan")
    rows = Rows(native.library(), RowShape(1, 1, 16), np.zeros(1), None)
    got = rows.merge(parts, sums, torch.tensor([[0, 1, 2, 3], [0, 2, 3, 3]]))
    assert torch.isnan(got[0]).all() and torch.equal(got[1], torch.ones(1, 16))


@needs_compiler
def test_another_compiler_has_another_name(fresh_library, monkeypatch):
    names = set()
    for options in ("", " -mno-avx512f"):
        monkeypatch.setenv("CXX", f"{shutil.which('g++') or shutil.which('c++')}{options}")
        native.library.cache_clear()
        names.add(native.kernel_name())
    assert len(names) == 2


@needs_compiler
def test_the_build_is_kept_and_loaded_again(fresh_library, monkeypatch):
    assert isinstance(native.library(), ctypes.CDLL)
    built = list((fresh_library / ".cache" / "granikv").glob("attention-*.so"))
    assert len(built) == 1
    monkeypatch.setattr(build, "_compile", lambda *args: pytest.fail("compiled again"))
    native.library.cache_clear()
    assert isinstance(native.library(), ctypes.CDLL)


@needs_compiler
@pytest.mark.parametrize("size", [0, 100, 20000])
def test_a_cut_file_is_built_again(fresh_library, size):
    assert native.library() is not None
    (kept,) = (fresh_library / ".cache" / "granikv").iterdir()
    whole = kept.read_bytes()
    kept.unlink()  # the first one stays mapped
    kept.write_bytes(whole[:size])
    native.library.cache_clear()
    assert isinstance(native.library(), ctypes.CDLL) and len(kept.read_bytes()) == len(whole)


@needs_compiler
def test_a_compiler_with_arguments_and_an_older_default(fresh_library, monkeypatch, caplog):
    monkeypatch.setenv("CXX", f"{shutil.which('g++') or shutil.which('c++')} -std=gnu++14")
    loaded = native.library()
    assert loaded is not None, caplog.text
    q, kv = torch.ones(20, 4, 64), torch.ones(100, 2, 64)
    o, lse = torch.zeros(20, 4, 64), torch.zeros(20, 4)
    Spans(loaded, Heads(2, 2, 64, 0.1), [Span(np.arange(20), 100, 0)]).run(q, kv, kv, o, lse)
    assert torch.allclose(o, torch.ones(()))


@pytest.mark.parametrize(
    "script",
    ["printf '\\377\\376\\n'; exit 0", "touch $7; exit 0", "exit 0"],
    ids=["not-utf-8", "writes-an-empty-file", "writes-nothing"],
)
def test_a_compiler_that_makes_no_library(fresh_library, monkeypatch, caplog, script):
    broken = fresh_library / "c++"
    broken.write_text(f"#!/bin/sh\n{script}\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    assert native.library() is None and "could not be built" in caplog.text


def test_a_compiler_that_hangs_is_killed_with_its_children(fresh_library, monkeypatch):
    script, mark = fresh_library / "c++", fresh_library / "pid"
    script.write_text(f"#!/bin/sh\nsleep 1234 &\necho $! > {mark}\nwait\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setattr(build, "VERSION_TIMEOUT_S", 0.5)
    assert native.library() is None
    child, deadline = int(mark.read_text()), time.monotonic() + 10
    while process_state(child) not in ("", "Z"):  # a killed process ends a moment later
        assert time.monotonic() < deadline
        time.sleep(0.01)


@needs_compiler
def test_a_user_without_a_home(fresh_library, monkeypatch):
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(build.Path, "home", no_home)
    assert isinstance(native.library(), ctypes.CDLL)


@needs_compiler
def test_a_home_that_cannot_be_written_is_no_obstacle(fresh_library, monkeypatch):
    (fresh_library / ".cache").write_text("a file where the folder should be")
    assert isinstance(native.library(), ctypes.CDLL)


def test_a_failing_compiler_is_told_and_torch_remains(fresh_library, monkeypatch, caplog):
    broken = fresh_library / "c++"
    broken.write_text("#!/bin/sh\n[ $1 = --version ] && exit 0\necho no such option >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with caplog.at_level(logging.WARNING):
        assert native.library() is None
    assert "could not be built" in caplog.text and "no such option" in caplog.text


def test_it_can_be_switched_off(fresh_library, monkeypatch):
    monkeypatch.setenv("GRANIKV_NATIVE", "0")
    assert native.library() is None


def test_no_compiler_is_no_error(fresh_library, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(fresh_library))
    assert native.library() is None
