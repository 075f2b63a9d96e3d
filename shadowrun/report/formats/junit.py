"""JUnit XML, as GitLab, Jenkins, Azure and GitHub's actions read it: one test case for each operator and finding.

GitLab uses only the first of two cases with the same class and name, and reads at most 30 MB; GitHub reads none itself.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Final
from xml.etree import ElementTree as ET

from shadowrun.report.issues import MAX_ISSUES, Issues, worst_first
from shadowrun.report.sanitize import clip

if TYPE_CHECKING:
    from shadowrun.report.document import Document
    from shadowrun.report.issues import Issue

__all__ = ["render_junit"]

_MAX_NAME: Final = 250
# Characters of a line of a body: with `MAX_ISSUES` findings, a file stays under 30 MB only with short bodies.
_MAX_BODY: Final = 1000
_MAX_BYTES: Final = 25_000_000


def render_junit(document: Document) -> str:
    """One suite, whose cases are the findings, and everything that was checked without one."""
    issues = document.issues or Issues(document.title)
    suite = ET.Element("testsuite", name=f"shadowrun.{issues.suite}")
    counts: Counter[str] = Counter()
    names: Counter[str] = Counter()
    shown = worst_first(issues.rows)[:MAX_ISSUES]
    size = 0
    for number, issue in enumerate(shown):
        case = _case(suite, issues.suite, _unique(issue.title, names), issue)
        counts[_outcome(issue)] += 1
        size += len(ET.tostring(case))
        if size > _MAX_BYTES:
            shown = shown[: number + 1]
            break
    left = len(issues.rows) - len(shown)
    for name in issues.passed[:MAX_ISSUES]:
        _new_case(suite, issues.suite, _unique(name, names))
        counts["passed"] += 1
    gate = document.gate
    # A run may fail without a finding: nothing was compared, or the program raised.
    if gate is not None:
        case = _new_case(suite, issues.suite, _unique("gate", names))
        counts["passed"] += 1
        if not gate.passed and not counts["failure"]:
            ET.SubElement(case, "error", message=gate.line, type="gate")
            counts["error"] += 1
    if left:
        case = _new_case(suite, issues.suite, _unique("findings that this file leaves out", names))
        ET.SubElement(case, "skipped", message=f"{left:,} more findings: see the other reports of the run")
        counts["skipped"] += 1
    n = len(suite.findall("testcase"))
    for element in (suite, root := ET.Element("testsuites", name="shadowrun")):
        element.attrib |= {"tests": str(n), "failures": str(counts["failure"]), "errors": str(counts["error"])}
    suite.attrib |= {"skipped": str(counts["skipped"]), "time": "0"}
    root.append(suite)
    ET.indent(root, " ")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def _outcome(issue: Issue) -> str:
    # JUnit knows no warning: a finding that fails no gate passes, and its text is the output of the case.
    if issue.known:
        return "skipped"
    return "failure" if issue.level == "error" else "passed"


def _case(suite: ET.Element, platform: str, name: str, issue: Issue) -> ET.Element:
    case = _new_case(suite, platform, name)
    if place := issue.place:
        case.attrib |= {"file": place.file, "line": str(place.line)}
    body = "\n".join(clip(line, _MAX_BODY) for line in issue.text.splitlines())
    outcome = _outcome(issue)
    if outcome == "skipped":
        ET.SubElement(case, "skipped", message=f"known issue: {issue.known}")
    elif outcome == "failure":
        ET.SubElement(case, "failure", message=clip(issue.message, _MAX_BODY), type=issue.rule).text = body
    else:
        ET.SubElement(case, "system-out").text = body
    return case


def _new_case(suite: ET.Element, platform: str, name: str) -> ET.Element:
    # GitLab shows the class name as the suite, and ignores the name of the suite. A plug-in of Jenkins takes it for a
    # folder, whose files it keeps.
    classname = "shadowrun." + re.sub(r"[/\\]", "_", platform)
    return ET.SubElement(suite, "testcase", classname=classname, name=name, time="0")


def _unique(name: str, seen: Counter[str]) -> str:
    name = clip(name, _MAX_NAME)
    seen[name] += 1
    return name if seen[name] == 1 else f"{name} #{seen[name]}"
