"""Findings of two runs against each other: new, gone, worse, same, by a signature that outlives numbers of calls."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from shadowrun.analysis.findings import KIND_OF, KINDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shadowrun.analysis.call_groups import CallGroups, Row
    from shadowrun.analysis.findings import Finding
    from shadowrun.analysis.known_issues import KnownIssues

__all__ = [
    "Baseline",
    "Change",
    "FindingChange",
    "FindingInRun",
    "Signature",
    "SinceBaseline",
    "changes",
    "signatures",
]

WORSE: Final = 2.0
"""A finding is worse if its error or its share of the operator's calls is more than so many times as large."""
# `store.schema.SEVERITY` is a rank (NaN, form, beyond rounding) in millions, and the error within it.
_RANK: Final = 1e6


class Change(StrEnum):
    """What became of a finding."""

    NEW = "new"
    WORSE = "worse"
    SAME = "same"
    GONE = "gone"


# Without explanation and line: both change with the program, while the fault stays.
class Signature(NamedTuple):
    """What a finding is found again by.

    Attributes:
        kind: One of `analysis.KINDS`.
        op: ``aten::add.Tensor``.
        module: Path of the module; empty for slow operators, which are slow everywhere.
        phase: Forward, backward or optimizer; empty likewise.
        cause: Cause; empty for none.
    """

    kind: str
    op: str
    module: str
    phase: str
    cause: str


@dataclass(frozen=True, slots=True)
class FindingInRun:
    """A finding in one run.

    Attributes:
        n_calls: Calls affected.
        n_calls_of_op: Calls of the operator in this module and phase.
        severity: Greatest severity of its calls (`store.schema.SEVERITY`); of slow operators the ratio of times.
        first_seq: Number of the first call.
        known: Reason of the known issue that excuses it; empty for none.
        site: Source line of the first call.
    """

    n_calls: int
    n_calls_of_op: int
    severity: float
    first_seq: int
    known: str = ""
    site: str = ""

    @property
    def share(self) -> float:
        """Share of the operator's calls."""
        return self.n_calls / max(1, self.n_calls_of_op)


@dataclass(frozen=True, slots=True)
class FindingChange:
    """A finding of one or both runs.

    Attributes:
        signature: What it is found again by.
        change: What became of it.
        before, after: In the first and the second run; None where it is not there.
    """

    signature: Signature
    change: Change
    before: FindingInRun | None
    after: FindingInRun | None

    @property
    def is_known(self) -> bool:
        """Whether the ledger excuses it where it is new or worse."""
        return self.after is not None and bool(self.after.known)


@dataclass(frozen=True, slots=True)
class Baseline:
    """Findings of an earlier run, to tell which of a later one are new.

    Attributes:
        name: Of its data file.
        platforms: ``npu against cpu``.
        findings: By signature.
    """

    name: str
    platforms: str
    findings: Mapping[Signature, FindingInRun]


@dataclass(frozen=True, slots=True)
class SinceBaseline:
    """What became of the findings of a baseline.

    Attributes:
        name: Of the baseline.
        platforms: Of the baseline, if they are others than those of the run; empty if they are the same.
        changes: All findings of both.
    """

    name: str
    platforms: str
    changes: tuple[FindingChange, ...]

    def failing(self, fail_on: Iterable[str]) -> list[FindingChange]:
        """Findings that are new or worse, as far as `fail_on` names these; known issues fail nothing.

        Not operators that are slow: times change from run to run.
        """
        wanted = {change for change in (Change.NEW, Change.WORSE) if change in fail_on}
        return [c for c in self.changes if c.change in wanted and not c.is_known and c.signature.kind != "slow"]

    def by_finding(self) -> dict[tuple[str, str, str, bool], Change]:
        """The worst change of all modules by kind, operator, cause and whether it is known: what findings differ by."""
        order, found = list(Change), dict[tuple[str, str, str, bool], Change]()
        for c in self.changes:
            if c.after is not None:
                s = c.signature
                key = s.kind, s.op, s.cause, c.is_known
                found[key] = min(found.get(key, c.change), c.change, key=order.index)
        return found


def signatures(
    table: CallGroups, slow: Iterable[Finding], ledger: KnownIssues | None = None
) -> dict[Signature, FindingInRun]:
    """Findings of a run by signature.

    Args:
        table: Calls of the run.
        slow: Findings of the kind ``slow``, which are properties of operators, and no calls.
        ledger: What is excused.
    """
    grouped: dict[Signature, list[Row]] = defaultdict(list)
    totals: Counter[tuple[str, str, str]] = Counter()
    for row in table.rows:
        context, outcome = row.context, row.outcome
        # All calls, those that match too: a share does not change with the length of a run.
        totals[context.op, context.module, str(context.phase)] += row.group.n
        kind = KIND_OF.get(outcome.status)
        if kind is not None and not outcome.is_own_failure:
            signature = Signature(kind, context.op, context.module, str(context.phase), str(outcome.cause or ""))
            grouped[signature].append(row)
    found = {}
    for signature, rows in grouped.items():
        excuse = ledger.excuse(signature.kind, signature.op, (signature.module,)) if ledger else None
        found[signature] = FindingInRun(
            sum(row.group.n for row in rows),
            totals[signature.op, signature.module, signature.phase],
            max(row.group.severity for row in rows),
            (first := min(rows, key=lambda row: row.group.first_seq)).group.first_seq,
            excuse.reason if excuse else "",
            first.context.site,
        )
    for finding in slow:
        ratio = finding.target_min_us / finding.ref_min_us if finding.ref_min_us > 0 else 0.0
        reason = finding.known.reason if finding.known else ""
        found[Signature("slow", finding.op, "", "", str(finding.cause or ""))] = FindingInRun(
            finding.n_calls, finding.n_calls_of_op, ratio, finding.first_seq, reason, *finding.sites[:1]
        )
    return found


def changes(
    before: Mapping[Signature, FindingInRun], after: Mapping[Signature, FindingInRun]
) -> tuple[FindingChange, ...]:
    """All findings of two runs, new and worse ones first."""
    found = [_change(signature, before.get(signature), after.get(signature)) for signature in {**before, **after}]
    order = list(Change)
    found.sort(key=lambda c: (order.index(c.change), KINDS.index(c.signature.kind), c.signature))
    return tuple(found)


def _change(signature: Signature, before: FindingInRun | None, after: FindingInRun | None) -> FindingChange:
    if before is None or after is None:
        return FindingChange(signature, Change.NEW if before is None else Change.GONE, before, after)
    # The error alone would hide that rounding has become NaN.
    ranks, errors = zip(*(divmod(seen.severity, _RANK) for seen in (before, after)), strict=True)
    is_worse = ranks[1] > ranks[0] or (ranks[1] == ranks[0] and errors[1] > WORSE * errors[0])
    # A fault that spreads to twice as many calls is worse, even if no error grew.
    is_worse |= after.share > WORSE * before.share
    return FindingChange(signature, Change.WORSE if is_worse else Change.SAME, before, after)
