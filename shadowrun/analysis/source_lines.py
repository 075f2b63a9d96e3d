"""Where the calls of each finding were made, and the user's lines around them, read when a report is made.

A data file may be another person's, and names any path: then only Python files below the working directory are read.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import stat
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from shadowrun.analysis.findings import finding_key, without_numbers
from shadowrun.types import Status

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from shadowrun.analysis.call_groups import CallGroups, Row
    from shadowrun.analysis.findings import Finding
    from shadowrun.analysis.known_issues import KnownIssues
    from shadowrun.types import Phase

__all__ = ["FindingOrigin", "SourceFile", "SourceLine", "SourceText", "find_origins", "read_source", "split_site"]


@dataclass(frozen=True, slots=True)
class FindingOrigin:
    """Calls of a finding with the same origin and inputs.

    Attributes:
        module, phase, site: Origin, as in `OpCall`.
        inputs: Printed inputs.
        n_calls: Number of calls.
        first_seq, first_step: Number and step of the first.
        max_abs, max_ulp: Greatest difference; 0 where none was measured.
        key: Numbers of their context and outcome in the data file.
    """

    module: str
    phase: Phase
    site: str
    inputs: str
    n_calls: int
    first_seq: int
    first_step: int
    max_abs: float
    max_ulp: int
    key: tuple[int, int]


def find_origins(
    table: CallGroups, findings: Iterable[Finding], ledger: KnownIssues | None = None
) -> Mapping[int, tuple[FindingOrigin, ...]]:
    """Number of each finding to its places, in the order of their first call."""
    by_key, slow = {}, {}
    for finding in findings:
        if finding.kind == "slow":
            slow[finding.op] = finding.number
        else:
            # As `finding_key` does: the finding shows the figures of its worst call, which are not those of all its
            # calls.
            explanation = without_numbers(finding.explanation)
            by_key[finding.kind, finding.op, finding.cause, explanation, finding.known] = finding.number
    found: dict[int, list[FindingOrigin]] = defaultdict(list)
    for row in table.rows:
        key = finding_key(row, ledger)
        if key in by_key:
            found[by_key[key]].append(_origin(row))
        # An operator that is slow may have findings of other kinds, so it is no alternative to the above.
        if row.context.op in slow and row.outcome.status in (Status.MATCH, Status.MISMATCH, Status.UNVERIFIED):
            found[slow[row.context.op]].append(_origin(row))
    return {number: tuple(places) for number, places in found.items()}


def _origin(row: Row) -> FindingOrigin:
    context, group = row.context, row.group
    return FindingOrigin(
        context.module,
        context.phase,
        context.site,
        context.inputs,
        group.n,
        group.first_seq,
        group.first_step,
        group.max_abs,
        group.max_ulp,
        (group.context_id, group.outcome_id),
    )


CONTEXT = 3
"""Lines shown before and after a line with a finding."""
# A data file may be another person's: how many files a report reads, and how much of each, is bounded.
MAX_FILES = 30
MAX_LINES = 300
"""Of one file."""
MAX_COLUMNS = 200
_MAX_BYTES = 4 << 20
_MAX_SITE = 5000

_SITE = re.compile(r"(?P<path>In \[\d+\]|.+?)(?:, line |:)(?P<line>\d+) in ")
_CELL = re.compile(r"In \[(\d+)\]")
# Installed with shadowrun, and named from the folder above it: `shadowrun/cli/commands/demo_models.py`.
_OWN = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of a program.

    Attributes:
        number: From 1.
        code: Its text.
        findings: Numbers of the findings of its calls.
        statuses: Status and number of its calls, those without a finding too.
    """

    number: int
    code: str
    findings: tuple[int, ...]
    statuses: tuple[tuple[Status, int], ...]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """Lines of one file around the findings, in order; others lie between two whose numbers do not follow.

    Attributes:
        path: As the data file has it; ``In [3]`` for the cell of a notebook.
        lines: The lines.
        is_changed: Whether the file was written after the run had started.
        n_left_out: Lines with findings beyond `MAX_LINES`.
    """

    path: str
    lines: tuple[SourceLine, ...]
    is_changed: bool
    n_left_out: int


@dataclass(frozen=True, slots=True)
class SourceText:
    """What could be read, and why the rest could not: a path and the reason for each file.

    Attributes:
        files: Those with most findings first.
        unread: Path and reason.
        n_left_out: Files beyond `MAX_FILES`.
    """

    files: tuple[SourceFile, ...]
    unread: tuple[tuple[str, str], ...]
    n_left_out: int


# A text of a file may have megabytes and many rows.
@functools.lru_cache(maxsize=10_000)
def split_site(site: str) -> tuple[str, int] | None:
    """Path and number of the line of ``train.py:12 in step``; the user's own, where a library's line follows."""
    found = _SITE.match(site[:_MAX_SITE])
    return (found["path"], int(found["line"])) if found and len(found["line"]) < 8 else None


