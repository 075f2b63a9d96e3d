"""The float64 run of what has no kernel in float64."""

import pytest
import torch

from shadowrun.compiled.rounding import Float64Mode, PerturbedRounding, RandomResults, grouped_product

ENDS = torch.tensor([2, 2, 5, 8], dtype=torch.int32)  # the second group is empty


@pytest.mark.parametrize(
    ("a", "b", "ends"),
    [
        ((8, 16), (4, 16, 32), ENDS),
        ((4, 16, 32), (32, 8), ENDS),
        ((16, 8), (8, 32), ENDS),
        ((4, 8, 16), (4, 16, 32), None),
    ],
)
def test_grouped_products_are_torchs_own(a, b, ends):
    a, b = torch.randn(a), torch.randn(b)
    expected = torch._grouped_mm(a, b, offs=ends)
    torch.testing.assert_close(grouped_product(a, b, ends), expected)
    with Float64Mode(RandomResults()):
        wide = torch._grouped_mm(a, b, offs=ends)
    assert wide.dtype is torch.float64
    torch.testing.assert_close(wide.float(), expected)


def test_what_ends_at_one_stays_there():
    x, target = torch.tensor([20.0, 30.0, 0.5] * 20), torch.ones(60)
    generator = torch.Generator().manual_seed(0)
    with PerturbedRounding(generator):
        y = x.sigmoid()
        loss = torch.nn.functional.binary_cross_entropy(y, target)  # refuses anything above 1
    assert (y[::3] != 1).all()  # it is moved, inwards
    assert (y[2::3].unique().numel(), loss.isfinite().item()) == (2, True)
