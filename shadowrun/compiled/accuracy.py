"""Judges results of compiled code: could eager have returned them, and which of both is nearer the float64 result."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from shadowrun.judge.oracle import FEW_RUNS, MANY_RUNS
from shadowrun.judge.result_diff import flat_values
from shadowrun.judge.rounding.bounds import RATIO, limit
from shadowrun.judge.rounding.rounding_bounds import BOUND, COARSE_BOUND
from shadowrun.numerics.bits import Uncomparable, bits_equal
from shadowrun.numerics.diff import diff
from shadowrun.numerics.excess import Array, Truth, excess
from shadowrun.numerics.form import form_difference
from shadowrun.numerics.precision import FORMATS
from shadowrun.types import Cause, Status, TensorDiff, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from shadowrun.operators.case import Value

__all__ = ["Errors", "JudgedResult", "ReferenceRuns", "allowed_differences", "judge"]

_NEARER: Final = 2.0
RMS: Final = 8.0
COARSE_RMS: Final = 2.0
"""How many times as far from eager, and from the truth, all elements together may be as other roundings move them: a
fourth of the bound for one element, as the greatest of many is some four times their root mean square. Inductor and
others on right programs reach 0.47 in float32 and 0.27 in bfloat16 (112 results of the models of `tests/compiled`).
Whole graphs of Dynamo's under bfloat16 autocast reach 0.64 by Inductor, and 1.26 units in one element, as eager does
(2093 results of 171 calls: transformer blocks, convolutions with batch and group norm, gated perceptrons, and a U-Net,
with eager's dropout masks; of its gradients, those that are right). With Inductor's own masks, elements that another
rounding of the numbers keeps made it 8.7 units."""
FACTOR: Final = 2.5
FACTOR_SHARE: Final = 0.25
"""The same for a factor that all elements have in common, where 16 bits were computed with: rounding to nearest has
none. In float32, functions and sums of other algorithms may have one of some units. Right ones reach 0.16 of the
size, and those whole graphs 0.24 of it, which is 0.37 of what is allowed there."""
# What other roundings move a result by, of its size, if it depends on 16 bits.
_COARSE_NOISE: Final = 2.0**-12
_INTEGERS: Final = frozenset({torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64})
NEARER = "nearer the truth than eager"


@dataclass(frozen=True, slots=True)
class ReferenceRuns:
    """How to run the same again.

    Attributes:
        truth: The float64 result; None where there is none.
        perturbed: Eagerly with perturbed rounding, different in each call.
        filled: Eagerly on `filled_memory`, with its `zeros`; None where it does not run so.
        statistics: Positions of what a norm saves for its own backward: it may be in another precision.
        mantissa: Bits of the shortest mantissa among the results of operators that `perturbed` has met.
    """

    truth: Callable[[], Sequence[Value] | None]
    perturbed: Callable[[], Sequence[Value]]
    filled: Callable[[bool], Sequence[Value] | None]
    statistics: frozenset[int] = frozenset()
    mantissa: Callable[[], int] = lambda: 52


@dataclass(frozen=True, slots=True)
class JudgedResult:
    """One result that differs.

    Attributes:
        position: Which.
        verdict: What is believed of it.
        diff: How far it is off; its `n_mismatched` counts the elements that rounding does not explain.
        errors: How far both are from the truth; None where that is not known.
    """

    position: int
    verdict: Verdict
    diff: TensorDiff
    errors: Errors | None = None


@dataclass(frozen=True, slots=True)
class Errors:
    """Distance from the float64 result, over the finite elements of one or more results.

    Attributes:
        actual: Sum of the squares of what compiled code is off.
        expected: The same of eager.
        size: Sum of the squares of the float64 result.
    """

    actual: float
    expected: float
    size: float

    @classmethod
    def together(cls, judged: Iterable[JudgedResult]) -> Errors | None:
        """Of all results that differ; None where of none the truth is known."""
        known = [j.errors for j in judged if j.errors is not None]
        if not known:
            return None
        return cls(sum(e.actual for e in known), sum(e.expected for e in known), sum(e.size for e in known))

    @property
    def relative(self) -> tuple[float, float]:
        """Euclidean norm of compiled code's error and of eager's, over that of the float64 result; NaN if that is 0."""
        if not self.size:
            return math.nan, math.nan
        return math.sqrt(self.actual / self.size), math.sqrt(self.expected / self.size)


def judge(
    names: Sequence[str], actual: Sequence[Value], expected: Sequence[Value], runs: ReferenceRuns
) -> tuple[Verdict, tuple[JudgedResult, ...]]:
    """Judge results that compiled code (*actual*) and eager (*expected*) computed from the same inputs.

    Strides are not compared: a compiler chooses those of intermediate tensors.

    Returns:
        The verdict on all, and those that differ.
    """
    if len(actual) != len(expected):
        counts = f"{len(actual)} results against {len(expected)}"
        return Verdict(Status.MISMATCH, Cause.METADATA, "number of results", counts), ()
    # What a norm saves for its own backward may be in another precision, which its backward accounts for.
    if runs.statistics:
        both = [
            _coarser(a, e) if k in runs.statistics else (a, e)
            for k, (a, e) in enumerate(zip(actual, expected, strict=True))
        ]
        actual, expected = [a for a, _ in both], [e for _, e in both]
    judged: list[JudgedResult] = []
    open_ones: list[int] = []
    for k, (name, a, e) in enumerate(zip(names, actual, expected, strict=True)):
        try:
            # A compiler chooses the strides of intermediate tensors.
            form = form_difference(a, e).partition("stride ")[0].rstrip(", ")
            if form:
                verdict = Verdict(Status.MISMATCH, Cause.METADATA, form.partition(" ")[0], f"{name}: {form}")
                judged.append(JudgedResult(k, verdict, diff(name, a, e)))
            elif not bits_equal(a, e):
                open_ones.append(k)
        except Uncomparable as error:
            judged.append(JudgedResult(k, Verdict(Status.UNVERIFIED, None, str(error)), diff(name, None, None)))
    judged += _judge_by_reference(names, actual, expected, open_ones, runs)
    if not judged:
        return Verdict(Status.MATCH), ()
    judged.sort(key=lambda j: j.position)
    worst = min(judged, key=lambda j: (_ORDER[j.verdict.status], j.verdict.explanation != NEARER))
    return worst.verdict, tuple(judged)


def _coarser(actual: Value, expected: Value) -> tuple[Value, Value]:
    """Both in the precision of the coarser one."""
    if not (isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor)):
        return actual, expected
    formats = FORMATS.get(actual.dtype), FORMATS.get(expected.dtype)
    if actual.dtype is expected.dtype or formats[0] is None or formats[1] is None:
        return actual, expected
    dtype = actual.dtype if formats[0].roundoff > formats[1].roundoff else expected.dtype
    return actual.to(dtype), expected.to(dtype)


def _judge_by_reference(
    names: Sequence[str], actual: Sequence[Value], expected: Sequence[Value], which: list[int], runs: ReferenceRuns
) -> list[JudgedResult]:
    if not which:
        return []
    truths = runs.truth()
    spreads = {k: _RoundingSpread(expected[k], None if truths is None else truths[k]) for k in which}
    # Before the bounds are known: what lies in such memory may be far from anything, and would widen them.
    filled = runs.filled(False)
    if filled is not None:
        for k in which:
            spreads[k].leave_open(filled[k], expected[k])
        # Eager may have got such memory from a former run on filled memory: only memory of zeros tells it apart.
        zeroed = runs.filled(True) if any(spreads[k].has_fill for k in which) else None
        if zeroed is not None:
            for k in which:
                spreads[k].leave_open(filled[k], zeroed[k])
    judged: list[JudgedResult] = []
    n_perturbed_runs = 0
    # Each run executes the whole graph again, so a result that four runs explain gets no more.
    for wanted in (FEW_RUNS, MANY_RUNS):
        for _ in range(n_perturbed_runs, wanted):
            results = runs.perturbed()
            for k in which:
                spreads[k].widen(results[k])
        for spread in spreads.values():
            # A float32 result of 16-bit intermediate values has their errors: its own dtype would condemn it.
            spread.use_16_bit_bounds(runs.mantissa())
        n_perturbed_runs = wanted
        judged = [_judge_result(k, names[k], actual[k], expected[k], spreads[k]) for k in which]
        if all(j.verdict.status is Status.MATCH for j in judged):
            break
    return judged


def allowed_differences(
    actual: Sequence[Value], expected: Sequence[Value], runs: ReferenceRuns
) -> list[float | torch.Tensor]:
    """By how much each result of compiled code may differ from eager's: one number, or one for each element.

    It is the bound of `judge`, seen from eager's result; infinite where rounding leaves an element open.
    """
    truths = runs.truth()
    spreads = [_RoundingSpread(e, None if truths is None else truths[k]) for k, e in enumerate(expected)]
    for _ in range(MANY_RUNS):
        for spread, result in zip(spreads, runs.perturbed(), strict=True):
            spread.widen(result)
    for spread in spreads:
        spread.use_16_bit_bounds(runs.mantissa())
    return [_allowed_difference(*each) for each in zip(actual, expected, spreads, strict=True)]


def _allowed_difference(actual: Value, expected: Value, spread: _RoundingSpread) -> float | torch.Tensor:
    a, e = flat_values(actual), flat_values(expected)
    fmt, truth = spread.fmt, spread.truth
    if a.shape != e.shape or fmt is None:
        return torch.from_numpy(np.where(truth.flips, np.inf, 0.0)) if truth.flips.any() else 0.0
    av, ev = a.to(torch.float64).numpy(), e.to(torch.float64).numpy()
    # As seen from eager: a script has eager's result, and no float64 run to compare with.
    most = limit(spread.bound, excess(ev, truth, fmt, np.arange(ev.size)))
    with np.errstate(all="ignore"):
        allowed = most * truth.unit(fmt) + np.abs(ev - truth.value)
        gap = np.abs(av - ev)
    # Rounding of the inputs decides these elements.
    allowed[truth.flips] = np.inf
    # Infinity and NaN have no distance: there the result must equal eager's.
    allowed[np.isnan(allowed)] = 0.0
    greatest = float(allowed.max(initial=0.0))
    wrong = gap[~(gap <= allowed)]
    # One number says the same where it parts all that is wrong from rounding.
    return greatest if wrong.size and (wrong > greatest).all() else torch.from_numpy(allowed)


class _Deviation(NamedTuple):
    """How far off all elements together are, in units of their size.

    Attributes:
        factor: By which they are too great.
        size: Root mean square.
    """

    factor: float
    size: float


class _RoundingSpread:
    """What rounding does to one result, and its truth."""

    def __init__(self, expected: Value, truth: Value) -> None:
        self._eager = flat_values(expected)
        tensors = isinstance(truth, torch.Tensor) and isinstance(expected, torch.Tensor)
        true = flat_values(truth) if tensors else self._eager
        self.known = tensors and true.numel() == self._eager.numel()
        if not self.known:
            true = self._eager
        if self._eager.dtype in FORMATS:
            true = true.to(torch.float64)
        elif true.dtype is not self._eager.dtype:
            true = true.to(self._eager.dtype)
        n = self._eager.numel()
        value = true.numpy()
        with np.errstate(all="ignore"):
            size = np.abs(value.astype(np.float64))
        self.truth = Truth(value, size, np.zeros(n), np.zeros(n, bool))
        self.undefined, self.has_fill = np.zeros(n, bool), False
        self.fmt = FORMATS.get(self._eager.dtype)
        self.is_coarse = self.fmt is not None and self.fmt.mantissa < 23
        self._moved: list[_Deviation] = []

    @property
    def bound(self) -> float:
        """Units of rounding that a correct element may be off."""
        return COARSE_BOUND if self.is_coarse else BOUND

    def widen(self, value: Value) -> None:
        """Take the differences of one perturbed run into the spread."""
        perturbed = flat_values(value)
        if perturbed.numel() != self._eager.numel():
            # Rounding decided the number of elements: none of them can be compared.
            self.truth.flips[:] = True
            return
        if self._eager.dtype not in FORMATS:
            # Integers and bools have no rounding: what another rounding of intermediate values changes is open.
            np.logical_or(self.truth.flips, perturbed.numpy() != self._eager.numpy(), out=self.truth.flips)
            return
        a, e = perturbed.to(torch.float64).numpy(), self._eager.to(torch.float64).numpy()
        with np.errstate(all="ignore"):
            gap = np.abs(a - e)
        # Rounding alone moves an element to infinity or NaN: which of both a compiler gets is open.
        changed = ~(np.isfinite(a) & np.isfinite(e)) & ~((a == e) | (np.isnan(a) & np.isnan(e)))
        np.logical_or(self.truth.flips, changed, out=self.truth.flips)
        # The greatest of all runs: each moves the roundings at random, and one alone may move them little.
        np.maximum(self.truth.spread, gap, out=self.truth.spread, where=np.isfinite(gap))
        self._moved.append(self.deviation(a, e))

    def leave_open(self, filled: Value, without: Value) -> None:
        """Take no element for wrong which depends on memory that no kernel writes.

        Args:
            filled: The result on `filled_memory`.
            without: The result on other memory.
        """
        there, here = flat_values(filled), flat_values(without)
        if there.numel() != self._eager.numel() or here.numel() != self._eager.numel():
            return
        self.has_fill = bool((self._is_fill(there) & self._is_fill(self._eager)).any())
        np.logical_or(self.undefined, (self._is_fill(there) & ~self._is_fill(here)).numpy(), out=self.undefined)
        np.logical_or(self.truth.flips, self.undefined, out=self.truth.flips)

    def _is_fill(self, t: torch.Tensor) -> torch.Tensor:
        if self._eager.dtype in FORMATS:
            return t.isnan()
        if t.dtype in _INTEGERS:
            return t == torch.iinfo(t.dtype).max
        return torch.zeros_like(t, dtype=torch.bool)

    def use_16_bit_bounds(self, mantissa: int) -> None:
        """Take the bounds of 16 bits for what was computed in these, whatever dtype it has.

        Args:
            mantissa: Bits of the shortest mantissa of an intermediate value.
        """
        if self.fmt is not None and mantissa < 23 and self._noise().size > _COARSE_NOISE:
            self.is_coarse = True
            self.fmt = self.fmt._replace(mantissa=min(self.fmt.mantissa, mantissa))

    def deviation(self, a: Array, b: Array) -> _Deviation:
        """How far one value of the result is from another, all elements together.

        Each element counts by its own size, but small ones by that of all, so that no few great ones decide.
        """
        value = self.truth.value
        with np.errstate(all="ignore"):
            gap, squares = a - b, np.square(value)
            good = np.isfinite(gap) & np.isfinite(squares) & ~self.truth.flips
            gap, value, squares = gap[good], value[good], squares[good]
            # Weights by size alone would let few great elements decide; relative errors alone, those that cancel.
            weights = 1 / (squares + squares.mean()) if squares.size and squares.any() else squares
            total = float(np.sum(weights * squares))
            if not total:
                return _Deviation(0.0, 0.0)
            factor, size = float(np.sum(weights * value * gap)), float(np.sum(weights * gap * gap))
        return _Deviation(factor / total, math.sqrt(size / total))

    def systematic(self, actual: Array, expected: Array) -> str:
        """What is wrong with all elements together where each is within its bound; empty if nothing is."""
        noise, own = self._noise(), self.deviation(expected, self.truth.value)
        if not noise.size:
            return ""
        both = self.deviation(actual, expected), self.deviation(actual, self.truth.value)
        # Right if near to either: eager may be the side that is off.
        size = min(o.size for o in both)
        if size > max((COARSE_RMS if self.is_coarse else RMS) * noise.size, RATIO * own.size):
            return f"root mean square of all {size:.3g} of their size, where rounding moves them by {noise.size:.3g}"
        # Rounding to nearest has no common factor; other algorithms in float32 may have one of some units.
        factor = min((o.factor for o in both), key=abs)
        limit = max(FACTOR * noise.factor, FACTOR_SHARE * noise.size, RATIO * abs(own.factor))
        if self.is_coarse and abs(factor) > limit:
            return f"all together {1 + factor:.5g} times what they should be, by rounding 1 ± {noise.factor:.2g}"
        return ""

    def _noise(self) -> _Deviation:
        n = max(len(self._moved), 1)
        means = (math.sqrt(sum(v * v for v in each) / n) for each in zip(*self._moved, strict=True))
        return _Deviation(*means) if self._moved else _Deviation(0.0, 0.0)


def _judge_result(k: int, name: str, actual: Value, expected: Value, spread: _RoundingSpread) -> JudgedResult:
    d = diff(name, actual, expected)
    a, e = flat_values(actual), flat_values(expected)
    fmt = spread.fmt
    if fmt is None:
        different = a.numpy() != e.numpy()
        bad = int((different & ~spread.truth.flips).sum())
        if bad:
            evidence = f"{name}: {bad} of {a.numel()} elements differ"
            # Less sure than elsewhere: whether an intermediate integer depended on rounding is known from a few runs
            # only.
            verdict = Verdict(Status.MISMATCH, Cause.IMPLEMENTATION, "", evidence, 0.5)
        else:
            verdict = Verdict(Status.UNVERIFIED, Cause.UNDEFINED, "tie", f"{int(different.sum())} elements of {name}")
        return JudgedResult(k, verdict, replace(d, n_mismatched=bad))
    av, ev = a.to(torch.float64).numpy(), e.to(torch.float64).numpy()
    where = np.arange(av.size)
    defined = ~spread.undefined
    excess_actual, excess_expected = (np.where(defined, excess(v, spread.truth, fmt, where), 0.0) for v in (av, ev))
    # An element that equals eager's is right, also where eager overflows and the float64 result does not.
    equal = (av == ev) | (np.isnan(av) & np.isnan(ev))
    wrong = (excess_actual > limit(spread.bound, excess_expected)) & ~equal
    top, top_eager = (float(e.max(initial=0.0)) for e in (excess_actual, excess_expected))
    d = replace(d, n_mismatched=int(wrong.sum()), excess_actual=top, excess_expected=top_eager)
    figures = f"greatest excess {top:.3g} units of rounding against {top_eager:.3g} of eager"
    errors = _errors(av[defined], ev[defined], spread.truth.value[defined]) if spread.known else None
    if wrong.any():
        evidence = f"{name}: {int(wrong.sum())} of {av.size} elements beyond rounding; {figures}"
        return JudgedResult(k, Verdict(Status.MISMATCH, Cause.IMPLEMENTATION, "", evidence, 0.8), d, errors)
    if together := spread.systematic(av, ev):
        d = replace(d, n_mismatched=int((av != ev).sum()))
        return JudgedResult(
            k, Verdict(Status.MISMATCH, Cause.IMPLEMENTATION, "", f"{name}: {together}", 0.8), d, errors
        )
    # Fusion keeps intermediate values in float32, so compiled code is often more accurate than eager.
    if errors is not None and errors.expected > _NEARER**2 * errors.actual:
        rms, rms_eager = (math.sqrt(e / av.size) for e in (errors.actual, errors.expected))
        evidence = f"{name}: root mean square error {rms:.3g}, that of eager {rms_eager:.3g}"
        return JudgedResult(k, Verdict(Status.MATCH, Cause.ROUNDING, NEARER, evidence), d, errors)
    return JudgedResult(k, Verdict(Status.MATCH, Cause.ROUNDING, "", f"{name}: {figures}"), d, errors)


def _errors(actual: Array, expected: Array, truth: Array) -> Errors:
    with np.errstate(all="ignore"):
        gaps = actual - truth, expected - truth
        finite = np.isfinite(gaps[0]) & np.isfinite(gaps[1])
        return Errors(*(float(np.sum(np.square(v[finite]))) for v in (*gaps, truth)))


_ORDER: Final = {Status.MISMATCH: 0, Status.UNVERIFIED: 1, Status.MATCH: 2}
