"""SARIF 2.1.0, as GitHub's code scanning takes it.

Its limits: 25,000 results and rules of a run, and 10 MB of a file (gzipped; other tools count the file itself). It
refuses a result without a place in a file, and keeps an alert from commit to commit by its partial fingerprint.
"""

from __future__ import annotations

import json
import re
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from shadowrun.report.issues import MAX_ISSUES, Issues, fingerprints, place_of, worst_first
from shadowrun.report.sanitize import clip

if TYPE_CHECKING:
    from shadowrun.report.document import Document
    from shadowrun.report.issues import Issue, Place

__all__ = ["render_sarif"]

SCHEMA: Final = "https://json.schemastore.org/sarif-2.1.0.json"
_MAX_BYTES: Final = 9_500_000
# Blanks before each line of a result in the whole file.
_DEPTH: Final = 5
_MAX_TEXT: Final = 1000
_MAX_PLACES: Final = 10
# The root of the repository; not its folder on this machine, which no report has.
_ROOT: Final = "%SRCROOT%"
# A viewer makes `[text](url)` a link. SARIF 2.1.0 (§3.11.6) has an escape for brackets in the text of a link only, and
# viewers show the backslash of any other: a space is what all read alike.
_LINK: Final = re.compile(r"\](?=\()")
_BASELINE: Final = {"new": "new", "worse": "updated", "same": "unchanged", "gone": "absent"}


def render_sarif(document: Document) -> str:
    """One run with one result for each finding."""
    issues = document.issues or Issues(document.title)
    ordered = worst_first(issues.rows)
    results: list[dict[str, Any]] = []
    rules: dict[str, dict[str, Any]] = {}
    size = 0
    for issue, key in zip(ordered[:MAX_ISSUES], fingerprints(issues.suite, ordered), strict=False):
        rules.setdefault(issue.rule, _rule(issue))
        result = _result(issue, list(rules).index(issue.rule), key, issues)
        text = json.dumps(result, indent=1)
        size += len(text) + _DEPTH * text.count("\n")
        if size > _MAX_BYTES:
            break
        results.append(result)
    invocation: dict[str, Any] = {"executionSuccessful": True}
    if left := len(ordered) - len(results):
        text = f"{left:,} more findings are left out: services take no more of one file."
        invocation["toolExecutionNotifications"] = [{"level": "warning", "message": {"text": text}}]
    driver = {"name": "shadowrun", "semanticVersion": metadata.version("shadowrun"), "rules": list(rules.values())}
    run = {
        "tool": {"driver": driver},
        # Ends with a slash: all runs of one platform are one series, and another platform's close none of its alerts.
        "automationDetails": {"id": f"shadowrun/{quote(issues.suite, safe='')}/"},
        "columnKind": "unicodeCodePoints",
        "invocations": [invocation],
        "results": results,
    }
    if document.gate is not None:
        run["properties"] = {"gate": document.gate.line}
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def _rule(issue: Issue) -> dict[str, Any]:
    what = f"{issue.kind}: {issue.cause}" if issue.cause else issue.kind
    name = "".join(word.capitalize() for word in issue.rule.replace("/", "-").split("-"))
    return {
        "id": issue.rule,
        "name": name,
        "shortDescription": {"text": _plain(what)},
        "help": {"text": f"`shadowrun explain {issue.rule.partition('/')[0]}` has what it means and what to do."},
        "properties": {"tags": ["pytorch", issue.kind]},
    }


def _plain(text: str) -> str:
    return _LINK.sub("] ", text)


def _result(issue: Issue, rule: int, key: str, issues: Issues) -> dict[str, Any]:
    places = [p for p in dict.fromkeys(map(place_of, issue.sites)) if p is not None]
    result: dict[str, Any] = {
        "ruleId": issue.rule,
        "ruleIndex": rule,
        "level": issue.level,
        "message": {"text": _plain("\n".join(clip(line, _MAX_TEXT) for line in issue.text.splitlines()))},
        "locations": [_location(place, issue) for place in places[:_MAX_PLACES] or [issues.whole]],
        "partialFingerprints": {"shadowrunFinding/v1": key},
    }
    if issue.change:
        result["baselineState"] = _BASELINE[issue.change]
    if issue.known:
        suppressed = {"kind": "external", "status": "accepted", "justification": clip(issue.known, _MAX_TEXT)}
        result["suppressions"] = [suppressed]
    return result


def _location(place: Place, issue: Issue) -> dict[str, Any]:
    functions = dict.fromkeys(filter(None, (place.function, issue.name)))
    return {
        "physicalLocation": {"artifactLocation": _artifact(place.file), "region": {"startLine": place.line}},
        "logicalLocations": [{"fullyQualifiedName": name, "kind": "function"} for name in functions],
    }


def _artifact(path: str) -> dict[str, str]:
    return {"uri": quote(path), "uriBaseId": _ROOT}
