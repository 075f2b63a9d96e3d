"""Where the calls of each finding were made: all places, of which a finding itself has the first few."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowrun.analysis.findings import finding_key, without_numbers
from shadowrun.types import Status

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shadowrun.analysis.call_groups import CallGroups, Row
    from shadowrun.analysis.findings import Finding
    from shadowrun.analysis.known_issues import KnownIssues
    from shadowrun.types import Phase

__all__ = ["FindingOrigin", "find_origins"]


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
