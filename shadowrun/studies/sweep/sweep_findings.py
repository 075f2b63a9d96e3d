"""Findings of a sweep, on two levels.

`finding_of_row` and `finding_of_error` translate the records of one case. `findings_of_sweep` groups the findings of
all cases by fault; `shadowrun repro` numbers these groups and writes a script for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowrun.platforms.unsupported import classify, first_sentence, is_out_of_memory
from shadowrun.platforms.worker.client import Unsendable, WorkerDied
from shadowrun.studies.sweep.cases import FAILURES, CaseFinding, Kind
from shadowrun.types import Cause, Status

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shadowrun.store.datafile import DataFile
    from shadowrun.studies.sweep.cases import Case, CaseOutcome

__all__ = [
    "ON_REFERENCE",
    "Row",
    "SweepFinding",
    "finding_of_error",
    "finding_of_row",
    "findings_of_sweep",
    "records_since",
]


Row = tuple[int, str, str, str, str, str, str, str, str]
"""seq, op, phase, status, cause, explanation, missing kernel, evidence, printed inputs."""

_SINCE = """
select call.seq, op.name, phase, status, cause, explanation, missing_kernel, evidence, inputs
from call join context on context.id = context_id join op on op.id = op_id
join verdict on verdict.id = verdict_id join outcome on outcome.id = outcome_id
where call.seq > ? order by call.seq
"""
# In this order: the first prefix that fits decides, and "worker died" is one of all three.
_PLATFORM_DIED = {
    "worker died 3 times": Kind.UNVERIFIED,  # after three deaths the operator is not called again
    "worker died: signal 9": Kind.OUT_OF_MEMORY,  # the kernel's out-of-memory killer and the sweep both use SIGKILL
    "worker died": Kind.CRASH,
    "worker hung": Kind.TIMEOUT,
}
_REFERENCE = "the reference cannot run it: "
_MAX_TEXT = 300


def records_since(data: DataFile, seq: int) -> list[Row]:
    """Calls recorded after call `seq`, in order."""
    return list(data.query(_SINCE, (seq,)))


def finding_of_row(row: Row) -> CaseFinding | None:
    """The finding of a recorded call; None for a match."""
    _, op, _, status, cause, explanation, kernel, evidence, _ = row
    kind: Kind | None
    match Status(status):
        case Status.MISMATCH:
            kind = {Cause.METADATA: Kind.FORM, Cause.REFERENCE: Kind.REFERENCE}.get(Cause(cause), Kind.MISMATCH)
        case Status.UNSUPPORTED:
            kind = Kind.UNSUPPORTED_DTYPE if cause == Cause.MISSING_DTYPE else Kind.UNSUPPORTED
        case Status.FALLBACK:
            kind = Kind.WARNED_FALLBACK if cause == Cause.WARNED_FALLBACK else Kind.SILENT_FALLBACK
        case Status.ERROR:
            kind = _kind_of_error(cause, explanation)
        case Status.UNVERIFIED:
            kind = _kind_of_unverified(explanation)
        case Status.MATCH if cause == Cause.EXCEPTIONAL_VALUES:  # a remark on a pass
            kind = Kind.PASS
        case _:
            kind = None
    return None if kind is None else CaseFinding(kind, op, kernel, cause, explanation[:_MAX_TEXT], evidence[:_MAX_TEXT])


def finding_of_error(error: BaseException, op: str = "") -> CaseFinding:
    """The finding of an exception that the target raised and the reference did not."""
    if isinstance(error, WorkerDied):
        return CaseFinding(_kind_of_error("", str(error)), op, "", Cause.IMPLEMENTATION, str(error)[:_MAX_TEXT])
    # A limit of the protocol with the worker process, no fault of the target.
    if isinstance(error, Unsendable):
        return CaseFinding(Kind.UNVERIFIED, op, explanation=str(error)[:_MAX_TEXT])
    if is_out_of_memory(error):
        return CaseFinding(Kind.OUT_OF_MEMORY, op, "", "", type(error).__name__, first_sentence(str(error)))
    failure = classify(error)
    if failure.supported:
        return CaseFinding(Kind.ERROR, op, "", "", type(error).__name__, failure.message)
    kind = Kind.UNSUPPORTED_DTYPE if failure.cause is Cause.MISSING_DTYPE else Kind.UNSUPPORTED
    kernel = failure.missing_kernel
    return CaseFinding(kind, op or kernel, kernel, failure.cause, type(error).__name__, failure.message)


def _kind_of_error(cause: str, explanation: str) -> Kind:
    if cause == Cause.HARNESS:
        return Kind.HARNESS
    if explanation == "out of memory":
        return Kind.OUT_OF_MEMORY
    return next((kind for words, kind in _PLATFORM_DIED.items() if explanation.startswith(words)), Kind.ERROR)


def _kind_of_unverified(explanation: str) -> Kind:
    words = explanation.removeprefix(_REFERENCE)
    # A reference whose process died says nothing about the target.
    died = words != explanation and _kind_of_error("", words) is not Kind.ERROR
    return Kind.HARNESS if died else Kind.UNVERIFIED


ON_REFERENCE = "on the reference: "
"""Prefix of the explanation if a case ended the process while the reference ran it."""
_ORDER = (*FAILURES, Kind.REFERENCE, Kind.HARNESS)


@dataclass(frozen=True, slots=True)
class SweepFinding:
    """Cases of an operator in a dtype that show one fault.

    Attributes:
        finding: The fault; its message is that of the first case.
        first: The first of these cases.
        inputs: Its inputs as text.
        parts: Number of cases of each part that shows it.
    """

    finding: CaseFinding
    first: Case
    inputs: str
    parts: tuple[tuple[str, int], ...]

    @property
    def counts(self) -> bool:
        """Whether it counts against the target; if not, the reference is at fault."""
        return self.finding.kind in FAILURES

    @property
    def kind(self) -> str:
        """``mismatch``. A process that ended on the reference is a ``crash`` here, not a harness error."""
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


def findings_of_sweep(results: Iterable[tuple[Case, CaseOutcome]]) -> list[SweepFinding]:
    """All faults of a sweep: first those that count, the worst kinds first, then faults of the reference.

    A fault of the reference is a result where float64 agrees with the target, or a case that ended the process there.
    """
    grouped: dict[tuple[str, ...], list[tuple[Case, CaseFinding, str]]] = {}
    for case, outcome in results:
        if case.sample < 0:  # a note on an abandoned part, not a case
            continue
        for f in outcome.findings:
            on_reference = f.kind is Kind.HARNESS and f.explanation.startswith(ON_REFERENCE)
            if f.kind in FAILURES or f.kind is Kind.REFERENCE or on_reference:
                key = (case.operator, case.dtype, f.kind, f.op, f.kernel, f.cause, f.explanation)
                grouped.setdefault(key, []).append((case, f, outcome.inputs))
    # Sorted: workers return cases in any order, and the numbers of findings must not depend on that.
    findings = [_found(sorted(shown, key=lambda s: s[0])) for shown in grouped.values()]
    return sorted(
        findings,
        key=lambda f: (_ORDER.index(f.finding.kind), f.first, f.finding.op, f.finding.cause, f.finding.explanation),
    )


def _found(shown: list[tuple[Case, CaseFinding, str]]) -> SweepFinding:
    first, finding, inputs = shown[0]
    counts: dict[str, int] = {}
    for case in dict.fromkeys(case for case, _, _ in shown):
        counts[case.part] = counts.get(case.part, 0) + 1
    return SweepFinding(finding, first, inputs, tuple(counts.items()))
