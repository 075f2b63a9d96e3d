"""From the records of a comparison to the findings of a case."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shadowrun.platforms.remote import Unsendable, WorkerDied
from shadowrun.platforms.unsupported import classify, first_sentence
from shadowrun.replay.room import is_out_of_memory
from shadowrun.sweep.outcome import Finding, Kind
from shadowrun.types import Cause, Status

if TYPE_CHECKING:
    from shadowrun.store.datafile import DataFile

__all__ = ["Row", "finding_of_error", "finding_of_row", "records_since"]

Row = tuple[int, str, str, str, str, str, str, str]
"""seq, op, phase, status, cause, explanation, missing kernel, evidence."""

_SINCE = """
select call.seq, op.name, phase, status, cause, explanation, missing_kernel, evidence
from call join context on context.id = context_id join op on op.id = op_id
join verdict on verdict.id = verdict_id join outcome on outcome.id = outcome_id
where call.seq > ? order by call.seq
"""
_PLATFORM_DIED = {
    "worker died 3 times": Kind.UNVERIFIED,  # and so this call was not tried
    "worker died: signal 9": Kind.OUT_OF_MEMORY,  # the system's way to end it, and that of the sweep
    "worker died": Kind.CRASH,
    "worker hung": Kind.TIMEOUT,
}
_REFERENCE = "the reference cannot run it: "
_MOST_TEXT = 300


def records_since(data: DataFile, seq: int) -> list[Row]:
    """Calls recorded after call `seq`, in order."""
    return list(data.query(_SINCE, (seq,)))


def finding_of_row(row: Row) -> Finding | None:
    """What a recorded call shows; None for a match."""
    _, op, _, status, cause, explanation, kernel, evidence = row
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
        case Status.MATCH if cause == Cause.EXCEPTIONAL_VALUES:  # told of a pass
            kind = Kind.PASS
        case _:
            kind = None
    return None if kind is None else Finding(kind, op, kernel, cause, explanation[:_MOST_TEXT], evidence[:_MOST_TEXT])


def finding_of_error(error: BaseException, op: str = "") -> Finding:
    """What an exception shows that the target raised and the reference did not."""
    if isinstance(error, WorkerDied):
        return Finding(_kind_of_error("", str(error)), op, "", Cause.IMPLEMENTATION, str(error)[:_MOST_TEXT])
    if isinstance(error, Unsendable):
        return Finding(Kind.UNVERIFIED, op, explanation=str(error)[:_MOST_TEXT])
    if is_out_of_memory(error):
        return Finding(Kind.OUT_OF_MEMORY, op, "", "", type(error).__name__, first_sentence(str(error)))
    failure = classify(error)
    if failure.supported:
        return Finding(Kind.ERROR, op, "", "", type(error).__name__, failure.message)
    kind = Kind.UNSUPPORTED_DTYPE if failure.cause is Cause.MISSING_DTYPE else Kind.UNSUPPORTED
    kernel = failure.missing_kernel
    return Finding(kind, op or kernel, kernel, failure.cause, type(error).__name__, failure.message)


def _kind_of_error(cause: str, explanation: str) -> Kind:
    if cause == Cause.HARNESS:
        return Kind.HARNESS
    if explanation == "out of memory":
        return Kind.OUT_OF_MEMORY
    return next((kind for words, kind in _PLATFORM_DIED.items() if explanation.startswith(words)), Kind.ERROR)


def _kind_of_unverified(explanation: str) -> Kind:
    words = explanation.removeprefix(_REFERENCE)
    died = words != explanation and _kind_of_error("", words) is not Kind.ERROR
    return Kind.HARNESS if died else Kind.UNVERIFIED
