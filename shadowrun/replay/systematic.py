"""Errors that no element proves, but all of them together do: they have one sign, or are the same in each row.

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

from shadowrun.numerics.precision import FORMATS
from shadowrun.numerics.tolerance import base_name
from shadowrun.replay.finding import flat_values, op_name
from shadowrun.replay.oracle import n_terms
from shadowrun.replay.stages import ONE_SUM, partial_sums
from shadowrun.replay.undefined import arguments
from shadowrun.types import Cause, Status, Verdict

if TYPE_CHECKING:
    from shadowrun.numerics.excess import Array
    from shadowrun.replay.case import Case
    from shadowrun.replay.finding import Finding
    from shadowrun.types import TensorDiff

__all__ = ["DEVIATIONS", "ENOUGH", "Drawn", "drawn", "follows", "may_be_systematic", "systematic", "units"]

ENOUGH: Final = 64
"""Elements of different value below which a mean says nothing."""
DIFFERING: Final = 0.1
"""Share of the elements of a 16-bit result that differ at least where it was truncated (a half) or computed from
rounded statistics; kernels that add in float32 and round once differ in less than 1 in 50."""
ONE_WAY: Final = 0.05
"""Share of all elements by which more are farther from zero than nearer, or the other way round."""
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
"""The same for attention, which may keep a constant (its scale) in 16 bits."""
SHARE_OF_ROWS: Final = 0.1
"""Of the square errors of a norm in 16 bits that one factor and one shift of each row may explain, beside the 2 of n
that they do by chance; statistics in bfloat16 make 0.3 or more."""
LOUDER: Final = 1.2
"""And times the reference's error by norm that it has to be."""

_FLOAT32: Final = 2.0**-24
_BLOCK: Final = 16
"""Terms that a matrix unit adds at once; some truncate after each such step."""
_SOME: Final = 1 << 16
_STAGES: Final = frozenset(
    """
    convolution convolution_backward _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_flash_attention
    _scaled_dot_product_flash_attention_backward _scaled_dot_product_efficient_attention
    _scaled_dot_product_efficient_attention_backward _softmax_backward_data native_layer_norm_backward
    """.split()  # noqa: SIM905
)
_IEEE: Final = frozenset({"add", "sub", "mul", "div"})
_BATCHED: Final = frozenset({"native_group_norm", "native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm"})
"""Norms that some kernels turn into one factor and one shift of each channel, rounded to 16 bits."""
_NORMS: Final = frozenset({"native_layer_norm", "_fused_rms_norm"})


class Drawn(NamedTuple):
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


def drawn(
    errors: Array, result: Array, shape: tuple[int, ...], roundoff: float, rows: _Rows | None = None
) -> Drawn | None:
    """How errors follow the result; None where too few elements tell.

    Args:
        errors: Flat, float64.
        result: What they are errors of.
        shape: Of the result.
        roundoff: Unit roundoff of its dtype.
        rows: Which elements share statistics.
    """
    with np.errstate(all="ignore"):
        fine = np.isfinite(errors) & np.isfinite(result)
        level = float(np.sqrt(np.mean(np.square(result[fine])))) if fine.any() else 0.0
    if not 0.0 < level < np.inf or np.unique(np.abs(result[fine][:_SOME])).size < ENOUGH:
        return None
    o, d = np.where(fine, result, 0.0), np.where(fine, errors, 0.0)
    unit = np.maximum(np.abs(o), level)
    p, z = o / unit, d / (unit * roundoff)
    weights = p * p
    whole = float(weights.sum())
    if _equal(weights) < ENOUGH / 2:
        return None  # A few elements are the result.
    factor = float(np.dot(p, z)) / whole
    score = p * (z - factor * p)
    places = [_Rows((prod(shape[:k]), n, prod(shape[k + 1 :])), (0, 2)) for k, n in enumerate(shape) if n > 1]
    groups = [*places, *([rows] if rows else [])]
    error = max(float(np.linalg.norm(s)) for s in (score, *(g.of(score) for g in groups))) / whole
    return Drawn(factor, error, min((_equal(g.of(weights)) for g in ([rows] if rows else places)), default=1.0))


