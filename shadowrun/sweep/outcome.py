"""What becomes of a case, and of an operator. Imports no torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["FAILURES", "NOT_COUNTED", "NOT_INVARIANT", "Finding", "Kind", "Outcome", "Support"]


class Kind(enum.StrEnum):
    """What became of a case; each has exactly one, its worst finding's."""

    PASS = "pass"  # noqa: S105 - no password
    CRASH = "crash"
    """The process died."""
    TIMEOUT = "time-out"
    OUT_OF_MEMORY = "out of memory"
    UNSUPPORTED = "unsupported operator"
    UNSUPPORTED_DTYPE = "unsupported dtype"
    ERROR = "error"
    """The target raised something else where the reference did not."""
    MISMATCH = "mismatch"
    FORM = "wrong form"
    """Wrong dtype, shape, strides or number of results."""
    MISSING_ERROR = "missing error"
    """Invalid input that the reference refuses, and the target does not."""
    WRONG_ERROR = "wrong error"
    """Invalid input that both refuse, by exceptions of different types."""
    SILENT_FALLBACK = "silent fallback"
    WARNED_FALLBACK = "warned fallback"
    UNVERIFIED = "unverified"
    """Ran, but could not be compared: random numbers, or memory that nobody wrote."""
    REFERENCE = "reference wrong"
    """The results differ, and float64 sides with the target."""
    NOT_VALID = "not valid"
    """The reference refuses inputs that were derived from the database's."""
    HARNESS = "harness error"
    """The reference fails on the database's own inputs, or shadowrun does."""


FAILURES = (
    Kind.CRASH,
    Kind.TIMEOUT,
    Kind.OUT_OF_MEMORY,
    Kind.UNSUPPORTED,
    Kind.UNSUPPORTED_DTYPE,
    Kind.ERROR,
    Kind.MISMATCH,
    Kind.FORM,
    Kind.MISSING_ERROR,
    Kind.WRONG_ERROR,
    Kind.SILENT_FALLBACK,
    Kind.WARNED_FALLBACK,
)
"""Counted against the target; the worst first."""

NOT_COUNTED = (Kind.UNVERIFIED, Kind.REFERENCE, Kind.NOT_VALID, Kind.HARNESS)
"""Counted neither for the target nor against it."""


NOT_INVARIANT = "rounded otherwise in a batch than alone"
"""Explanation of what is told of a pass."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a case showed; many cases share it.

    Attributes:
        kind: What.
        op: Operator inside, as the dispatcher names it, ``aten::_softmax``; empty where none can be blamed.
        kernel: The kernel that was missing, ``aten::lerp.Scalar_out``; empty where none was.
        cause: Value of `shadowrun.types.Cause`; empty where there is none.
        explanation: Short: the hypothesis that fits, the type of the exception.
        message: The first sentence of the exception, or the evidence of the first case.
    """

    kind: Kind
    op: str = ""
    kernel: str = ""
    cause: str = ""
    explanation: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a case.

    Attributes:
        findings: What it showed, the worst first; none for a pass.
        inputs: ``f32[2, 3], dim=1``; empty for a pass.
    """

    findings: tuple[Finding, ...] = ()
    inputs: str = ""

    @property
    def kind(self) -> Kind:
        """The worst finding's."""
        return self.findings[0].kind if self.findings else Kind.PASS

    @classmethod
    def of(cls, findings: list[Finding], inputs: str = "") -> Outcome:
        """Put the worst finding first, and each once."""
        order = (*FAILURES, Kind.HARNESS, Kind.REFERENCE, Kind.UNVERIFIED, Kind.NOT_VALID, Kind.PASS)
        found = sorted(dict.fromkeys(findings), key=lambda f: order.index(f.kind))
        return cls(tuple(found), inputs if found else "")


class Support(enum.StrEnum):
    """What a platform has of an operator, over all cases that count."""

    FULL = "full"
    PARTIAL = "partial"
    NONE = "none"
    UNTESTED = "untested"
    """No case counts: all are unverified, or fail on the reference too."""
