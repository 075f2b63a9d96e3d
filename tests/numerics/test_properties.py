"""Properties of the functions on numbers, and their agreement with exact rational arithmetic, for every float dtype."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shadowrun.numerics.bits import bits_equal, dense_order, plainly_equal, resolved
from shadowrun.numerics.diff import diff
from shadowrun.numerics.elements import plain
from shadowrun.numerics.excess import EDGE, Truth, excess
from shadowrun.numerics.form import dtype_name, form_difference, meta
from shadowrun.numerics.precision import FORMATS, monotone, remaining_bits, ulp_distance
from shadowrun.operators.facts import absolute_error, base_name, ulp_bound
from tests.numerics.by_specification import by_specification

SIGNED = [d for d, f in FORMATS.items() if f.signed]
EVERY = list(FORMATS)
SMALL = [d for d in EVERY if d.itemsize == 1]
quick = settings(max_examples=60, deadline=None)
dtypes = pytest.mark.parametrize("dtype", EVERY, ids=str)
signed = pytest.mark.parametrize("dtype", SIGNED, ids=str)


def of_bits(bits, dtype):
    """A tensor with these bits, given as unsigned integers."""
    width = 8 * dtype.itemsize
    unsigned = np.array(bits, dtype=f"u{width // 8}")
    return torch.from_numpy(unsigned.view(f"i{width // 8}").copy()).view(dtype)


def patterns(dtype, n=6):
    """Bit patterns: any, and near each other, so that differences of few units are common."""
    top = (1 << 8 * dtype.itemsize) - 1
    near = st.tuples(st.integers(0, top), st.lists(st.integers(-3, 3), min_size=n, max_size=n)).map(
        lambda t: [min(max(t[0] + d, 0), top) for d in t[1]]
    )
    return st.one_of(near, st.lists(st.integers(0, top), min_size=n, max_size=n))


def exact(t):
    """The numbers of a tensor as fractions, which float64 holds for every dtype; None for NaN and infinities."""
    return [Fraction(x) if math.isfinite(x) else None for x in t.double().reshape(-1).tolist()]


def rank(x: Fraction, dtype) -> int:
    """How many numbers of the dtype lie between 0 and x, x included, with its sign: by arithmetic, not by bits."""
    fmt = FORMATS[dtype]
    if x == 0:
        return 0
    size, normal, step = abs(x), Fraction(fmt.normal), Fraction(fmt.smallest)
    if not fmt.signed:
        return size.numerator.bit_length() - size.denominator.bit_length() + 127
    if size < normal:
        n = size / step
    else:
        e = math.frexp(float(size))[1] - math.frexp(fmt.normal)[1]
        n = (e + 1) * 2**fmt.mantissa + (size / (normal * Fraction(2) ** e) - 1) * 2**fmt.mantissa
    assert n.denominator == 1
    return int(n) if x > 0 else -int(n)


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_ulp_of_all_pairs_of_8_bit_floats(dtype):
    values = of_bits(range(256), dtype)
    numbers = exact(values)
    finite = [i for i in range(256) if numbers[i] is not None]
    order = {x: i for i, x in enumerate(sorted({numbers[i] for i in finite}))}
    # Once for each number: fractions are slow, and there are 20,000 pairs.
    places = {i: order[numbers[i]] for i in finite}
    ranks = {i: rank(numbers[i], dtype) for i in finite}
    single = values.unbind()
    bits = [values.view(torch.int8).numpy()[i : i + 1] for i in range(256)]
    for i, j in itertools.product(finite[::3], finite):
        distance = abs(places[i] - places[j])
        assert diff("", single[i], single[j]).max_ulp == distance, (i, j)
        assert abs(ranks[i] - ranks[j]) == distance
        if FORMATS[dtype].signed:
            assert ulp_distance(bits[i], bits[j], 8) == distance


@dtypes
def test_ulp_against_exact_arithmetic(dtype):
    @quick
    @given(patterns(dtype, 2))
    def run(bits):
        a, e = of_bits(bits[:1], dtype), of_bits(bits[1:], dtype)
        (x,), (y,) = exact(a), exact(e)
        assume(x is not None and y is not None)
        assert diff("", a, e).max_ulp == abs(rank(x, dtype) - rank(y, dtype))

    run()


@signed
def test_monotone_orders_as_the_numbers(dtype):
    @quick
    @given(patterns(dtype))
    def run(bits):
        t = of_bits(bits, dtype)
        numbers = t.double().numpy()
        mapped = monotone(t.view(FORMATS[dtype].view).numpy().astype(np.int64), 8 * dtype.itemsize)
        for i, j in itertools.combinations(np.flatnonzero(~np.isnan(numbers)), 2):
            assert (mapped[i] < mapped[j]) == (numbers[i] < numbers[j])
            assert (mapped[i] == mapped[j]) == (numbers[i] == numbers[j])

    run()


@signed
def test_ulp_is_a_distance(dtype):
    @quick
    @given(patterns(dtype, 3))
    def run(bits):
        t = of_bits(bits, dtype)
        assume(not bool(t.double().isnan().any()))
        width = 8 * dtype.itemsize
        ab, ba, bc, ac = (
            ulp_distance(*(t[i : i + 1].view(FORMATS[dtype].view).numpy() for i in pair), width)
            for pair in ((0, 1), (1, 0), (1, 2), (0, 2))
        )
        assert ab == ba
        assert ac <= ab + bc

    run()


@dtypes
def test_remaining_precision_by_its_definition(dtype):
    """The leading bits of the significand in which two numbers of one sign and exponent agree."""
    fmt = FORMATS[dtype]

    @quick
    @given(st.integers(-3, 3), st.integers(0, 2**fmt.mantissa - 1), st.integers(0, 2**fmt.mantissa - 1), st.booleans())
    def run(exponent, m, n, negative):
        scale = Fraction(2) ** (exponent - fmt.mantissa) * (-1 if negative and fmt.signed else 1)
        a, e = (torch.tensor(float((2**fmt.mantissa + k) * scale), dtype=torch.float64).to(dtype) for k in (m, n))
        agree = max(i for i in range(fmt.mantissa + 1) if m >> (fmt.mantissa - i) == n >> (fmt.mantissa - i))
        assert diff("", a, e).remaining_bits == agree
        assert diff("", e, a).remaining_bits == agree
        if fmt.signed:
            assert diff("", (-a.double()).to(dtype), e).remaining_bits == 0
        assert diff("", a, (e.double() * 2).to(dtype)).remaining_bits == 0

    run()


@given(st.integers(0, 2**52), st.integers(0, 52))
def test_remaining_bits_falls_with_the_difference(xor, mantissa):
    assert 0 <= remaining_bits(xor, mantissa) <= mantissa
    assert remaining_bits(2 * xor, mantissa) <= remaining_bits(xor, mantissa)


@dtypes
def test_diff_is_symmetric(dtype):
    fields = "n_elements n_different max_abs rmse max_ulp remaining_bits n_nan n_inf n_zero_sign n_subnormal".split()  # noqa: SIM905

    @quick
    @given(patterns(dtype), patterns(dtype))
    def run(left, right):
        a, e = of_bits(left, dtype), of_bits(right, dtype)
        there, back = diff("", a, e), diff("", e, a)
        for name in fields:
            assert getattr(there, name) == pytest.approx(getattr(back, name), rel=1e-6), name
        assert diff("", a, a.clone()).n_different == 0
        assert bits_equal(a, e) == bits_equal(e, a) == (there.n_different == 0)

    run()


@dtypes
def test_greatest_differences_against_exact_arithmetic(dtype):
    @quick
    @given(patterns(dtype), patterns(dtype))
    def run(left, right):
        a, e = of_bits(left, dtype), of_bits(right, dtype)
        pairs = [(x, y) for x, y in zip(exact(a), exact(e), strict=True) if x is not None and y is not None]
        found = diff("", a, e)
        gap = max((abs(x - y) for x, y in pairs), default=Fraction(0))
        ratio = max((abs(x - y) / abs(y) for x, y in pairs if y), default=Fraction(0))
        # float32 results are subtracted in float32; nothing beyond float64 is asked for.
        assume(gap < 1e300 and ratio < 1e300)
        assert found.max_abs == pytest.approx(float(gap), rel=1e-6, abs=1e-44)
        assert found.max_rel == pytest.approx(float(ratio), rel=1e-6, abs=1e-44)

    run()


@signed
def test_a_power_of_two_changes_no_relative_figure(dtype):
    info = torch.finfo(dtype)

    @quick
    @given(
        st.lists(st.floats(0.5, 0.96875), min_size=4, max_size=4), st.lists(st.integers(-2, 2), min_size=4, max_size=4)
    )
    def run(values, steps):
        e = torch.tensor(values, dtype=torch.float64).to(dtype)
        view = FORMATS[dtype].view
        a = (e.view(view) + torch.tensor(steps).to(view)).view(dtype)
        for power in (2.0, 0.5, 4.0):
            wide = (a.double() * power).to(dtype), (e.double() * power).to(dtype)
            assume(all(bool((t.double().abs() >= info.tiny).all()) for t in (a, e, *wide)))
            one, other = diff("", a, e), diff("", *wide)
            assert (one.max_ulp, one.remaining_bits, one.n_different) == (
                other.max_ulp,
                other.remaining_bits,
                other.n_different,
            )
            assert other.max_rel == pytest.approx(one.max_rel, rel=1e-5)
            assert other.max_abs == pytest.approx(one.max_abs * power, rel=1e-5)
            assert other.rmse == pytest.approx(one.rmse * power, rel=1e-5)

    run()


special = st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 1e-40, -1e-40, 1e-310, 3e38])


@given(special, special)
def test_classes_of_pairs(x, y):
    a, e = (torch.tensor([value], dtype=torch.float64) for value in (x, y))
    normal = FORMATS[torch.float64].normal
    wanted = dict.fromkeys(("n_nan", "n_inf", "n_zero_sign", "n_subnormal"), 0)
    if math.isnan(x) != math.isnan(y):
        wanted["n_nan"] = 1
    elif not math.isnan(x) and x != y and (math.isinf(x) or math.isinf(y)):
        wanted["n_inf"] = 1
    elif x == y == 0 and math.copysign(1, x) != math.copysign(1, y):
        wanted["n_zero_sign"] = 1
    elif (x == 0) != (y == 0) and 0 < abs(x or y) < normal:
        wanted["n_subnormal"] = 1
    for found in (diff("", a, e), diff("", e, a), by_specification(a, e)):
        assert {name: getattr(found, name) for name in wanted} == wanted


numbers = st.floats(-1e3, 1e3).filter(lambda x: x == 0 or abs(x) > 1e-3)


@dtypes
def test_excess_against_exact_arithmetic(dtype):
    fmt = FORMATS[dtype]

    @quick
    @given(numbers, numbers, st.floats(0, 1), st.floats(0, 1))
    def run(value, o, spread, floor):
        truth = Truth(np.array([o]), np.array([abs(o)]), np.array([spread]), np.array([False]))
        found = excess(np.array([value]), truth, fmt, np.array([0]), floor)[0]
        unit = Fraction(spread) + Fraction(fmt.roundoff) * abs(Fraction(o)) + Fraction(fmt.smallest) + Fraction(floor)
        wanted = abs(Fraction(value) - Fraction(o)) / unit
        assume(wanted < 1e300)
        assert found == pytest.approx(float(wanted), rel=1e-9)
        # It falls with the spread, and a factor common to all of them drops out but for the smallest number.
        wider = truth._replace(spread=np.array([2 * spread + 1.0]))
        assert excess(np.array([value]), wider, fmt, np.array([0]), floor)[0] <= found
        if unit > 10**7 * Fraction(fmt.smallest):
            scaled = Truth(np.array([o * 64]), np.array([abs(o) * 64]), np.array([spread * 64]), np.array([False]))
            again = excess(np.array([value * 64]), scaled, fmt, np.array([0]), floor * 64)[0]
            assert again == pytest.approx(found, rel=1e-6, abs=1e-6)

    run()


@signed
def test_excess_across_classes(dtype):
    fmt = FORMATS[dtype]

    def of(value, o, spread=0.0, *, flips=False):
        truth = Truth(np.array([o]), np.array([abs(o)]), np.array([spread]), np.array([flips]))
        return excess(np.array([value]), truth, fmt, np.array([0]))[0]

    assert of(math.nan, math.nan) == of(math.inf, math.inf) == 0
    assert of(math.nan, 1.0) == of(1.0, math.nan) == of(math.inf, 1.0) == of(math.inf, -math.inf) == math.inf
    assert of(math.nan, 1.0, flips=True) == 0
    edge = fmt.largest / (1 + (EDGE - 1) * fmt.roundoff)
    assert of(math.inf, edge) == 0
    assert of(-math.inf, edge) == math.inf
    assert of(math.inf, fmt.largest / (1 + 4 * EDGE * fmt.roundoff)) == math.inf


LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 1),
    "sliced": lambda t: t[:, ::2],
    "expanded": lambda t: t[:1].expand(3, *t.shape[1:]),
    "permuted": lambda t: t.permute(2, 0, 1),
}


@dtypes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_do_not_change_values(dtype, layout):
    t = LAYOUTS[layout](of_bits(list(range(24)), dtype).reshape(2, 3, 4))
    dense = torch.tensor(t.double().tolist(), dtype=torch.float64).to(dtype)
    assert sorted(dense_order(t)) == [0, 1, 2]
    assert t.permute(dense_order(t)).stride() == tuple(sorted(t.stride(), reverse=True))
    assert bits_equal(t, dense)
    assert plainly_equal(t, dense) == (t.is_contiguous() and t.stride() == dense.stride())
    assert bits_equal(plain(t), dense)
    assert bits_equal(resolved(t), dense)
    assert diff("", t, dense).n_different == 0
    assert form_difference(t, dense) == "" or form_difference(t, dense).startswith("stride")
    assert bool(form_difference(t, dense)) == bool(form_difference(dense, t))
    assert meta(t).dtype == dtype_name(dtype)
    assert meta(t).shape == tuple(t.shape)


@given(st.sampled_from(["add", "mul", "_to_copy", "index_put", "layer_norm"]), st.sampled_from(["", "_"]),
       st.sampled_from(["", "_foreach_"]), st.sampled_from(["", ".out", ".Tensor"]))  # fmt: skip
def test_variants_of_an_operator_share_name_and_bound(name, inplace, foreach, overload):
    op = f"aten::{foreach}{name}{inplace}{overload}"
    assert base_name(op) == name
    assert base_name(base_name(op)) == name
    for dtype in (torch.float32, torch.float16, torch.int64):
        assert ulp_bound(op, [dtype]) == ulp_bound(f"aten::{name}", [dtype])
        # A bound of 0 with integers, whatever the operator.
        assert dtype.is_floating_point or ulp_bound(op, [dtype]) == 0


@pytest.mark.parametrize("op", ["gelu", "_log_softmax", "softplus", "upsample_bilinear2d", "mm"])
@given(st.floats(1e-3, 1e3), st.floats(2.0**-53, 2.0**-3))
def test_absolute_errors_grow_with_roundoff_and_size(op, size, roundoff):
    def of(u, s):
        return np.max(absolute_error(f"aten::{op}", u, s, np.array([s]), 7))

    assert of(roundoff, size) >= 0
    assert of(2 * roundoff, size) == pytest.approx(2 * of(roundoff, size))
    assert of(roundoff, 2 * size) >= of(roundoff, size)
