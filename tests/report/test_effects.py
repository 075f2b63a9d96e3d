"""Why the loss differs: where the accumulated error rises, what it reaches, and what the two authors can do."""

from __future__ import annotations

import math

import pytest

from shadowrun import report
from shadowrun.analysis import for_authors
from shadowrun.analysis.drift_effects import DriftTrace, read_repairs
from shadowrun.run import Run
from shadowrun.store import DataFile
from shadowrun.types import Cause, Phase, RunInfo, Status, TensorDiff, TensorMeta, Verdict

F, B = Phase.FORWARD, Phase.BACKWARD
META = TensorMeta("f32", (4,))


def trace(*calls):
    """Effects of calls (step, phase, key, relative error[, is the root])."""
    found = DriftTrace()
    for seq, (step, phase, key, relative, *root) in enumerate(calls):
        found.add((0, step), phase, seq, (key, 0), (relative, relative), is_root=bool(root))
    return found.effects()


def test_an_error_that_is_handed_on_is_no_rise():
    found = trace((0, F, 1, 0.1), (0, F, 2, 0.1), (0, F, 3, 0.3), (0, F, 2, 0.05), (0, B, 4, 0.2))
    assert found.rise == pytest.approx({(1, 0): 0.1, (2, 0): 0.0, (3, 0): 0.2, (4, 0): 0.2})
    assert found.reach == {(1, 0): 0.1, (2, 0): 0.1, (3, 0): 0.3, (4, 0): 0.2}


def test_the_rise_is_that_of_a_step_on_average():
    assert trace((0, F, 1, 0.1), (1, F, 1, 0.3)).rise == pytest.approx({(1, 0): 0.2})


def test_the_loss_is_the_last_result_before_backward():
    calls = [(0, F, 1, 0.1), (0, F, 2, 0.2), (0, F, 3, 0.0, "root"), (0, B, 4, 0.5), (0, B, 5, 0.4), (0, F, 6, 0.9)]
    (end,) = trace(*calls).ends
    assert (end.loss_seq, end.loss_context, end.loss_rel, end.grad_context, end.grad_rel) == (1, 2, 0.2, 4, 0.5)


def test_the_ends_are_those_of_the_first_the_worst_and_the_last_step():
    errors = [0.1, 0.2, 0.9, 0.3, 0.2]
    found = trace(*((step, F, 1, error) for step, error in enumerate(errors)))
    assert [end.step for end in found.ends] == [0, 2, 4]
    wild = trace((0, F, 1, 0.1), (1, F, 1, math.nan), (2, F, 1, math.inf))
    assert [end.step for end in wild.ends][1:2] == [1]
    assert math.isnan(wild.reach[1, 0])


def run_of(drifts, cause=Cause.REDUCED_PRECISION, repairs=None):
    data = DataFile.create(None, RunInfo("npu", "cpu", repairs=repairs or {}))
    verdict = data.verdict_id(Verdict(Status.MISMATCH, cause, "inputs rounded to bf16"))
    for seq, drift in enumerate(drifts):
        place = data.context_id(f"aten::op{seq}", "f32[4]", ("f32",), "[4]", "Net", F, "", "npu:0")
        data.add_diffs(seq, [TensorDiff("output 0", META, META, 4, 4, 4, max_abs=10.0**-seq)])
        data.add((seq, 0, place, verdict, 1.0, 1.0, drift, drift))
    data.close()
    return Run(data)


def section(run):
    return report.render(run, "html").partition('<section id="effects">')[2].partition("</section>")[0]


def test_findings_are_ranked_by_their_effect():
    text = section(run_of([0.1, 0.7, 0.6]))
    assert [text.index(f"<code>aten::op{n}</code>") for n in (1, 0, 2)] == sorted(
        text.index(f"<code>aten::op{n}</code>") for n in range(3)
    )
    assert "aten::op2, call 2" in text
    assert "was not measured: a run with --drift does it from its second" in text
    assert "not recorded" not in text


def test_the_share_of_one_operator_leads():
    """It is a measurement; how much the error rises is a hint."""
    repairs = {
        "aten::op2": {"n_steps": 2, "n_calls": 4, "error": 4e-3, "without": 1e-3, "lost": ""},
        "aten::op0": {"n_steps": 1, "n_calls": 1, "error": 1e-3, "without": 3e-3, "lost": ""},
        "aten::op1": {"n_steps": 0, "n_calls": 0, "error": 0.0, "without": 0.0, "lost": "aten::bernoulli"},
        "aten::op3": {"n_steps": 1, "n_calls": 0, "error": 1e-3, "without": 1e-3, "lost": ""},
        "aten::hostile": {"n_steps": "1e999", "n_calls": [], "error": None},
        "aten::odd": 3,
    }
    run = run_of([0.1, 0.7, 0.6], repairs=repairs)
    text = section(run)
    places = [text.index(f"<code>aten::op{n}</code>") for n in (2, 1, 0)]
    assert places == sorted(places)
    for shown in ("75 %", "none: it grows by 200 %", "not measured: the chain ends at aten::bernoulli"):
        assert shown in text
    plain = report.render(run, "txt")
    assert "aten::op2 0.002" in " ".join(plain.split())
    assert "no call before the loss" in plain
    assert "hostile" not in text + plain
    assert set(read_repairs(run.info)) == {"aten::op0", "aten::op1", "aten::op2", "aten::op3"}


def test_without_the_accumulated_error_the_report_says_so():
    text = section(run_of([-1.0, -1.0]))
    assert "The accumulated error was not recorded" in text
    assert "error rises by" not in text


def test_a_run_without_mismatches_has_no_such_section():
    assert section(Run(DataFile.create(None, RunInfo("npu", "cpu")))) == ""


def test_each_finding_has_advice_for_both_authors():
    text = report.render(run_of([0.1]), "html").partition('id="finding-1"')[2]
    assert "<dt>in the model" in text
    assert "<dt>in the kernel" in text
    assert "set_float32_matmul_precision" in text


@pytest.mark.parametrize("cause", sorted(set(Cause) - {Cause.ROUNDING, Cause.HARNESS}))
def test_all_causes_have_advice(cause):
    model, kernel = for_authors(cause, op="aten::mm", kernel="aten::mm.out")
    assert model.endswith(".")
    assert kernel.endswith(".")
    assert "{" not in model + kernel
    assert for_authors(cause, op="compiled::graph 0") is None
