"""The failures of a sweep as `Issues`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shadowrun.report.issues import Issue, Issues
from shadowrun.report.sanitize import clip
from shadowrun.studies.sweep.cases import Support

if TYPE_CHECKING:
    from collections.abc import Collection

    from shadowrun.studies.sweep.cases import Kind
    from shadowrun.studies.sweep.coverage_file import SweepInfo
    from shadowrun.studies.sweep.support import FailingPart, SupportTable

__all__ = ["sweep_issues"]


def sweep_issues(table: SupportTable, info: SweepInfo, fail_on: Collection[Kind], file: str = "") -> Issues:
    """One issue for each operator and reason; parts without a failure have passed.

    Args:
        table: Results of the sweep.
        info: Its platforms.
        fail_on: Kinds that fail the sweep.
        file: Name of the coverage file: operators of a database have no source line.
    """
    grouped: dict[tuple[str, ...], list[FailingPart]] = {}
    for operator in table.operators:
        for f in operator.failing:
            key = (f.finding.kind, operator.name, f.finding.kernel or f.finding.op, f.finding.cause)
            grouped.setdefault(key, []).append(f)
    rows = tuple(_issue(key, parts, info.target, fail_on) for key, parts in grouped.items())
    passed = tuple(
        f"{operator.name} [{dtype} {part}]"
        for operator in table.operators
        for (dtype, part), support in operator.parts.items()
        if support is Support.FULL
    )
    return Issues(info.target, rows, passed, file)


def _issue(key: tuple[str, ...], parts: list[FailingPart], target: str, fail_on: Collection[Kind]) -> Issue:
    first = parts[0]
    finding = first.finding
    _, name, where, cause = key
    place = f" in {where}" if where and where != name else ""
    why = ": ".join(filter(None, (cause, finding.explanation, finding.message)))
    return Issue(
        kind=str(finding.kind),
        cause=cause,
        name=name,
        message=clip(f"{name} on {target}: {finding.kind}{place}{f', {why}' if why else ''}"),
        level="error" if finding.kind in fail_on else "warning",
        key=key,
        lines=(
            ("cases", clip(", ".join(f"{f.dtype} {f.part} {f.n}/{f.of}" for f in parts))),
            ("first", f"sample {first.first.sample} of {first.first.part}, {first.inputs or 'no inputs'}"),
        ),
    )
