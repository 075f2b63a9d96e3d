"""The ladder of hashes gives the remaining precision that its definition gives from the tensors themselves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shadowrun.numerics.hash_ladder import MANTISSA, factors, keys, ladder, mantissa_of, remaining_precision

WIDTH = {"float64": 64, "float32": 32, "float16": 16, "bfloat16": 16, "float8_e4m3fn": 8, "float8_e5m2": 8}


def by_definition(a, b, m):
    """Schlögl et al.: m less the lost bits, the smallest shift under which all elements are equal; 0 if more than m."""
    return next((m - k for k in range(m + 1) if ((a >> k) == (b >> k)).all()), 0)


@st.composite
def pairs(draw, dtype):
    """Raw bits of two tensors: equal but for what a few changes make, small or of any bit."""
    width = WIDTH[dtype]
    words = st.integers(0, 2**width - 1)
    a = np.array(draw(st.lists(words, min_size=1, max_size=100)), f"u{width // 8}")
    b = a.copy()
    for _ in range(draw(st.integers(0, 3))):
        i, change = draw(st.integers(0, len(a) - 1)), draw(st.one_of(words, st.integers(0, 15)))
        with np.errstate(over="ignore"):
            # An exclusive or changes any bits; a sum straddles powers of two, and goes from the greatest to infinity.
            b[i] = b[i] ^ b.dtype.type(change) if draw(st.booleans()) else b[i] + b.dtype.type(change)
    return a, b


@pytest.mark.parametrize("dtype", WIDTH)
@given(data=st.data())
def test_remaining_precision_from_hashes_is_that_of_the_tensors(dtype, data):
    a, b = data.draw(pairs(dtype))
    m = mantissa_of(dtype)
    assert remaining_precision(ladder(a, m), ladder(b, m)) == by_definition(a, b, m)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (1.0, np.nextafter(np.float32(1), np.float32(2)), 22),
        (1.0, np.nextafter(np.float32(1), np.float32(0)), 0),  # straddles a power of two
        (0.0, -0.0, 0),
        (1e-45, 0.0, 22),  # subnormal: the lowest bit
        (np.inf, np.nan, 0),  # the first mantissa bit of a quiet NaN
        (2.5, 2.5, 23),
        (2.5, -2.5, 0),
    ],
)
def test_values_where_precision_is_known(a, b, expected):
    bits = [ladder(np.array([x], np.float32).view(np.uint32), 23) for x in (a, b)]
    assert remaining_precision(*bits) == expected


def test_payloads_of_nan_are_told_apart():
    a, b = (np.array([0x7FC00000 + payload], np.uint32) for payload in (0, 1))
    assert remaining_precision(ladder(a, 23), ladder(b, 23)) == 22


def test_order_and_number_of_elements_count():
    a = np.arange(100, dtype=np.uint32)
    b = a.copy()
    b[[3, 40]] = b[[40, 3]]
    c = np.zeros(100, np.uint32)
    assert (ladder(a, 23) != ladder(b, 23))[:3].all()
    assert ladder(c, 23)[0] != ladder(c[:99], 23)[0]


def test_a_ladder_has_a_rung_for_each_mantissa_bit_and_one_more():
    for dtype, m in MANTISSA.items():
        assert len(ladder(np.zeros(3, f"u{max(1, WIDTH.get(dtype, 8) // 8)}"), m if dtype in WIDTH else 0)) >= 1
    assert {d: len(ladder(np.zeros(3, f"u{w // 8}"), mantissa_of(d))) for d, w in WIDTH.items()} == {
        "float64": 53,
        "float32": 24,
        "float16": 11,
        "bfloat16": 8,
        "float8_e4m3fn": 4,
        "float8_e5m2": 3,
    }


def test_keys_and_factors_are_fixed_for_ever():
    """Other machines have recorded with them."""
    assert [int(k) for k in keys(0, 2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F5]
    assert int(ladder(np.arange(40, dtype=np.uint32), 23)[0]) == 0xE4EE8BECF99CB188
    assert (factors() & np.uint64(1)).all()
