"""What CI services show at the lines of a change: GitHub's workflow commands, and GitLab's code quality.

GitHub shows 10 annotations of each level in a step, 50 in a job, and drops the others without a word.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from shadowrun.report.issues import LEVELS, MAX_ISSUES, Issues, fingerprints, worst_first
from shadowrun.report.sanitize import clip

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shadowrun.report.document import Document
    from shadowrun.report.issues import Issue

__all__ = ["render_code_quality", "render_github"]

_MAX_SHOWN: Final = 10
_MAX_TEXT: Final = 400
_COMMANDS: Final = dict(zip(LEVELS, ("error", "warning", "notice"), strict=True))
_SEVERITIES: Final = dict(zip(LEVELS, ("major", "minor", "info"), strict=True))


def render_github(document: Document) -> str:
    """Workflow commands, one a line: GitHub reads them from the output of a step."""
    issues = document.issues or Issues(document.title)
    # What a baseline has as well, or had, is no news of this change.
    news = [issue for issue in issues.rows if issue.change not in ("same", "gone")]
    lines = [line for level in LEVELS for line in _annotations([i for i in news if i.level == level], level)]
    gate = document.gate
    if gate is not None and not (not gate.passed and any(issue.level == "error" for issue in issues.rows)):
        lines.append(_command("notice" if gate.passed else "error", {"title": "shadowrun"}, gate.line))
    return "\n".join([*lines, ""]) if lines else "::notice title=shadowrun::no findings\n"


def _annotations(rows: list[Issue], level: str) -> Iterator[str]:
    shown = rows if len(rows) <= _MAX_SHOWN else rows[: _MAX_SHOWN - 1]
    for issue in shown:
        place = issue.place
        where = {"file": place.file, "line": str(place.line)} if place is not None else {}
        wanted = [text for label, text in issue.lines if label in ("differs", "do")]
        known = [f"known issue: {issue.known}"] if issue.known else []
        text = "\n".join(clip(line, _MAX_TEXT) for line in (issue.message, *wanted, *known))
        yield _command(_COMMANDS[level], {**where, "title": clip(issue.title, _MAX_TEXT)}, text)
    if left := len(rows) - len(shown):
        text = f"{left:,} more of this level: GitHub shows {_MAX_SHOWN} in a step. The report has all."
        yield _command(_COMMANDS[level], {"title": "shadowrun"}, text)


def _command(name: str, properties: dict[str, str], text: str) -> str:
    """A command, of which no text of a program can begin another."""
    given = ",".join(f"{key}={_escaped(value, ':,')}" for key, value in properties.items())
    return f"::{name} {given}::{_escaped(text)}"


def _escaped(text: str, more: str = "") -> str:
    for char in "%\r\n" + more:
        text = text.replace(char, f"%{ord(char):02X}")
    return text


def render_code_quality(document: Document) -> str:
    """GitLab's subset of Code Climate: an array, shown in merge requests. Known issues have the severity info."""
    issues = document.issues or Issues(document.title)
    ordered = [issue for issue in worst_first(issues.rows) if issue.change != "gone"][:MAX_ISSUES]
    rows = []
    for issue, key in zip(ordered, fingerprints(issues.suite, ordered), strict=True):
        place = issue.place or issues.whole
        known = f" (known issue: {issue.known})" if issue.known else ""
        rows.append(
            {
                "description": clip(f"{issue.message}{known}", _MAX_TEXT),
                "check_name": f"shadowrun/{issue.rule}",
                "fingerprint": key,
                "severity": _SEVERITIES[issue.level],
                "location": {"path": place.file, "lines": {"begin": place.line}},
            }
        )
    return json.dumps(rows, indent=1) + "\n"
