"""Bias: errors that no element proves, but all of them together. They have one sign, or one factor in each row.

The errors of rounding have either sign, and their mean over many elements is near zero. So a factor of the whole
result (1 + 1e-6 in a float32 product) or truncation instead of rounding to 16 bits shows far below the bound of any
element: in the factor by which the errors follow the result, once it is beyond what chance and the constants of a right
kernel make. Statistics that were rounded to 16 bits show in the share of the errors that one factor and one shift of
each row explain.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from shadowrun.judge.oracle import n_terms
from shadowrun.judge.result_diff import flat_values
from shadowrun.judge.rounding.bounds import partial_sums
from shadowrun.numerics.precision import FORMATS
from shadowrun.types import Cause, Status, Verdict

if TYPE_CHECKING:
    from shadowrun.judge.result_diff import ResultDiff
    from shadowrun.numerics.excess import Array, Truth
    from shadowrun.numerics.nearness import Nearness
    from shadowrun.operators.case import Case
    from shadowrun.operators.facts import OpFacts
    from shadowrun.types import TensorDiff

__all__ = [
    "DEVIATIONS",
    "ENOUGH",
    "ErrorFactor",
    "bias_limit",
    "bias_verdict",
    "count_truncated",
    "error_factor",
    "has_common_factor",
    "is_truncated",
    "may_be_biased",
]

ENOUGH: Final = 64
"""Elements of different value below which a mean says nothing."""
DIFFERENT: Final = 0.8
"""Share of the elements of a float32 result that have values of their own where rows are independent."""
DIFFERING: Final = 0.1
"""Share of the elements of a 16-bit result that differ at least where it was truncated (a half) or computed from
rounded statistics; kernels that add in float32 and round once differ in less than 1 in 50."""
ONE_WAY: Final = 0.05
"""Share of all elements by which more are farther from zero than nearer, or the other way round."""
TOWARD_ZERO: Final = 0.3
"""Share by which more are nearer to zero where all were truncated: a half, less what is exact."""
DEVIATIONS: Final = 6.0
"""Standard errors that are no chance."""
UNITS: Final = 4.0
"""Unit roundoffs of float32 and float64 by which all of a right result may be off: a reciprocal, a root and a constant,
each a little wrong. Those of torch's own kernels under other instruction sets are below 1."""
UNITS_ROOT: Final = 0.75
"""Further ones for each root of the terms of a sum, over the root of the number of rows that are independent."""
UNITS_COARSE: Final = 0.15
"""The same for 16 bits, where float32 lies between: right kernels reach 0.02, truncation 0.7."""
UNITS_STAGES: Final = 0.4
"""The same for kernels of several stages, which round more often: these reach 0.12."""
UNITS_SCALED: Final = 1.0
"""The same for what may keep a constant in 16 bits: attention its scale, group and batch norms the factor and shift of
each channel, gelu a root."""
SHARE_OF_ROWS: Final = 0.2
"""Of the square errors of a norm in 16 bits that one factor and one shift of each row may explain, plus the 4 of n
that they do by chance: right statistics make 0.15 where each step after them is rounded, bfloat16 ones 0.3 or more."""
SHARE_OF_FEW: Final = 0.6
"""The same where a row has few different values or a few great ones, which err alike: these make 0.53."""
VARIED: Final = 0.6
"""Share of the elements of a row that have values of their own in others."""
FEWEST: Final = 8
"""Values of a row below which a factor and a shift of it explain any error."""
ALL_TRUNCATED: Final = 0.99
"""Elements that are truncated where that shows, and right elsewhere: those of kernels that add in float32."""
MIN_ERROR_RATIO: Final = 1.2
"""And times the reference's error by norm that it has to be."""

_FLOAT32: Final = 2.0**-24
# The weights here are the reference's, and those of the oracle the truth's: near the limit the two may disagree.
_LESS: Final = 0.9
# Terms that a matrix unit adds at once; some truncate after each such step.
_BLOCK: Final = 16
_SOME: Final = 1 << 16


class ErrorFactor(NamedTuple):
    """By which factor, less 1, errors follow the result, in unit roundoffs.

    Attributes:
        factor: The least squares estimate.
        error: Its standard error: the greatest of those that take elements, rows (which share statistics), or what
            lies at one place of a dimension for independent.
        rows: How many rows, or places of a dimension, there are of equal weight.
    """

    factor: float
    error: float
    rows: float


