"""The packed product against float64, at the row counts that a step can have."""

import pytest
import torch

from granikv import native
from granikv.models.linear import MAX_BOTH_ELEMENTS, MIN_PACKED_ELEMENTS, Linear


@pytest.mark.parametrize("num_rows", [0, 1, 3, 8, 16, 17, 33, 48, 49, 200])
@pytest.mark.parametrize(
    "outputs", [96, MIN_PACKED_ELEMENTS // 72 + 9, MAX_BOTH_ELEMENTS // 72 + 9]
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(num_rows, outputs, with_bias):
    generator = torch.Generator().manual_seed(num_rows)
    weight = torch.randn(outputs, 72, generator=generator)
    bias = torch.randn(outputs, generator=generator) if with_bias else None
    x = torch.randn(num_rows, 72, generator=generator)
    expected = x.double() @ weight.double().T + (bias.double() if with_bias else 0.0)
    linear = Linear(weight.clone(), bias)
    got = linear(x)
    assert got.shape == (num_rows, outputs)
    assert torch.allclose(got.double(), expected, atol=1e-4)
    if outputs * 72 < MIN_PACKED_ELEMENTS:
        assert linear.packed is None
    if outputs * 72 <= MAX_BOTH_ELEMENTS:
        assert linear.weight is not None
    else:
        assert linear.packed is None or linear.weight is None, "held twice"


def test_views_of_a_larger_tensor_are_read_as_they_are():
    weight, wide = torch.randn(MIN_PACKED_ELEMENTS // 64, 64), torch.randn(5, 96)
    x = wide[:, 16:80]
    assert torch.allclose(Linear(weight)(x), x.contiguous() @ weight.T, atol=1e-4)


needs_compiler = pytest.mark.skipif(
    native.library() is None, reason="no C++ compiler found: install g++ to build the CPU kernel"
)


@needs_compiler
@pytest.mark.parametrize("num_rows", [1, 7, 8, 9, 16, 24, 25, 47])
@pytest.mark.parametrize("width, outputs", [(1, 1), (15, 7), (16, 8), (83, 29), (576, 64)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_compiled_product_equals_float64(num_rows, width, outputs, with_bias):
    """Rows apart, with NaN between them and around all; nothing but y is written."""
    if num_rows > native.library().granikv_max_product_rows():
        pytest.skip(f"{num_rows} rows: this processor's vectors hold fewer")
    generator = torch.Generator().manual_seed(width)
    wide = torch.full((num_rows + 2, width + 5), float("nan"))
    x = wide[1:-1, 2:-3]
    x.copy_(torch.randn(num_rows, width, generator=generator))
    around = torch.full((outputs + 2, width), float("nan"))
    weight = around[1:-1]
    weight.copy_(torch.randn(outputs, width, generator=generator))
    bias = torch.randn(outputs, generator=generator) if with_bias else None
    assert native.multiplies(x)
    got = native.product(x, weight, bias)
    expected = x.double() @ weight.double().T + (bias.double() if with_bias else 0.0)
    assert (got - expected).abs().max() < 2e-4


def test_other_rows_are_not_for_the_compiled_product():
    x = torch.randn(4, 8)
    for other in (x.double(), x.T, x[:0], x.expand(400, 4, 8)[:, 0], x.half()):
        assert not native.multiplies(other)


@needs_compiler
def test_decode_rows_take_the_compiled_product(monkeypatch):
    """Where the weight is held as it lies; one and two rows are read at memory speed anyway."""
    taken = []
    product = native.product
    monkeypatch.setattr(
        native, "product", lambda x, *more: taken.append(len(x)) or product(x, *more)
    )
    weight = torch.randn(MIN_PACKED_ELEMENTS // 64, 64)
    large = torch.randn(MAX_BOTH_ELEMENTS // 64 + 1, 64)
    for linear in (Linear(weight), Linear(large, held=True)):
        for num_rows in (0, 1, 2, 3, 16, 500):
            x = torch.randn(num_rows, 64)
            assert torch.allclose(linear(x), x @ linear.weight.T, atol=1e-4)
        assert taken == [3, 16]
        taken.clear()
    Linear(large)(torch.randn(3, 64))  # packed only
    Linear(weight[:16])(torch.randn(3, 64))  # all call overhead
    assert not taken


@needs_compiler
def test_a_weight_that_is_held_elsewhere_is_not_packed():
    weight = torch.randn(MAX_BOTH_ELEMENTS // 64 + 1, 64)
    linear = Linear(weight, held=True)
    assert linear.packed is None and linear.weight is weight


def test_without_a_compiler_the_packed_product_serves(monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)
    weight, x = torch.randn(MIN_PACKED_ELEMENTS // 64, 64), torch.randn(8, 64)
    assert torch.allclose(Linear(weight, held=True)(x), x @ weight.T, atol=1e-4)


def test_a_bias_of_another_kind_and_a_wrong_width():
    """The compiled product reads fp32 numbers side by side: others are not for it."""
    weight, x = torch.randn(600, 256), torch.randn(4, 256)
    strided = torch.arange(1200.0)[::2]
    want = torch.nn.functional.linear(x, weight, strided)
    assert (Linear(weight, strided)(x) - want).abs().max() < 1e-3
    for width in (255, 257):
        with pytest.raises((ValueError, RuntimeError)):
            Linear(weight)(torch.randn(4, width))
