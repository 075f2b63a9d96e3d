"""Causes that reproduce the result: named where they do, and not where they only look like it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import shadowrun
from shadowrun.replay import hypotheses
from shadowrun.replay.judge import Judge
from shadowrun.types import Cause, Status
from tests.replay.test_hypotheses import normal

aten = torch.ops.aten
REPEATED = torch.randint(0, 10, (60,), generator=torch.Generator().manual_seed(1))


def to_bfloat16(bits):
    return (bits & -65536).view(torch.float32).bfloat16()


def truncated(x, **_):
    return to_bfloat16(x.float().view(torch.int32))


def without_tail(n):
    return lambda a, b: a[:, :-n] @ b[:-n]


def stirling(x):
    y = x + 1
    return (y - 0.5) * y.log() - y + 0.5 * math.log(2 * math.pi) + 1 / (12 * y) - x.log()


CASES = {
    "last 8 of 1100 terms": (
        "last 8 terms missing",
        aten.mm.default,
        without_tail(8),
        (normal(32, 1100), normal(1100, 32)),
        {},
    ),
    "last 8 of 1100 terms in bfloat16": (
        "last 8 terms missing",
        aten.mm.default,
        without_tail(8),
        (normal(32, 1100).bfloat16(), normal(1100, 32).bfloat16()),
        {},
    ),
    "last 24 of 1000 terms, 32 sums": (
        "last 24 terms missing",
        aten.sum.dim_IntList,
        lambda x, d: x[:, :-24].sum(d),
        (normal(32, 1000), [1]),
        {},
    ),
    "last 100 of 700 terms": (
        "last 100 terms missing",
        aten.mm.default,
        without_tail(100),
        (normal(32, 700), normal(700, 32)),
        {},
    ),
    "a cast that truncates": (
        "results truncated to bfloat16, not rounded",
        aten._to_copy.default,
        truncated,
        (normal(50, 60),),
        {"dtype": torch.bfloat16},
    ),
    "expm1 that cancels": (
        "as exp(x) - 1, which cancels",
        aten.expm1.default,
        lambda x: x.exp() - 1,
        (normal(1000, scale=1e-5),),
        {},
    ),
    "a poor series": ("", aten.lgamma.default, stirling, (torch.linspace(0.1, 10, 2000),), {}),
    "include_self": (
        "argument include_self ignored",
        aten.scatter_reduce.two,
        lambda s, d, i, v, r, **_: aten.scatter_reduce.two(s, d, i, v, r),
        (normal(10), 0, REPEATED, normal(60), "sum"),
        {"include_self": False},
    ),
    "scale_grad_by_freq": (
        "argument scale_grad_by_freq ignored",
        aten.embedding_dense_backward.default,
        lambda g, i, n, p, _: aten.embedding_dense_backward.default(g, i, n, p, False),
        (normal(60, 8), REPEATED, 10, -1, True),
        {},
    ),
    "alpha": (
        "argument alpha ignored",
        aten.add.Tensor,
        lambda a, b, **_: a + b,
        (normal(50), normal(50, seed=1)),
        {"alpha": 0.3},
    ),
    "bias": (
        "argument bias ignored",
        aten.native_layer_norm.default,
        lambda x, s, w, _, e: aten.native_layer_norm.default(x, s, w, None, e),
        (normal(16, 32), [32], normal(32), normal(32, seed=1), 1e-5),
        {},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_explanation_reproduces_the_result(make_case, name):
    explanation, op, target, args, kwargs = CASES[name]
    verdict, _ = Judge()(make_case(op, target, *args, **kwargs))
    assert (verdict.status, verdict.explanation) == (Status.MISMATCH, explanation), verdict


def test_stochastic_rounding_is_no_factor(make_case):
    seeds = itertools.count()

    def cast(x, **_):
        g = torch.Generator().manual_seed(next(seeds))
        return to_bfloat16(x.view(torch.int32) + torch.randint(0, 65536, x.shape, generator=g, dtype=torch.int32))

    verdict, _ = Judge()(make_case(aten._to_copy.default, cast, normal(50, 60), dtype=torch.bfloat16))
    assert verdict.cause is Cause.NON_DETERMINISM, verdict


def test_sums_that_are_not_of_one_value_are_no_lost_duplicates(make_case):
    def doubled(s, d, i, v):
        return s + 2 * (aten.index_add.default(s, d, i, v) - s)

    verdict, _ = Judge()(make_case(aten.index_add.default, doubled, torch.ones(10), 0, REPEATED, normal(60)))
    assert verdict.explanation != "duplicate indices lost", verdict


@pytest.mark.filterwarnings("ignore:Warning only once")
@pytest.mark.parametrize("strided", [False, True])
def test_an_offset_that_is_ignored_is_no_chance(give_sim, strided):
    def relu(x):
        memory = x.as_strided(x.shape, x.stride(), 0)
        return torch.where(memory > 0, memory, torch.zeros_like(memory))

    give_sim("relu", relu)
    with shadowrun.compare("sim") as run:
        base = torch.randn(300, generator=torch.Generator().manual_seed(0)).to("sim")
        torch.relu(base.view(30, 10).t()[:, 10:20] if strided else base[100:200])
    [wrong] = [r.verdict for r in run.records() if r.verdict.status is Status.MISMATCH]
    expected = "right on contiguous inputs" if strided else "right without a storage offset"
    assert (wrong.cause, wrong.explanation) == (Cause.LAYOUT, expected)


@pytest.mark.filterwarnings("ignore:Warning only once")
def test_what_is_right_the_second_time_at_the_same_offset_is_chance(give_sim):
    calls = itertools.count()

    def relu(x):
        return torch.where(x > 0, x, torch.zeros_like(x)) + (next(calls) == 0)

    give_sim("relu", relu)
    with shadowrun.compare("sim") as run:
        torch.relu(torch.randn(300).to("sim")[100:200])
    [wrong] = [r.verdict for r in run.records() if r.verdict.status is Status.MISMATCH]
    assert wrong.cause is Cause.NON_DETERMINISM


class Counted:
    """Counts how often hypotheses are tried, and runs of the oracle on changed inputs."""

    def __init__(self, monkeypatch):
        self.tried = self.asked = 0
        under = hypotheses.Oracle.under

        def counted(oracle, *args, **kwargs):
            self.asked += 1
            return under(oracle, *args, **kwargs)

        def counting(test):
            def tried(suspect):
                self.tried += 1
                return test(suspect)

            return tried

        monkeypatch.setattr(hypotheses.Oracle, "under", counted)
        table = tuple(h._replace(test=counting(h.test)) for h in hypotheses.HYPOTHESES)
        monkeypatch.setattr(hypotheses, "HYPOTHESES", table)

    def during(self, function):
        before = self.tried, self.asked
        result = function()
        return result, self.tried - before[0], self.asked - before[1]


def bfloat16_product(c, a, b):
    return c + a.bfloat16().float() @ b.bfloat16().float()


def test_a_known_cause_is_tried_first(make_case, monkeypatch):
    counted, judge = Counted(monkeypatch), Judge()
    cases = [
        make_case(aten.addmm.default, bfloat16_product, normal(32), normal(192, 32, seed=s), normal(32, 32, seed=s + 1))
        for s in (0, 10)
    ]
    (first, _), tried, asked = counted.during(lambda: judge(cases[0]))
    (second, _), tried_again, asked_again = counted.during(lambda: judge(cases[1]))
    (alone, _), _, _ = counted.during(lambda: Judge()(cases[1]))
    assert (first.cause, first.explanation) == (second.cause, second.explanation)
    assert second == alone
    assert tried_again == 1 < tried
    assert asked_again < asked


def test_a_known_cause_that_does_not_hold_gives_way(make_case, monkeypatch):
    counted, judge = Counted(monkeypatch), Judge()
    args = normal(32), normal(192, 32), normal(32, 32)
    judge(make_case(aten.addmm.default, bfloat16_product, *args))
    flipped = make_case(aten.addmm.default, lambda *a: -aten.addmm(*a), *args)
    (verdict, _), tried, _ = counted.during(lambda: judge(flipped))
    assert verdict.explanation == "sign flipped"
    assert tried > 1
