"""Causes that reproduce the result: named where they do, and not where they only look like it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import shadowrun
from shadowrun.judge.cause import hypotheses
from shadowrun.judge.judge import Judge
from shadowrun.judge.oracle import Oracle
from shadowrun.types import Cause, Status
from tests.judge.test_hypotheses import normal

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


CHANNELS = torch.ones(4)
NORM = (normal(8, 4, 5, 5), CHANNELS, CHANNELS)
GRADIENT = (normal(8, 4, 5, 5, seed=1), normal(8, 4, 5, 5), CHANNELS)
NONE = torch.empty(0)
WITHOUT = {
    "no running statistics": (aten.native_batch_norm.default, *NORM, None, None, True, 0.1, 1e-5),
    "none in the schema": (aten._native_batch_norm_legit.no_stats, *NORM, True, 0.1, 1e-5),
    "a gradient in training": (
        aten.native_batch_norm_backward.default,
        *GRADIENT,
        *[CHANNELS] * 4,
        True,
        1e-5,
        [True] * 3,
    ),
    "a gradient in training without running statistics": (
        aten.native_batch_norm_backward.default,
        *GRADIENT,
        None,
        None,
        *[CHANNELS] * 2,
        True,
        1e-5,
        [True] * 3,
    ),
    "a gradient in evaluation": (
        aten.native_batch_norm_backward.default,
        *GRADIENT,
        *[CHANNELS] * 2,
        *[NONE] * 2,
        False,
        1e-5,
        [True] * 3,
    ),
    "a gradient of the newer operator": (
        aten.batch_norm_backward.default,
        *GRADIENT,
        *[CHANNELS] * 4,
        True,
        1e-5,
        [True] * 3,
        NONE,
    ),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_no_batch_norm_is_asked_without_its_statistics(make_case, monkeypatch, name):
    """The kernel reads them unchecked, and the process ends."""
    op, *args = WITHOUT[name]
    real, asked, complete = Oracle.with_argument, [], sum(a is CHANNELS for a in args) > 4

    def watched(oracle, argument, value):
        asked.append(argument)
        assert argument not in {"running_mean", "running_var", "save_mean", "save_invstd", "save_var"}
        assert complete or argument not in {"train", "training"}
        return real(oracle, argument, value)

    monkeypatch.setattr(Oracle, "with_argument", watched)

    def wrong(*args):
        first, *others = op(*args)
        return first + (7919 * first).sin() * 0.01, *others

    verdict, _ = Judge()(make_case(op, wrong, *args))
    assert verdict.status is Status.MISMATCH, verdict
    assert asked


def test_the_mode_of_a_batch_norm_ignored(make_case):
    op = aten.native_batch_norm.default
    args = (*NORM, normal(4, seed=2), CHANNELS * 3, False, 0.1, 1e-5)
    verdict, _ = Judge()(make_case(op, lambda *a: (op(*a[:5], True, *a[6:])[0], *op(*a)[1:]), *args))
    assert verdict.explanation == "argument training ignored", verdict


def test_operators_of_others_are_not_asked_with_other_arguments(make_case):
    """What their kernels check is not known; this one would end the process."""
    library = torch.library.Library("shadowrun_alternatives", "DEF")
    given = []

    def kernel(x, offset=None):
        given.append(offset is not None)
        return x + offset

    library.define("shifted(Tensor x, Tensor? offset=None) -> Tensor")
    library.impl("shifted", kernel, "CPU")
    op = torch.ops.shadowrun_alternatives.shifted.default
    verdict, _ = Judge()(make_case(op, lambda x, o: x * 1.5 + o, normal(20), normal(20, seed=1)))
    library._destroy()
    assert verdict.status is Status.MISMATCH, verdict
    assert all(given)


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
        under = Oracle.on_changed_inputs

        def counted(oracle, *args, **kwargs):
            self.asked += 1
            return under(oracle, *args, **kwargs)

        def counting(test):
            def tried(suspect):
                self.tried += 1
                return test(suspect)

            return tried

        monkeypatch.setattr(Oracle, "on_changed_inputs", counted)
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


def test_a_guess_is_tried_first_where_it_was_right_twice(make_case, monkeypatch):
    def attention(q, k, v):
        return aten._scaled_dot_product_flash_attention_for_cpu(*(t.bfloat16() for t in (q, k, v)))

    def target(q, k, v):
        return tuple(t.float() for t in attention(q, k, v))

    counted, judge = Counted(monkeypatch), Judge()
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    tried = []
    for seed in (0, 10, 20):
        case = make_case(op, target, *(normal(2, 2, 48, 16, seed=seed + i) for i in range(3)))
        (verdict, _), n, _ = counted.during(lambda case=case: judge(case))
        assert verdict.confidence < hypotheses.CERTAIN, verdict
        tried.append(n)
    assert tried[0] == tried[1] > tried[2] == 1
