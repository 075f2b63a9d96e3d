"""Slow operators, and those that the target cannot run, as `Issues`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shadowrun.report.issues import Issue, Issues
from shadowrun.report.sanitize import clip
from shadowrun.studies.slowdown.table import BOUNDS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from shadowrun.studies.slowdown.table import Slowdown

__all__ = ["FAIL_ON", "slowdown_issues"]

FAIL_ON: Final = ("critical", "error")
"""Operators slower than the critical ratio beyond the noise; calls that the target cannot run."""


def slowdown_issues(slowdown: Slowdown, suite: str, fail_on: Collection[str], file: str = "") -> Issues:
    """One issue for each operator that is slower beyond the noise, and for each call that the target cannot run.

    Args:
        slowdown: What was measured.
        suite: Target and reference.
        fail_on: Of `FAIL_ON`.
        file: Name of the data file: a measured call has no source line.
    """
    rows = (*_slow(slowdown, suite, fail_on), *_failed(slowdown, suite, fail_on))
    named = {issue.name for issue in rows}
    passed = tuple(o.op for o in slowdown.operators if o.op not in named)
    return Issues(suite, rows, passed, file)


def _slow(slowdown: Slowdown, suite: str, fail_on: Collection[str]) -> Iterator[Issue]:
    critical = {o.op for o in slowdown.surely_slower(slowdown.critical_ratio)}
    for o in slowdown.surely_slower(BOUNDS[0]):
        bound = slowdown.critical_ratio if o.op in critical else BOUNDS[0]
        yield Issue(
            kind="slow",
            cause="critical" if o.op in critical else "",
            name=o.op,
            message=clip(f"{o.op}, {suite}: {o.ratio:.2f} times slower, more than {bound:g} beyond the noise"),
            level="error" if "critical" in fail_on and o.op in critical else "warning",
            key=("slow", o.op),
            lines=(
                ("spread", f"{o.lower:.2f} to {o.upper:.2f}"),
                ("calls", f"{o.n_calls:,}"),
                ("slowest inputs", clip(o.worst.call.inputs)),
            ),
        )


def _failed(slowdown: Slowdown, suite: str, fail_on: Collection[str]) -> Iterator[Issue]:
    for m in slowdown.failing:
        yield Issue(
            kind="error",
            cause="",
            name=m.call.op,
            message=clip(f"{m.call.op}, {suite}: the target cannot run it: {m.failed}"),
            level="error" if "error" in fail_on else "warning",
            key=("error", m.call.op, m.call.inputs),
            lines=(("inputs", clip(m.call.inputs)),),
        )