class _Rows(NamedTuple):
    """Which elements share statistics: those that differ only in some axes of another shape."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]

    def of(self, values: Array) -> Array:
        """Sums over the elements of each row."""
        sums: Array = values.reshape(self.shape).sum(self.axes).reshape(-1)
        return sums


def _equal(weights: Array) -> float:
    """How many equal weights tell as much as these."""
    return float(np.sum(weights) ** 2 / np.sum(np.square(weights)))


def may_be_systematic(case: Case, position: int, d: TensorDiff) -> bool:
    """Whether a result of 16 bits that is a unit off here and there has to be looked at as a whole."""
    fmt = FORMATS.get(flat_values(case.expected[position]).dtype)
    if fmt is None or fmt.mantissa >= 23 or d.n_elements < ENOUGH or d.n_different < DIFFERING * d.n_elements:
        return False
    if base_name(op_name(case)) in _NORMS:
        return True
    actual, expected = (flat_values(v[position]).abs() for v in (case.actual, case.expected))
    away = int((actual > expected).sum()) - int((actual < expected).sum())
    return abs(away) >= ONE_WAY * d.n_elements and units(case, position, fmt.roundoff, 1) is not None


def follows(actual: torch.Tensor, expected: torch.Tensor, roundoff: float) -> bool:
    """Whether a float32 result is a little more or less than the reference's everywhere, at a glance."""
    if actual.numel() < ENOUGH:
        return False
    size = float(torch.dot(expected, expected))
    return size > 0.0 and abs(float(torch.dot(actual - expected, expected))) > UNITS * roundoff * size


def systematic(case: Case, finding: Finding) -> Verdict | None:
    """Look for an error that all elements of a result share.

    Args:
        case: The call.
        finding: A result that passed element by element; its `truth` is known.

    Returns:
        A MISMATCH, with `finding.bad` all elements that differ; None where there is nothing to see.
    """
    truth, fmt, value = finding.truth, finding.fmt, case.expected[finding.position]
    if truth is None or fmt is None or not isinstance(value, torch.Tensor) or value.is_complex():
        return None
    if finding.actual.numel() < ENOUGH or finding.classes.any():
        return None
    if units(case, finding.position, fmt.roundoff, 1) is None and base_name(op_name(case)) not in _NORMS:
        return None
    with np.errstate(all="ignore"):
        ours, theirs = (t.to(torch.float64).numpy() - truth.value for t in (finding.actual, finding.expected))
    if evidence := _one_factor(case, finding, ours, theirs):
        verdict = Verdict(Status.MISMATCH, Cause.IMPLEMENTATION, "", f"{finding.name}: {evidence}", 0.5)
    elif evidence := _in_rows(case, finding, ours, theirs):
        name = "statistics of the rows rounded"
        verdict = Verdict(Status.MISMATCH, Cause.REDUCED_PRECISION, name, f"{finding.name}: {evidence}", 0.8)
    else:
        return None
    finding.bad = finding.where
    return verdict


def _one_factor(case: Case, finding: Finding, ours: Array, theirs: Array) -> str | None:
    assert finding.truth is not None
    assert finding.fmt is not None
    value, roundoff = case.expected[finding.position], finding.fmt.roundoff
    assert isinstance(value, torch.Tensor)
    shape, rows = tuple(value.shape), _rows(case, finding.position)
    with np.errstate(all="ignore"):
        gap = ours - theirs
    between = drawn(gap, finding.truth.value, shape, roundoff, rows)
    if between is None:
        return None
    length = finding.actual.numel() // rows.of(finding.truth.value).size if rows else 0
    own = units(case, finding.position, roundoff, between.rows, length)
    if own is None:
        return None
    if finding.fmt.mantissa >= 23:
        # Where terms cancel, what is left of the result is noise itself.
        with np.errstate(all="ignore"):
            noise = float(np.sqrt(np.nanmean(np.square(finding.truth.spread)) / np.nanmean(finding.truth.magnitude**2)))
        own *= max(1.0, noise / (4 * roundoff))
    limit = own + DEVIATIONS * between.error
    if not abs(between.factor) > limit:
        return None
    one, other = (drawn(d, finding.truth.value, shape, roundoff, rows) for d in (ours, theirs))
    if one is None or other is None or abs(one.factor) <= max(own, 2 * abs(other.factor)):
        return None
    return (
        f"all of it is off by a factor of 1 {'+' if one.factor > 0 else '-'} {abs(one.factor) * roundoff:.2g}, "
        f"{abs(one.factor):.2g} units of rounding where {limit:.2g} may be chance; {other.factor:.2g} on the reference"
    )


