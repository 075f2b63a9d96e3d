"""Operators that do not repeat themselves, as `Issues`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shadowrun.analysis.wording import plural
from shadowrun.report.issues import Issue, Issues
from shadowrun.report.sanitize import clip

if TYPE_CHECKING:
    from collections.abc import Collection

    from shadowrun.studies.determinism.report import Determinism

__all__ = ["determinism_issues"]

_MAX_PLACES = 10


def determinism_issues(found: Determinism, fail_on: Collection[str]) -> Issues:
    """One issue for each operator and change under which it gave other bits, and for each process that failed.

    Args:
        found: What was found.
        fail_on: Dimensions that fail the command.
    """
    rows = [_issue(found, op, dimension, fail_on) for op in found.ops for dimension in found.broken_in(op)]
    rows += [
        Issue(
            kind="failed process",
            cause="",
            name=f"run {run.number}",
            message=clip(f"{found.program}: run {run.number} ended with status {run.status}: {run.message}"),
            level="error",
            key=("failed process", str(run.threads), str(run.number)),
        )
        for run in found.runs
        if run.status
    ]
    passed = tuple(op for op in found.ops if not found.broken_in(op))
    return Issues(f"determinism of {found.program}", tuple(rows), passed, found.program.partition(" ")[0])


def _issue(found: Determinism, op: str, dimension: str, fail_on: Collection[str]) -> Issue:
    stability = found.of(dimension, op)
    places = list(stability.where)
    more = len(places) - _MAX_PLACES
    at = ", ".join(places[:_MAX_PLACES]) + (f" and {more} more" if more > 0 else "")
    n = stability.n_breaks
    return Issue(
        kind="not repeatable",
        cause=dimension,
        name=op,
        message=clip(f"{op} gives other bits, {dimension}: {plural(n, 'call')}, {stability.n_distinct} results"),
        level="error" if dimension in fail_on else "warning",
        key=("not repeatable", op, dimension),
        lines=(("breaks at", clip(at)),),
    )
