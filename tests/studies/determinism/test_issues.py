"""Operators that break, as findings of CI services."""

from collections import Counter

from shadowrun.studies.determinism.processes import ProcessRun
from shadowrun.studies.determinism.report import RUNS, THREADS, Determinism, determinism_issues
from shadowrun.studies.determinism.stability import Stability


def broken(*places):
    stability = Stability()
    for place in places:
        stability.add_break(Counter({1: 2, 2: 1}), place)
    return stability


def test_what_breaks_and_processes_that_failed():
    runs = [ProcessRun(0, 0, None, 0, ""), ProcessRun(0, 1, None, 1, "ValueError: x")]
    outcomes = {
        RUNS: {"aten::mm": broken("fc, forward, step 0"), "aten::add": Stability(n_holds=3)},
        THREADS: {"aten::mm": broken("2")},
    }
    found = Determinism("train.py --fast", runs, outcomes, [], {}, 0, [], 0)
    issues = determinism_issues(found, [RUNS])
    assert [(i.name, i.rule, i.level) for i in issues.rows] == [
        ("aten::mm", "not-repeatable/run-to-run", "error"),
        ("aten::mm", "not-repeatable/threads", "warning"),
        ("run 1", "failed-process", "error"),
    ]
    assert issues.rows[0].message == "aten::mm gives other bits, run to run: 1 call, 2 results"
    assert issues.rows[0].lines == (("breaks at", "fc, forward, step 0"),)
    assert "ended with status 1: ValueError: x" in issues.rows[2].message
    assert (issues.passed, issues.file) == (("aten::add",), "train.py")