def units(case: Case, position: int, roundoff: float, rows: float | None, length: int = 0) -> float | None:
    """Unit roundoffs by which all of a right result may be off; None where nothing is known of that.

    Args:
        case: The call.
        position: Which result.
        roundoff: Unit roundoff of its dtype.
        rows: How many sums there are at least whose errors are independent; None for any number.
        length: Terms of each, where that is more than enter an element.
    """
    op, named = base_name(op_name(case)), arguments(case)
    if any(named.get(k, 1) not in (0, 1) for k in ("alpha", "beta")):
        return None
    fine = roundoff <= _FLOAT32
    if op in _IEEE:
        factors = [named.get(k) for k in ("self", "other")]
        several = all(isinstance(t, torch.Tensor) and t.dim() for t in factors)
        return None if fine or not several or named.get("rounding_mode") else UNITS_COARSE
    if (op not in ONE_SUM and op not in _STAGES) or (position > 0 and op in ONE_SUM):
        return None
    if "attention" in op and "backward" not in op and position > 0:
        return None
    n = n_terms(case, position)
    if fine:
        n = length or n
        return UNITS + (UNITS_ROOT * float((n / max(rows, 1.0)) ** 0.5) if rows is not None else 0.0)
    if partial_sums(case, position) > 1 or op in _BATCHED:
        return None
    least = UNITS_COARSE if op in ONE_SUM else UNITS_SCALED if "attention" in op else UNITS_STAGES
    return least + n / _BLOCK * _FLOAT32 / roundoff


def _rows(case: Case, position: int) -> _Rows | None:
    """Elements that share the statistics of one row, group or channel; None for operators without such."""
    op, named, value = base_name(op_name(case)), arguments(case), case.expected[position]
    if not isinstance(value, torch.Tensor) or not value.numel():
        return None
    shape = tuple(value.shape)
    if "softmax" in op and shape:
        k = int(named["dim"]) % len(shape)
        return _Rows((prod(shape[:k]), shape[k], prod(shape[k + 1 :])), (1,))
    x = named.get("input")
    if "norm" not in op or not isinstance(x, torch.Tensor) or shape != tuple(x.shape):
        return None
    if "normalized_shape" in named:
        return _Rows((-1, prod(named["normalized_shape"])), (1,))
    if "group" in named:
        return _Rows((shape[0] * int(named["group"]), -1), (1,))
    return _Rows((shape[0], shape[1], -1), (0, 2)) if len(shape) > 1 else None


def _in_rows(case: Case, finding: Finding, ours: Array, theirs: Array) -> str | None:
    """Errors of a norm in 16 bits that are one factor and one shift of each row: its statistics were rounded."""
    assert finding.truth is not None
    assert finding.fmt is not None
    op, named = base_name(op_name(case)), arguments(case)
    if op not in _NORMS or finding.position or finding.fmt.mantissa >= 23 or not np.isfinite(ours).all():
        return None
    n = prod(named["normalized_shape"])
    if n < ENOUGH // 2 or ours.size < 4 * n or not np.isfinite(theirs).all():
        return None
    weight, bias = (_in_row(named.get(k), n, default) for k, default in (("weight", 1.0), ("bias", 0.0)))
    deviation = finding.truth.value.reshape(-1, n) - bias
    shares = [_explained(d.reshape(-1, n), deviation, weight) for d in (ours, theirs)]
    louder = float(np.linalg.norm(ours) / max(np.linalg.norm(theirs), np.finfo(np.float64).tiny))
    if shares[0] <= SHARE_OF_ROWS + 4 / n or shares[0] <= 2 * shares[1] or louder < LOUDER:
        return None
    return (
        f"a factor and a shift of each row make {shares[0]:.2g} of its square error, {shares[1]:.2g} on the reference; "
        f"by norm it is {louder:.2g} times the reference's"
    )


def _in_row(value: Any, n: int, default: float) -> Array:
    if isinstance(value, torch.Tensor):
        row: Array = flat_values(value.detach()).to(torch.float64).numpy()
        return row
    return np.full(n, default)


def _explained(errors: Array, deviation: Array, weight: Array) -> float:
    """Share of the square errors that the best factor of each row's deviations and the best shift of it make."""
    shift = np.broadcast_to(weight, deviation.shape)
    aa, ab, bb = (np.sum(x * y, 1) for x, y in ((deviation, deviation), (deviation, shift), (shift, shift)))
    ad, bd = (np.sum(x * errors, 1) for x in (deviation, shift))
    determinant = aa * bb - ab * ab
    with np.errstate(all="ignore"):
        made = (bb * ad * ad - 2 * ab * ad * bd + aa * bd * bd) / determinant
    made = np.where(determinant > 1e-9 * aa * bb, made, 0.0)
    whole = float(np.sum(np.square(errors)))
    return float(made.sum()) / whole if whole > 0.0 else 0.0
