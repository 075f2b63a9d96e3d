"""Hypotheses on the values alone: nothing is run again.

Each function takes the call and returns an explanation if it holds for *every* mismatched element of every
mismatched result, else None.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from shadowrun.judge.oracle import n_terms
from shadowrun.judge.result_diff import ResultDiff, flat_values, values_at
from shadowrun.numerics.bits import bits_equal

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.judge.oracle import Oracle
    from shadowrun.operators.case import Case

__all__ = [
    "MismatchedCall",
    "block_edge",
    "coarse_noise",
    "coarse_sums",
    "early_overflow",
    "equals_input",
    "flushed_results",
    "last_elements",
    "nan_missing",
    "nan_produced",
    "not_written",
    "offset",
    "permuted",
    "reproduces",
    "rounded_results",
    "saturated",
    "scaled",
    "sign_flipped",
    "sign_of_zero",
    "stale",
    "unexplained",
    "update_scaled",
]

MARGIN: Final = 0.25
"""What an explanation may leave of the root mean square distance from the truth. Truncation instead of rounding looks
like a factor until the right elements are included: 0.66 is left; right explanations leave 0.07 at most."""


@dataclass(slots=True)
class MismatchedCall:
    """A mismatched call: the case, its mismatched results, and the oracle if there is one.

    Attributes:
        known: Explanation of an earlier call of this kind: where a hypothesis has several forms, it comes first.
    """

    case: Case
    mismatches: list[ResultDiff]
    oracle: Callable[[], Oracle | None]
    known: str = ""


def _bad(result_diff: ResultDiff) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Mismatched elements of both sides, as float64."""
    sides = (values_at(t, result_diff.bad) for t in (result_diff.actual, result_diff.expected))
    return tuple(t.to(torch.float64).numpy() for t in sides)  # type: ignore[return-value]


def _everywhere(call: MismatchedCall, holds: Callable[[ResultDiff, Any, Any], Any], name: str) -> str | None:
    with np.errstate(all="ignore"):
        return name if all(bool(np.all(holds(f, *_bad(f)))) for f in call.mismatches) else None


def _same_at_bad(result_diff: ResultDiff, candidate: torch.Tensor) -> bool:
    if candidate.numel() != result_diff.actual.numel():
        return False
    index = torch.from_numpy(result_diff.bad)
    return bits_equal(result_diff.actual[index], candidate.to(result_diff.actual.dtype)[index])


def unexplained(result_diff: ResultDiff) -> float:
    """Residual under no hypothesis: one that holds must be far better, or it changes little."""
    truth = None if result_diff.truth is None else torch.from_numpy(result_diff.truth.value)
    return float("inf") if truth is None else result_diff.residual(truth)


def reproduces(result_diff: ResultDiff, alternative: torch.Tensor) -> bool:
    """Whether what a hypothesis predicts is the target's result to rounding, everywhere, and far better than the truth.

    Args:
        result_diff: The result.
        alternative: What the hypothesis predicts, flat, all elements.
    """
    residual = result_diff.residual(alternative, only_bad=False, most=result_diff.tolerance)
    # An alternative close to the truth (a factor of 1.0001) would explain what is hardly beyond the limit.
    return (
        residual <= result_diff.tolerance
        and residual <= unexplained(result_diff) / 2
        and result_diff.remaining_error(alternative) <= MARGIN
    )


def stale(call: MismatchedCall) -> str | None:
    """The target returned what it returned the call before."""
    previous = call.case.previous_actual
    if previous is None or len(previous) != len(call.case.names):
        return None
    # Compared with the call before only: a buffer that is reused too early holds the latest result.
    values = [previous[f.position] for f in call.mismatches]
    if any(v is None for v in values):
        return None
    same = all(_same_at_bad(f, flat_values(v)) for f, v in zip(call.mismatches, values, strict=True))
    return "stale buffer" if same else None


def not_written(call: MismatchedCall) -> str | None:
    """An argument that the operator should have written is as it was."""
    named = call.case.arguments()
    for result_diff in call.mismatches:
        argument, _, member = result_diff.name.partition("[")
        before = named.get(argument)
        if member and isinstance(before, (list, tuple)):
            before = before[int(member.rstrip("]"))]
        if not isinstance(before, torch.Tensor) or not _same_at_bad(result_diff, flat_values(before)):
            return None
    return "result not written"


