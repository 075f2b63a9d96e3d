"""The float64 run of what has no kernel in float64."""

import pytest
import torch

from shadowrun.compiled.rounding import (
    Float64Mode,
    PerturbedRounding,
    RandomResults,
    filled_memory,
    grouped_product,
    perturbed,
)

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_subnormal_numbers_move_by_the_smallest_one(dtype):
    limits = torch.finfo(dtype)
    smallest = torch.tensor(limits.tiny, dtype=torch.float64) * limits.eps
    t = (torch.tensor([0.0, 3.0, -40.0, 0.75 / limits.eps] * 8, dtype=torch.float64) * smallest).to(dtype)
    moved = ((perturbed(t, torch.Generator().manual_seed(0)) - t).double() / smallest).abs().view(8, 4)
    assert moved.unique(dim=0).tolist() == [[0.0, 1.0, 1.0, 1.0]]


def test_kernels_get_memory_of_nan_and_afterwards_what_they_got_before():
    scores, labels = torch.randn(9, 1, 4).log_softmax(2), torch.tensor([[1, 2]])
    lengths = torch.tensor([5]), torch.tensor([2])
    with filled_memory():
        _, alpha = torch._ctc_loss(scores, labels, *lengths)
        assert torch.are_deterministic_algorithms_enabled()
    # Of times after the end of the item, nothing is written.
    assert alpha.isnan()[0].all(1).tolist() == [False] * 5 + [True] * 4
    assert not torch.are_deterministic_algorithms_enabled()


def test_memory_of_zeros_is_what_the_program_asks_for():
    x = torch.ones(3)
    with filled_memory(), filled_memory(0):
        assert [t.tolist() for t in (torch.empty(2), x.new_empty(2), torch.empty_like(x), x.clone())] == [
            [0.0] * 2,
            [0.0] * 2,
            [0.0] * 3,
            [1.0] * 3,
        ]
        assert x.resize_(2).tolist() == [1.0] * 2
