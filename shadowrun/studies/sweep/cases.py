"""The values of a sweep: cases by operator, dtype, part and sample, and their outcomes.

This module imports no torch: `shadowrun sweep --help` lists the parts, and importing torch takes seconds.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = [
    "ANY_DTYPE",
    "DERIVED",
    "FAILURES",
    "INVARIANCE",
    "NOT_COUNTED",
    "NOT_INVARIANT",
    "PARTS",
    "PROBES",
    "Case",
    "CaseFinding",
    "CaseOutcome",
    "Kind",
    "Part",
    "Support",
    "Task",
]


ANY_DTYPE = "any"
"""The dtype of cases with invalid inputs, which the database lists once for each operator."""


# Coverage files store the values of `Part` and `Kind`: a renamed one makes older files invalid.
class Part(enum.StrEnum):
    """The aspect of an operator that a case tests."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """Gradients of all inputs that can have one."""
    INPLACE = "inplace"
    OUT = "out"
    """``out=``: of the right shape for even samples, empty and resized for odd ones."""
    TRANSPOSED = "transposed"
    """Inputs with the same values, transposed in memory."""
    STRIDED = "strided"
    """Inputs with the same values, transposed in memory and with gaps."""
    STRIDED_INPLACE = "strided_inplace"
    CHANNELS_LAST = "channels_last"
    ZERO_DIM = "zero_dim"
    """Each input tensor reduced to one element, without dimensions."""
    EMPTY = "empty"
    """Each input tensor cut to size 0 in its first dimension."""
    MEMORY = "memory"
    """Side effects of a call on memory, also in place on a strided view; values are not compared."""
    INVALID = "invalid"
    """Inputs for which the operator must raise."""
    PROBE = "probe"
    """NaN, infinities, zeros, subnormals and the edges of the range."""
    TAIL = "tail"
    """The target alone: one element per call against all in one call, on the inputs of `PROBE`."""
    LAYOUT = "layout"
    """The target alone: strided inputs against contiguous ones."""
    SLICE = "slice"
    """The target alone: an item of a batch computed alone against the same item in the batch."""


INVARIANCE = frozenset((Part.TAIL, Part.LAYOUT, Part.SLICE))
"""Parts in which the target is compared with itself."""
PROBES = (Part.PROBE, Part.TAIL, Part.LAYOUT, Part.SLICE)
"""Parts that ``--probe`` asks for."""
PARTS = tuple(part for part in Part if part not in PROBES)
"""Parts that are run by default."""
DERIVED = frozenset(
    {
        *(Part.OUT, Part.INPLACE, Part.TRANSPOSED, Part.STRIDED, Part.STRIDED_INPLACE),
        *(Part.CHANNELS_LAST, Part.ZERO_DIM, Part.EMPTY, Part.MEMORY),
        *PROBES,
    }
)
"""Parts with inputs derived from those of the database.

The database does not state whether derived inputs are valid: a case counts only if the reference accepts it.
"""


# Ordered: the first case of a finding must be the same in each reading of a file.
@dataclass(frozen=True, slots=True, order=True)
class Case:
    """One call to test.

    Attributes:
        operator: Name in torch's database with its variant, ``linalg.norm.subgradients_at_zero``, or of a
            recorded call, ``aten::add.Tensor``.
        dtype: ``float32``; `ANY_DTYPE` for invalid inputs.
        part: The aspect that it tests.
        sample: Index of the sample inputs, from 0; the same seed gives the same inputs.
    """

    operator: str
    dtype: str
    part: Part
    sample: int

    def __str__(self) -> str:
        """``softmax float32 forward 3``."""
        return f"{self.operator} {self.dtype} {self.part} {self.sample}"


@dataclass(frozen=True, slots=True)
class Task:
    """Work for one worker process: parts of an operator in a dtype.

    Attributes:
        operator, dtype: As in `Case`.
        parts: Parts to run.
        done: Part and sample of the cases that are in the coverage file already.
    """

    operator: str
    dtype: str
    parts: tuple[Part, ...]
    done: frozenset[tuple[Part, int]] = frozenset()


class Kind(enum.StrEnum):
    """Outcome of a case: the kind of its worst finding."""

    PASS = "pass"  # noqa: S105 - no password
    CRASH = "crash"
    """The process died."""
    TIMEOUT = "time-out"
    OUT_OF_MEMORY = "out of memory"
    UNSUPPORTED = "unsupported operator"
    UNSUPPORTED_DTYPE = "unsupported dtype"
    ERROR = "error"
    """The target raised another exception, and the reference none."""
    MISMATCH = "mismatch"
    FORM = "wrong form"
    """Wrong dtype, shape, strides or number of results."""
    MISSING_ERROR = "missing error"
    """The reference raises on invalid input, the target does not."""
    WRONG_ERROR = "wrong error"
    """Both raise on invalid input, with exceptions of different types."""
    SILENT_FALLBACK = "silent fallback"
    WARNED_FALLBACK = "warned fallback"
    UNVERIFIED = "unverified"
    """Ran, but could not be compared: random numbers, or uninitialised memory."""
    REFERENCE = "reference wrong"
    """The results differ, and the float64 result agrees with the target."""
    NOT_VALID = "not valid"
    """The reference raises on inputs that were derived from those of the database."""
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
"""Explanation of a pass whose rounding depends on the batch. Coverage files store this text: it must not change."""


@dataclass(frozen=True, slots=True)
class CaseFinding:
    """One failure or remark; many cases share one.

    Attributes:
        kind: Its kind.
        op: Operator inside, as the dispatcher names it, ``aten::_softmax``; empty if unknown.
        kernel: The missing kernel, ``aten::lerp.Scalar_out``; empty if none is missing.
        cause: Value of `shadowrun.types.Cause`; empty if there is none.
        explanation: In a few words: the hypothesis that fits, or the type of the exception.
        message: The first sentence of the exception, or the evidence of the first case.
    """

    kind: Kind
    op: str = ""
    kernel: str = ""
    cause: str = ""
    explanation: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class CaseOutcome:
    """Outcome of a case.

    Attributes:
        findings: The worst first; none for a pass.
        inputs: ``f32[2, 3], dim=1``; empty for a pass.
    """

    findings: tuple[CaseFinding, ...] = ()
    inputs: str = ""

    @property
    def kind(self) -> Kind:
        """The kind of the worst finding."""
        return self.findings[0].kind if self.findings else Kind.PASS

    @classmethod
    def from_findings(cls, findings: list[CaseFinding], inputs: str = "") -> CaseOutcome:
        """Sort findings by severity and drop duplicates."""
        # A finding on a pass is a remark, and comes last.
        # Not the order of `Kind`: a case counts against the target by its first finding, so failures come before
        # remarks.
        order = (*FAILURES, Kind.HARNESS, Kind.REFERENCE, Kind.UNVERIFIED, Kind.NOT_VALID, Kind.PASS)
        ordered = sorted(dict.fromkeys(findings), key=lambda f: order.index(f.kind))
        # Nearly all cases pass: their inputs would be most of the file, and the seed gives them again.
        return cls(tuple(ordered), inputs if ordered else "")


class Support(enum.StrEnum):
    """Support of an operator on a platform, over all cases that count."""

    FULL = "full"
    PARTIAL = "partial"
    NONE = "none"
    UNTESTED = "untested"
    """No case counts: all are unverified, or fail on the reference too."""
