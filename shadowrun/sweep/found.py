"""What a sweep found, one entry for each fault: what `shadowrun repro` numbers and shows alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowrun.sweep.outcome import FAILURES, Finding, Kind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shadowrun.sweep.cases import Case
    from shadowrun.sweep.outcome import Outcome

__all__ = ["ON_REFERENCE", "Found", "found_in"]

ON_REFERENCE = "on the reference: "
"""How the explanation begins where a case ended the process while the reference ran it."""
_ORDER = (*FAILURES, Kind.REFERENCE, Kind.HARNESS)


@dataclass(frozen=True, slots=True)
class Found:
    """Cases of an operator in a dtype that show one fault.

    Attributes:
        finding: The fault; its message is that of the first case.
        first: The first of them.
        inputs: Its inputs, printed.
        parts: Parts that show it, with the number of cases.
    """

    finding: Finding
    first: Case
    inputs: str
    parts: tuple[tuple[str, int], ...]

    @property
    def counts(self) -> bool:
        """Whether it counts against the target; else it is one of the reference."""
        return self.finding.kind in FAILURES

    @property
    def kind(self) -> str:
        """``mismatch``; what ended the process on the reference is ``crash`` too, not a harness error."""
        where = self.finding.explanation
        return (
            where.removeprefix(ON_REFERENCE).partition(",")[0] if where.startswith(ON_REFERENCE) else self.finding.kind
        )

    @property
    def title(self) -> str:
        """``cosh float32: mismatch in aten::cosh``."""
        where = self.finding.op or self.finding.kernel
        place = f" in {where}" if where and where != self.first.operator else ""
        return f"{self.first.operator} {self.first.dtype}: {self.kind}{place}"

    @property
    def reason(self) -> str:
        """``exceptional values: vector body and scalar tail differ (12 of 195 elements; …)``."""
        f = self.finding
        words = ": ".join(filter(None, (f.cause, f.explanation)))
        return f"{words} ({f.message})" if f.message and words else words or f.message

    @property
    def shown_by(self) -> str:
        """``4 forward, 1 strided``."""
        return ", ".join(f"{n} {part}" for part, n in self.parts)


def found_in(results: Iterable[tuple[Case, Outcome]]) -> list[Found]:
    """All faults of a sweep: those that count, the worst kinds first; then those of the reference.

    These are results on which float64 sides with the target, and cases that ended the process on the reference.
    """
    grouped: dict[tuple[str, ...], list[tuple[Case, Finding, str]]] = {}
    for case, outcome in results:
        if case.sample < 0:  # what was not tried
            continue
        for f in outcome.findings:
            on_reference = f.kind is Kind.HARNESS and f.explanation.startswith(ON_REFERENCE)
            if f.kind in FAILURES or f.kind is Kind.REFERENCE or on_reference:
                key = (case.operator, case.dtype, f.kind, f.op, f.kernel, f.cause, f.explanation)
                grouped.setdefault(key, []).append((case, f, outcome.inputs))
    found = [_found(sorted(shown, key=lambda s: s[0])) for shown in grouped.values()]
    return sorted(
        found,
        key=lambda f: (_ORDER.index(f.finding.kind), f.first, f.finding.op, f.finding.cause, f.finding.explanation),
    )


def _found(shown: list[tuple[Case, Finding, str]]) -> Found:
    first, finding, inputs = shown[0]
    counts: dict[str, int] = {}
    for case in dict.fromkeys(case for case, _, _ in shown):
        counts[case.part] = counts.get(case.part, 0) + 1
    return Found(finding, first, inputs, tuple(counts.items()))