def error_factor(
    errors: Array,
    result: Array,
    shape: tuple[int, ...],
    roundoff: float,
    rows: _Rows | None = None,
    at_least: float = 0.0,
) -> ErrorFactor | None:
    """The factor by which errors follow the result; None where there are too few elements.

    Args:
        errors: Flat, float64.
        result: What they are errors of.
        shape: Of the result.
        roundoff: Unit roundoff of its dtype.
        rows: Which elements share statistics.
        at_least: None too where the factor is not above this and chance: no limit lies below.
    """
    with np.errstate(all="ignore"):
        fine = np.isfinite(errors) & np.isfinite(result)
        # Without the copies, where there is nothing to leave out: the same numbers.
        whole_result = bool(fine.all())
        of_fine = result if whole_result else result[fine]
        level = float(np.sqrt(np.mean(np.square(of_fine)))) if of_fine.size else 0.0
    if not 0.0 < level < np.inf:
        return None
    o, d = (result, errors) if whole_result else (np.where(fine, result, 0.0), np.where(fine, errors, 0.0))
    # Elements near zero would get a weight without bound, because their relative error is large where terms cancel.
    unit = np.maximum(np.abs(o), level)
    p, z = o / unit, d / (unit * roundoff)
    weights = p * p
    whole = float(weights.sum())
    factor = float((p * z).sum()) / whole
    # Most results end here, and most others before the sort below, which cost a fifth of a step.
    if abs(factor) <= at_least or _equal(weights) < ENOUGH / 2:
        return None  # Or a few elements are the result.
    # White's standard error: errors of rounding grow with the element, and the usual formula assumes equal variances.
    score = p * (z - factor * p)
    places = [_Rows((prod(shape[:k]), n, prod(shape[k + 1 :])), (0, 2)) for k, n in enumerate(shape) if n > 1]
    groups = [*places, *([rows] if rows else [])]
    # Elements of a row share statistics, and those of a column share a factor, so their errors are not independent. The
    # greatest of the standard errors is valid for any of these.
    error = max(_norm(s) for s in (score, *(g.row_sums(score) for g in groups))) / whole
    if at_least and not abs(factor) > at_least + DEVIATIONS * error:
        return None
    some = np.abs(result[fine & (result != 0.0)][:_SOME])
    different = np.unique(some).size
    # Equal values have equal errors, whose mean does not tend to zero: only different values are evidence.
    if different < ENOUGH:
        return None
    # Sums of the same few values err alike in all rows.
    independent = min((_equal(g.row_sums(weights)) for g in ([rows] if rows else places)), default=1.0)
    return ErrorFactor(factor, error, independent if different > DIFFERENT * some.size else 1.0)