def equals_input(call: MismatchedCall) -> str | None:
    """A result is an input, as if the operator had done nothing."""
    for result_diff in call.mismatches:
        result = call.case.actual[result_diff.position]
        shape = result.shape if isinstance(result, torch.Tensor) else ()
        inputs = [t for t in call.case.args if isinstance(t, torch.Tensor) and t.shape == shape]
        # One element may equal an input by chance.
        if result_diff.bad.size < 2 or not any(_same_at_bad(result_diff, flat_values(t)) for t in inputs):
            return None
    return "equals its input"


def nan_missing(call: MismatchedCall) -> str | None:
    """NaN on the reference only."""
    return _everywhere(call, lambda _f, a, e: np.isnan(e) & ~np.isnan(a), "NaN treated as missing")


def nan_produced(call: MismatchedCall) -> str | None:
    """NaN on the target only."""
    return _everywhere(call, lambda _f, a, e: np.isnan(a) & ~np.isnan(e), "NaN produced")


def early_overflow(call: MismatchedCall) -> str | None:
    """Infinite on the target, finite on the reference."""
    return _everywhere(call, lambda _f, a, e: np.isinf(a) & np.isfinite(e), "overflows early")


def saturated(call: MismatchedCall) -> str | None:
    """Finite on the target, infinite on the reference."""
    return _everywhere(call, lambda _f, a, e: np.isfinite(a) & np.isinf(e), "infinity lost")


def sign_of_zero(call: MismatchedCall) -> str | None:
    """+0 against -0."""
    return _everywhere(call, lambda f, a, e: (f.fmt is not None) & (a == 0) & (e == 0), "sign of zero lost")


def flushed_results(call: MismatchedCall) -> str | None:
    """Zero where the reference has a subnormal number."""

    def holds(f: ResultDiff, a: Any, e: Any) -> Any:
        return False if f.fmt is None else (a == 0) & (e != 0) & (np.abs(e) < f.fmt.normal)

    return _everywhere(call, holds, "subnormal results flushed")


def sign_flipped(call: MismatchedCall) -> str | None:
    """Minus the reference."""
    flipped = all(
        f.fmt is not None and f.residual(-f.expected.to(torch.float64)) <= f.tolerance for f in call.mismatches
    )
    return "sign flipped" if flipped else None


def scaled(call: MismatchedCall) -> str | None:
    """A constant times the reference."""
    factors = []
    for f in call.mismatches:
        a, e = _bad(f)
        factor = _constant(a, e)
        if f.fmt is None or factor is None:
            return None
        if factor and not reproduces(f, f.expected.to(torch.float64) * factor):
            return None
        if not factor and a.any():
            return None
        factors.append(factor)
    return f"scaled by {factors[0]:.6g}" if any(factors) else "zero in the place of every wrong element"


def update_scaled(call: MismatchedCall) -> str | None:
    """A written argument moved by a constant times what it should have."""
    named = call.case.arguments()
    factors = []
    for f in call.mismatches:
        match = re.fullmatch(r"(\w+)(?:\[(\d+)\])?", f.name)
        before = named.get(match[1]) if match else None
        if match and match[2] and isinstance(before, (list, tuple)):
            before = before[int(match[2])]
        if not isinstance(before, torch.Tensor) or f.fmt is None:
            return None
        start = flat_values(before).to(torch.float64)
        step = f.expected.to(torch.float64) - start
        index = torch.from_numpy(f.bad)
        factor = _constant((f.actual.to(torch.float64) - start)[index].numpy(), step[index].numpy())
        if factor is None or not reproduces(f, start + step * factor):
            return None
        factors.append(factor)
    return f"update scaled by {factors[0]:.6g}"


