"""What the analyses make of a run with every kind of finding."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from shadowrun.run import Run
from shadowrun.store import DataFile
from shadowrun.types import Cause, Phase, RunInfo, Status, TensorDiff, TensorMeta, Verdict

META = TensorMeta("f32", (4,))
OK = Verdict(Status.MATCH)


@pytest.fixture(scope="module")
def run(sample) -> Run:
    return Run(sample.build())


def make(*calls: dict, info: RunInfo = RunInfo("npu", "cpu"), **options) -> Run:  # noqa: B008 - frozen
    """A run of calls given by what matters about them."""
    data = DataFile.create(None, info, **options)
    contexts: dict[tuple, int] = {}
    for seq, call in enumerate(calls):
        key = call.get("op", "aten::mm"), call.get("module", "")
        if key not in contexts:
            contexts[key] = data.context_id(
                key[0], "f32[4]", ("f32",), "[4]", key[1], Phase.FORWARD, "a.py:1 in f", "cpu"
            )
        data.add_diffs(seq, call.get("diffs", ()))
        number = data.verdict_id(call.get("verdict", OK), call.get("kernel", ""))
        data.add(
            (seq, seq // 10, contexts[key], number, *call.get("us", (-1.0, -1.0)), *call.get("drift", (-1.0, -1.0)))
        )
    data.close()
    return Run(data)


def diff(**figures) -> TensorDiff:
    return TensorDiff("output 0", META, META, **{"n_elements": 4, "n_different": 1} | figures)


def mismatch(cause: Cause, explanation: str = "") -> Verdict:
    return Verdict(Status.MISMATCH, cause, explanation)


def test_findings_are_ordered_by_what_can_be_done(run: Run) -> None:
    assert [(f.kind, f.op) for f in run.findings()] == [
        ("unsupported", "aten::roll"),
        ("unsupported", "aten::add_.Tensor"),
        ("error", "aten::lgamma"),
        ("mismatch", "aten::_softmax"),
        ("mismatch", "aten::exp"),
        ("mismatch", "aten::t_copy"),
        ("mismatch", "aten::mm"),
        ("mismatch", "aten::native_batch_norm"),
        ("fallback", "aten::cumsum"),
        ("slow", "aten::sort"),
    ]


def test_a_finding_says_where_and_what_to_do(run: Run) -> None:
    finding = next(f for f in run.findings() if f.op == "aten::mm")
    assert (finding.n_calls, finding.n_calls_of_op, finding.first_seq, finding.first_step) == (6, 6, 5, 0)
    assert finding.phases == ("forward", "backward")
    assert (finding.modules, finding.sites, finding.n_inputs) == (
        ("ResNet.fc",),
        ("/home/me/net/model.py:101 in forward",),
        2,
    )
    assert finding.worst_seq == 5  # of equally bad calls the earliest
    assert finding.worst.excess_actual == 4128.0
    assert "63,998 of 64,000" in finding.evidence
    assert finding.confidence == 0.99
    assert "reduced-precision arithmetic on the target (inputs rounded to bf16)" in finding.next_step


def test_a_partly_supported_operator_names_its_kernel(run: Run) -> None:
    finding = next(f for f in run.findings() if f.op == "aten::add_.Tensor")
    assert (finding.n_calls, finding.n_calls_of_op) == (3, 6)
    assert finding.missing_kernels == ("aten::add.out",)
    assert "aten::add.out" in finding.next_step


def test_severity_puts_class_before_form_before_magnitude_and_the_innocent_last() -> None:
    found = make(
        {"op": "small", "verdict": mismatch(Cause.IMPLEMENTATION), "diffs": [diff(n_mismatched=1, excess_actual=20.0)]},
        {"op": "propagated", "verdict": mismatch(Cause.PROPAGATED), "diffs": [diff(n_mismatched=1, n_nan=1)]},
        {"op": "large", "verdict": mismatch(Cause.IMPLEMENTATION), "diffs": [diff(n_mismatched=1, excess_actual=9e3)]},
        {"op": "form", "verdict": mismatch(Cause.METADATA), "diffs": [diff(detail="stride")]},
        {"op": "nan", "verdict": mismatch(Cause.EXCEPTIONAL_VALUES), "diffs": [diff(n_mismatched=1, n_nan=1)]},
    ).findings()
    assert [f.op for f in found] == ["nan", "form", "large", "small", "propagated"]


def test_the_worst_call_is_found_among_many_and_nan_counts_as_worst() -> None:
    calls = [
        {"module": f"Net.{r}", "verdict": mismatch(Cause.IMPLEMENTATION), "diffs": [diff(n_mismatched=1, max_rel=r)]}
        for r in (0.1, 0.4, math.nan, 0.2)
    ]
    (finding,) = make(*calls).findings()
    assert finding.worst_seq == 2
    assert "Replay call 2 (the worst of 4 such calls; the first is 0) alone" in finding.next_step
    (alone,) = make(calls[2]).findings()
    assert "Replay call 0 alone" in alone.next_step
    (row,) = make(*calls).summary()
    assert math.isnan(row.max_rel)


@pytest.mark.parametrize(
    ("ref", "target", "n", "found"),
    [(100.0, 1200.0, 3, 1), (100.0, 1200.0, 2, 0), (100.0, 1050.0, 3, 0), (200.0, 1300.0, 3, 0), (100.0, -1.0, 3, 0)],
    ids=["slow", "too few calls", "less than a millisecond", "less than ten times", "not timed"],
)
def test_slow(ref: float, target: float, n: int, found: int) -> None:
    run = make(*[{"us": (ref, target)}] * n)
    assert [f.kind for f in run.findings()] == ["slow"] * found
    assert run.counts()[Status.MATCH] == n


def test_slow_ratio_comes_from_the_configuration() -> None:
    calls = [{"us": (1000.0, 5000.0)}] * 3
    assert make(*calls).findings() == []
    assert len(make(*calls, info=RunInfo("npu", "cpu", config={"slow_ratio": 4.0})).findings()) == 1


def test_the_quickest_call_decides_about_slowness() -> None:
    assert make(*[{"us": (100.0, 9000.0)}] * 5, {"us": (100.0, 150.0)}).findings() == []


def test_a_fallback_is_not_reported_as_slow_too() -> None:
    calls = [{"us": (1.0, 9000.0), "verdict": Verdict(Status.FALLBACK, Cause.SILENT_FALLBACK)}] * 3
    assert [f.kind for f in make(*calls).findings()] == ["fallback"]


def test_the_first_divergence_is_the_earliest_mismatch(run: Run) -> None:
    assert run.first_divergence().call.seq == 1
    assert make({}).first_divergence() is None


def test_coverage(run: Run) -> None:
    coverage = run.coverage()
    assert (coverage.n_operators, coverage.n_calls, coverage.n_supported_calls) == (16, 54, 39)
    assert coverage.n_by_state == {"unsupported": 2, "error": 1, "fallback": 1, "unverified": 1, "supported": 11}
    assert [k.kernel for k in coverage.missing_kernels] == ["aten::add.out", "aten::cumsum.out", "aten::roll"]
    assert (coverage.skipped[0].op, coverage.skipped[0].n) == ("aten::view", 420)
    assert not coverage.runs
    assert coverage.verdict == "does not run: 2 operators missing, 1 operator raising errors, fallbacks on 1 operator"
    assert coverage.percent_operators == 100 * 11 / 16
    # 3 fallbacks of 40 µs each, of all that ran on the target.
    timed = [r for r in run.records() if r.target_time_us >= 0 and r.verdict.status is not Status.SKIPPED]
    fallbacks = [r for r in timed if r.verdict.status is Status.FALLBACK]
    assert coverage.fallback_share == pytest.approx(
        sum(r.target_time_us for r in fallbacks) / sum(r.target_time_us for r in timed)
    )
    assert 0 < coverage.fallback_share < 1


def test_coverage_by_module() -> None:
    lost = {"op": "b", "module": "M.lost", "verdict": Verdict(Status.UNSUPPORTED), "kernel": "aten::k"}
    drawn = {"op": "d", "module": "M.drawn", "verdict": Verdict(Status.UNVERIFIED, None, "random")}
    coverage = make({"op": "a", "module": "M.whole"}, {"op": "a", "module": "M.lost"}, lost, lost, drawn).coverage()
    modules = {m.module: (m.n_calls, m.n_supported_calls, m.lacking) for m in coverage.modules}
    assert modules == {"M.lost": (3, 1, ("b",)), "M.drawn": (1, 0, ()), "M.whole": (1, 1, ())}
    assert coverage.modules[0].module == "M.lost"
    assert coverage.missing_kernels[0].modules == ("M.lost",)


def test_coverage_verdicts() -> None:
    fallback = {"op": "b", "verdict": Verdict(Status.FALLBACK, Cause.SILENT_FALLBACK)}
    assert make({}).coverage().verdict == "runs"
    assert make({}, fallback).coverage().verdict.startswith("runs with fallbacks on 1 operator")
    slow = fallback | {"us": (1.0, 30.0)}
    assert make({"us": (1.0, 90.0)}, slow).coverage().verdict == "runs with fallbacks on 1 operator = 25 % of the time"
    assert make().coverage().verdict.startswith("is unknown")
    unverified = {"verdict": Verdict(Status.UNVERIFIED, None, "budget")}
    assert make(unverified).coverage().n_by_state["unverified"] == 1
    # Once compared is enough to know that the kernel exists.
    assert make({}, unverified).coverage().n_by_state["supported"] == 1


def test_internal_failures_are_never_the_targets_fault(run: Run) -> None:
    assert [(n.op, n.n_calls) for n in run.internal_failures()] == [("aten::bmm", 3)]
    assert "aten::bmm" not in {f.op for f in run.findings()}
    row = next(s for s in run.summary() if s.op == "aten::bmm")
    assert (row.n_error, row.n_own_failures) == (0, 3)


def test_notes_are_what_was_not_plainly_verified(run: Run) -> None:
    assert {(n.op, n.status) for n in run.notes()} == {
        ("aten::index_put_", "unverified"), ("aten::topk", "unverified"), ("aten::scatter_add_", "match"),
    }  # fmt: skip


def test_gate(run: Run) -> None:
    assert run.gate().line == "FAILED: 2 unsupported, 1 error, 5 mismatches (1 fallback, 1 slow not counted)"
    assert run.gate({"slow"}).line.startswith("FAILED: 1 slow (2 unsupported, 1 error, 5 mismatches, 1 fallback")
    assert not run.gate().passed
    assert make({}, {}).gate().line == "PASSED: 2 calls match"
    assert make({}).gate().passed
    nothing = make({"verdict": Verdict(Status.UNVERIFIED, None, "budget")})
    assert (nothing.gate().passed, nothing.gate().line) == (False, "FAILED: no call could be compared")


def test_summary(run: Run) -> None:
    row = next(s for s in run.summary() if s.op == "aten::mm")
    assert (row.n_calls, row.n_mismatch, row.worst_seq, row.max_ulp, row.remaining_bits) == (6, 6, 5, 73_912, 7)
    assert row.shapes == ("[64, 512] [512, 1000]", "[512, 64] [64, 1000]")
    assert (row.ref_min_us, row.target_min_us) == (905.0, 351.0)
    assert row.ref_median_us == 931.0  # of 905, 921, 923, 939, 941, 957
    assert run.to_rows()[0]["op"] == "aten::add_.Tensor"
    assert math.isclose(sum(s.n_calls for s in run.summary()), 54)


def test_drift_is_the_worst_of_each_step() -> None:
    run = make(*({"drift": (seq * 2.0, float(seq % 7))} for seq in range(20)))
    assert [(d.step, d.drift_abs, d.drift_rel, d.seq) for d in run.drift()] == [(0, 18.0, 6.0, 6), (1, 38.0, 6.0, 13)]


def test_reading_again_sees_what_was_added_since() -> None:
    data = DataFile.create(None, RunInfo("npu", "cpu"))
    run = Run(data)
    assert run.counts()[Status.MATCH] == 0
    number = data.context_id("aten::mm", "", (), "", "", Phase.FORWARD, "", "cpu")
    data.add((0, 0, number, data.verdict_id(OK), 1.0, 1.0, -1.0, -1.0))
    data.flush()
    assert run.counts()[Status.MATCH] == 1


def test_a_comparison_is_asked_to_flush_before_reading() -> None:
    class Live(Run):
        def _sync(self) -> None:
            self._data.flush()

    data = DataFile.create(None, RunInfo("npu", "cpu"))
    data.rows.append(
        (
            0,
            0,
            data.context_id("a", "", (), "", "", Phase.FORWARD, "", "cpu"),
            data.verdict_id(OK),
            1.0,
            1.0,
            -1.0,
            -1.0,
        )
    )
    assert Live(data).counts()[Status.MATCH] == 1


def test_folding_changes_no_figure() -> None:
    """Sums of matches stand in for the calls themselves; times are whole, so that their sums are exact."""
    chance = random.Random(0)
    calls = []
    for seq in range(6000):
        ulp = chance.randrange(5)
        verdict = Verdict(Status.MATCH, Cause.ROUNDING, "order", f"{ulp} ULP in call {seq}") if ulp else OK
        if seq % 700 == 0:
            verdict = mismatch(Cause.IMPLEMENTATION, "wrong")
        figures = diff(
            max_abs=ulp / 8, max_rel=chance.random(), max_ulp=ulp, remaining_bits=24 - ulp, n_mismatched=seq % 700 == 0
        )
        calls.append(
            {
                "op": f"aten::op{seq % 7}",
                "module": f"Net.{seq % 3}",
                "verdict": verdict,
                "diffs": [figures] if ulp or seq % 700 == 0 else [],
                "us": (float(chance.randrange(100)), float(chance.randrange(100)) if seq % 5 else -1.0),
            }
        )
    plain, folded = make(*calls, fold=False), make(*calls, max_records=500)
    n_kept = next(folded._data.query("select count(*) from call"))[0]
    assert n_kept <= 500 + 1000  # what may wait for the next flush
    assert next(folded._data.query("select count(*) from verdict"))[0] < 3000
    assert next(folded._data.query("select count(*) from diff"))[0] <= n_kept

    def comparable(run: Run) -> list:
        """Medians are of the calls kept one by one, and are not comparable."""
        return [dataclasses.replace(row, ref_median_us=0.0, target_median_us=0.0) for row in run.summary()]

    assert comparable(folded) == comparable(plain)
    assert folded.findings() == plain.findings()
    assert folded.coverage() == plain.coverage()
    assert folded.counts() == plain.counts()
    assert folded.first_divergence() == plain.first_divergence()
