"""`diff` in C, from the tensors to the finished value: the same for every form, and nothing is left behind."""

from __future__ import annotations

import sys
import tracemalloc

import numpy as np
import pytest
import torch

from shadowrun.numerics.diff import diff, native_diff
from tests.numerics.by_specification import by_specification, same
from tests.numerics.test_native_statistics import numbers

pytestmark = pytest.mark.skipif(native_diff is None, reason="no compiled part, or a torch without what it needs")

FORMS = {
    "a number": lambda t: t[7],
    "one element": lambda t: t[7:8],
    "no dimension but ones": lambda t: t[7:8].view(1, 1, 1),
    "dimensions of one": lambda t: t.view(1, 300, 1, 200),
    "a matrix": lambda t: t.view(300, 200),
    "a parameter": lambda t: torch.nn.Parameter(t.clone()),
    "part of a graph": lambda t: t.clone().requires_grad_() * 2,
    "other strides of ones": lambda t: t.as_strided((1, 300, 1, 200), (5, 200, 9, 1)),
    "from within": lambda t: t[3:],
    "gaps": lambda t: t[::2],
    "negated when read": torch._neg_view,
    "a subclass": lambda t: t.as_subclass(Sub),
    "without elements": lambda t: t[:0],
}

PLAIN = list(FORMS)[:9]
"""Forms that C knows from the tensor to the diff."""


class Sub(torch.Tensor):
    pass


@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
    rng = np.random.default_rng(4)
    a, e = numbers(torch.float32, 60_000, rng), numbers(torch.float32, 60_000, rng)
    left, right = FORMS[form](a), FORMS[form](e)
    assert (native_diff("x", left, right) is not None) == (form in PLAIN)
    wanted = by_specification(left, right)
    same(diff("x", left, right), wanted)
    assert repr(diff("x", left, right)) == repr(wanted).replace(
        f"rmse={wanted.rmse}", f"rmse={diff('x', left, right).rmse}"
    )
    if left.dim() == right.dim():
        same(diff("x", left, right.contiguous() + 0), by_specification(left, right.contiguous() + 0))
    same(diff("x", left, right.double()), by_specification(left, right.double()))
    same(diff("x", left, right.int()), by_specification(left, right.int()))
    same(diff("x", left, e.view(2, -1)), by_specification(left, e.view(2, -1)))
    same(diff("x", left, None), by_specification(left, None))


def test_strides_of_ones_that_differ_are_told():
    e = torch.arange(3.0).view(1, 3)
    a = (e + 1).as_strided((1, 3), (7, 1))
    assert a.is_contiguous()
    found = diff("x", a, e)
    assert found.actual.stride == (7, 1)
    assert found.expected.stride == (3, 1)
    same(found, by_specification(a, e))


def test_what_python_numbers_differ_by():
    for left, right in ((1.5, 1.0), (3, 4), (True, False), (1.5, torch.tensor(1.0)), (1j, 2j)):
        same(diff("x", left, right), by_specification(left, right))


def test_views_and_other_layouts():
    rng = np.random.default_rng(4)
    a, e = numbers(torch.float32, 60_000, rng).view(200, 300), numbers(torch.float32, 60_000, rng).view(200, 300)
    pairs = (a.T, e.T), (a[1:, 3:], e[1:, 3:]), (a.T, e.T.contiguous()), (a[:, :1].expand(200, 7), e[:, :7])
    for left, right in pairs:
        same(diff("x", left, right), by_specification(left, right))
    same(
        diff("x", torch.complex(a, e), torch.complex(e, e)), by_specification(torch.complex(a, e), torch.complex(e, e))
    )
    same(diff("x", a.double(), e), by_specification(a.double(), e))


def test_diffs_leave_no_memory_behind():
    rng = np.random.default_rng(8)
    e, a = numbers(torch.float32, 600, rng).view(20, 30), numbers(torch.float32, 600, rng).view(20, 30)
    one_a, one_e, name = a[:1].view(30, 1), e[:1].view(30, 1), "output 12345"
    others = (one_a.as_strided((30, 1), (1, 5)), one_e), (a.T, e.T), (a, e.double()), (a, None), (1.0, a)

    def run(n):
        for _ in range(n):
            diff(name, a, e)
            diff(name, one_a, one_e)
            for left, right in others:
                native_diff(name, left, right)

    run(10)
    tracemalloc.start()
    try:
        run(10)
        before = tracemalloc.get_traced_memory()[0], sys.getrefcount(name), sys.getrefcount(None)
        run(500)
        after = tracemalloc.get_traced_memory()[0], sys.getrefcount(name), sys.getrefcount(None)
    finally:
        tracemalloc.stop()
    assert after[0] - before[0] < 2000
    assert abs(after[1] - before[1]) + abs(after[2] - before[2]) < 50
