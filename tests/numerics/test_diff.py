from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shadowrun.numerics.diff import CHUNK, diff
from shadowrun.numerics.precision import FORMATS, monotone, remaining_bits, ulp_distance

FLOATS = {torch.float64: np.int64, torch.float32: np.int32, torch.float16: np.int16, torch.bfloat16: np.int16}


def bits_of(t: torch.Tensor) -> list[int]:
    return [int(b) for b in t.reshape(-1).view(FORMATS[t.dtype].view).tolist()]


def naive(actual: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    """Every statistic element by element in Python."""
    fmt = FORMATS[actual.dtype]
    width = 8 * actual.element_size()
    counts = "n_different", "n_nan", "n_inf", "n_zero_sign", "n_subnormal", "n_from_zero"
    out = dict.fromkeys((*counts, "max_abs", "max_rel", "max_ulp"), 0.0)
    out["remaining_bits"] = fmt.mantissa
    squares, n_finite = 0.0, 0
    pairs = zip(
        actual.double().reshape(-1).tolist(), expected.double().reshape(-1).tolist(), bits_of(actual),
        bits_of(expected), strict=True,
    )  # fmt: skip
    for a, e, ia, ie in pairs:
        ua, ue = ia % (1 << width), ie % (1 << width)
        out["n_different"] += ua != ue
        out["n_nan"] += math.isnan(a) != math.isnan(e)
        out["n_inf"] += not (math.isnan(a) or math.isnan(e)) and a != e and (math.isinf(a) or math.isinf(e))
        out["n_zero_sign"] += a == e == 0 and ua != ue
        sub_a, sub_e = 0 < abs(a) < fmt.normal, 0 < abs(e) < fmt.normal
        out["n_subnormal"] += (sub_a and e == 0) or (sub_e and a == 0)
        if not (math.isnan(a) and math.isnan(e)):
            shift = next(i for i in range(width + 1) if ua >> i == ue >> i)
            out["remaining_bits"] = min(out["remaining_bits"], max(0, fmt.mantissa - shift))
        if math.isfinite(a) and math.isfinite(e):
            n_finite += 1
            out["n_from_zero"] += e == 0 != a
            out["max_abs"] = max(out["max_abs"], abs(a - e))
            squares += (a - e) * (a - e)  # not **, which raises where it overflows
            if e != 0:
                out["max_rel"] = max(out["max_rel"], abs(a - e) / abs(e))
            signed = [-(u - (1 << (width - 1))) if u >> (width - 1) else u for u in (ua, ue)]
            out["max_ulp"] = max(out["max_ulp"], abs(signed[0] - signed[1]))
    out["rmse"] = math.sqrt(squares / n_finite) if n_finite else 0.0
    return out


def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
    found, wanted = diff("output 0", actual, expected), naive(actual, expected)
    for key, value in wanted.items():
        got = getattr(found, key)
        if key in {"max_abs", "max_rel", "rmse"}:
            assert got == pytest.approx(value, rel=1e-4, abs=1e-44), key
        else:
            assert got == value, key


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_against_python(dtype):
    width = 8 * torch.empty(0, dtype=dtype).element_size()

    @settings(max_examples=60, deadline=None)
    @given(hnp.arrays(np.uint64, st.integers(1, 20)), st.data())
    def run(bits, data):
        a = bits.astype(f"u{width // 8}")
        flips = data.draw(hnp.arrays(a.dtype, a.shape))
        mask = data.draw(st.sampled_from([0, 1, 0xFF, (1 << (width - 1)) | 1, (1 << width) - 1]))
        e = a ^ (flips & np.array(mask, dtype=a.dtype))
        left, right = (torch.from_numpy(x.view(FLOATS[dtype]).copy()).view(dtype) for x in (a, e))
        found, wanted = diff("output 0", left, right), naive(left, right)
        counts = "n_different", "n_nan", "n_inf", "n_zero_sign", "n_subnormal", "n_from_zero"
        for key in (*counts, "max_ulp", "remaining_bits"):
            assert getattr(found, key) == wanted[key], key

    run()


@pytest.mark.parametrize("n", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chunk_boundaries(n, dtype):
    g = torch.Generator().manual_seed(n)
    expected = torch.randn(n, generator=g).to(dtype)
    actual = expected.clone()
    actual[-1] = expected[-1] + 3
    found = diff("output 0", actual, expected)
    assert (found.n_different, found.worst_index, found.n_elements) == (1, (n - 1,), n)
    assert found.rmse == pytest.approx(float((actual[-1] - expected[-1]).float()) / math.sqrt(n), rel=1e-2)
    noisy = (expected.float() * (1 + 1e-2 * torch.randn(n, generator=g))).to(dtype)
    check(noisy, expected)


@pytest.mark.parametrize("kind", ["transposed", "strided", "expanded", "scalar", "empty", "permuted"])
def test_layouts(kind):
    e = torch.arange(24.0).reshape(2, 3, 4) + 1
    a = e.clone()
    a[1, 2, 0] += 0.5
    if kind == "transposed":
        a, e = a.transpose(0, 2), e.transpose(0, 2)
    elif kind == "strided":
        a, e = a[:, ::2, ::2], e[:, ::2, ::2]
    elif kind == "expanded":
        a, e = a[1:, 2:, :1].expand(5, 3, 7), e[1:, 2:, :1].expand(5, 3, 7)
    elif kind == "scalar":
        a, e = a[1, 2, 0], e[1, 2, 0]
    elif kind == "permuted":
        a, e = a.permute(1, 2, 0).contiguous(), e.permute(1, 2, 0)
    else:
        a, e = a[:0], e[:0]
    found = diff("output 0", a, e)
    if kind == "empty":
        assert (found.n_elements, found.n_different, found.worst_index) == (0, 0, ())
        return
    assert found.max_abs == 0.5
    assert float(a[found.worst_index]) - float(e[found.worst_index]) == 0.5
    assert found.n_different == int((a != e).sum())


def test_integers_are_exact():
    low, high = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    found = diff("output 0", torch.tensor([low, 3]), torch.tensor([high, 3]))
    assert (found.max_ulp, found.remaining_bits, found.n_different) == (2**64 - 1, -1, 1)
    small = diff("output 0", torch.tensor([-128, 5], dtype=torch.int8), torch.tensor([127, 5], dtype=torch.int8))
    assert small.max_ulp == 255
    assert diff("output 0", torch.tensor([True]), torch.tensor([False])).max_ulp == 0
    assert diff("output 0", 3, 5).max_abs == 2


def test_equal_infinities_are_no_difference():
    t = torch.tensor([math.inf, -math.inf, math.nan, 1.0])
    found = diff("output 0", t, t.clone())
    assert (found.n_different, found.n_inf, found.n_nan, found.max_abs, found.max_ulp) == (0, 0, 0, 0.0, 0)
    other = torch.tensor([math.inf, -math.inf, math.nan, 2.0])
    assert diff("output 0", t, other).max_abs == 1.0


def test_complex_by_components_and_other_forms():
    a = torch.tensor([1 + 2j, 3 + 4j])
    found = diff("output 0", a, a + torch.tensor([0j, 1j]))
    assert (found.n_elements, found.n_different, found.worst_index, found.worst_expected) == (4, 1, (1,), 5.0)
    assert diff("output 0", torch.ones(2), torch.ones(3)).detail == "shape (2,) against (3,)"
    assert diff("output 0", torch.ones(2).half(), torch.ones(2) * 2).max_abs == 1.0
    assert diff("output 0", torch.eye(2).to_sparse(), torch.eye(2) * 2).max_abs == 1.0


@given(st.integers(-(2**31), 2**31 - 1), st.integers(-(2**31), 2**31 - 1))
def test_monotone_map_orders_as_the_numbers(i, j):
    x, y = torch.tensor([i, j], dtype=torch.int32).view(torch.float32).tolist()
    if math.isnan(x) or math.isnan(y):
        return
    mi, mj = monotone(np.array([i, j], np.int64), 32).tolist()
    assert (mi < mj) == (x < y)
    assert (mi == mj) == (x == y)


def test_neighbours_are_one_apart():
    for x in (-1.5, -1e-45, 0.0, 1e-40, 3.4e38, -1.1754942e-38):
        t = torch.tensor([x])
        up = torch.nextafter(t, torch.tensor([math.inf]))
        assert ulp_distance(t.view(torch.int32).numpy(), up.view(torch.int32).numpy(), 32) == 1


def test_remaining_bits_by_definition():
    assert remaining_bits(0, 23) == 23
    assert remaining_bits(1, 23) == 22
    assert remaining_bits(1 << 23, 23) == 0
    assert diff("output 0", torch.tensor([1.0]), torch.tensor([0.99999994])).remaining_bits == 0
    assert diff("output 0", torch.tensor([1.5]), torch.tensor([1.0])).remaining_bits == 0
    assert diff("output 0", torch.tensor([1.25]), torch.tensor([1.0])).remaining_bits == 1


@pytest.mark.parametrize("worst", [[3, 7], [7, 3]], ids=["above first", "below first"])
def test_of_two_that_are_as_far_off_the_first_is_the_worst(worst):
    e = torch.full((10,), 4.0)
    a = e.clone()
    a[worst[0]] += 0.5
    a[worst[1]] -= 0.5
    assert diff("output 0", a, e).worst_index == (3,)
    assert diff("output 0", a.reshape(2, 5).T, e.reshape(2, 5).T).worst_index == (3, 0)
