"""What is counted of a pair of tensors on their device is what `diff` counts on the host."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowrun.numerics.device_statistics import COUNTED, DeviceStatistics, PendingStatistics
from shadowrun.numerics.diff import diff

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
GREATEST = 2**31 - 1


def counted(*pairs):
    pending = PendingStatistics()
    for pair in pairs:
        pending.add(*pair)
    return pending.fetch()


def of_diff(actual, expected):
    d = diff("", actual, expected)
    return DeviceStatistics(d.n_different, min(d.max_ulp, GREATEST), d.n_nan + d.n_inf + d.n_subnormal, d.n_zero_sign)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(COUNTED), st.data())
def test_any_bits(dtype, data):
    width = torch.iinfo(BITS[dtype])
    bits = st.lists(st.integers(width.min, width.max), min_size=8, max_size=8)
    a, e = (torch.tensor(data.draw(bits), dtype=BITS[dtype]).view(dtype) for _ in range(2))
    near = e.clone()
    near.view(BITS[dtype])[::2] ^= data.draw(st.integers(0, 7))
    assert counted((a, e), (near, e)) == [of_diff(a, e), of_diff(near, e)]


@pytest.mark.parametrize("dtype", COUNTED, ids=str)
def test_each_class_against_each(dtype):
    tiny = torch.finfo(dtype).tiny
    values = [0.0, 1.0, 2.0, 4.0, tiny, tiny / 2, torch.finfo(dtype).max, float("inf"), float("nan")]
    x = torch.tensor([*values, *(-v for v in values)]).to(dtype)
    for a in x.split(1):
        for e in x.split(1):
            assert counted((a, e)) == [of_diff(a, e)], (a, e)


def test_rows_keep_their_order_and_are_fetched_once():
    x = torch.arange(6.0).view(2, 3)
    pending = PendingStatistics()
    for steps in (0, 1, 3):
        other = x.clone()
        other.view(torch.int32)[1] += steps
        pending.add(other, x)
    assert pending.fetch() == [(0, 0, 0, 0), (3, 1, 0, 0), (3, 3, 0, 0)]
    assert pending.fetch() == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.complex128, torch.float8_e4m3fn])
def test_of_other_dtypes_only_whether_they_differ(dtype):
    a, e = torch.tensor([0, 1, 1, 0]).to(dtype), torch.tensor([0, 1, 0, 1]).to(dtype)
    assert counted((a, e), (a, a.clone()))[0][:2] == (2, GREATEST)
    assert counted((a, a.clone())) == [(0, 0, 0, 0)]


FORMS = {"transposed": lambda t: t.mT, "with gaps": lambda t: t[:, ::2], "permuted": lambda t: t.permute(1, 0, 2)}


@pytest.mark.parametrize("form", FORMS)
def test_any_strides(form):
    x = torch.randn(4, 6, 5)
    a, e = FORMS[form](x.clone()), FORMS[form](x)
    a[0, 1] += 1
    assert counted((a, e)) == [of_diff(a, e)]


def test_a_lazy_sign_counts_as_if_it_were_written():
    x = torch.randn(4, 6)
    assert counted((torch._neg_view(x), -x), (torch._neg_view(x), x)) == [(0, 0, 0, 0), of_diff(-x, x)]
