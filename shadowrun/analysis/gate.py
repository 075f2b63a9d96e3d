"""The closing line and whether a run passes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowrun.analysis.findings import KINDS, Finding
from shadowrun.analysis.words import plural
from shadowrun.types import Status

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

__all__ = ["FAIL_ON", "Gate", "cut_short", "judge"]

FAIL_ON = frozenset({"unsupported", "error", "mismatch"})
"""Kinds of findings that fail a run unless told otherwise."""


_NO_FAILURE = ("KeyboardInterrupt", "SystemExit")
"""The program's own status says what they mean."""


@dataclass(frozen=True, slots=True)
class Gate:
    """Whether a run passes, the line that says so, and the kinds of findings that decided.

    Attributes:
        passed: Whether it does.
        line: ``PASSED: 12 calls match``.
        fail_on: Kinds of findings that would fail it.
        only_cut_short: It fails for nothing else than the exception that ended the program.
    """

    passed: bool
    line: str
    fail_on: frozenset[str] = FAIL_ON
    only_cut_short: bool = False


def cut_short(raised: str) -> bool:
    """Whether an exception ended a program that would have gone on."""
    return bool(raised) and not raised.startswith(_NO_FAILURE)


def judge(
    findings: Iterable[Finding],
    counts: dict[Status, int],
    fail_on: Collection[str] = FAIL_ON,
    known: Iterable[Finding] = (),
    regions: str = "",
    raised: str = "",
    unselected: str = "",
    *,
    salvaged: bool = False,
) -> Gate:
    """Judge a run: findings of the kinds in `fail_on` fail it, and so does one that verified nothing, or was cut short.

    Args:
        findings: Those that count.
        counts: Calls by status.
        fail_on: Kinds that fail the run.
        known: Those that a ledger excuses; they are named, and fail nothing.
        regions: How many compiled regions there were and what became of them, as `Regions.line` says it.
        raised: Exception that ended the program.
        unselected: Why nothing was selected.
        salvaged: This is what could be read of a damaged data file: it does not pass, since what is missing may fail.
    """
    kinds = Counter(finding.kind for finding in findings)
    named = {kind: _count(kinds[kind], kind) for kind in KINDS if kinds[kind]}
    failing = [text for kind, text in named.items() if kind in fail_on]
    passing = [text for kind, text in named.items() if kind not in fail_on]
    excused = Counter(finding.kind for finding in known)
    passing += [_count(excused[kind], f"known {kind}") for kind in KINDS if excused[kind]]
    also = f" ({', '.join(passing)} not counted)" if passing else ""
    also += f"; {regions}" if regions else ""
    n_compared = counts[Status.MATCH] + counts[Status.MISMATCH]
    ended = f"the program ended with {raised}" if raised else ""
    if failing:
        return Gate(False, f"FAILED: {'; '.join(filter(None, [ended, ', '.join(failing)]))}{also}", frozenset(fail_on))
    if not n_compared and fail_on:
        why = "; ".join(filter(None, [ended, "no call could be compared", unselected]))
        return Gate(False, f"FAILED: {why}{also}", frozenset(fail_on))
    if fail_on and cut_short(raised):
        line = f"FAILED: {ended}; {plural(n_compared, 'call')} compared until then{also}"
        return Gate(False, line, frozenset(fail_on), only_cut_short=True)
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
