"""The ledger against runs: what is excused, what expired, what is stale."""

from __future__ import annotations

import datetime as dt

import pytest

import shadowrun
from shadowrun.analysis import KnownIssues
from shadowrun.run import Run
from shadowrun.settings import KnownLine
from shadowrun.store import DataFile
from shadowrun.types import Cause, Phase, RunInfo, Status, Verdict

OK = Verdict(Status.MATCH)
BAD = Verdict(Status.MISMATCH, Cause.IMPLEMENTATION)
MISSING = Verdict(Status.UNSUPPORTED, Cause.MISSING_OPERATOR)
UNSEEN = Verdict(Status.UNVERIFIED, None, "sparse layout")
OWN = Verdict(Status.ERROR, Cause.HARNESS, "MemoryError")


def data_of(*calls, times=(-1.0, -1.0), path=None, rank=0) -> DataFile:
    """Calls given as operator, module and verdict."""
    data = DataFile.create(path, RunInfo(f"npu:{rank}", "cpu", rank=rank, world_size=2))
    for seq, (op, module, verdict) in enumerate(calls):
        context = data.context_id(op, "f32[4]", ("f32",), "[4]", module, Phase.FORWARD, "a.py:1 in f", "npu:0")
        data.add((seq, 0, context, data.verdict_id(verdict), *times, -1.0, -1.0))
    data.close()
    return data


def line(operator="aten::mm", platform="npu", **fields) -> KnownLine:
    return KnownLine(operator, platform, fields.pop("reason", "a ticket"), origin="shadowrun.toml:1", **fields)


def states(run: Run) -> list[str]:
    return [use.state for use in run.known().lines]


def test_known_calls_are_findings_of_their_own():
    calls = [("aten::mm", "Net.encoder.0", BAD)] * 2 + [("aten::mm", "Net.decoder", BAD), ("aten::mm", "Net.head", OK)]
    run = Run(data_of(*calls), [line(module="*.encoder.*")])
    (new,), (known,) = run.findings(), run.known().findings
    assert (new.modules, new.n_calls, new.known) == (("Net.decoder",), 1, None)
    assert (known.modules, known.n_calls, known.known) == (("Net.encoder.0",), 2, line(module="*.encoder.*"))
    assert run.first_divergence().call.module == "Net.decoder"
    assert run.gate().line == "FAILED: 1 mismatch (1 known mismatch not counted)"
    assert states(run) == ["matched"]


def test_what_is_all_known_passes():
    run = Run(data_of(("aten::mm", "", BAD), ("aten::exp", "", OK), ("aten::lerp", "", MISSING)), [line("*")])
    assert run.findings() == []
    assert run.first_divergence() is None
    gate = run.gate()
    assert gate.passed
    assert gate.line == "PASSED: 1 call matches (1 known unsupported, 1 known mismatch not counted)"


def test_the_data_file_stays_what_it_is():
    data = data_of(("aten::mm", "", BAD))
    assert Run(data, [line()]).counts() == Run(data).counts()
    assert Run(data).first_divergence().call.op == "aten::mm"
    assert not Run(data).gate().passed


def test_kind_and_platform_must_fit():
    data = data_of(("aten::mm", "", BAD), ("aten::mm", "", MISSING))
    kinds = lambda *lines: [f.kind for f in Run(data, lines).findings()]  # noqa: E731
    assert kinds(line()) == []
    assert kinds(line(kind="mismatch")) == ["unsupported"]
    assert kinds(line(kind="unsupported")) == ["mismatch"]
    assert kinds(line(platform="cuda")) == ["unsupported", "mismatch"]
    assert states(Run(data, [line(platform="cuda"), line(kind="slow"), line(kind="fallback")])) == [
        "other platform", "not exercised", "stale",
    ]  # fmt: skip


def test_the_day_of_expiry_is_the_last_that_excuses():
    data = data_of(("aten::mm", "", BAD))
    today = dt.datetime.now().astimezone().date()
    assert Run(data, [line(expires=today)]).findings() == []
    past = line(expires=today - dt.timedelta(days=1))
    run = Run(data, [past])
    assert len(run.findings()) == 1
    (use,) = run.known().lines
    assert (use.state, use.n_diverging) == ("expired", 1)
    assert use.remark == (
        f"shadowrun.toml:1: aten::mm on npu is no longer excused: the line expired on {past.expires} (a ticket). "
        "Fix it, or set a new date."
    )
    assert states(Run(data, [past, line()])) == ["expired", "matched"]
    assert Run(data, [past, line()]).findings() == []
    assert KnownIssues([past], "npu", today=dt.date(2020, 1, 1)).excuse("mismatch", "aten::mm", ("",)) == past


