"""The float64 oracle decides one result: the excess of both sides against the bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from shadowrun.judge.rounding.bounds import (
    OUTLIER,
    RATIO,
    REFERENCE_RATIO,
    bound,
    floor,
    has_one_stage,
    is_coarse,
    is_fast_convolution,
    limit,
    outlier,
    partial_sums,
)
from shadowrun.judge.rounding.rounding_bounds import BOUND, is_made_of_sums
from shadowrun.types import Cause, Status, TensorDiff, Verdict

if TYPE_CHECKING:
    from shadowrun.judge.result_diff import ResultDiff
    from shadowrun.numerics.excess import Array
    from shadowrun.operators.case import Case

__all__ = ["reference_wrong", "verdict_by_oracle"]

Mask = npt.NDArray[np.bool_]


def verdict_by_oracle(case: Case, result_diff: ResultDiff, d: TensorDiff, ratio: float = RATIO) -> Verdict:
    """Judge one result by its truth.

    Args:
        case: The call.
        result_diff: The result; its `truth` is known. Excess, limit and mismatched elements are filled in.
        d: Its statistics.
        ratio: How many times the reference's own greatest excess the target may have.
    """
    if result_diff.fmt is None:
        return _integer_verdict(result_diff)
    result_diff.floor = floor(case, result_diff)
    result_diff.measure()
    actual, expected = result_diff.excess_actual, result_diff.excess_expected
    assert actual is not None
    assert expected is not None
    result_diff.limit = limit(bound(case, result_diff), expected, ratio)
    wrong = actual > result_diff.limit
    # One ULP everywhere is one rounding more: for 16 bits that is allowed.
    if not wrong.any() and result_diff.fmt.mantissa < 23 and d.max_ulp > 1:
        wrong = _coarse_on_the_whole(case, result_diff, perturbed=ratio > 0)
    # Winograd and FFT are larger in error but correct: NNPACK reaches a root mean square of 31 units.
    if wrong.any() and is_fast_convolution(case.facts, result_diff):
        evidence = f"{result_diff.name}: noise of a fast convolution (Winograd, FFT), at most {actual.max():.3g} units"
        return Verdict(Status.MATCH, Cause.ROUNDING, "", evidence)
    result_diff.bad = result_diff.where[wrong]
    evidence = (
        f"{result_diff.name}: {result_diff.bad.size} of {result_diff.actual.numel()} elements beyond rounding; "
        f"greatest excess {actual.max():.3g} units of rounding against {expected.max():.3g} of the reference"
    )
    if wrong.any():
        # Infinite excess on both sides: both are NaN or infinite where the oracle has a number.
        if bool(np.isinf(expected[wrong]).all()):
            return Verdict(Status.MISMATCH, Cause.EXCEPTIONAL_VALUES, "neither side is right", evidence, 0.4)
        return Verdict(Status.MISMATCH, Cause.IMPLEMENTATION, "", evidence, 0.5)
    if _reference_off(result_diff, expected):
        return reference_wrong(
            f"{result_diff.name}: greatest excess {expected.max():.3g} units of rounding against {actual.max():.3g} of "
            "the target"
        )
    return Verdict(Status.MATCH, Cause.ROUNDING, "", f"max {d.max_ulp} ULP, {actual.max():.2g} units of rounding")


def reference_wrong(evidence: str) -> Verdict:
    """The verdict if the oracle confirms the target."""
    sentence = f"the float64 oracle sides with the target: {evidence}"
    return Verdict(Status.MISMATCH, Cause.REFERENCE, "the reference is wrong", sentence, 0.8)


def _reference_off(result_diff: ResultDiff, expected: Array) -> bool:
    """Whether the reference is wrong beyond doubt: also relative to the greatest element of the result."""
    # Correct implementations that cancel (a variance of nearly equal values, the tail of gelu) are far off relative to
    # one element, but not relative to the greatest one.
    assert result_diff.truth is not None
    assert result_diff.fmt is not None
    assert result_diff.excess_actual is not None
    # NaN or infinity on the reference where the target is right needs no size to compare with.
    if bool((np.isinf(expected) & (result_diff.excess_actual <= result_diff.limit)).any()):
        return True
    size = result_diff.truth.magnitude
    whole = result_diff.fmt.roundoff * float(size[np.isfinite(size)].max(initial=0.0))
    with np.errstate(all="ignore"):
        gap = np.abs(result_diff.differing_values(result_diff.expected) - result_diff.truth.value[result_diff.where])
    off = (expected > REFERENCE_RATIO * BOUND) & (gap > REFERENCE_RATIO * BOUND * whole)
    return bool(off.any())


def _integer_verdict(result_diff: ResultDiff) -> Verdict:
    assert result_diff.truth is not None
    where = torch.from_numpy(result_diff.where)
    truth = result_diff.truth.value[result_diff.where]
    # An index or a comparison that flips under a rounding of the inputs has no right value.
    tie = result_diff.truth.flips[result_diff.where]
    actual, expected = result_diff.actual[where].numpy(), result_diff.expected[where].numpy()
    result_diff.bad = result_diff.where[~tie & (actual != truth)]
    if result_diff.bad.size:
        evidence = f"{result_diff.bad.size} of {result_diff.actual.numel()} elements of {result_diff.name} differ"
        return Verdict(Status.MISMATCH, Cause.IMPLEMENTATION, "", evidence, 0.5)
    if bool((~tie & (expected != truth)).any()):
        return reference_wrong(f"{int((~tie).sum())} elements of {result_diff.name}")
    return Verdict(Status.UNVERIFIED, Cause.UNDEFINED, "tie", f"{int(tie.sum())} elements of {result_diff.name}")


def _coarse_on_the_whole(case: Case, result_diff: ResultDiff, *, perturbed: bool) -> Mask:
    """Find errors of a 16-bit result that no element proves alone, but all of them together.

    Returns:
        A mask over `result_diff.where` of the elements that are wrong then.
    """
    # Sums that were accumulated in 16 bits have too great a mean square. A wrong element stands out from all others, if
    # nothing is rounded before the result.
    assert result_diff.excess_actual is not None
    n = result_diff.actual.numel()
    whole = replace(result_diff, where=np.arange(n), zero_signs=np.zeros(n, bool), classes=np.zeros(n, bool), floor=0.0)
    whole.measure()
    assert whole.excess_actual is not None
    assert whole.excess_expected is not None
    actual_excess, expected_excess = (x[np.isfinite(x)] for x in (whole.excess_actual, whole.excess_expected))
    # Fewer elements give no mean square and no median.
    if n < 32 or not expected_excess.size:
        return np.zeros(result_diff.where.size, bool)
    row, (actual_rms, expected_rms) = (
        case.facts,
        (float(np.sqrt(np.mean(np.square(x)))) for x in (actual_excess, expected_excess)),
    )
    if is_made_of_sums(row) and is_coarse(row, actual_rms, expected_rms, partial_sums(case, result_diff.position) - 1):
        # One rounding to nearest is at most 1: what is beyond was rounded more often.
        return result_diff.excess_actual > 1.0
    if not has_one_stage(case):
        return np.zeros(result_diff.where.size, bool)
    # Before the perturbed runs the noise is unknown: what may stand out is looked at again after them.
    return result_diff.excess_actual > (outlier(actual_excess, float(expected_excess.max())) if perturbed else OUTLIER)
