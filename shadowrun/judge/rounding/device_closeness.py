"""The first rule of closeness on an accelerator: results a few units in the last place apart stay there.

Where a reference computes in another dtype, nearly every float result differs in its last bit, and to bring each one to
the host would take longer than the step. One flag says whether the judge has to look (`closeness` has the rule).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.judge.rounding.bias import DIFFERING, ENOUGH, ONE_WAY, TOWARD_ZERO, UNITS
from shadowrun.judge.rounding.closeness import MAX_TERMS, SCALES, few_ulp, sum_units
from shadowrun.numerics.precision import FORMATS
from shadowrun.operators.facts import facts, ulp_bound

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["allowed_ulp", "needs_judge", "squared_arguments", "sum_tolerance"]

# Kernels add up 16-bit terms in float32.
_ROUNDOFF: Final = FORMATS[torch.float32].roundoff


def allowed_ulp(op: str, t: torch.Tensor, position: int, arguments: Mapping[str, object]) -> int:
    """Units in the last place that a result may be off without a look of the judge; 0 if every bit counts.

    Args:
        op: ``aten::add.Tensor``.
        t: The result.
        position: Which of the results.
        arguments: Of the call, by name.
    """
    fmt = FORMATS.get(t.dtype)
    if fmt is None or not fmt.signed or position in facts(op).by_equation or t.dtype is torch.float64:
        return 0
    bound = ulp_bound(op, [t.dtype], dict(arguments))
    return few_ulp(fmt) if bound is None else min(few_ulp(fmt), bound)


def needs_judge(
    actual: torch.Tensor, expected: torch.Tensor, most: int, *, by_rows: bool, tolerance: torch.Tensor | None = None
) -> torch.Tensor:
    """Whether the judge has to look at a result, as a bool on its device.

    Args:
        actual: The target's result, float32 or shorter.
        expected: The reference's, in the same form.
        most: Units in the last place that they may be apart.
        by_rows: Statistics of rows may be rounded, which no count of signs shows.
        tolerance: How far elements may be apart in any case (`sum_tolerance`); None for the distance in ULP alone.
    """
    fmt = FORMATS[actual.dtype]
    differs = actual.view(fmt.view) != expected.view(fmt.view)
    least = torch.minimum(actual.abs(), expected.abs())
    plain = actual.isfinite() & expected.isfinite() & (least >= fmt.normal)
    a, e = (_in_order(t, fmt.view) for t in (actual, expected))
    # Two finite numbers are less than 2**32 - 2**24 apart, so that no great distance wraps to a small one.
    apart = (a - e).abs_() > most
    n = actual.numel()
    if tolerance is not None:
        gap = actual.to(torch.float32) - expected.to(torch.float32)  # NaN is within none
        apart = apart & ~(gap.abs() <= tolerance)
    found = (differs & (apart | ~plain)).any()
    if n < ENOUGH or (fmt.mantissa >= 23 and tolerance is None):
        return found
    if fmt.mantissa >= 23:
        # A factor within the tolerance of each element is a fault all the same; see `bias.has_common_factor`.
        return found | ((gap * expected).sum().abs() > UNITS * fmt.roundoff * expected.square().sum())
    # Rounding to nearest moves as many elements away from zero as towards it.
    many = differs.sum() >= DIFFERING * n
    away = torch.sign(a.abs() - e.abs()).sum()
    biased = (away <= -TOWARD_ZERO * n) | (away.abs() >= ONE_WAY * n)
    return found | (many if by_rows else many & biased)


def squared_arguments(
    plan_arguments: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a sum or product by which the operator gives the sum of its squared terms, in float32.

    Args:
        plan_arguments: Names in the schema, in order.
        args: Positional arguments.
        kwargs: By name.
    """

    def square(name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(torch.float32).square() if value.is_floating_point() else value
        if isinstance(value, (list, tuple)):
            return [square(name, v) for v in value]
        return value * value if name in SCALES and type(value) is float else value

    return tuple(map(square, plan_arguments, args)), {k: square(k, v) for k, v in kwargs.items()}


def sum_tolerance(squared: torch.Tensor, expected: torch.Tensor, terms: float) -> torch.Tensor | None:
    """How far results of sums in float32 may be apart, by element; None where tf32 would fit in (`closeness`).

    Args:
        squared: Sums of the squared terms.
        expected: The reference's result.
        terms: How many terms enter each element.
    """
    if terms > MAX_TERMS or squared.shape != expected.shape:
        return None
    # The result itself is rounded to its own dtype: that is what `most` of `needs_judge` is for.
    size = squared.to(torch.float32).sqrt()
    if expected.dtype is torch.float32:
        size = size + expected.abs()
    return (size * (sum_units(terms) * _ROUNDOFF)).nan_to_num_(0.0, 0.0, 0.0)


def _in_order(t: torch.Tensor, view: torch.dtype) -> torch.Tensor:
    """Integers in the order of the floats: magnitudes with a sign, so that neighbours are 1 apart."""
    bits = t.view(view).to(torch.int32)
    return torch.where(bits < 0, -(bits & torch.iinfo(view).max), bits)