def read_source(
    table: CallGroups, places: Mapping[int, Iterable[FindingOrigin]], started: str, *, everywhere: bool
) -> SourceText:
    """The lines around all findings.

    Args:
        table: The calls of the run.
        places: Number of each finding to its places.
        started: When the run started, as in `RunInfo`.
        everywhere: Read any file: the run is of this process.
    """
    findings: dict[str, dict[int, dict[int, None]]] = defaultdict(lambda: defaultdict(dict))
    for number, of_finding in places.items():
        for place in of_finding:
            site = split_site(place.site)
            if site is not None:
                findings[site[0]][site[1]][number] = None
    # Most findings first: what the limits leave out matters least.
    paths = sorted(findings, key=lambda path: (-len(set().union(*findings[path].values())), path))
    statuses = _statuses(table, set(paths[:MAX_FILES]))
    files, unread = [], []
    for path in paths[:MAX_FILES]:
        text, modified, reason = _cell(path, everywhere) if _CELL.fullmatch(path) else _read(path, everywhere)
        if text is None:
            unread.append((path, reason))
            continue
        marked = {line: tuple(numbers) for line, numbers in findings[path].items()}
        lines = tuple(_around(text.splitlines(), marked, statuses[path]))
        n_left_out = len(marked) - sum(bool(line.findings) for line in lines)
        if lines:
            files.append(SourceFile(path, lines, modified > _seconds(started), n_left_out))
        else:
            unread.append((path, "it has fewer lines than when it ran"))
    return SourceText(tuple(files), tuple(unread), max(0, len(paths) - MAX_FILES))


def _statuses(table: CallGroups, paths: set[str]) -> Mapping[str, Mapping[int, Counter[Status]]]:
    found: dict[str, dict[int, Counter[Status]]] = defaultdict(lambda: defaultdict(Counter))
    for row in table.rows:
        site = split_site(row.context.site)
        if site is not None and site[0] in paths:
            found[site[0]][site[1]][row.outcome.status] += row.group.n
    return found


def _around(
    code: list[str], findings: Mapping[int, tuple[int, ...]], statuses: Mapping[int, Counter[Status]]
) -> Iterator[SourceLine]:
    wanted: set[int] = set()
    for number in sorted(findings):
        # A number beyond the end is of a file that was shortened since: no line is better than a wrong one.
        if number <= len(code) and len(wanted) < MAX_LINES:
            wanted.update(range(max(1, number - CONTEXT), min(len(code), number + CONTEXT) + 1))
    for number in sorted(wanted):
        counts = tuple(statuses.get(number, {}).items())
        yield SourceLine(number, code[number - 1][:MAX_COLUMNS], findings.get(number, ()), counts)


def _read(path: str, everywhere: bool) -> tuple[str | None, float, str]:
    """Text of a file, when it was written, and why there is no text."""
    try:
        file = _located(path) if everywhere or _leads_below(path) else None
        if file is None or not (everywhere or _may_read(file)):
            return None, 0.0, "it is no Python file below the working directory"
        # Not blocking: the name may be that of a pipe.
        # Opened first and looked at by its descriptor: between a check of the path and the opening, the file could be
        # another.
        with os.fdopen(os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as opened:
            found = os.fstat(opened.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_BYTES:
                return None, 0.0, "it is no file of source text"
            return opened.read(_MAX_BYTES).decode("utf-8", "replace"), found.st_mtime, ""
    except FileNotFoundError:
        return None, 0.0, "it is not there"
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        return None, 0.0, str(getattr(error, "strerror", None) or "its name is none of a file")


def _located(path: str) -> Path:
    own = _OWN.parent / path
    if path.startswith(f"{_OWN.name}/") and own.is_file() and not Path(path).is_file():
        return own.resolve()
    return Path(path).resolve(strict=True)


def _leads_below(path: str) -> bool:
    """Whether a name leads to a file of ours or of the working directory, by its text: another machine is not asked."""
    # A network drive would be mounted, or a password sent to it, by the question whether a file is there.
    if path.startswith(f"{_OWN.name}/") and Path(os.path.normpath(_OWN.parent / path)).is_relative_to(_OWN):
        return True
    full = Path(os.path.normpath(Path.cwd() / path))
    return any(full.is_relative_to(folder) for folder in (Path.cwd(), os.environ.get("PWD") or Path.cwd()))


def _may_read(file: Path) -> bool:
    """Whether a file that a data file names may be shown, as one of this program's."""
    if file.suffix != ".py":
        return False
    if file.is_relative_to(_OWN):
        return True
    folder = Path.cwd()
    # Not below `.venv` or `.git`: what lies there is not the user's program, and may be secret.
    return file.is_relative_to(folder) and not any(p.startswith(".") for p in file.relative_to(folder).parts)


def _cell(path: str, everywhere: bool) -> tuple[str | None, float, str]:
    """Text of a notebook's cell, which only the kernel that ran it has."""
    number = _CELL.fullmatch(path)
    if everywhere and number and "IPython" in sys.modules:
        with contextlib.suppress(Exception):  # IPython's own, of any version
            return str(sys.modules["IPython"].get_ipython().user_ns["In"][int(number[1])]), 0.0, ""
    return None, 0.0, "the kernel that ran this cell has ended: write the report in the notebook itself"


def _seconds(started: str) -> float:
    try:
        return datetime.fromisoformat(started).timestamp()
    except ValueError:
        # A time that cannot be read calls no file changed.
        return float("inf")
