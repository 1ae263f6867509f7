"""The packed product against float64, at the row counts that a step can have."""

import pytest
import torch

from granikv.models.linear import MAX_BOTH_ELEMENTS, MIN_PACKED_ELEMENTS, Linear


@pytest.mark.parametrize("num_rows", [0, 1, 3, 8, 33, 200])
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
