"""What the compiled kernel does between a layer's products, against float64."""

import pytest
import torch
import torch.nn.functional as F

from granikv import native
from granikv.models import fused

pytestmark = pytest.mark.skipif(
    native.library() is None, reason="no C++ compiler found: install g++ to build the CPU kernel"
)

WIDTHS = [1, 7, 16, 50, 576, 1000]  # below, at and off the vectors' width


def behind(num_rows: int, width: int, seed: int) -> torch.Tensor:
    """Random rows with NaN right after the last number."""
    x = torch.full((num_rows * width + 64,), float("nan"))
    x[: num_rows * width] = torch.randn(num_rows * width, generator=torch.manual_seed(seed)) * 4
    return x[: num_rows * width].view(num_rows, width)


@pytest.mark.parametrize("has_x", [True, False])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("num_rows", [1, 3, 200])
def test_add_rms_norm(num_rows, width, has_x):
    delta, weight = behind(num_rows, width, 0), behind(1, width, 1)[0]
    x = behind(num_rows, width, 2) if has_x else None
    kept = delta.clone(), None if x is None else x.clone()
    assert native.takes(delta, x, weight)
    normed, total = fused.add_rms_norm(delta, x, weight, 1e-5)
    want = delta if x is None else delta + x
    assert torch.equal(total, want)
    want = F.rms_norm(want.double(), (width,), weight.double(), 1e-5)
    assert (normed - want).abs().max() < 1e-5
    assert torch.equal(delta, kept[0]) and (x is None or torch.equal(x, kept[1]))


def test_a_norm_of_zeros_is_zero():
    zeros = torch.zeros(2, 40)
    normed, _ = fused.add_rms_norm(zeros, None, torch.ones(40), 1e-5)
    assert torch.equal(normed, zeros)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("num_rows", [1, 3, 200])
def test_silu_mul(num_rows, width):
    gate_up = behind(num_rows, 2 * width, 3) * 5
    gate, up = gate_up.double().chunk(2, -1)
    want = F.silu(gate) * up
    allowed = (1e-6 + 1.2e-7 * gate.abs()) * want.abs()  # the exponent is rounded too
    assert ((fused.silu_mul(gate_up) - want).abs() <= allowed + 1e-30).all()


@pytest.mark.parametrize("gate, want", [(-1e30, 0.0), (-200.0, 0.0), (0.0, 0.0), (1e30, 2e30)])
def test_gates_far_out(gate, want):
    """e^-gate neither overflows nor makes NaN of what torch makes 0."""
    got = fused.silu_mul(torch.tensor([[gate, 2.0]]))
    assert abs(float(got) - want) <= 1e-6 * abs(want) + 1e-5
    assert torch.isnan(fused.silu_mul(torch.tensor([[float("nan"), 2.0]]))).all()


def test_what_it_does_not_take_stays_with_torch():
    """Other dtypes, gaps between rows and parts to be summed."""
    x, weight = torch.randn(4, 40), torch.ones(20)
    assert not native.takes(x[:, :20], None, weight)
    assert not native.takes(x.bfloat16())
    normed, total = fused.add_rms_norm(x[:, :20], None, weight, 1e-5)
    assert torch.equal(normed, F.rms_norm(x[:, :20], (20,), weight, 1e-5))
    parts = torch.randn(3, 4, 20)
    normed, total = fused.add_rms_norm(parts, x[:, :20].contiguous(), weight, 1e-5)
    assert (total - (parts.sum(0) + x[:, :20])).abs().max() < 1e-6
    assert fused.silu_mul(x.bfloat16()).dtype == torch.bfloat16
