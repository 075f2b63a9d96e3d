import pytest
import torch

from shadowrun.studies.campaign.oracles import FIRED, ORACLES, differing, from_mask, to_mask

X = torch.linspace(1, 2, 100)


def names(actual, expected, exact=None, *, condemned=False):
    return set(differing(actual, expected, lambda: exact, condemned=condemned))


def test_equal_bits_differ_by_no_rule():
    nan = torch.tensor([float("nan"), 1.0])
    assert names([X, nan], [X.clone(), nan.clone()]) == set()
    assert names([X], [X.clone()], condemned=True) == {"shadowrun"}


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        (1 + 2e-7, {"bitwise"}),
        (1 + 3e-4, {"bitwise", "allclose 1e-4", "dynamo"}),
        (1 + 1.5e-2, {"bitwise", "allclose 1e-4", "dynamo", "nnsmith"}),
        (1 + 3e-2, {"bitwise", "allclose 1e-4", "dynamo", "nnsmith", "backendbench"}),
        (1.2, {*ORACLES} - {"shadowrun"}),
    ],
)
def test_each_rule_has_its_threshold(scale, expected):
    assert names([X * scale], [X]) == expected


def test_a_permutation_escapes_the_sum():
    assert "torchfuzz" not in names([X.flip(0)], [X])
    assert "nnsmith" in names([X.flip(0)], [X])


def test_dynamo_compares_with_float64():
    # Both are equally far from the exact result: Dynamo's rule accepts what allclose does not.
    exact = X.double()
    expected, actual = (exact * (1 + 2e-3)).float(), (exact * (1 - 2e-3)).float()
    assert "dynamo" not in names([actual], [expected], [exact])
    assert "allclose 1e-4" in names([actual], [expected], [exact])


def test_another_form_differs_by_every_rule_but_the_judge():
    assert names([X.double()], [X]) == {*ORACLES} - {"shadowrun"}
    assert names([X[:5]], [X], condemned=True) == {*ORACLES}


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.complex64, torch.bfloat16])
def test_every_dtype_is_compared(dtype):
    one, other = torch.ones(4).to(dtype), torch.zeros(4).to(dtype)
    assert {"bitwise", "nnsmith"} <= names([one], [other])


def test_masks():
    for chosen in ((), ("bitwise",), (*ORACLES, FIRED)):
        assert from_mask(to_mask(frozenset(chosen))) == set(chosen)
