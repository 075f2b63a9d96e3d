"""`Issues`: the findings of a report as CI services take them, whatever the command.

A command that has findings puts them into `Document.issues`; then its report has all formats of `ISSUE_FORMATS`. What
the services have in common is here: levels, places in files, fingerprints, and one limit.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["MAX_ISSUES", "Issue", "Issues", "Place", "fingerprints", "place_of", "worst_first"]

MAX_ISSUES: Final = 25_000
"""Of one file: GitHub takes so many results of SARIF; the others are counted."""
LEVELS: Final = ("error", "warning", "note")

_LINE: Final = re.compile(r"(?P<file>.+?):(?P<line>[1-9]\d{0,8})(?: in (?P<function>.*))?")
_FIRST_REACHED: Final = " (first reached from "


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a file.

    Attributes:
        file: From the working directory, with slashes.
        line: From 1.
        function: Qualified name; empty if unknown.
    """

    file: str
    line: int
    function: str = ""


@dataclass(frozen=True, slots=True)
class Issue:
    """A finding.

    Attributes:
        kind: ``mismatch``, ``unsupported``: the family of the rule.
        cause: Cause; empty for none. Rules are pairs of kind and cause.
        name: Operator, region or case.
        message: What is wrong, in one line.
        level: ``error`` if it fails the gate, ``warning`` if not, ``note`` for a known issue.
        key: What it is found again by in a later run.
        lines: Labelled lines of the report: where, what differs, why, what to do.
        sites: Source lines, as in reports; the first is the place.
        known: Reason of the known issue that excuses it; empty for none.
        change: ``new``, ``worse``, ``same`` or ``gone`` since a baseline; empty without one.
    """

    kind: str
    cause: str
    name: str
    message: str
    level: str
    key: tuple[str, ...]
    lines: tuple[tuple[str, str], ...] = ()
    sites: tuple[str, ...] = ()
    known: str = ""
    change: str = ""

    @property
    def rule(self) -> str:
        """``mismatch/reduced-precision``."""
        return "/".join(re.sub(r"\W+", "-", word.lower()).strip("-") for word in (self.kind, self.cause) if word)

    @property
    def title(self) -> str:
        """``aten::mm: mismatch (reduced precision)``."""
        return f"{self.name}: {self.kind}" + (f" ({self.cause})" if self.cause else "")

    @property
    def place(self) -> Place | None:
        """Where to show it; None if it has no line of a file."""
        return next(filter(None, map(place_of, self.sites)), None)

    @property
    def text(self) -> str:
        """Message and labelled lines."""
        return "\n".join([self.message, *(f"{label}: {text}" for label, text in self.lines)])


@dataclass(frozen=True, slots=True)
class Issues:
    """All findings of a report.

    Attributes:
        suite: What was tested: ``npu``.
        rows: The findings, the worst first.
        passed: Names of what was checked and has no finding: operators, cases.
        file: File that an issue without a source line is shown at: the program, or the data file.
    """

    suite: str
    rows: tuple[Issue, ...] = ()
    passed: tuple[str, ...] = ()
    file: str = ""

    @property
    def whole(self) -> Place:
        """Where an issue without a source line is shown: a service refuses a result without a place."""
        return Place(_in_folder(self.file) or "shadowrun", 1)


def place_of(site: str) -> Place | None:
    """The user's line of a site; None for a cell of a notebook, and a file outside of the working directory.

    ``lib.py:3 in f (first reached from train.py:9 in <module>)`` is a library's line that the user's led to;
    ``train.py:9 in step (adam.py:30 in step)`` is the user's line, with the library's.
    """
    line, _, own = site.removesuffix(")").partition(_FIRST_REACHED) if site.endswith(")") else (site, "", "")
    if not own and site.endswith(")"):
        line = site.rpartition(" (")[0] or site
    found = _LINE.fullmatch(own or line)
    if found is None:
        return None
    # The text of the issue has the line of any other file.
    file = _in_folder(found["file"])
    return Place(file, int(found["line"]), found["function"] or "") if file else None


def _in_folder(path: str) -> str:
    """A path from the working directory, with slashes; empty for one outside of it.

    Services take files of the repository only, and a data file from anyone may name ``//host/x.py``.
    """
    file = PurePath(path)
    if file.is_absolute() and file.is_relative_to(Path.cwd()):
        file = file.relative_to(Path.cwd())
    return "" if file.is_absolute() or ".." in file.parts or not file.parts else file.as_posix()


def worst_first(issues: Iterable[Issue]) -> list[Issue]:
    """Those that fail a gate first; within both groups the order stays."""
    return sorted(issues, key=lambda issue: LEVELS.index(issue.level))


def fingerprints(suite: str, issues: Iterable[Issue]) -> Iterator[str]:
    """A text for each issue that stays the same from run to run, and that no other of the report has."""
    seen: Counter[tuple[str, ...]] = Counter()
    for issue in issues:
        seen[issue.key] += 1
        # Two findings of a run may differ in their explanation only, which is no part of the key.
        words = (suite, *issue.key, str(seen[issue.key]))
        yield hashlib.sha256("\0".join(words).encode("utf-8", "replace")).hexdigest()
