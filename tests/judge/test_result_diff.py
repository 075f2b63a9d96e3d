"""Distances of a result from an alternative: each element has its own, whatever lies next to it."""

import math

import numpy as np
import pytest
import torch

from shadowrun.judge.result_diff import ResultDiff
from shadowrun.numerics.excess import PART, Truth
from shadowrun.numerics.precision import FORMATS

INF, NAN = math.inf, math.nan
# Of the target, of the alternative, and whether these are as far apart as two classes.
PAIRS = [(INF, INF, False), (NAN, NAN, False), (INF, -INF, True), (1.0, NAN, True), (NAN, 1.0, True), (INF, 1.0, True)]


def result_of(actual, where, floor=0.0):
    nothing = np.zeros(where.size, bool)
    value = actual.to(torch.float64).numpy().copy()
    truth = Truth(value, np.abs(value), np.zeros(value.size), np.zeros(value.size, bool))
    fmt = FORMATS[torch.float32]
    return ResultDiff(0, "", actual, actual, fmt, where, nothing, nothing, bad=where, floor=floor, truth=truth)


@pytest.mark.parametrize("some", [False, True], ids=["all elements", "some"])
@pytest.mark.parametrize(("actual", "other", "apart"), PAIRS)
def test_an_element_of_another_class_counts_and_an_equal_one_does_not(actual, other, apart, some):
    n, at = PART + 100, PART + 7
    values, alternative = torch.ones(n), torch.full((n,), 1 + 2.0**-22)
    values[at], alternative[at] = actual, other
    where = np.arange(n)[1 if some else 0 :]
    result = result_of(values, where, np.zeros(where.size))
    assert (result.residual(alternative) > 1e6) == apart
    # The other elements are two units of rounding apart each.
    near = result.residual(torch.where(torch.arange(n) == at, values, alternative).double())
    assert near == pytest.approx(4, rel=1e-5)


def test_distances_have_the_floor_of_their_element():
    n = 2 * PART + 1
    floor = np.arange(1.0, n)
    result = result_of(torch.zeros(n), np.arange(n)[1:], floor)
    alternative = torch.from_numpy(np.concatenate([[0.0], floor]))
    assert result.residual(alternative) == pytest.approx(1, rel=1e-5)


def test_the_excess_of_an_element_of_another_class_is_infinite_and_that_of_an_equal_infinity_0():
    values = torch.ones(PART + 100)
    values[PART + 9] = INF
    result = result_of(values.clone(), np.arange(values.numel()))
    result.actual[PART + 7] = INF
    result.measure()
    assert np.flatnonzero(result.excess_actual).tolist() == [PART + 7]
    assert result.excess_actual.max() == INF


def test_most_ends_the_search_but_does_not_change_which_side_of_it_the_residual_is():
    alternative = torch.zeros(3 * PART).double()
    alternative[PART], alternative[-1] = 1e-43, 1.0
    result = result_of(torch.zeros(3 * PART), np.arange(3 * PART))
    whole = result.residual(alternative)
    assert whole > 1e6
    assert 50 < result.residual(alternative, most=50) < 100
    assert result.residual(alternative, most=1e7) == whole
