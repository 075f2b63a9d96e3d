"""Tables from a coverage file alone: what the platform has of each operator, and what fails."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shadowrun.sweep.outcome import FAILURES, NOT_INVARIANT, Finding, Kind, Support

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shadowrun.sweep.cases import Case, Part
    from shadowrun.sweep.outcome import Outcome

__all__ = ["FailingPart", "OperatorSupport", "SupportTable", "support_of"]


@dataclass(frozen=True, slots=True)
class FailingPart:
    """A part of an operator that fails, for one reason.

    Attributes:
        dtype, part: Where.
        finding: The reason; its message is that of the first case.
        n: Cases that show it.
        of: Cases of that part that count.
        first: The first of them.
        inputs: Its inputs.
    """

    dtype: str
    part: Part
    finding: Finding
    n: int
    of: int
    first: Case
    inputs: str


@dataclass(frozen=True, slots=True)
class OperatorSupport:
    """What the platform has of an operator.

    Attributes:
        name: Operator.
        support: Over all dtypes and parts.
        parts: Support by dtype and part.
        counts: Cases by kind.
        failing: What fails and why, the worst first.
    """

    name: str
    support: Support
    parts: Mapping[tuple[str, Part], Support]
    counts: Mapping[Kind, int]
    failing: tuple[FailingPart, ...]


@dataclass(frozen=True, slots=True)
class SupportTable:
    """A sweep as a table.

    Attributes:
        operators: By name.
        counts: Cases by dtype and part, and by kind.
        not_invariant: Operators that round an item otherwise in a batch than alone: ``aten::bmm``.
    """

    operators: tuple[OperatorSupport, ...]
    counts: Mapping[tuple[str, Part], Mapping[Kind, int]]
    not_invariant: tuple[str, ...] = ()

    @property
    def by_support(self) -> dict[Support, int]:
        """Number of operators of each class."""
        counted = Counter(operator.support for operator in self.operators)
        return {support: counted[support] for support in Support}

    @property
    def totals(self) -> dict[Kind, int]:
        """Cases of each kind."""
        counted: Counter[Kind] = Counter()
        for kinds in self.counts.values():
            counted.update(kinds)
        return {kind: counted[kind] for kind in Kind}

    @classmethod
    def of(cls, results: Iterable[tuple[Case, Outcome]]) -> SupportTable:
        """Read all cases of a sweep, in any order."""
        tallies: dict[str, dict[tuple[str, Part], _Tally]] = {}
        not_invariant: set[str] = set()
        for case, outcome in results:
            not_invariant.update(f.op for f in outcome.findings if f.explanation == NOT_INVARIANT)
            tallies.setdefault(case.operator, {}).setdefault((case.dtype, case.part), _Tally()).add(case, outcome)
        counts: dict[tuple[str, Part], Counter[Kind]] = {}
        for parts in tallies.values():
            for key, tally in parts.items():
                counts.setdefault(key, Counter()).update(tally.counts)
        operators = tuple(_operator(name, tallies[name]) for name in sorted(tallies))
        return cls(operators, {key: counts[key] for key in sorted(counts)}, tuple(sorted(not_invariant)))


@dataclass(slots=True)
class _Tally:
    """Cases of one operator, dtype and part."""

    counts: Counter[Kind] = field(default_factory=Counter)
    failing: dict[tuple[str, ...], tuple[Finding, int, Case, str]] = field(default_factory=dict)

    def add(self, case: Case, outcome: Outcome) -> None:
        self.counts[outcome.kind] += 1
        reasons = {
            (f.kind, f.op, f.kernel, f.cause, f.explanation): f
            for f in reversed(outcome.findings)
            if f.kind in FAILURES
        }
        for key, f in reasons.items():
            finding, n, first, inputs = self.failing.get(key, (f, 0, case, outcome.inputs))
            if case < first:
                finding, first, inputs = f, case, outcome.inputs
            self.failing[key] = finding, n + 1, first, inputs


def support_of(counts: Mapping[Kind, int]) -> Support:
    """Class of the cases of these kinds."""
    failed = sum(counts.get(kind, 0) for kind in FAILURES)
    passed = counts.get(Kind.PASS, 0)
    if not failed:
        return Support.FULL if passed else Support.UNTESTED
    return Support.PARTIAL if passed else Support.NONE


def _operator(name: str, parts: dict[tuple[str, Part], _Tally]) -> OperatorSupport:
    total: Counter[Kind] = Counter()
    failing = []
    for (dtype, part), tally in sorted(parts.items()):
        total.update(tally.counts)
        of = sum(n for kind, n in tally.counts.items() if kind is Kind.PASS or kind in FAILURES)
        failing += [
            FailingPart(dtype, part, finding, n, of, first, inputs)
            for finding, n, first, inputs in tally.failing.values()
        ]
    failing.sort(key=lambda f: (FAILURES.index(f.finding.kind), f.dtype, f.part, f.finding.op, f.finding.explanation))
    by_part = {key: support_of(tally.counts) for key, tally in sorted(parts.items())}
    return OperatorSupport(name, support_of(total), by_part, dict(total), tuple(failing))