class _Rows(NamedTuple):
    """Which elements share statistics: those that differ only in some axes of another shape."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]

    def row_sums(self, values: Array) -> Array:
        """Sums over the elements of each row."""
        sums: Array = values.reshape(self.shape).sum(self.axes).reshape(-1)
        return sums


def _norm(values: Array) -> float:
    # No dot product of numpy here: its library wakes a thread for each processor, and these wait in a loop. They took
    # a quarter of the processor time of a step against another instruction set.
    return float(np.sqrt(np.sum(np.square(values))))


def _equal(weights: Array) -> float:
    """Effective number of weights (Kish): as many equal ones have the same variance of the mean."""
    return float(np.sum(weights) ** 2 / np.sum(np.square(weights)))


def may_be_biased(case: Case, position: int, d: TensorDiff) -> bool:
    """Whether a 16-bit result that is at most a unit off has to be tested for bias."""
    fmt = FORMATS.get(flat_values(case.expected[position]).dtype)
    if fmt is None or fmt.mantissa >= 23 or d.n_elements < ENOUGH or d.n_different < DIFFERING * d.n_elements:
        return False
    # Rounded statistics err in either direction from row to row, so a count of signs over the result shows nothing.
    if case.facts.norm == "row":
        return True
    actual, expected = (flat_values(v[position]).abs() for v in (case.actual, case.expected))
    # Cheaper than the oracle: rounding to nearest moves as many elements away from zero as towards it.
    away = int((actual > expected).sum()) - int((actual < expected).sum())
    if away <= -TOWARD_ZERO * d.n_elements:
        return True
    return abs(away) >= ONE_WAY * d.n_elements and bias_limit(case, position, fmt.roundoff, 1) is not None


def has_common_factor(near: Nearness, n: int, roundoff: float) -> bool:
    """Whether a float32 result is the reference's times a factor beyond rounding; a cheap test.

    Args:
        near: How the result lies to the reference's. Where its weighted factor is none, `error_factor` finds none
            between the two results.
        n: Number of elements.
        roundoff: Unit roundoff of the dtype.
    """
    if n < ENOUGH:
        return False
    # Two sums instead of the oracle; 4 units leave room for the constants of right kernels. The weights of the truth
    # differ from these by its rounding.
    return abs(near.factor) > UNITS * roundoff or not abs(near.weighted) <= _LESS * UNITS * roundoff


def bias_verdict(case: Case, result_diff: ResultDiff) -> Verdict | None:
    """Find an error that all elements of a result share.

    Args:
        case: The call.
        result_diff: A result that passed element by element; its `truth` is known.

    Returns:
        A MISMATCH, with `result_diff.bad` all elements that differ; None where there is no bias.
    """
    truth, fmt, value = result_diff.truth, result_diff.fmt, case.expected[result_diff.position]
    if truth is None or fmt is None or not isinstance(value, torch.Tensor) or value.is_complex():
        return None
    # A NaN or an infinity would make every sum below meaningless.
    if result_diff.actual.numel() < ENOUGH or result_diff.classes.any():
        return None
    with np.errstate(all="ignore"):
        actual_errors, expected_errors = (
            t.to(torch.float64).numpy() - truth.value for t in (result_diff.actual, result_diff.expected)
        )
    if evidence := _one_factor(case, result_diff, actual_errors, expected_errors) or _truncated(
        result_diff, actual_errors, expected_errors
    ):
        verdict = Verdict(Status.MISMATCH, Cause.IMPLEMENTATION, "", f"{result_diff.name}: {evidence}", 0.5)
    elif evidence := _in_rows(case, result_diff, actual_errors, expected_errors):
        name = "statistics of the rows rounded"
        verdict = Verdict(Status.MISMATCH, Cause.REDUCED_PRECISION, name, f"{result_diff.name}: {evidence}", 0.8)
    else:
        return None
    result_diff.bad = result_diff.where
    return verdict


def _truncated(result_diff: ResultDiff, actual_errors: Array, expected_errors: Array) -> str | None:
    """Whether a result of 16 bits was truncated, whatever the operator."""
    assert result_diff.truth is not None
    counts = count_truncated(result_diff.actual, result_diff.truth)
    if counts is None or counts[0] < ENOUGH or not _error_ratio(actual_errors, expected_errors) >= MIN_ERROR_RATIO:
        return None
    n_distinct, n_truncated, n_right = counts
    others = result_diff.actual.numel() - n_distinct
    # A factor just below 1 does the same to numbers that are nearly equal.
    few = np.unique(np.abs(result_diff.truth.value)).size < ENOUGH
    if few or n_truncated < ALL_TRUNCATED * n_distinct or n_right < ALL_TRUNCATED * others:
        return None
    return f"{n_truncated} of {n_distinct} elements are truncated where rounding gives another number"


def _one_factor(case: Case, result_diff: ResultDiff, actual_errors: Array, expected_errors: Array) -> str | None:
    assert result_diff.truth is not None
    assert result_diff.fmt is not None
    value, roundoff = case.expected[result_diff.position], result_diff.fmt.roundoff
    assert isinstance(value, torch.Tensor)
    shape, rows = tuple(value.shape), _rows(case, result_diff.position)
    least = bias_limit(case, result_diff.position, roundoff, None)
    if least is None:
        return None
    with np.errstate(all="ignore"):
        gap = actual_errors - expected_errors
    between = error_factor(gap, result_diff.truth.value, shape, roundoff, rows, least)
    if between is None:
        return None
    length = result_diff.actual.numel() // rows.row_sums(result_diff.truth.value).size if rows else 0
    least = bias_limit(case, result_diff.position, roundoff, between.rows, length)
    if least is None:
        return None
    if result_diff.fmt.mantissa >= 23:
        # Where terms cancel, what is left of the result is noise itself.
        with np.errstate(all="ignore"):
            noise = float(
                np.sqrt(np.nanmean(np.square(result_diff.truth.spread)) / np.nanmean(result_diff.truth.magnitude**2))
            )
        least *= max(1.0, noise / (4 * roundoff))
    limit = least + DEVIATIONS * between.error
    # `not >`: a NaN is no bias.
    if not abs(between.factor) > limit:
        return None
    actual, expected = (
        error_factor(d, result_diff.truth.value, shape, roundoff, rows) for d in (actual_errors, expected_errors)
    )
    # Correct kernels may share a constant error; the target is blamed only if it is twice as far off as the reference.
    if actual is None or expected is None or abs(actual.factor) <= max(least, 2 * abs(expected.factor)):
        return None
    return (
        f"all of it is off by a factor of 1 {'+' if actual.factor > 0 else '-'} {abs(actual.factor) * roundoff:.2g}, "
        f"{abs(actual.factor):.2g} units of rounding where {limit:.2g} may be chance; {expected.factor:.2g} on the "
        "reference"
    )


def bias_limit(case: Case, position: int, roundoff: float, rows: float | None, length: int = 0) -> float | None:
    """Unit roundoffs by which all of a right result may be off; None for operators without such a limit.

    Args:
        case: The call.
        position: Which result.
        roundoff: Unit roundoff of its dtype.
        rows: How many sums there are at least whose errors are independent; None for any number.
        length: Terms of each, where that is more than enter an element.
    """
    row, named = case.facts, case.arguments()
    # A scale held in another precision is a factor of the whole result, and no error.
    if any(named.get(k, 1) not in (0, 1) for k in ("alpha", "beta")):
        return None
    fine = roundoff <= _FLOAT32
    if row.rounds_once:
        factors = [named.get(k) for k in ("self", "other")]
        several = all(isinstance(t, torch.Tensor) and t.dim() for t in factors)
        # A Python number may be rounded to 16 bits by one kernel and not by another: a factor that both may have.
        return None if fine or not several or named.get("rounding_mode") else UNITS_COARSE
    if row.smooth:
        return None if fine or position else UNITS_SCALED
    if not (row.one_stage or row.several_stages) or (position > 0 and row.one_stage):
        return None
    if row.attention and not row.backward and position > 0:
        return None
    n = n_terms(case, position)
    if fine:
        # A softmax or a norm adds up a whole row for each element, which the number of inputs for each result does not
        # show.
        n = length or n
        return UNITS + (UNITS_ROOT * float((n / max(rows, 1.0)) ** 0.5) if rows is not None else 0.0)
    # Each addition in 16 bits is rounded; small terms vanish in a large sum, always towards the same side.
    if partial_sums(case, position) > 1 or (row.norm == "channel" and named.get("training") is False):
        return None
    least = UNITS_SCALED + _mean(case, position) if row.norm == "channel" else _least(row)
    # Some matrix units truncate each partial sum of 16 terms to float32, which shifts the result one way.
    return least + n / _BLOCK * _FLOAT32 / roundoff


def _least(row: OpFacts) -> float:
    return UNITS_COARSE if row.one_stage else UNITS_SCALED if row.attention else UNITS_STAGES


def _mean(case: Case, position: int) -> float:
    """The means of a norm's input over its deviations, by norm: by so much more a rounded shift counts."""
    rows, x = _rows(case, position), case.arguments()["input"]
    if rows is None:
        return float("inf")
    values = flat_values(x.detach()).to(torch.float64).numpy()
    with np.errstate(all="ignore"):
        sums = rows.row_sums(values)
        means = np.mean(np.square(sums * (sums.size / values.size)))
        return float(np.sqrt(means / (np.mean(np.square(values)) - means)))


