"""Known issues: the findings that the ledger excuses, and its lines that are out of date."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from shadowrun.analysis.findings import MIN_TIMED_CALLS
from shadowrun.analysis.wording import plural
from shadowrun.settings import fits_operator, fits_platform
from shadowrun.types import Status

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shadowrun.analysis.call_groups import CallGroups, Row
    from shadowrun.analysis.findings import Finding
    from shadowrun.settings import KnownLine

__all__ = ["KnownIssues", "LedgerLineUse", "LedgerUse"]

_DIVERGING = frozenset({Status.MISMATCH, Status.UNSUPPORTED, Status.FALLBACK, Status.ERROR})
# Statuses that show whether an operator still diverges; unverified does not.
_CONCLUSIVE = _DIVERGING | {Status.MATCH}


@dataclass(frozen=True, slots=True)
class LedgerLineUse:
    """State of a line of the ledger in a run.

    Attributes:
        line: The line.
        state: ``matched``: it excuses calls; ``expired``: its date is past, it excuses nothing; ``stale``: its
            operator ran and did not diverge; ``not exercised``: its operator did not run in its modules;
            ``other platform``: the run was on another target.
        n_diverging: Calls that it matches.
        n_calls: Calls of its operator, in its modules, that show whether it diverges.
    """

    line: KnownLine
    state: str
    n_diverging: int
    n_calls: int

    @property
    def remark(self) -> str:
        """What to do about the line; empty if nothing."""
        line = self.line
        what = f"{line.origin}: {line.operator} on {line.platform}"
        if self.state == "expired":
            verb = "is no longer excused" if self.n_diverging else "is in the ledger"
            return f"{what} {verb}: the line expired on {line.expires} ({line.reason}). Fix it, or set a new date."
        if self.state == "stale":
            return f"{what} no longer diverges in {plural(self.n_calls, 'call')}: delete this line ({line.reason})."
        return ""


@dataclass(frozen=True, slots=True)
class LedgerUse:
    """Known issues of a run: excused findings, each with its line, and the state of all lines."""

    findings: tuple[Finding, ...] = ()
    lines: tuple[LedgerLineUse, ...] = ()


class KnownIssues:
    """The lines of a ledger, applied to a run.

    Args:
        lines: All lines.
        platform: Spec of the run's target.
        today: Date that expiry is compared with.

    Attributes:
        lines: All lines.
    """

    def __init__(self, lines: Iterable[KnownLine], platform: str, today: dt.date | None = None) -> None:
        self.lines = tuple(lines)
        # The local date, as the person who wrote the line means it.
        self._today = today or dt.datetime.now().astimezone().date()
        self._here = [line for line in self.lines if fits_platform(line.platform, platform)]

    def excuse(self, kind: str, op: str, modules: Iterable[str]) -> KnownLine | None:
        """The first valid line that matches; its module pattern must match all modules."""
        if not self._here:  # asked for every group of calls
            return None
        modules = tuple(modules)
        fitting = (line for line in self._here if not self._expired(line))
        # The first, so that the order of the file decides, as in a list of ignored paths.
        return next((line for line in fitting if _fits(line, kind, op, modules)), None)

    def uses(self, table: CallGroups, findings: Iterable[Finding]) -> tuple[LedgerLineUse, ...]:
        """State of each line; `findings` are all of the run, excused ones included."""
        findings = tuple(findings)
        return tuple(self._use(line, table, findings) for line in self.lines)

    def _expired(self, line: KnownLine) -> bool:
        return line.expires is not None and line.expires < self._today

    def _use(self, line: KnownLine, table: CallGroups, findings: tuple[Finding, ...]) -> LedgerLineUse:
        if line not in self._here:
            return LedgerLineUse(line, "other platform", 0, 0)
        # Calls that another line excuses also show that this line is not stale.
        rows = [row for row in table.rows if _concerns(line, row)]
        n_diverging = sum(row.group.n for row in rows if _diverges(line, row))
        # Slow is no status of a call: only the findings have it.
        n_diverging += sum(f.n_calls for f in findings if f.kind == "slow" and _fits(line, f.kind, f.op, f.modules))
        n_calls = sum(_conclusive_calls(row) for row in rows)
        # Too few calls to find an operator slow are no evidence that it is fast either.
        timed = line.kind != "slow" or n_calls >= MIN_TIMED_CALLS
        # An expired line is named even if its operator did not run: its date asks for a decision.
        if n_diverging:
            state = "expired" if self._expired(line) else "matched"
        elif n_calls and timed:
            state = "stale"
        else:
            state = "expired" if self._expired(line) else "not exercised"
        return LedgerLineUse(line, state, n_diverging, n_calls)


def _fits(line: KnownLine, kind: str, op: str, modules: tuple[str, ...]) -> bool:
    if line.kind not in ("", kind) or not fits_operator(line.operator, op):
        return False
    if line.module == "*":
        return True
    # `all` of nothing is true: calls outside of modules fit `*` only.
    return bool(modules) and all(fnmatchcase(module, line.module) for module in modules)


def _concerns(line: KnownLine, row: Row) -> bool:
    """Whether a line covers these calls, whatever their status."""
    return fits_operator(line.operator, row.context.op) and fnmatchcase(row.context.module, line.module)


def _diverges(line: KnownLine, row: Row) -> bool:
    status = row.outcome.status
    # Kinds of findings and statuses have the same names, but for slow.
    named = str(status) == line.kind if line.kind else status in _DIVERGING
    return named and not row.outcome.is_own_failure


def _conclusive_calls(row: Row) -> int:
    return row.group.n if row.outcome.status in _CONCLUSIVE and not row.outcome.is_own_failure else 0