@pytest.mark.parametrize(
    ("calls", "fields", "state"),
    [
        ([("aten::mm", "", OK)] * 3, {}, "stale"),
        ([("aten::mm", "", OK)], {"expires": dt.date(2020, 1, 1)}, "stale"),
        ([("aten::bmm", "", OK)], {"expires": dt.date(2020, 1, 1)}, "expired"),
        ([("aten::bmm", "", OK)], {}, "not exercised"),
        ([("aten::mm", "Net.a", OK)], {"module": "Net.b"}, "not exercised"),
        ([("aten::mm", "Net.a", OK), ("aten::mm", "Net.b", UNSEEN)], {"module": "Net.b"}, "not exercised"),
        ([("aten::mm", "", OWN)], {}, "not exercised"),
        ([("aten::mm", "", OK), ("aten::mm", "", BAD)], {}, "matched"),
        ([("aten::mm", "", MISSING)], {"kind": "mismatch"}, "stale"),
    ],
)
def test_lines_that_excuse_nothing(calls, fields, state):
    assert states(Run(data_of(*calls), [line(**fields)])) == [state]


def test_a_stale_line_says_what_to_do():
    (use,) = Run(data_of(("aten::mm", "", OK)), [line()]).known().lines
    assert use.remark == "shadowrun.toml:1: aten::mm on npu no longer diverges in 1 call: delete this line (a ticket)."


def test_a_line_in_the_shadow_of_another_is_not_stale():
    run = Run(data_of(("aten::mm", "", BAD)), [line(reason="first"), line(reason="second")])
    assert [f.known.reason for f in run.known().findings] == ["first"]
    assert states(run) == ["matched", "matched"]


def test_many_modules():
    """More modules than a finding lists: the line still knows its own."""
    calls = [("aten::mm", f"Net.{i}", BAD) for i in range(20)]
    past = dt.date(2020, 1, 1)
    assert states(Run(data_of(*calls), [line(module="Net.19", expires=past)])) == ["expired"]
    run = Run(data_of(*calls), [line(module="Net.19")])
    assert (run.findings()[0].n_calls, run.known().findings[0].n_calls) == (19, 1)


def test_the_files_of_all_ranks(tmp_path):
    """One ledger for all: what one rank alone has is excused there, and the line is not stale."""
    for rank, calls in enumerate(([("aten::exp", "", OK)], [("aten::mm", "", BAD), ("aten::exp", "", BAD)])):
        data_of(*calls, path=tmp_path / f"run.{rank}.shadowrun", rank=rank)
    shadowrun.combine(tmp_path, tmp_path / "all.shadowrun")
    ledger = tmp_path / "ledger.toml"
    ledger.write_text('[[known]]\noperator = "mm"\nplatform = "npu"\nreason = "a ticket"\n', encoding="utf-8")
    run = shadowrun.load(tmp_path / "all.shadowrun", known=ledger)
    assert [(f.op, f.known.reason) for f in run.known().findings] == [("aten::mm", "a ticket")]
    assert states(run) == ["matched"]
    assert run.first_divergence().call.op == "aten::exp"
    assert shadowrun.load(tmp_path / "all.shadowrun").first_divergence().call.op == "aten::mm"


def test_slow_operators():
    calls = [("aten::sort", "Net.a", OK), ("aten::sort", "Net.b", OK)] * 3
    data = data_of(*calls, times=(10.0, 90_000.0))
    assert [f.kind for f in Run(data).findings()] == ["slow"]
    run = Run(data, [line("aten::sort", kind="slow")])
    assert (run.findings(), states(run)) == ([], ["matched"])
    # One operator is slow or not, whatever the module: a line for a part of them excuses nothing.
    assert len(Run(data, [line("aten::sort", kind="slow", module="Net.a")]).findings()) == 1


def test_without_a_ledger_nothing_changes(sample):
    run = Run(sample.build())
    assert (run.known().findings, run.known().lines) == ((), ())
    assert all(finding.known is None for finding in run.findings())
    assert repr(run.findings()) == repr(Run(sample.build(), [line(platform="cuda")]).findings())
