"""The last step for one result: both sides' distance from the oracle, weighed against the bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from shadowrun.replay.bounds import (
    BOUND,
    OUTLIER,
    RATIO,
    REFERENCE_RATIO,
    bound,
    floor,
    is_coarse,
    is_fast_convolution,
    outlier,
    sums,
)
from shadowrun.replay.finding import Finding, op_name
from shadowrun.replay.stages import has_one_stage, partial_sums
from shadowrun.types import Cause, Status, TensorDiff, Verdict

if TYPE_CHECKING:
    from shadowrun.numerics.excess import Array
    from shadowrun.replay.case import Case

__all__ = ["reference_wrong", "weigh"]

Mask = npt.NDArray[np.bool_]


def weigh(case: Case, finding: Finding, d: TensorDiff, ratio: float = RATIO) -> Verdict:
    """Judge one result by its truth.

    Args:
        case: The call.
        finding: The result; its `truth` is known. What is found out about it is written down in it.
        d: Its statistics.
        ratio: How many times the reference's own greatest excess the target may have.
    """
    if finding.fmt is None:
        return _weigh_integers(finding)
    finding.floor = floor(case, finding)
    finding.measure()
    ea, ee = finding.excess_actual, finding.excess_expected
    assert ea is not None
    assert ee is not None
    own = float(ee[np.isfinite(ee)].max(initial=0.0))
    limit = bound(case, finding)
    finding.limit = max(limit, ratio * own)
    wrong = ea > finding.limit
    if not wrong.any() and finding.fmt.mantissa < 23 and d.max_ulp > 1:
        wrong = _coarse_on_the_whole(case, finding, perturbed=ratio > 0)
    if wrong.any() and is_fast_convolution(op_name(case), finding):
        evidence = f"{finding.name}: noise of a fast convolution (Winograd, FFT), at most {ea.max():.3g} units"
        return Verdict(Status.MATCH, Cause.ROUNDING, "", evidence)
    finding.bad = finding.where[wrong]
    evidence = (
        f"{finding.name}: {finding.bad.size} of {finding.actual.numel()} elements beyond rounding; greatest excess "
        f"{ea.max():.3g} units of rounding against {ee.max():.3g} of the reference"
    )
    if wrong.any():
        if bool(np.isinf(ee[wrong]).all()):
            return Verdict(Status.MISMATCH, Cause.EXCEPTIONAL_VALUES, "neither side is right", evidence, 0.4)
        return Verdict(Status.MISMATCH, Cause.IMPLEMENTATION, "", evidence, 0.5)
    if _reference_off(finding, ee):
        return reference_wrong(
            f"{finding.name}: greatest excess {ee.max():.3g} units of rounding against {ea.max():.3g} of the target"
        )
    return Verdict(Status.MATCH, Cause.ROUNDING, "", f"max {d.max_ulp} ULP, {ea.max():.2g} units of rounding")


def reference_wrong(evidence: str) -> Verdict:
    """The verdict where the oracle sides with the target."""
    sentence = f"the float64 oracle sides with the target: {evidence}"
    return Verdict(Status.MISMATCH, Cause.REFERENCE, "the reference is wrong", sentence, 0.8)


def _reference_off(finding: Finding, ee: Array) -> bool:
    """Whether the reference is wrong beyond doubt: also relative to the greatest element of the result.

    Correct implementations that cancel (a variance of nearly equal values, the tail of gelu) are far off
    relative to one element, but not relative to the whole.
    """
    assert finding.truth is not None
    assert finding.fmt is not None
    assert finding.excess_actual is not None
    if bool((np.isinf(ee) & (finding.excess_actual <= finding.limit)).any()):
        return True
    size = finding.truth.magnitude
    whole = finding.fmt.roundoff * float(size[np.isfinite(size)].max(initial=0.0))
    with np.errstate(all="ignore"):
        gap = np.abs(finding.taken(finding.expected) - finding.truth.value[finding.where])
    off = (ee > REFERENCE_RATIO * BOUND) & (gap > REFERENCE_RATIO * BOUND * whole)
    return bool(off.any())


def _weigh_integers(finding: Finding) -> Verdict:
    assert finding.truth is not None
    where = torch.from_numpy(finding.where)
    truth = finding.truth.value[finding.where]
    tie = finding.truth.flips[finding.where]
    actual, expected = finding.actual[where].numpy(), finding.expected[where].numpy()
    finding.bad = finding.where[~tie & (actual != truth)]
    if finding.bad.size:
        evidence = f"{finding.bad.size} of {finding.actual.numel()} elements of {finding.name} differ"
        return Verdict(Status.MISMATCH, Cause.IMPLEMENTATION, "", evidence, 0.5)
    if bool((~tie & (expected != truth)).any()):
        return reference_wrong(f"{int((~tie).sum())} elements of {finding.name}")
    return Verdict(Status.UNVERIFIED, Cause.UNDEFINED, "tie", f"{int(tie.sum())} elements of {finding.name}")


def _coarse_on_the_whole(case: Case, finding: Finding, *, perturbed: bool) -> Mask:
    """Find what no element of a 16-bit result proves by itself, but all of them together do.

    Sums that were accumulated in 16 bits have too great a mean square; a wrong element stands out from all others, if
    nothing is rounded on the way to the result.

    Returns:
        A mask over `finding.where` of the elements that are wrong then.
    """
    assert finding.excess_actual is not None
    n = finding.actual.numel()
    whole = replace(finding, where=np.arange(n), zero_signs=np.zeros(n, bool), classes=np.zeros(n, bool), floor=0.0)
    whole.measure()
    assert whole.excess_actual is not None
    assert whole.excess_expected is not None
    ours, theirs = (x[np.isfinite(x)] for x in (whole.excess_actual, whole.excess_expected))
    if n < 32 or not theirs.size:
        return np.zeros(finding.where.size, bool)
    op, (actual, expected) = op_name(case), (float(np.sqrt(np.mean(np.square(x)))) for x in (ours, theirs))
    if sums(op) and is_coarse(op, actual, expected, partial_sums(case, finding.position) - 1):
        return finding.excess_actual > 1.0
    if not has_one_stage(case):
        return np.zeros(finding.where.size, bool)
    # Without the spreads nothing is known of the noise: what might stand out has to be looked at again.
    return finding.excess_actual > (outlier(ours, float(theirs.max())) if perturbed else OUTLIER)
