"""The ledger of known divergences, held against a run: what it excuses, and which of its lines are out of date."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from shadowrun.analysis.words import plural
from shadowrun.settings import fits_operator, fits_platform
from shadowrun.types import Status

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shadowrun.analysis.findings import Finding
    from shadowrun.analysis.table import Row, Table
    from shadowrun.settings import KnownLine

__all__ = ["Known", "Ledger", "LineUse"]

MIN_TIMED_CALLS = 3
"""As for findings of the kind slow: fewer calls tell nothing."""

_DIVERGING = frozenset({Status.MISMATCH, Status.UNSUPPORTED, Status.FALLBACK, Status.ERROR})
_TELLING = _DIVERGING | {Status.MATCH}
"""What shows whether an operator still diverges; a call that could not be verified does not."""


@dataclass(frozen=True, slots=True)
class LineUse:
    """What became of a line of the ledger in a run.

    Attributes:
        line: The line.
        state: ``matched``: it excuses calls; ``expired``: its day is past, it excuses nothing; ``stale``: its
            operator ran and did not diverge; ``not exercised``: its operator did not run, or not there;
            ``other platform``: the run was on another target.
        n_diverging: Calls that it fits.
        n_calls: Calls of its operator, in its modules, that tell whether it diverges.
    """

    line: KnownLine
    state: str
    n_diverging: int
    n_calls: int

    @property
    def remark(self) -> str:
        """What the reader should do about the line; empty where there is nothing to do."""
        line = self.line
        what = f"{line.origin}: {line.operator} on {line.platform}"
        if self.state == "expired":
            verb = "is no longer excused" if self.n_diverging else "is in the ledger"
            return f"{what} {verb}: the line expired on {line.expires} ({line.reason}). Settle it, or set a new day."
        if self.state == "stale":
            return f"{what} no longer diverges in {plural(self.n_calls, 'call')}: delete this line ({line.reason})."
        return ""


@dataclass(frozen=True, slots=True)
class Known:
    """What the ledger says of a run: findings that it excuses, each with its line, and what became of all lines."""

    findings: tuple[Finding, ...] = ()
    lines: tuple[LineUse, ...] = ()


class Ledger:
    """Lines of a ledger, and the run that they are held against.

    Args:
        lines: All lines.
        platform: Spec of the run's target.
        today: The day on which lines expire.
    """

    def __init__(self, lines: Iterable[KnownLine], platform: str, today: dt.date | None = None) -> None:
        self._lines = tuple(lines)
        self._today = today or dt.datetime.now().astimezone().date()
        self._here = [line for line in self._lines if fits_platform(line.platform, platform)]

    def excuse(self, kind: str, op: str, modules: Iterable[str]) -> KnownLine | None:
        """The first line in force that fits; its module pattern must fit all modules."""
        if not self._here:
            return None
        modules = tuple(modules)
        fitting = (line for line in self._here if not self._expired(line))
        return next((line for line in fitting if _fits(line, kind, op, modules)), None)

    def uses(self, table: Table, findings: Iterable[Finding]) -> tuple[LineUse, ...]:
        """What became of each line; `findings` are all of the run, those that are excused too."""
        findings = tuple(findings)
        return tuple(self._use(line, table, findings) for line in self._lines)

    def _expired(self, line: KnownLine) -> bool:
        return line.expires is not None and line.expires < self._today

    def _use(self, line: KnownLine, table: Table, findings: tuple[Finding, ...]) -> LineUse:
        if line not in self._here:
            return LineUse(line, "other platform", 0, 0)
        # What another line excuses already still shows that this one is no stale line.
        rows = [row for row in table.rows if _concerns(line, row)]
        n_diverging = sum(row.group.n for row in rows if _diverges(line, row))
        n_diverging += sum(f.n_calls for f in findings if f.kind == "slow" and _fits(line, f.kind, f.op, f.modules))
        n_calls = sum(_telling_calls(row) for row in rows)
        timed = line.kind != "slow" or n_calls >= MIN_TIMED_CALLS
        if n_diverging:
            state = "expired" if self._expired(line) else "matched"
        elif n_calls and timed:
            state = "stale"
        else:
            state = "expired" if self._expired(line) else "not exercised"
        return LineUse(line, state, n_diverging, n_calls)


def _fits(line: KnownLine, kind: str, op: str, modules: tuple[str, ...]) -> bool:
    if line.kind not in ("", kind) or not fits_operator(line.operator, op):
        return False
    if line.module == "*":
        return True
    return bool(modules) and all(fnmatchcase(module, line.module) for module in modules)


def _concerns(line: KnownLine, row: Row) -> bool:
    """Whether a line is about these calls, whatever became of them."""
    return fits_operator(line.operator, row.context.op) and fnmatchcase(row.context.module, line.module)


def _diverges(line: KnownLine, row: Row) -> bool:
    status = row.outcome.status
    named = str(status) == line.kind if line.kind else status in _DIVERGING
    return named and not row.outcome.is_own_failure


def _telling_calls(row: Row) -> int:
    return row.group.n if row.outcome.status in _TELLING and not row.outcome.is_own_failure else 0
