"""What a script compares: which results, and by how much they may differ."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import torch

from shadowrun.judge.rounding.bounds import floor
from shadowrun.types import Cause

if TYPE_CHECKING:
    from shadowrun.judge.judgement import ToleranceOf
    from shadowrun.judge.result_diff import ResultDiff
    from shadowrun.numerics.excess import Array
    from shadowrun.operators.case import Case
    from shadowrun.repro.call_replayer import ReplayOutcome

__all__ = ["Check", "checks_of"]

# How many times the bound a difference must be for one bound to stand for those of all elements.
_CLEAR = 2.0


@dataclasses.dataclass(frozen=True)
class Check:
    """How one result is compared.

    Attributes:
        name: ``output 0``, or the argument that the call wrote to.
        allowed: Differences that rounding explains: one number, or one for each element; infinite where the operator
            leaves the element open.
        strides: Whether its strides are compared too.
        signed_zeros: Whether the signs of zeros are.
    """

    name: str
    allowed: float | torch.Tensor = 0.0
    strides: bool = False
    signed_zeros: bool = False


def checks_of(judged: ReplayOutcome, tolerance: ToleranceOf | None = None) -> tuple[Check, ...]:
    """The checks on which a mismatch fails.

    Args:
        judged: The mismatch.
        tolerance: Tolerances that the user gave, by operator and dtype.
    """
    # A wrong form is the finding: values are not judged then, and any difference is allowed.
    if judged.verdict.cause is Cause.METADATA:
        strides = judged.verdict.explanation == "stride"
        names = [d.name for d in judged.diffs if d.detail]
        return tuple(Check(name, float("inf"), strides=strides) for name in names)
    case = judged.case
    if case is None:
        return ()
    given = {d.name: tolerance(case.op, d.expected.dtype) for d in judged.diffs} if tolerance else {}
    return tuple(_check(case, finding, given.get(finding.name)) for finding in judged.findings)


def _check(case: Case, finding: ResultDiff, tolerances: tuple[float, float] | None) -> Check:
    actual, expected = (t.to(torch.float64).numpy() for t in (finding.actual, finding.expected))
    with np.errstate(all="ignore"):
        gap = np.abs(actual - expected)
    where = finding.bad if finding.bad.size else finding.where
    zeros = bool(np.isin(where, finding.where[finding.zero_signs]).any()) if finding.fmt is not None else False
    allowed = _allowed(case, finding, tolerances, expected, gap)
    finite = gap[where][np.isfinite(gap[where])]
    with np.errstate(all="ignore"):
        share = gap[where] / np.where(allowed[where] > 0, allowed[where], np.nan)
    share = share[np.isfinite(share)]
    # Differences close to their bound would make a script that fails or passes by chance on another machine.
    if finite.size == where.size and share.size == where.size and share.max(initial=0.0) <= _CLEAR:
        # ReplayOutcome as a whole, or by the float64 oracle only: half of what is wrong now is the bound.
        allowed = np.where(np.isfinite(allowed), allowed * (0.5 * share.max(initial=0.0)), allowed)
    bounds = allowed[np.isfinite(allowed)]
    greatest = float(bounds.max(initial=0.0))
    one = bounds.size == allowed.size and (
        not finite.size or not greatest or float(finite.max()) > _CLEAR * greatest or finite.size < where.size
    )
    # One number where it serves for all elements: a script with a table of bounds is hard to read.
    shown: float | torch.Tensor = _rounded_up(greatest) if one else torch.from_numpy(allowed)
    return Check(finding.name, shown, signed_zeros=zeros)


def _allowed(
    case: Case, finding: ResultDiff, tolerances: tuple[float, float] | None, expected: Array, gap: Array
) -> Array:
    """For each element, the difference that rounding on both sides explains."""
    n = expected.size
    allowed = np.zeros(n)
    truth, fmt = finding.truth, finding.fmt
    if truth is not None and fmt is not None:
        nothing = np.zeros(n, bool)
        whole = dataclasses.replace(finding, where=np.arange(n), zero_signs=nothing, classes=nothing)
        unit = truth.unit(fmt, floor(case, whole))
        with np.errstate(all="ignore"):
            # A script has no float64 oracle: it compares with the reference, whose own error is added to the bound.
            own = np.abs(expected - truth.value)
            allowed = finding.limit * unit + np.where(np.isfinite(own), own, 0.0)
        # Elements that a rounding of the inputs decides may differ in any way.
        allowed[truth.flips | ~np.isfinite(allowed)] = np.inf
    elif truth is not None:
        allowed[truth.flips] = np.inf
    elif tolerances is not None:
        rtol, atol = tolerances
        allowed = atol + rtol * np.abs(expected)
    # Elements that differ and were not judged: the operator's definition leaves them open.
    unjudged = (gap > 0) & ~np.isin(np.arange(n), finding.where)
    allowed[unjudged] = np.inf
    allowed[np.isnan(allowed)] = 0.0
    # A mismatched element is checked whatever excuses elements at large.
    allowed[finding.bad[np.isinf(allowed[finding.bad])]] = 0.0
    return allowed


def _rounded_up(value: float) -> float:
    """With two digits: a bound is no measurement."""
    if value <= 0:
        return 0.0
    short = float(f"{value:.1e}")
    # 5 % is at least half a step of two digits, which rounding may have taken away.
    return short if short >= value else float(f"{value * 1.05:.1e}")