def _rows(case: Case, position: int) -> _Rows | None:
    """Elements that share the statistics of one row, group or channel; None for operators without such."""
    row, named, value = case.facts, case.arguments(), case.expected[position]
    if not isinstance(value, torch.Tensor) or not value.numel():
        return None
    shape = tuple(value.shape)
    if row.normalizes == "softmax" and shape:
        k = int(named["dim"]) % len(shape)
        return _Rows((prod(shape[:k]), shape[k], prod(shape[k + 1 :])), (1,))
    x = named.get("input")
    if row.normalizes != "norm" or not isinstance(x, torch.Tensor) or shape != tuple(x.shape):
        return None
    if "normalized_shape" in named:
        return _Rows((-1, prod(named["normalized_shape"])), (1,))
    if "group" in named:
        return _Rows((shape[0] * int(named["group"]), -1), (1,))
    return _Rows((shape[0], shape[1], -1), (0, 2)) if len(shape) > 1 else None


def _in_rows(case: Case, result_diff: ResultDiff, actual_errors: Array, expected_errors: Array) -> str | None:
    """Errors of a norm in 16 bits that are one factor and one shift of each row: its statistics were rounded."""
    assert result_diff.truth is not None
    assert result_diff.fmt is not None
    named = case.arguments()
    if (
        case.facts.norm != "row"
        or result_diff.position
        or result_diff.fmt.mantissa >= 23
        or not np.isfinite(actual_errors).all()
    ):
        return None
    # Per row, because statistics belong to a row. Group and batch norms are not judged so: a right kernel's rounded
    # factor of each channel gives the same pattern.
    n = prod(named["normalized_shape"])
    if n < ENOUGH // 2 or actual_errors.size < 4 * n or not np.isfinite(expected_errors).all():
        return None
    weight, bias = (_in_row(named.get(k), n, default) for k, default in (("weight", 1.0), ("bias", 0.0)))
    deviation = result_diff.truth.value.reshape(-1, n) - bias
    # A wrong variance scales the deviations of a row, a wrong mean shifts them by the weight.
    shares = [_explained(d.reshape(-1, n), deviation, weight) for d in (actual_errors, expected_errors)]
    ratio = _error_ratio(actual_errors, expected_errors)
    limit = _limit(named["input"], deviation, n)
    if shares[0] <= limit + 4 / n or shares[0] <= 2 * shares[1] or ratio < MIN_ERROR_RATIO:
        return None
    return (
        f"a factor and a shift of each row make {shares[0]:.2g} of its square error, {shares[1]:.2g} on the reference; "
        f"by norm it is {ratio:.2g} times the reference's"
    )