def biased_variance(call: MismatchedCall) -> str | None:
    """A running variance moved by the sum of squares over n where the reference divides by n - 1."""
    named = call.case.arguments()
    x, before, momentum = named.get("input"), named.get("running_var"), named.get("momentum")
    if not isinstance(x, torch.Tensor) or not isinstance(before, torch.Tensor) or not isinstance(momentum, float):
        return None
    n = x.numel() // max(before.numel(), 1)
    if n < 2 or any(f.name != "running_var" for f in call.mismatches):
        return None
    kept = flat_values(before).to(torch.float64) * (1 - momentum)
    for f in call.mismatches:
        # The reference's own variance, scaled: the inputs need not be summed again.
        biased = kept + (f.expected.to(torch.float64) - kept) * (n - 1) / n
        if not reproduces(f, biased):
            return None
    return "variance divided by n, not n - 1"


def offset(call: MismatchedCall) -> str | None:
    """A constant more than the reference."""
    gaps = []
    for f in call.mismatches:
        a, e = _bad(f)
        if f.fmt is None or a.size < 4 or not np.isfinite(a - e).all():
            return None
        # The median: one wild element must not hide an offset of all others.
        gap = float(np.median(a - e))
        if not reproduces(f, f.expected.to(torch.float64) + gap):
            return None
        gaps.append(gap)
    return f"offset by {gaps[0]:.3g}"


def _constant(a: np.ndarray[Any, Any], e: np.ndarray[Any, Any]) -> float | None:
    """The factor between two arrays by least squares, if there are enough elements to speak of one."""
    finite = np.isfinite(a) & np.isfinite(e)
    if a.size < 4 or not finite.all() or not np.abs(e).max() > 0:
        return None
    # Divided first: the square of a float64 above 1e154 overflows.
    scale = np.abs(e).max()
    # No `np.dot`: see `bias._norm`.
    return float(np.sum(a / scale * (e / scale)) / np.sum(np.square(e / scale)))


def permuted(call: MismatchedCall) -> str | None:
    """The same values at other places."""
    for f in call.mismatches:
        if f.bad.size < 2:
            return None
        a, e = (np.sort(t) for t in _bad(f))
        # A permuted result may come from another path, so the same values may be rounded differently.
        unit = 8.0 * (f.fmt.roundoff if f.fmt else 0.0)
        if not np.allclose(a, e, rtol=unit, atol=0.0, equal_nan=True):
            return None
    return "elements permuted"


def last_elements(call: MismatchedCall) -> str | None:
    """Only the last elements, of all or of each row, are wrong."""
    for f in call.mismatches:
        n, bad = f.actual.numel(), f.bad
        if bad.size == 0 or 2 * bad.size > n:
            return None
        # Contiguous at the end: a vector loop without its tail.
        if bad[0] >= n - bad.size:
            continue
        result = call.case.actual[f.position]
        row = result.shape[-1] if isinstance(result, torch.Tensor) and result.dim() > 1 else n
        columns = np.unique(bad % row)
        # More than a quarter of a row is no tail.
        if 4 * columns.size > row or columns[0] < row - columns.size or 2 * bad.size < columns.size * (n // row):
            return None
    return "last elements"


def block_edge(call: MismatchedCall) -> str | None:
    """The wrong elements lie at the same place of blocks of equal size."""
    steps = []
    for f in call.mismatches:
        n, bad = f.actual.numel(), f.bad
        if bad.size < 3:
            return None
        step = int(np.gcd.reduce(np.diff(bad)))
        # Blocks of kernels have 4 elements or more, and a fault of edges affects most of them.
        if step < 4 or 2 * bad.size < n // step:
            return None
        steps.append((step, int(bad[0]) % step))
    step, place = steps[0]
    return f"block edge, every {step}" if place in {0, step - 1} else f"every {step}th element"


def rounded_results(call: MismatchedCall) -> str | None:
    """All results of the target are the numbers of a shorter dtype that are nearest to the reference."""
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16), ("float32", torch.float32)):
        if all(f.fmt is not None and _rounded_to(dtype, f) for f in call.mismatches):
            return f"results rounded to {name}"
    if all(f.actual.dtype == torch.float32 and f.actual.numel() >= 4 for f in call.mismatches):
        # tf32 keeps 10 of the 23 bits of the mantissa: the last 13 are zero.
        low = all(not bool((f.actual.view(torch.int32) & 0x1FFF).any()) for f in call.mismatches)
        near = all(bool(((f.actual - f.expected).abs() <= 2.0**-10 * f.expected.abs()).all()) for f in call.mismatches)
        if low and near:
            return "results rounded to tf32"
    return None


