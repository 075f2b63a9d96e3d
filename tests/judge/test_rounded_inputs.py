"""tf32 in products so long that no single element proves it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shadowrun.judge.judge import Judge
from shadowrun.types import Cause, Status

aten = torch.ops.aten


def tf32(t):
    return ((t.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def positive(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def in_blocks(a, b):
    total = torch.zeros(a.shape[0], b.shape[1])
    for i in range(0, a.shape[1], 1000):
        total = total + a[:, i : i + 1000] @ b[i : i + 1000]
    return total


@pytest.mark.parametrize("terms", [16384, 65536])
def test_tf32_in_long_products_of_positive_terms(make_case, terms):
    args = positive(64, terms), positive(terms, 64, seed=1)
    for product in (torch.mm, in_blocks):
        verdict, diffs = Judge()(make_case(aten.mm.default, lambda a, b, p=product: p(tf32(a), tf32(b)), *args))
        assert (verdict.status, verdict.cause) == (Status.MISMATCH, Cause.REDUCED_PRECISION), verdict
        assert verdict.explanation == "inputs rounded to tf32"
        assert diffs[0].n_mismatched > 0


@pytest.mark.parametrize("terms", [16384, 65536])
def test_other_orders_of_long_sums_are_right(make_case, terms):
    args = positive(64, terms), positive(terms, 64, seed=1)
    for right in (in_blocks, lambda a, b: (a.double() @ b.double()).float(), lambda a, b: a.flip(1) @ b.flip(0)):
        verdict, _ = Judge()(make_case(aten.mm.default, right, *args))
        assert (verdict.status, verdict.cause) == (Status.MATCH, Cause.ROUNDING), verdict


@pytest.mark.parametrize(
    ("op", "shapes"),
    [
        (aten.addmm.default, ((32, 24), (32, 64), (64, 24))),
        (aten.baddbmm.default, ((3, 5, 4), (3, 5, 64), (3, 64, 4))),
        (aten.addmv.default, ((32,), (32, 64), (64,))),
    ],
    ids=["addmm", "baddbmm", "addmv"],
)
def test_what_is_added_to_a_product_is_not_rounded(make_case, op, shapes):
    args = [positive(*shape, seed=i) - 0.5 for i, shape in enumerate(shapes)]
    case = make_case(op, lambda added, a, b: op(added, tf32(a), tf32(b)), *args)
    assert Judge()(case)[0].explanation == "inputs rounded to tf32"


def test_inputs_that_tf32_holds_prove_nothing(make_case):
    args = tf32(positive(64, 16384)), tf32(positive(16384, 64, seed=1))
    verdict, _ = Judge()(make_case(aten.mm.default, lambda a, b: in_blocks(tf32(a), tf32(b)), *args))
    assert verdict.status is Status.MATCH


def test_a_reference_in_tf32_is_the_one_that_is_wrong(make_case):
    a, b = positive(64, 65536), positive(65536, 64, seed=1)
    case = make_case(aten.mm.default, in_blocks, a, b)
    assert Judge()(replace(case, expected=(tf32(a) @ tf32(b),)))[0].cause is Cause.REFERENCE