def _limit(x: torch.Tensor, deviation: Array, n: int) -> float:
    """Share of the errors that a factor and a shift of each row may explain in right kernels."""
    ordered = np.sort(flat_values(x.detach()).to(torch.float64).numpy().reshape(-1, n), 1)
    different = float(np.median(1 + np.count_nonzero(np.diff(ordered, axis=1), axis=1)))
    squares = np.square(deviation)
    with np.errstate(all="ignore"):
        equal = float(np.median(np.square(squares.sum(1)) / np.square(squares).sum(1)))
    if different < FEWEST:
        return float("inf")
    return SHARE_OF_ROWS if different >= VARIED * n and equal >= FEWEST else SHARE_OF_FEW


def _error_ratio(actual_errors: Array, expected_errors: Array) -> float:
    """The target's error by norm over the reference's; not a number where either is not finite."""
    with np.errstate(all="ignore"):
        return _norm(actual_errors) / max(_norm(expected_errors), float(np.finfo(np.float64).tiny))


def _in_row(value: Any, n: int, default: float) -> Array:
    if isinstance(value, torch.Tensor):
        row: Array = flat_values(value.detach()).to(torch.float64).numpy()
        return row
    return np.full(n, default)


def _explained(errors: Array, deviation: Array, weight: Array) -> float:
    """Share of the square errors that the best factor of each row's deviations and the best shift of it make."""
    shift = np.broadcast_to(weight, deviation.shape)
    # Least squares with two regressors, in closed form, for all rows at once.
    aa, ab, bb = (np.sum(x * y, 1) for x, y in ((deviation, deviation), (deviation, shift), (shift, shift)))
    ad, bd = (np.sum(x * errors, 1) for x in (deviation, shift))
    determinant = aa * bb - ab * ab
    with np.errstate(all="ignore"):
        made = (bb * ad * ad - 2 * ab * ad * bd + aa * bd * bd) / determinant
    # Two directions that are nearly parallel leave a quotient of rounding errors.
    made = np.where(determinant > 1e-9 * aa * bb, made, 0.0)
    whole = float(np.sum(np.square(errors)))
    return float(made.sum()) / whole if whole > 0.0 else 0.0


TELLING: Final = 8
SHARE_TRUNCATED: Final = 0.95
"""Of the elements on which truncation and rounding differ: sums in float32 lie on the other side of a number once in
some thousand times."""


def count_truncated(actual: torch.Tensor, truth: Truth) -> tuple[int, int, int] | None:
    """On how many elements truncation and rounding differ, how many of these are truncated, how many others are right.

    None for another dtype than those of 16 bits, and for an oracle that is no float64.
    """
    o = torch.from_numpy(truth.value) if truth.value.dtype == np.float64 else None
    if o is None or o.numel() != actual.numel() or actual.dtype not in (torch.float16, torch.bfloat16):
        return None
    # Where rounding to nearest goes towards zero, truncation gives the same number: those elements show nothing.
    nearest = o.to(actual.dtype)
    away = nearest.to(torch.float64).abs() > o.abs()
    # Magnitude and sign are apart: one less is one nearer to zero.
    truncated = (nearest.view(torch.int16) - away.to(torch.int16)).view(actual.dtype)
    telling = away & torch.isfinite(nearest)
    return int(telling.sum()), int((telling & (actual == truncated)).sum()), int((~away & (actual == nearest)).sum())


def is_truncated(result_diff: ResultDiff, truth: Truth) -> bool:
    """Whether the target's result is truncated where that shows."""
    counts = count_truncated(result_diff.actual, truth)
    return counts is not None and counts[0] >= TELLING and counts[1] >= SHARE_TRUNCATED * counts[0]