def _rounded_to(dtype: torch.dtype, f: ResultDiff) -> bool:
    limits = torch.finfo(dtype)
    if f.actual.numel() < 4 or limits.eps <= torch.finfo(f.actual.dtype).eps:
        return False
    a, e = f.actual.to(torch.float64), f.expected.to(torch.float64)
    # Numbers of a shorter dtype stay what they are when they are converted to it.
    if not torch.equal(a.to(dtype).to(torch.float64), a):
        return False
    size = e.abs()
    # Among subnormal numbers a formula that cancels has the same few digits (exp(x) - 1 those of float16).
    if int((size >= limits.smallest_normal).sum()) < 4:
        return False
    # Half a unit in the last place of the shorter dtype, at each element.
    half = torch.exp2(torch.floor(torch.log2(size.clamp(min=limits.smallest_normal)))) * (limits.eps / 2)
    own = 0.0 if f.truth is None else torch.from_numpy(f.truth.spread)
    near = (a - e).abs() <= half + 8.0 * torch.finfo(f.actual.dtype).eps * size + own
    return bool((near | ~torch.isfinite(a) | ~torch.isfinite(e)).all())


def coarse_sums(call: MismatchedCall) -> str | None:
    """Sums off by more than one rounding of a 16-bit dtype, whose numbers they all are."""
    if not call.case.facts.accumulates:
        return None
    dtypes = {f.actual.dtype for f in call.mismatches}
    # A 16-bit result has only one candidate; a float32 result may have been accumulated in either dtype.
    for dtype in dtypes if dtypes <= {torch.float16, torch.bfloat16} else (torch.float16, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        if all(_noise(call, f) and bool((f.actual.to(dtype) == f.actual).all()) for f in call.mismatches):
            return f"accumulated in {name}"
    return None


def coarse_noise(call: MismatchedCall) -> str | None:
    """Errors of almost every sum, of the size that numbers of a 16-bit dtype on the way make: a guess."""
    row = call.case.facts
    if not row.accumulates or row.resamples:
        return None
    for name, unit in (("float16", 2.0**-11), ("bfloat16", 2.0**-8)):
        for f in call.mismatches:
            level = _noise(call, f)
            # Errors of rounding terms grow as the root of their number, so the level bounds the dtype from both sides.
            root = n_terms(call.case, f.position) ** 0.5
            if not level or 2 * f.bad.size < f.actual.numel() or not unit / 8 < level < unit * max(2.0, root / 4):
                break
        else:
            return f"errors of the size of {name} on the way"
    return None


def _noise(call: MismatchedCall, f: ResultDiff) -> float:
    """Median error relative to the unit of rounding, as a unit roundoff; 0 if the errors do not look like noise."""
    if f.truth is None or f.fmt is None or f.excess_actual is None or f.where.size < 8:
        return 0.0
    finite = f.excess_actual[np.isfinite(f.excess_actual)]
    if f.bad.size < 8 and not 0.0 < finite.max(initial=0.0) / 8 <= np.median(finite) and not _coarser_elsewhere(f):
        return 0.0  # A few elements far beyond all others are no noise.
    greatest = 8.0 * n_terms(call.case, f.position) ** 0.5 * 2.0**-8 / f.fmt.roundoff
    if finite.size < f.where.size or float(finite.max()) > greatest:
        return 0.0
    return float(np.median(finite)) * f.fmt.roundoff


def _coarser_elsewhere(f: ResultDiff) -> bool:
    """Whether a 16-bit result is off twice as far as the reference also where it is not mismatched."""
    if f.fmt is None or f.fmt.mantissa >= 23 or f.excess_actual is None or f.excess_expected is None:
        return False
    others = ~np.isin(f.where, f.bad)
    actual, expected = f.excess_actual[others], f.excess_expected[others]
    return bool(others.sum() >= 32 and np.mean(np.square(actual)) > 4.0 * np.mean(np.square(expected)))
