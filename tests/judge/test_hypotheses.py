"""Each cause is named when it is the cause."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from shadowrun.judge.judge import Judge
from shadowrun.types import Cause, Status

aten = torch.ops.aten


def normal(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * scale


def poked(op, places, change):
    def run(*args):
        out = op(*args)
        out.view(-1)[places] = change(out.view(-1)[places])
        return out

    return run


def truncated(t):
    return (t.view(torch.int32) & ~0x1FFF).view(torch.float32)


def tf32(t):
    return ((t.view(torch.int32) + 4096) & ~0x1FFF).view(torch.float32)


def half_sums(a, b):
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float16)
    for i in range(a.shape[1]):
        total = total + (a[:, i : i + 1] * b[i : i + 1]).half()
    return total.float()


def with_ties(t):
    tied = t.clone()
    tied.view(torch.int32)[::3] &= ~0x3FFF
    tied.view(torch.int32)[::3] |= 0x1000
    return tied


def tf32_to_even(t):
    bits = t.view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def wrong_when_strided(x, w):
    return x @ w if x.is_contiguous() else x.mT.contiguous().view(x.shape) @ w


def only_first(selves, others):
    selves[0].add_(others[0])


A, B = normal(32, 128), normal(128, 32)
TINY = torch.tensor([1e-20, 3e-20, -2e-20, 1.0, 2.0, 3.0])
STRIDED = normal(48, 32).t()[:, :32]
CASES = {
    "inputs rounded to tf32": (Cause.REDUCED_PRECISION, aten.mm.default, lambda a, b: tf32(a) @ tf32(b), A, B),
    "inputs rounded to tf32 (truncated)": (
        Cause.REDUCED_PRECISION,
        aten.mm.default,
        lambda a, b: truncated(a) @ truncated(b),
        A,
        B,
    ),
    # Of 13 dropped bits, one number in 8,192 lies in the middle: as many terms have a result or two.
    "inputs rounded to tf32 (ties to even)": (
        Cause.REDUCED_PRECISION,
        aten.mm.default,
        lambda a, b: tf32_to_even(a) @ tf32_to_even(b),
        with_ties(A),
        with_ties(B),
    ),
    "inputs rounded to bf16": (
        Cause.REDUCED_PRECISION,
        aten.addmm.default,
        lambda c, a, b: c + a.bfloat16().float() @ b.bfloat16().float(),
        normal(32),
        A,
        B,
    ),
    "inputs rounded to fp16": (
        Cause.REDUCED_PRECISION,
        aten.exp.default,
        lambda x: x.half().float().exp(),
        normal(100),
    ),
    "results rounded to bfloat16": (
        Cause.REDUCED_PRECISION,
        aten.mm.default,
        lambda a, b: (a @ b).bfloat16().float(),
        A,
        B,
    ),
    "accumulated in float16": (Cause.REDUCED_PRECISION, aten.mm.default, half_sums, A, B),
    "subnormal results flushed": (
        Cause.FLUSHED_SUBNORMALS,
        aten.mul.Tensor,
        lambda a, b: torch.where((a * b).abs() < 1e-38, 0.0, a * b),
        TINY,
        TINY,
    ),
    "subnormal inputs flushed": (
        Cause.FLUSHED_SUBNORMALS,
        aten.mul.Tensor,
        lambda a, b: torch.where(a.abs() < 1e-38, 0.0, a) * b,
        TINY * 1e-20,
        torch.full((6,), 1e20),
    ),
    "subnormal inputs and results flushed": (
        Cause.FLUSHED_SUBNORMALS,
        aten.mul.Tensor,
        lambda a, b: torch.where((a * b).abs() < 1e-38, 0.0, torch.where(a.abs() < 1e-38, 0.0, a) * b),
        torch.tensor([1e-39, 1e-30, 2.0]),
        torch.tensor([1e20, 1e-10, 3.0]),
    ),
    "zero in the place of every wrong element": (
        Cause.IMPLEMENTATION,
        aten.erf.default,
        lambda x: torch.where(x.abs() < 1e-6, 0.0, x.erf()),
        torch.tensor([1e-9, 2e-7, -3e-8, 0.5, 1.0, -2e-8, 0.1, 1e-12]),
    ),
    "NaN treated as missing": (
        Cause.EXCEPTIONAL_VALUES,
        aten.maximum.default,
        torch.fmax,
        torch.tensor([1.0, math.nan]),
        torch.ones(2),
    ),
    "NaN produced": (
        Cause.EXCEPTIONAL_VALUES,
        aten.hypot.default,
        lambda a, b: torch.sqrt(a * a + b * b) * torch.where(a.isinf(), math.nan, 1.0),
        torch.tensor([math.inf, 1.0]),
        torch.ones(2),
    ),
    "overflows early": (
        Cause.EXCEPTIONAL_VALUES,
        aten.hypot.default,
        lambda a, b: torch.sqrt(a * a + b * b),
        torch.tensor([1e30, 1.0]),
        torch.ones(2),
    ),
    "infinity lost": (
        Cause.EXCEPTIONAL_VALUES,
        aten.exp.default,
        lambda x: x.exp().clamp(max=3e38),
        torch.tensor([1000.0, 1.0]),
    ),
    "sign of zero lost": (Cause.EXCEPTIONAL_VALUES, aten.neg.default, lambda x: 0 - x, torch.tensor([0.0, 1.0])),
    "right on contiguous inputs": (Cause.LAYOUT, aten.mm.default, wrong_when_strided, STRIDED, normal(32, 8)),
    "result not written": (
        Cause.IMPLEMENTATION,
        aten._foreach_add_.List,
        only_first,
        [normal(5), normal(6)],
        [normal(5), normal(6)],
    ),
    "equals its input": (Cause.IMPLEMENTATION, aten.gelu.default, torch.clone, normal(50)),
    "last elements": (
        Cause.IMPLEMENTATION,
        aten.exp.default,
        poked(aten.exp.default, slice(-3, None), torch.zeros_like),
        normal(100),
    ),
    "block edge, every 32": (
        Cause.IMPLEMENTATION,
        aten.exp.default,
        poked(aten.exp.default, slice(31, None, 32), lambda v: v + torch.arange(1.0, 5.0) ** 3),
        normal(128),
    ),
    "last term missing": (
        Cause.IMPLEMENTATION,
        aten.sum.dim_IntList,
        lambda x, d: x[:, :-1].sum(d),
        normal(8, 100),
        [1],
    ),
    "duplicate indices lost": (
        Cause.IMPLEMENTATION,
        aten.index_add.default,
        lambda s, d, i, v: s.index_copy(d, i, s[i] + v),
        torch.zeros(50),
        0,
        torch.arange(60) % 50,
        normal(60),
    ),
    "scaled by 1.001": (Cause.IMPLEMENTATION, aten.mm.default, lambda a, b: a @ b * 1.001, A, B),
    "offset by 1e-05": (Cause.IMPLEMENTATION, aten.sigmoid.default, lambda x: x.sigmoid() + 1e-5, normal(100)),
    "sign flipped": (Cause.IMPLEMENTATION, aten.mm.default, lambda a, b: -(a @ b), A, B),
    "elements permuted": (Cause.IMPLEMENTATION, aten.mm.default, lambda a, b: (a @ b).flip(1), A, B),
    "": (Cause.IMPLEMENTATION, aten.gelu.default, lambda x: x.cos(), normal(100)),
}


@pytest.mark.parametrize("explanation", CASES)
def test_cause(make_case, explanation):
    cause, op, target, *args = CASES[explanation]
    verdict, _ = Judge()(make_case(op, target, *args))
    assert (verdict.status, verdict.cause, verdict.explanation) == (Status.MISMATCH, cause, explanation), verdict
    assert (verdict.confidence > 0.5) == bool(explanation)


def test_stale_buffer(make_case):
    previous = (normal(10, seed=9).exp(),)
    case = make_case(aten.exp.default, lambda _x: previous[0].clone(), normal(10), previous=previous)
    assert Judge()(case)[0].explanation == "stale buffer"


def test_non_determinism(make_case):
    count = itertools.count()
    verdict, _ = Judge()(make_case(aten.exp.default, lambda x: x.exp() + next(count) + 1, normal(10)))
    assert verdict.cause is Cause.NON_DETERMINISM


def test_another_order_each_time_is_rounding(make_case):
    count = itertools.count()
    index = torch.zeros(1000, dtype=torch.int64)

    def shuffled(self, dim, i, source):
        order = torch.randperm(1000, generator=torch.Generator().manual_seed(next(count)))
        return aten.index_add.default(self, dim, i, source[order])

    verdict, _ = Judge()(make_case(aten.index_add.default, shuffled, torch.zeros(3), 0, index, normal(1000)))
    assert (verdict.status, verdict.cause) == (Status.MATCH, Cause.NON_DETERMINISM)


def test_hypotheses_can_be_switched_off(make_case):
    verdict, _ = Judge(hypotheses=False)(make_case(aten.mm.default, lambda a, b: -(a @ b), A, B))
    assert (verdict.status, verdict.explanation) == (Status.MISMATCH, "")
