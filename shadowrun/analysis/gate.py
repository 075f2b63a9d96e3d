"""The gate: whether a run passes, and the line of the report that states it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowrun.analysis.findings import KINDS, Finding
from shadowrun.analysis.wording import plural
from shadowrun.errors import FindingsError
from shadowrun.settings import FAIL_ON
from shadowrun.types import Status
from shadowrun.visible_text import MAX_WHOLE, clip

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from shadowrun.analysis.changes import SinceBaseline

__all__ = ["Gate", "ended_by_exception", "evaluate_gate"]

# The user ended the program, or it ended itself: what was compared until then counts.
_STOPPED = "StoppedAtFinding"
_NO_FAILURE = ("KeyboardInterrupt", "SystemExit", _STOPPED)
_MAX_RAISED = 5


@dataclass(frozen=True, slots=True)
class Gate:
    """Result of the gate.

    Attributes:
        passed: Whether the run passes.
        line: ``PASSED: 12 calls match``.
        fail_on: Kinds of findings that fail it.
        only_exception: The exception that ended the program is the only reason for failing.
    """

    passed: bool
    line: str
    fail_on: frozenset[str] = frozenset(FAIL_ON)
    only_exception: bool = False

    def error(self, findings: Iterable[Finding]) -> FindingsError:
        """The exception of a run that fails: the gate's line, and operator, line and cause of the first findings."""
        failing = [finding for finding in findings if finding.kind in self.fail_on]
        more = [f"… and {len(failing) - _MAX_RAISED} more"] if len(failing) > _MAX_RAISED else []
        return FindingsError(
            "\n".join((clip(self.line, MAX_WHOLE), *map(str, failing[:_MAX_RAISED]), *more)), tuple(failing)
        )


def ended_by_exception(raised: str) -> bool:
    """Whether an exception ended the program early."""
    return bool(raised) and not raised.startswith(_NO_FAILURE)


def evaluate_gate(
    findings: Iterable[Finding],
    counts: dict[Status, int],
    fail_on: Collection[str] = FAIL_ON,
    regions: str = "",
    raised: str = "",
    unselected: str = "",
    *,
    salvaged: bool = False,
    since: SinceBaseline | None = None,
) -> Gate:
    """Fail a run with findings of the kinds in `fail_on`, without compared calls, or ended by an exception.

    Args:
        findings: All, known issues too: these are counted in the line, and fail nothing.
        counts: Calls by status.
        fail_on: Kinds that fail the run.
        regions: Summary of the compiled regions, `Regions.line`.
        raised: Exception that ended the program.
        unselected: Why nothing was selected.
        salvaged: Only part of a damaged data file could be read: the run fails, since the missing part may have
            failed.
        since: What became of the findings of a baseline: `fail_on` may name ``new`` and ``worse``.
    """
    kinds, excused = Counter[str](), Counter[str]()
    for finding in findings:
        (kinds if finding.known is None else excused)[finding.kind] += 1
    named = {kind: _count(kinds[kind], kind) for kind in KINDS if kinds[kind]}
    failing = [text for kind, text in named.items() if kind in fail_on]
    passing = [text for kind, text in named.items() if kind not in fail_on]
    if since is not None:
        changed = Counter(change.change for change in since.failing(fail_on))
        failing += [f"{plural(n, 'finding')} {change} since {since.name}" for change, n in sorted(changed.items())]
    passing += [_count(excused[kind], f"known {kind}") for kind in KINDS if excused[kind]]
    also = f" ({', '.join(passing)} not counted)" if passing else ""
    also += f"; {regions}" if regions else ""
    n_compared = counts[Status.MATCH] + counts[Status.MISMATCH]
    ended = f"the program ended with {raised}" if raised else ""
    ended = "stopped at the first of these" if raised == _STOPPED else ended
    # First of all reasons: a finding is what has to be fixed, whatever else happened.
    if failing:
        return Gate(False, f"FAILED: {'; '.join(filter(None, [ended, ', '.join(failing)]))}{also}", frozenset(fail_on))
    # A run that compared nothing proves nothing: it must not pass in CI.
    if not n_compared and fail_on:
        why = "; ".join(filter(None, [ended, "no call could be compared", unselected]))
        return Gate(False, f"FAILED: {why}{also}", frozenset(fail_on))
    # Calls after the exception were never compared.
    if fail_on and ended_by_exception(raised):
        line = f"FAILED: {ended}; {plural(n_compared, 'call')} compared until then{also}"
        return Gate(False, line, frozenset(fail_on), only_exception=True)
    # What cannot be read may be what failed.
    if fail_on and salvaged:
        line = (
            f"FAILED: only part of a damaged data file could be read; {plural(n_compared, 'call')} compared in it{also}"
        )
        return Gate(False, line, frozenset(fail_on))
    unverified = f", {counts[Status.UNVERIFIED]:,} could not be verified" if counts[Status.UNVERIFIED] else ""
    verb = "matches" if counts[Status.MATCH] == 1 else "match"
    line = f"PASSED: {plural(counts[Status.MATCH], 'call')} {verb}{unverified}{also}"
    return Gate(True, line, frozenset(fail_on))


def _count(n: int, kind: str) -> str:
    return f"{n:,} {kind}" if kind.endswith(("unsupported", "slow")) else plural(n, kind)
