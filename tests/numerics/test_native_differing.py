"""The elements that differ, found in C and found in Python, are the same; and so are their kinds."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowrun.native import core
from shadowrun.numerics import elements as module
from shadowrun.numerics.elements import differing
from shadowrun.numerics.precision import FORMATS

pytestmark = pytest.mark.skipif(core is None, reason="no compiled part")

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def check(actual, expected):
    fmt = FORMATS[actual.dtype]
    n = int((actual.view(fmt.view) != expected.view(fmt.view)).sum())
    found = differing(actual, expected, fmt, n)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "core", None)
        wanted = differing(actual, expected, fmt, n)
    assert found.where.size == n
    for got, part in zip(found, wanted, strict=True):
        assert got.dtype == part.dtype
        assert np.array_equal(got, part)
    return found


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn], ids=str)
def test_every_pair_of_classes(dtype):
    # Of infinities, torch 2.11 makes NaN in float8_e4m3fn, which has none, and 2.13 its greatest number.
    most = math.inf if dtype.itemsize > 1 else torch.finfo(dtype).max
    values = torch.tensor([0.0, -0.0, math.nan, most, -most, 1.0, -2.0], dtype=torch.float64).to(dtype)
    bits = values.view(FORMATS[dtype].view)
    payload = bits[2:3] ^ 1 if dtype.itemsize > 1 else bits[2:3]
    bits = torch.cat([bits, payload])
    pairs = torch.tensor(list(itertools.product(range(len(bits)), repeat=2)))
    found = check(bits[pairs[:, 0]].view(dtype), bits[pairs[:, 1]].view(dtype))
    assert found.zeros.sum() == 2
    assert found.classes.any()
    assert found.nans.any() == (dtype.itemsize > 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_bits(dtype):
    @settings(max_examples=30, deadline=None)
    @given(
        st.sampled_from([1, 7, 2047, 2048, 2049, 9000]), st.integers(0, 10**6), st.sampled_from([0.0, 0.001, 0.5, 1])
    )
    def run(n, seed, share):
        rng = np.random.default_rng(seed)
        width = 8 * dtype.itemsize
        bits = rng.integers(0, 1 << width, n, dtype=f"u{dtype.itemsize}")
        other = np.where(rng.random(n) < share, rng.integers(0, 1 << width, n, dtype=bits.dtype), bits)
        left, right = (torch.from_numpy(b.view(f"i{dtype.itemsize}")).view(dtype) for b in (bits, other))
        check(left, right)
        check(left[::2], right[::2])

    run()


def test_a_wrong_count_does_no_harm():
    a, e = torch.ones(5000), torch.zeros(5000)
    for n in (0, 1, 4999, 5001):
        assert np.array_equal(differing(a, e, FORMATS[torch.float32], n).where, np.arange(5000))


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="no floats of 8 bits with 3 of mantissa"):
        core.differing(0, 0, 0, 8, 3, 0, 0, 0)
    with pytest.raises(TypeError, match="differing: wrong number"):
        core.differing(0, 0)
