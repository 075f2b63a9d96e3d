"""The ladder of the verdict: the names of its rungs, a trace of the steps, and which rung a recorded verdict came from.

A trace is a list that the judge fills in where it is given one; without one nothing is computed for it.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from shadowrun.types import Cause, Status, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shadowrun.types import TensorDiff

__all__ = ["Rung", "Step", "Trace", "deciding", "recorded_steps", "rung_of"]


class Rung(enum.StrEnum):
    """One step of the ladder; docs/verdicts.md has a section on each."""

    BITS = "bits"
    FORM = "form"
    CLASSES = "classes of values"
    OPEN = "open elements"
    EQUATION = "equation"
    TOLERANCE = "user tolerance"
    BOUND = "ULP bound"
    CLOSENESS = "closeness"
    ORACLE = "float64 oracle"
    SHORT_PRODUCT = "short product"
    LONG_PRODUCT = "tf32 in a long product"
    BIAS = "bias"
    BIAS_OVER_CALLS = "bias over calls"
    SLICES = "slices"
    RANDOM = "random operator"
    CAUSE = "cause"


@dataclass(frozen=True, slots=True)
class Step:
    """What one rung found.

    Attributes:
        rung: The rung.
        result: Which result: ``output 0``; empty for the call.
        figure: What was measured.
        limit: Up to what this is right; empty where there is no limit.
        outcome: What was decided; None where it was left open.
    """

    rung: Rung
    result: str
    figure: str
    limit: str = ""
    outcome: Status | None = None


class Trace(list[Step]):
    """The steps of a judgement, in order."""

    def add_step(
        self, rung: Rung, result: str, figure: str, limit: str = "", decided: Verdict | Status | None = None
    ) -> None:
        """Add a step; `decided` is the verdict that it led to, if it did."""
        outcome = decided.status if isinstance(decided, Verdict) else decided
        self.append(Step(rung, result, figure.removeprefix(f"{result}: "), limit, outcome))

    def decided(self, verdict: Verdict) -> None:
        """The last step led to a verdict."""
        self[-1] = replace(self[-1], outcome=verdict.status)


_WORST_FIRST: Final = (Status.MISMATCH, Status.UNVERIFIED, Status.MATCH)


def deciding(steps: Sequence[Step]) -> Rung | None:
    """The rung that decided a call; None where it was not judged.

    The worst verdict of all results is that of the call. What names its cause decides nothing.
    """
    found = [step for step in steps if step.outcome in _WORST_FIRST and step.rung is not Rung.CAUSE]
    if not found:
        return None
    worst = min(_WORST_FIRST.index(step.outcome) for step in found if step.outcome is not None)
    return [step.rung for step in found if step.outcome is _WORST_FIRST[worst]][-1]


# The judge's own sentences (`Verdict.evidence`), by the rung that writes them.
# In this order: "units of rounding" of the oracle occurs in sentences of other rungs too.
_EVIDENCE: Final = (
    (Rung.TOLERANCE, r"(?:within|beyond) rtol "),
    (Rung.SHORT_PRODUCT, r"are no neighbours of the sum of"),
    (Rung.LONG_PRODUCT, r"(?:without tf32 in its inputs|its inputs were rounded to tf32)"),
    (Rung.BIAS_OVER_CALLS, r"calls of this kind together are off"),
    (Rung.BIAS, r"(?:all of it is off by a factor|a factor and a shift of each row|are truncated where rounding)"),
    (Rung.EQUATION, r"units of rounding, the reference to "),
    (Rung.BOUND, r"(?:within \d+ of the operator|the operator is exact|an exact operator)"),
    (Rung.CLASSES, r"NaN payloads or signs of zeros"),
    (Rung.CLOSENESS, r"^max \d+ ULP(?:, within \S+ units of rounding of the reference)?(?:;|$)"),
    (Rung.ORACLE, r"(?:units of rounding|no float64 oracle|too large for the oracle|the float64 oracle sides with)"),
)


def rung_of(verdict: Verdict) -> Rung | None:
    """The rung that a judged call's verdict came from; None where it was not judged, or nothing says so.

    Args:
        verdict: As it was recorded; the sentences of a file may be anything.
    """
    cause, evidence = verdict.cause, verdict.evidence
    if verdict.status not in (Status.MATCH, Status.MISMATCH, Status.UNVERIFIED):
        return None
    if verdict.status is Status.MATCH and cause is None:
        return Rung.BITS
    if cause is Cause.METADATA:
        return Rung.FORM
    if cause is Cause.RANDOMNESS:
        return Rung.RANDOM
    if cause is Cause.UNDEFINED and verdict.explanation in ("tie", "duplicate indices", "conversion out of range"):
        return Rung.OPEN
    if verdict.explanation in ("NaN or infinity on one side only", "a copy changed the payload of NaN"):
        return Rung.CLASSES
    found = (rung for rung, pattern in _EVIDENCE if re.search(pattern, evidence or verdict.explanation))
    return next(found, None)


def recorded_steps(verdict: Verdict, diffs: Sequence[TensorDiff]) -> list[Step]:
    """What a record says of the steps: the figures of each result that differed, and the rung that decided.

    Args:
        verdict: As it was recorded.
        diffs: The results that differed.
    """
    steps = []
    for d in diffs:
        if d.detail:
            steps.append(Step(Rung.FORM, d.name, d.detail))
        steps.append(Step(Rung.BITS, d.name, f"{d.n_different} of {d.n_elements} elements differ", "0"))
        classes = d.n_nan + d.n_inf + d.n_zero_sign + d.n_subnormal
        if classes:
            counts = f"NaN {d.n_nan}, infinity {d.n_inf}, sign of zero {d.n_zero_sign}, subnormal {d.n_subnormal}"
            steps.append(Step(Rung.CLASSES, d.name, f"{counts} on one side only"))
        steps.append(Step(Rung.CLOSENESS, d.name, f"at most {d.max_ulp} ULP, {d.max_abs:.3g} absolute"))
        if d.excess_actual >= 0:
            figure = f"greatest excess {d.excess_actual:.3g} units of rounding, the reference {d.excess_expected:.3g}"
            steps.append(Step(Rung.ORACLE, d.name, figure))
    rung = rung_of(verdict)
    if rung is not None:
        steps.append(Step(rung, "", verdict.evidence or verdict.explanation or "equal", "", verdict.status))
    return steps
