"""The statistics in C are those of the specification in numpy: every field, dtype and set of instructions."""

from __future__ import annotations

import itertools
import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowrun.native import core
from shadowrun.numerics import diff as diff_module
from shadowrun.numerics.diff import CHUNK, Totals, diff, format_of
from shadowrun.numerics.precision import FORMATS
from tests.numerics.by_specification import by_specification, same
from tests.numerics.test_realistic_pairs import OTHERS

pytestmark = pytest.mark.skipif(core is None, reason="no compiled part")

FLOATS = list(FORMATS)
SETS = ("plain", "avx2", "avx512")
SIZES = (1, 2, 15, 16, 17, 301, 2047, 2049, CHUNK // 2 + 3, 2 * CHUNK + 5)
"""Around the lanes of a sum, a block and a chunk of each dtype."""


def by_statistics(actual, expected):
    """As for what is not plain: Python brings the tensors into form, C compares them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diff_module, "native_diff", None)
        return diff("x", actual, expected)


def check(actual, expected):
    wanted = by_specification(actual, expected)
    same(diff("x", actual, expected), wanted)
    same(by_statistics(actual, expected), wanted)
    form = format_of(actual.dtype)
    assert form is not None
    places = actual.data_ptr(), expected.data_ptr(), actual.numel(), actual.nbytes, form
    best = core.statistics(*places)
    for name in SETS:
        try:
            found = core.statistics(*places, name)
        except ValueError:  # a processor without them
            assert name != "plain"
        else:
            assert repr(found) == repr(best), name  # repr: NaN is NaN


def bits_to(dtype, bits):
    unsigned = np.ascontiguousarray(bits).astype(f"u{dtype.itemsize}")
    return torch.from_numpy(unsigned.view(f"i{dtype.itemsize}")).view(dtype)


def numbers(dtype, n, rng):
    if dtype is torch.bool:
        return torch.from_numpy(rng.integers(0, 2, n).astype(bool))
    if dtype.is_floating_point:
        return torch.from_numpy(rng.standard_normal(n)).to(dtype)
    return bits_to(dtype, rng.integers(0, 100, n))


SPECIAL = [0.0, -0.0, math.nan, math.inf, -math.inf, 1.0, -1.0]


def specials(dtype):
    """Zeros, NaN, infinities, the greatest, the smallest normal and subnormal numbers, of both signs."""
    fmt = FORMATS[dtype]
    if not fmt.signed:
        return bits_to(dtype, np.array([0, 1, 2, 126, 127, 128, 253, 254, 255]))
    extremes = [fmt.largest, fmt.smallest, fmt.normal, fmt.normal - fmt.smallest]
    return torch.tensor(SPECIAL + extremes + [-x for x in extremes], dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_pair_of_special_values(dtype):
    values = specials(dtype)
    bits = values.view(FORMATS[dtype].view)
    pairs = torch.tensor(list(itertools.product(range(len(bits)), repeat=2)))
    left, right = bits[pairs[:, 0]].view(dtype), bits[pairs[:, 1]].view(dtype)
    check(left, right)
    for i in range(len(pairs)):  # and alone, and as the one that differs
        check(left[i : i + 1].clone(), right[i : i + 1].clone())
        near = right.clone()
        near.view(FORMATS[dtype].view)[i] = left.view(FORMATS[dtype].view)[i]
        same(diff("x", near, right), by_specification(near, right), i)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats(dtype, n):
    rng = np.random.default_rng(n)
    e, view = numbers(dtype, n, rng), FORMATS[dtype].view
    check(numbers(dtype, n, rng), e)  # all differ, signs too
    check((e.view(view) ^ 1).view(dtype), e)  # one unit in the last place
    check(e, e.clone())
    last = e.clone()
    last.view(view)[-1] ^= 3
    check(last, e)
    relu = e.float().clamp(min=0).to(dtype)
    check((relu.view(view) ^ (relu.view(view) != 0)).view(dtype), relu)
    check(torch.where(torch.from_numpy(rng.random(n) < 0.1), 0.0, e.float()).to(dtype), relu)  # to zero, from zero
    masked = e.float()
    masked[:: 1 + n // 3] = -math.inf
    check((masked * (1 + 0.1 * torch.rand(n))).to(dtype), masked.to(dtype))


@pytest.mark.parametrize("dtype", [d for d in FLOATS if d.itemsize > 1], ids=str)
@pytest.mark.parametrize("at", [0, 1, 2047, 2048, CHUNK - 1, CHUNK, CHUNK + 5])
def test_one_element_of_another_kind(dtype, at):
    e = torch.linspace(1, 2, CHUNK + 9, dtype=torch.float64).to(dtype)
    noisy = (e.view(FORMATS[dtype].view) ^ 1).view(dtype)
    for value in (math.nan, math.inf, -math.inf, 0.0, -0.0, -1.5, FORMATS[dtype].smallest, FORMATS[dtype].largest):
        for base in (e, noisy):
            a = base.clone()
            a[at] = value
            check(a, e)
            check(e, a)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_integers_and_bools(dtype, n):
    rng = np.random.default_rng(n)
    e = numbers(dtype, n, rng)
    check(numbers(dtype, n, rng), e)
    check(e, e.clone())
    one = e.clone()
    one.view(torch.uint8)[-dtype.itemsize] ^= 1
    check(one, e)
    if dtype is not torch.bool:
        limits = torch.iinfo(dtype)
        ends = np.array([limits.min, limits.max, 0, 1, limits.max // 2], dtype=str(dtype)[6:])
        check(*(torch.from_numpy(rng.choice(ends, n)) for _ in range(2)))
        check(*(bits_to(dtype, rng.integers(0, 256, (n, dtype.itemsize), np.uint8).view(f"u{dtype.itemsize}")[:, 0])
                for _ in range(2)))  # fmt: skip


def test_bools_of_other_bytes_than_0_and_1():
    rng = np.random.default_rng(0)
    left, right = (torch.from_numpy(rng.integers(0, 256, 5000).astype(np.uint8)).view(torch.bool) for _ in range(2))
    check(left, right)


@pytest.mark.parametrize("dtype", [*FLOATS, *OTHERS], ids=str)
def test_any_bits(dtype):
    @settings(max_examples=25, deadline=None)
    @given(st.sampled_from(SIZES), st.integers(0, 10**6), st.sampled_from([1, 3, 0x7F, 0x80, 0xFF, -1]), st.booleans())
    def run(n, seed, mask, few):
        rng = np.random.default_rng(seed)
        width = 8 * dtype.itemsize
        bits = rng.integers(0, 1 << width, n, dtype=f"u{dtype.itemsize}")
        flips = rng.integers(0, 1 << width, n, dtype=bits.dtype) & np.array(mask % (1 << width), dtype=bits.dtype)
        if few:
            flips[rng.random(n) < 0.999] = 0
        check(bits_to(dtype, bits), bits_to(dtype, bits ^ flips))

    run()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_any_scale(dtype):
    @settings(max_examples=25, deadline=None)
    @given(st.sampled_from(SIZES), st.integers(-320, 308), st.integers(-60, 0), st.integers(0, 10**6))
    def run(n, exponent, noise, seed):
        rng = np.random.default_rng(seed)
        with np.errstate(all="ignore"):
            e = rng.standard_normal(n) * 10.0**exponent
            a = e + rng.standard_normal(n) * 10.0 ** max(exponent + noise, -323)
        check(torch.from_numpy(a).to(dtype), torch.from_numpy(e).to(dtype))

    run()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int32], ids=str)
def test_any_address(dtype):
    rng = np.random.default_rng(3)
    n = 2051
    e = numbers(dtype, n, rng)
    a = numbers(dtype, n, rng)
    wanted = by_specification(a, e)
    for k in range(1, 8):
        sides = []
        for t, offset in ((a, k), (e, 8 - k)):
            memory = np.zeros(t.nbytes + 16, np.uint8)
            memory[offset : offset + t.nbytes] = t.view(torch.uint8).numpy()
            sides.append((memory, memory.ctypes.data + offset))
        found = core.statistics(sides[0][1], sides[1][1], n, a.nbytes, format_of(dtype))
        totals = Totals(*found)
        assert (totals.n_different, totals.max_abs, totals.max_rel, totals.max_ulp) == (
            wanted.n_different, wanted.max_abs, wanted.max_rel, wanted.max_ulp,
        )  # fmt: skip
        assert (totals.worst,) == wanted.worst_index
        assert found[-2:] == (wanted.worst_actual, wanted.worst_expected)


@pytest.mark.parametrize("dtype", [*FLOATS, *OTHERS], ids=str)
def test_empty(dtype):
    empty = torch.empty(0, dtype=dtype)
    same(diff("x", empty, empty.clone()), by_specification(empty, empty.clone()))


def test_subnormal_numbers_that_the_processor_flushes():
    rng = np.random.default_rng(5)
    e = torch.from_numpy(rng.standard_normal(5000) * 1e-38).float()
    a = e * (1 + 0.1 * numbers(torch.float32, 5000, rng))
    a[::7], e[::5] = 0.0, 0.0
    assert torch.set_flush_denormal(True)
    try:
        got, wanted = diff("x", a, e), by_specification(a, e)
    finally:
        torch.set_flush_denormal(False)
    same(got, wanted)
    assert diff("x", a, e) != got, "nothing was flushed: the test shows nothing"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_sum_of_squares_is_exact_to_its_bound(dtype):
    n = 3 * CHUNK + 77
    rng = np.random.default_rng(6)
    e = numbers(dtype, n, rng)
    a = (e.double() * (1 + 1e-2 * numbers(torch.float64, n, rng))).to(dtype)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    gaps = (a.to(wide) - e.to(wide)).double().tolist()
    exact = math.sqrt(math.fsum(g * g for g in gaps) / n)
    assert diff("x", a, e).rmse == pytest.approx(exact, rel=n / 16 * 2**-53)


def test_wrong_arguments_are_named():
    t = torch.ones(3)
    places = t.data_ptr(), t.data_ptr(), 3, 12
    with pytest.raises(ValueError, match='no statistics of the format "float128"'):
        core.statistics(*places, ("float128", 0.0, 0.0, True, None))
    with pytest.raises(ValueError, match='no instructions "mmx"'):
        core.statistics(*places, format_of(torch.float32), "mmx")
    with pytest.raises(ValueError, match="256 numbers"):
        core.statistics(*places, ("float8", 0.0, 0.0, True, b"short"))
    for wrong in ((), places, (*places, []), (*places, ("float32",)), ("x", *places[1:], format_of(torch.float32)),
                  (*places[:2], -1, 12, format_of(torch.float32))):  # fmt: skip
        with pytest.raises((TypeError, OverflowError)):
            core.statistics(*wrong)


def test_it_leaks_no_reference():
    e = numbers(torch.float32, 100, np.random.default_rng(7))
    a, name = -e, b"float32".decode()  # a string without other references
    form = format_of(torch.float32)._replace(name=name)
    watched = form, name, a, True
    before = [sys.getrefcount(x) for x in watched]
    for _ in range(500):
        core.statistics(a.data_ptr(), e.data_ptr(), 100, 400, form)
    after = [sys.getrefcount(x) for x in watched]
    assert max(abs(x - y) for x, y in zip(after, before, strict=True)) < 100  # other threads hold True now and then
