"""The trace of a judgement, and the rung that a recorded verdict came from."""

from __future__ import annotations

import pytest
import torch

from shadowrun.judge.decision_trace import Rung, Step, Trace, deciding, recorded_steps, rung_of
from shadowrun.judge.judge import Judge
from shadowrun.types import Cause, Status, Verdict
from tests.judge.test_bias import truncated
from tests.judge.test_factorizations import signs
from tests.judge.test_matrix_products import in_half_blocks, normal

aten = torch.ops.aten
NAN = float("nan")


def traced(case, **options):
    judge = Judge(**options)
    judge.trace = Trace()
    verdict, diffs = judge(case)
    plain, _ = Judge(**options)(case)
    assert verdict == plain, "a trace changes a verdict"
    return verdict, diffs, judge.trace


def one_ulp(op):
    return lambda *args: torch.nextafter(op(*args), torch.tensor(torch.inf))


def other_signs(a, mode):
    q, r = aten.linalg_qr.default(a, mode)
    # The same memory layout: a mere stride would be a finding of its own.
    s = signs(torch.ones(1, q.shape[-1]))
    return q.mul_(s), r.mul_(s.mT)


def in_bfloat16(a, b):
    return a.bfloat16().float() @ b.bfloat16().float()


A, B = normal(16, 32), normal(32, 8)
ROW, TIED = normal(64), torch.tensor([1.0, 2.0, 2.0])
SHORT = normal(30, 40, dtype=torch.bfloat16), normal(40, 40, dtype=torch.bfloat16)
LONG = normal(64, 128, dtype=torch.bfloat16), normal(128, 64, dtype=torch.bfloat16)
CASES = {
    Rung.BITS: (aten.add.Tensor, lambda a, b: a + b, (A, A), {}),
    Rung.FORM: (aten.exp.default, lambda x: x.exp().double(), (ROW,), {}),
    Rung.CLASSES: (aten.relu.default, lambda x: -(-x).clamp(max=0), (-ROW.abs(),), {}),
    Rung.OPEN: (aten.argmax.default, lambda x: torch.tensor(2), (TIED,), {}),
    Rung.EQUATION: (aten.linalg_qr.default, other_signs, (normal(12, 6), "reduced"), {}),
    Rung.TOLERANCE: (aten.exp.default, lambda x: x.exp() * 1.01, (ROW,), {"rtol": 0.1, "atol": 0.0}),
    Rung.BOUND: (aten.exp.default, one_ulp(torch.exp), (ROW,), {}),
    Rung.CLOSENESS: (aten.mm.default, one_ulp(torch.mm), (A, B), {}),
    Rung.ORACLE: (aten.mm.default, in_bfloat16, (A, B), {}),
    Rung.SHORT_PRODUCT: (aten.mm.default, in_half_blocks, SHORT, {"hypotheses": False}),
    Rung.BIAS: (aten.mm.default, truncated(torch.mm), LONG, {"hypotheses": False}),
    Rung.RANDOM: (aten.bernoulli.p, lambda x, p: torch.ones_like(x), (ROW, 0.5), {}),
}


@pytest.mark.parametrize("rung", CASES)
def test_a_trace_names_the_rung_that_decided(rung, make_case):
    op, target, args, options = CASES[rung]
    verdict, diffs, trace = traced(make_case(op, target, *args), **options)
    assert deciding(trace) is rung, (verdict, trace)
    assert rung_of(verdict) is rung, verdict
    assert deciding(recorded_steps(verdict, diffs)) is rung


def test_an_exact_operator_that_is_wrong_is_decided_by_its_bound(make_case):
    verdict, diffs, trace = traced(make_case(aten.maximum.default, lambda a, b: a.fmax(b), ROW * NAN, ROW))
    assert verdict.explanation == "NaN treated as missing"
    assert deciding(trace) is deciding(recorded_steps(verdict, diffs)) is Rung.BOUND
    assert trace[-1].rung is Rung.CAUSE
    assert trace[-2].limit.startswith("0 ULP: nothing is rounded")


def test_steps_have_figures_and_limits(make_case):
    a, b = normal(32, 64), normal(64, 32)
    verdict, diffs, trace = traced(make_case(aten.mm.default, in_bfloat16, a, b))
    assert verdict.cause is Cause.REDUCED_PRECISION
    close, *oracle, cause = trace[1:]
    assert (close.rung, close.outcome) == (Rung.CLOSENESS, None)
    assert close.limit == "4 ULP, or 20 units of rounding"
    assert [step.outcome for step in oracle] == [None, Status.MISMATCH]
    assert oracle[-1].limit == "40 units"
    assert "perturbed runs" in oracle[-1].figure
    assert cause.figure.startswith("inputs rounded to bf16: holds for all")
    recorded = recorded_steps(verdict, diffs)
    assert [step.rung for step in recorded] == [Rung.BITS, Rung.CLOSENESS, Rung.ORACLE, Rung.ORACLE]
    assert f"{diffs[0].excess_actual:.3g}" in recorded[2].figure


def test_the_worst_result_decides_for_the_call():
    steps = [
        Step(Rung.CLOSENESS, "output 0", "", "", Status.MATCH),
        Step(Rung.ORACLE, "output 1", "", "", Status.MISMATCH),
        Step(Rung.BOUND, "output 2", "", "", Status.MATCH),
        Step(Rung.CAUSE, "", "", "", Status.MISMATCH),
    ]
    assert deciding(steps) is Rung.ORACLE
    assert deciding([]) is None


@pytest.mark.parametrize(
    ("verdict", "rung"),
    [
        (Verdict(Status.SKIPPED, None, "collective"), None),
        (Verdict(Status.FALLBACK, Cause.SILENT_FALLBACK, "computed on the CPU"), None),
        (Verdict(Status.UNVERIFIED, None, "no float64 oracle: it needs 4096 MiB"), Rung.ORACLE),
        (Verdict(Status.MISMATCH, Cause.IMPLEMENTATION, "", "anything that a file may say"), None),
    ],
)
def test_what_was_not_judged_has_no_rung(verdict, rung):
    assert rung_of(verdict) is rung


def test_slices_are_a_step(make_case, monkeypatch):
    from shadowrun.judge import large_results

    monkeypatch.setattr(large_results, "LARGE_BYTES", 1 << 18)
    monkeypatch.setattr(large_results, "WANTED_BYTES", 1 << 17)
    a, b = normal(400, 64), normal(64, 48)
    _, _, trace = traced(make_case(aten.mm.default, in_bfloat16, a, b))
    assert trace[-1].rung is Rung.SLICES
    assert "by slices" in trace[-1].figure
