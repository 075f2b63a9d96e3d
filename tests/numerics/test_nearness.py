"""Places and factors of two results: those of C are those of torch."""

import contextlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shadowrun.native import core
from shadowrun.numerics import nearness as module
from shadowrun.numerics.nearness import nearness

needs_c = pytest.mark.skipif(core is None, reason="native code is not built")
BOUND = 4 * 2.0**-24, 2.0**-149


def pair(n, seed=0, far=(), scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    expected = torch.randn(n, generator=generator) * scale
    actual = expected * (1 + 2.0**-23 * torch.randint(-1, 2, (n,), generator=generator))
    for place, value in far:
        actual[place] = value
    return actual, expected


def both(actual, expected, *, weighted=True, bound=BOUND):
    return nearness(actual, expected, *bound, weighted=weighted), module._by_torch(
        actual, expected, *bound, weighted=weighted
    )


def same(found, wanted):
    assert torch.equal(found.far, wanted.far)
    for a, b in ((found.factor, wanted.factor), (found.weighted, wanted.weighted)):
        assert (math.isnan(a) and math.isnan(b)) or a == pytest.approx(b, rel=1e-3, abs=2e-10)


@needs_c
@pytest.mark.parametrize("n", [1, 63, 64, 65, 2047, 2048, 2049, 5000])
@pytest.mark.parametrize("weighted", [False, True])
def test_c_finds_what_torch_finds(n, weighted):
    actual, expected = pair(n, seed=n, far=[(0, 9.0), (n // 2, -9.0), (n - 1, 5.0)])
    found, wanted = both(actual, expected, weighted=weighted)
    same(found, wanted)
    assert found.far.tolist() == sorted({0, n // 2, n - 1})
    assert weighted or found.weighted == 0.0


@needs_c
def test_with_each_set_of_instructions():
    actual, expected = pair(3000, far=[(k, 7.0) for k in range(0, 3000, 7)])
    plain = core.nearness(actual, expected, *BOUND, True, "plain")
    assert len(plain[0]) == 8 * len(range(0, 3000, 7))
    for name in ("avx2", "avx512"):
        with contextlib.suppress(ValueError):  # a processor without them
            assert core.nearness(actual, expected, *BOUND, True, name) == plain


NUMBERS = st.floats(width=32) | st.sampled_from([0.0, -0.0, 2.0**-149, -(2.0**-130), math.inf, math.nan, 3e38, 1.0])


@needs_c
@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=200), st.integers(0, 3))
def test_of_any_numbers(numbers, more):
    values = torch.tensor(numbers * (1 + 20 * more))
    found, wanted = both(values[:, 0].contiguous(), values[:, 1].contiguous())
    assert torch.equal(found.far, wanted.far)


def test_a_common_factor_is_found():
    _, expected = pair(4096)
    factor = 1 + 2.0**-20
    for found in both(expected * factor, expected):
        assert found.factor == pytest.approx(2.0**-20, rel=0.1)
        assert found.weighted == pytest.approx(2.0**-20, rel=0.1)


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan])
def test_without_a_size_there_is_no_factor(value):
    expected = torch.full((100,), value)
    for found in both(expected + 1, expected):
        assert math.isnan(found.weighted)
        assert not abs(found.factor) > 0.0


def test_what_c_does_not_read_is_compared_by_torch():
    actual, expected = pair(200, far=[(9, 9.0)])
    wide = nearness(actual.double(), expected.double(), *BOUND, weighted=True)
    strided = nearness(torch.stack([actual] * 2, 1)[:, 0], torch.stack([expected] * 2, 1)[:, 0], *BOUND, weighted=True)
    assert wide.far.tolist() == strided.far.tolist() == [9]
    assert core is None or core.nearness(actual.double(), expected.double(), *BOUND, True) is None
    assert core is None or core.nearness(actual, expected[:-1], *BOUND, True) is None
    assert nearness(actual[:0], expected[:0], *BOUND, weighted=True).far.tolist() == []


@needs_c
def test_wrong_arguments_are_named():
    with pytest.raises(TypeError, match="nearness"):
        core.nearness(torch.ones(2), torch.ones(2))
    with pytest.raises(TypeError):
        core.nearness(torch.ones(2), torch.ones(2), "x", 0.0, True)
    with pytest.raises(ValueError, match="instructions"):
        core.nearness(torch.ones(2), torch.ones(2), 0.0, 0.0, True, "sse")
