"""The failures of a sweep as `Issues`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shadowrun.report.issues import Issue, Issues
from shadowrun.report.sanitize import clip
from shadowrun.studies.sweep.cases import Kind, Support
from shadowrun.studies.sweep.reports.support import Direction

if TYPE_CHECKING:
    from collections.abc import Collection

    from shadowrun.analysis import KnownIssues
    from shadowrun.settings import KnownLine
    from shadowrun.studies.sweep.cases import CaseFinding
    from shadowrun.studies.sweep.coverage_file import SweepInfo
    from shadowrun.studies.sweep.reports.support import Change, Changes, FailingPart, SupportTable

__all__ = ["changes_issues", "known_line", "sweep_issues"]

# The words of a ledger; all other failures are errors.
_STATUSES = {
    Kind.UNSUPPORTED: "unsupported",
    Kind.UNSUPPORTED_DTYPE: "unsupported",
    Kind.MISMATCH: "mismatch",
    Kind.FORM: "mismatch",
    Kind.SILENT_FALLBACK: "fallback",
    Kind.WARNED_FALLBACK: "fallback",
}


def known_line(finding: CaseFinding, operator: str, ledger: KnownIssues | None) -> KnownLine | None:
    """The line of a ledger that excuses a failure: by the missing kernel, the wrong operator, or the function."""
    if ledger is None:
        return None
    status = _STATUSES.get(finding.kind, "error")
    names = filter(None, (finding.kernel, finding.op, operator))
    return next((line for name in names if (line := ledger.excuse(status, name, ()))), None)


def sweep_issues(
    table: SupportTable,
    info: SweepInfo,
    fail_on: Collection[Kind],
    file: str = "",
    ledger: KnownIssues | None = None,
) -> Issues:
    """One issue for each operator and reason; parts without a failure have passed.

    Args:
        table: Results of the sweep.
        info: Its platforms.
        fail_on: Kinds that fail the sweep.
        file: Name of the coverage file: operators of a database have no source line.
        ledger: Known issues, which fail nothing.
    """
    grouped: dict[tuple[str, ...], list[FailingPart]] = {}
    for operator in table.operators:
        for f in operator.failing:
            key = (f.finding.kind, operator.name, f.finding.kernel or f.finding.op, f.finding.cause)
            grouped.setdefault(key, []).append(f)
    rows = tuple(_issue(key, parts, info.target, fail_on, ledger) for key, parts in grouped.items())
    passed = tuple(
        f"{operator.name} [{dtype} {part}]"
        for operator in table.operators
        for (dtype, part), support in operator.parts.items()
        if support is Support.FULL
    )
    return Issues(info.target, rows, passed, file)


def changes_issues(changes: Changes, fail_on: Collection[str], file: str) -> Issues:
    """One issue for each part of an operator that regressed, or that fails for another reason; the others passed.

    Args:
        changes: Between two sweeps.
        fail_on: Directions that fail: ``regressed``.
        file: Name of the later coverage file.
    """
    worse = [c for c in changes.changes if c.direction is not Direction.GAINED]
    passed = tuple(f"{c.name} [{c.dtype} {c.part}]" for c in changes.in_direction(Direction.GAINED))
    return Issues(changes.after, tuple(_change_issue(c, changes, fail_on) for c in worse), passed, file)


def _change_issue(c: Change, changes: Changes, fail_on: Collection[str]) -> Issue:
    kinds = f"{', '.join(c.kinds_before) or 'pass'} → {', '.join(c.kinds_after) or 'pass'}"
    return Issue(
        kind=str(c.direction),
        cause=", ".join(c.kinds_after),
        name=f"{c.name} [{c.dtype} {c.part}]",
        message=clip(f"{c.name} {c.dtype} {c.part} {c.direction} since {changes.before}: {c.why}"),
        level="error" if str(c.direction) in fail_on else "warning",
        key=(str(c.direction), c.name, c.dtype, str(c.part)),
        lines=(("support", f"{c.before} → {c.after}"), ("failures", kinds)),
        change="new" if c.direction is Direction.REGRESSED else "",
    )


def _issue(
    key: tuple[str, ...],
    parts: list[FailingPart],
    target: str,
    fail_on: Collection[Kind],
    ledger: KnownIssues | None,
) -> Issue:
    first = parts[0]
    finding = first.finding
    _, name, where, cause = key
    place = f" in {where}" if where and where != name else ""
    known = known_line(finding, name, ledger)
    why = ": ".join(filter(None, (cause, finding.explanation, finding.message)))
    return Issue(
        kind=str(finding.kind),
        cause=cause,
        name=name,
        message=clip(f"{name} on {target}: {finding.kind}{place}{f', {why}' if why else ''}"),
        level="note" if known else "error" if finding.kind in fail_on else "warning",
        key=key,
        lines=(
            ("cases", clip(", ".join(f"{f.dtype} {f.part} {f.n}/{f.of}" for f in parts))),
            ("first", f"sample {first.first.sample} of {first.first.part}, {first.inputs or 'no inputs'}"),
        ),
        known=known.reason if known else "",
    )
