"""The section on compiled regions, in all formats, against golden files; written as `test_report` says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from shadowrun import report
from shadowrun.analysis import regions
from shadowrun.errors import UsageError
from shadowrun.run import Run, combine, load
from shadowrun.types import Cause, Phase, RunInfo, Status, Verdict
from tests.golden_kit import content

GOLDEN = Path(__file__).parents[1] / "golden"
LINE = "4 compiled regions: 2 match, 1 mismatch, 1 unverified; 7 calls of compiled regions not compared"


@pytest.fixture(scope="module")
def run(sample) -> Run:
    return Run(sample.build(steps=0, compiled=True))


@pytest.mark.parametrize("kind", ["txt", "md", "json", "html"])
def test_golden(run: Run, kind: str) -> None:
    golden, actual = GOLDEN / f"regions.{kind}", content(report.render(run, kind))
    if os.environ.get("SHADOWRUN_GOLDEN"):
        golden.write_text(actual, encoding="utf-8")
    assert actual == golden.read_text(encoding="utf-8")


def test_a_region_may_have_any_name(tmp_path) -> None:
    """Python makes no number of a text of more than 4300 digits."""
    names = [f"compiled::graph {n}" for n in ("9" * 5000, "10", "2", "else")]
    assert sorted(names, key=regions._natural) == [names[2], names[1], names[0], names[3]]


def test_the_summary_line_counts_them(run: Run) -> None:
    assert run.gate().line == f"FAILED: 1 mismatch; {LINE}"
    assert report.render(run, "txt").splitlines()[-1] == run.gate().line


@pytest.mark.parametrize("kind", ["txt", "md", "html"])
def test_each_says_what_it_is_how_far_off_and_what_to_do(run: Run, kind: str) -> None:
    text = " ".join(report.render(run, kind).split()).replace("\\", "")
    for said in (
        "head.py:21 in forward", "inductor", "openvino", "nearer the truth than eager", "61 of 64 elements mismatch",
        "shadowrun.compile_check(model, *inputs)", "compiled before the comparison began", "called at", "train.py:52",
    ):  # fmt: skip
        assert said in text, said


def test_they_are_no_operators(run: Run) -> None:
    assert run.coverage().n_operators == 0
    assert run.summary() == []
    assert [(f.kind, f.op) for f in run.findings()] == [("mismatch", "compiled::graph 1")]
    with pytest.raises(UsageError, match="shadowrun compile --repro DIR"):
        run.repro(run.findings()[0], "nowhere")


def test_a_run_without_regions_says_nothing_of_them(sample) -> None:
    plain = Run(sample.build())
    assert "ompiled" not in report.render(plain, "txt") + report.render(plain, "md")
    assert json.loads(report.render(plain, "json"))["regions"] == {"line": "", "rows": [], "skipped": []}


def test_one_region_of_each_phase(sample) -> None:
    data = sample.build(steps=0)
    data.add_region("compiled::graph 10", "inductor", 3, "")
    verdicts = {Phase.BACKWARD: Verdict(Status.MATCH), Phase.FORWARD: Verdict(Status.UNVERIFIED, Cause.HARNESS, "why")}
    for seq, (phase, verdict) in enumerate(verdicts.items()):
        context = data.context_id("compiled::graph 10", "", (), "", "", phase, "a.py:1 in f", "cpu")
        data.add((seq, 0, context, data.verdict_id(verdict), -1.0, -1.0, -1.0, -1.0))
    data.flush()
    first, second = Run(data).regions().rows
    assert (first.phase, first.status, first.site) == (Phase.FORWARD, Status.UNVERIFIED, "a.py:1 in f")
    assert (second.phase, second.status, second.next_step) == (Phase.BACKWARD, Status.MATCH, "")


def test_they_survive_the_file_and_the_combination_of_files(sample, tmp_path: Path) -> None:
    for rank in range(2):
        info = RunInfo("npu", "cpu", rank=rank, world_size=2, started=str(rank))
        sample.build(tmp_path / f"run.{rank}.shadowrun", steps=0, compiled=True, info=info)
    assert load(tmp_path / "run.0.shadowrun").regions().line == LINE
    both = combine([tmp_path], tmp_path / "all.shadowrun").regions()
    assert [(r.backend, r.n_operators, r.n_calls) for r in both.rows if r.name == "compiled::graph 2"] == [
        ("openvino", 4, 2)
    ]
    assert "14 calls of compiled regions not compared" in both.line
