"""The Gluon kernels against the portable ones, their oracles, and the twin."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
from support import ON_GPU, Row, Step, compare

from granikv.attention.variants import LAYOUTS, AttentionShape, takes_gluon

CAPABILITY = torch.cuda.get_device_capability() if ON_GPU else (0, 0)
HERE = 10 * CAPABILITY[0] + CAPABILITY[1]
needs_hopper = pytest.mark.skipif(
    not takes_gluon(AttentionShape(4, 1, 128, 2), HERE, triton.__version__),
    reason="needs an sm_90 GPU: run pytest tests/kernels/test_gluon.py on one",
)
ALWAYS = replace(LAYOUTS["large"], gluon_blocks_per_sm=0.0)
EVERYONE = (0, 8, 150)
ROWS = [
    Row([EVERYONE], 1),
    Row([EVERYONE], 32),  # a block
    Row([EVERYONE], 33),
    Row([EVERYONE], 97, seen=200),  # keys beyond the last seen one
    Row([EVERYONE], 90, flat=True),  # a run
    Row([], 64),
    Row([EVERYONE], 20, num_new=9),
]


@needs_hopper
@pytest.mark.parametrize("heads", [(32, 8), (5, 1), (16, 1), (9, 1)])
def test_equals_the_portable_kernel(heads):
    dtype = torch.bfloat16
    step = Step(ROWS, heads=heads, dim=128, dtype=dtype, layout=ALWAYS)
    attention = step.attention()
    assert attention._cold_gluon is not None
    compare(step.run(attention)[: len(step.twin())], step.twin(), dtype)
    states = attention.o_partials.clone(), attention.lse_partials.clone()
    attention._cold_gluon = None
    step.run(attention)
    count = step.split.num_partials
    for got, want in zip(states, (attention.o_partials, attention.lse_partials), strict=True):
        compare(got[:count].cpu(), want[:count].cpu(), dtype)


# Tiles of 128 stacked rows, whole and not, items of less than a block, rows that see a part of one.
CROWD = [Row([EVERYONE], 3 + i) for i in range(35)] + [Row([EVERYONE], 0, seen=50)]
LONG = (0, 8, 700)
DEEP = [Row([LONG], 5 + i) for i in range(33)] + [Row([LONG], 0, seen=n) for n in (1, 129, 300)]


@needs_hopper
@pytest.mark.parametrize("rows", [CROWD, DEEP], ids=["crowd", "deep"])
@pytest.mark.parametrize("heads", [(32, 8), (5, 1), (16, 1), (3, 1)])
@pytest.mark.parametrize("name", ["dense", "even"])
def test_hot_equals_the_portable_kernel(name, heads, rows):
    dtype = torch.bfloat16
    # few SMs give long items, many give short ones
    for num_sms in (8, 132):
        step = Step(rows, heads, 128, dtype, 4096, 1024, 1024, num_sms, LAYOUTS[name], padding=2)
        attention = step.attention()
        assert attention._hot_gluon is not None
        twin = step.twin()
        compare(step.run(attention)[: len(twin)], twin, dtype)
        states = attention.o_partials.clone(), attention.lse_partials.clone()
        attention._hot_gluon = attention._cold_gluon = None
        step.run(attention)
        count = step.split.num_partials
        for got, want in zip(states, (attention.o_partials, attention.lse_partials), strict=True):
            compare(got[:count].cpu(), want[:count].cpu(), dtype)


@needs_hopper
@pytest.mark.parametrize("name", ["dense", "even"])
def test_hot_gives_the_same_bits_under_capture_and_again(name):
    step = Step(DEEP, (32, 8), 128, torch.bfloat16, 4096, 1024, 1024, 132, LAYOUTS[name], padding=3)
    first = step.check(capture=True)
    for _ in range(20):
        assert torch.equal(first, step.check(capture=True))


@needs_hopper
def test_a_grid_beyond_the_items_and_repeated_results():
    step = Step(ROWS, heads=(32, 8), dim=128, dtype=torch.bfloat16, layout=ALWAYS, padding=3)
    first = step.check(capture=True)
    assert torch.equal(first, step.check(capture=True))


def test_where_it_is_taken():
    shape = AttentionShape(32, 8, 128, 2)
    assert takes_gluon(shape, 90, "3.6.0")
    for capability, version in ((80, "3.6.0"), (100, "3.6.0"), (0, "3.6.0"), (90, "3.60.0")):
        assert not takes_gluon(shape, capability, version), (capability, version)
    for other in (replace(shape, element_bytes=4), replace(shape, head_dim=64)):
        assert not takes_gluon(other, 90, "3.6.0"), other
