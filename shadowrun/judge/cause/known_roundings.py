"""Inputs that the target rounds to fewer bits, recognised again in later calls of a context without the oracle.

A device whose products round their inputs to tf32 or bfloat16 is wrong in each product of a step, for one reason. The
full ladder asks the oracle three times for each. Once it has named the reason, the next calls of the context run the
operator once more on the CPU, on inputs rounded so, and are mismatches for the same reason where that explains the
distance from the reference as well as it did, and the distance is as great as it was. Of a product, its sketch
(`product_sketch`) is enough where it fits as well as it did. The ladder judges the first call of each context, the 2nd,
4th, 8th … call of an operator all the same, each that fits less well, and each that is clearly farther from the
reference than all calls of the context before: of a product, also relative to its terms, whose rounding does not grow
where those of a gradient cancel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from shadowrun.judge.cause.convolution_sketch import sketch_convolution
from shadowrun.judge.cause.hypotheses import ROUNDED_INPUTS, operands_of, rounding_named
from shadowrun.judge.cause.product_sketch import factors_of, sketch_product
from shadowrun.judge.cause.value_hypotheses import MARGIN
from shadowrun.judge.large_results import is_large
from shadowrun.judge.oracle import n_terms
from shadowrun.judge.result_diff import flat_values
from shadowrun.judge.rounding.bounds import RATIO
from shadowrun.judge.rounding.rounding_bounds import rounding_bound
from shadowrun.numerics.bits import plainly_equal
from shadowrun.numerics.diff import diff
from shadowrun.operators.case import tensors
from shadowrun.operators.vendor_ops import evaluate
from shadowrun.types import Status, TensorDiff, Verdict

if TYPE_CHECKING:
    from shadowrun.operators.case import Case, Value

__all__ = ["KnownRoundings"]

# A program with changing shapes has a new context in each call.
MAX_CONTEXTS: Final = 4096
BEYOND: Final = 8.0
"""How many times its limit the greatest excess was, so that no call with half of that distance can be rounding."""
WORSE: Final = 1.25
"""How much farther than all before a call is that is measured anew: of the calls of a finding, the worst is kept."""
GROWN: Final = 1.5
"""How much less well the rounding may explain a call than it did when the ladder found it."""
CLEAR: Final = 1 / 16
"""Greatest element of a sketch, relative to the greatest distance from the reference: one that is off for another
reason, and by an eighth of that, makes the sketch twice as large."""


class _Fit(NamedTuple):
    """How a result lies to the reference's and to what rounded inputs give.

    Attributes:
        distance: Root mean square distance from the reference, relative to the reference.
        remaining: Share of it that remains from what rounded inputs give.
        greatest: Greatest distance from that, relative to the greatest distance from the reference.
        explained: Elements nearer to that than to the reference; by a sketch, those that differ.
    """

    distance: float
    remaining: float
    greatest: float
    explained: int


@dataclass(slots=True)
class _Known:
    """What the ladder said of a context.

    Attributes:
        verdict: Its last.
        only_operands: Whether what is added to a product is left as it is.
        fits: By result, how its calls lay: the least distance, and the most that remained.
        worst: By result, their greatest distance.
        of_terms: Of a product, the greatest distance that the ladder has measured, relative to its terms, else None.
        sketched: As `fits`, by sketches; None without these.
    """

    verdict: Verdict
    only_operands: bool
    fits: dict[int, _Fit]
    worst: dict[int, float]
    of_terms: float | None
    sketched: dict[int, _Fit] | None

    def add(self, former: _Known) -> None:
        """Add earlier calls of the context, in which layers may take turns."""
        # Only a call that is worse than all of the context is measured anew, so that the greatest distance stays.
        self.worst = {k: max(d, former.worst.get(k, 0.0)) for k, d in self.worst.items()}
        if self.of_terms is not None:
            self.of_terms = max(self.of_terms, former.of_terms or 0.0)
        same = (former.verdict.explanation, former.only_operands) == (self.verdict.explanation, self.only_operands)
        if same and former.fits.keys() == self.fits.keys():
            self.fits = _widest(self.fits, former.fits)
            if self.sketched is not None and former.sketched is not None:
                self.sketched = _widest(self.sketched, former.sketched)


class KnownRoundings:
    """The contexts whose inputs the target rounds."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._n_calls: dict[tuple[str, str], int] = {}

    def learn(self, context: int, case: Case, verdict: Verdict, diffs: tuple[TensorDiff, ...]) -> None:
        """Remember what the ladder said of a call; any other verdict than rounded inputs forgets the context."""
        former = self._known.pop(context, None)
        rounded = verdict.status is Status.MISMATCH and verdict.explanation.startswith(ROUNDED_INPUTS)
        if not rounded or case.mutated or is_large(case):
            return
        if len(self._known) >= MAX_CONTEXTS:
            self._known.clear()
            self._n_calls.clear()
        known = _fitted(case, verdict, diffs)
        if known is not None:
            if former is not None:
                known.add(former)
            self._known[context] = known

    def judge(self, context: int, case: Case) -> tuple[Verdict, tuple[TensorDiff, ...]] | None:
        """The verdict on a call with the reason that is known; None where the ladder has to judge it."""
        known = self._known.get(context)
        if known is None:
            return None
        key = case.op, known.verdict.explanation
        # From 1: the ladder has judged the call that taught the rounding.
        self._n_calls[key] = n_calls = self._n_calls.get(key, 1) + 1
        # A power of two: the ladder looks again.
        if not n_calls & (n_calls - 1) or len(case.actual) != len(case.expected):
            return None
        diffs = _diffs(case, known.fits)
        fits = None if diffs is None else _explained(case, known, diffs)
        if diffs is None or fits is None:
            return None
        for k, now in fits.items():
            if now.distance > WORSE * known.worst[k]:
                # The worst call of a finding is captured, and only the ladder measures how bad a call is.
                if _is_worse(case, known, now, diffs[k]):
                    return None
                known.worst[k] = now.distance
            diffs[k] = replace(diffs[k], n_mismatched=now.explained)
        shares = [now.remaining for now in fits.values()]
        evidence = (
            f"known of this line: {max(shares):.2g} of the distance from the reference remains from what rounded "
            f"inputs give (judged in full: each first call, and the 2nd, 4th, 8th … of {case.op})"
        )
        return replace(known.verdict, evidence=evidence), tuple(diffs.values())


def _widest(fits: dict[int, _Fit], others: dict[int, _Fit]) -> dict[int, _Fit]:
    """Of the same results: the least distance, and the most that remains."""
    found = {}
    for k, a in fits.items():
        b = others[k]
        least, remaining = min(a.distance, b.distance), max(a.remaining, b.remaining)
        found[k] = _Fit(least, remaining, max(a.greatest, b.greatest), a.explained)
    return found


def _fitted(case: Case, verdict: Verdict, diffs: tuple[TensorDiff, ...]) -> _Known | None:
    wrong = {d.name: d for d in diffs if d.n_mismatched}
    if len(wrong) != len(diffs):
        return None  # a result that is rounding has other bounds, which are not known here
    # Devices that round the factors of a product leave a bias in float32: tried first.
    for only_operands in (True, False):
        values = _on_rounded_inputs(case, verdict.explanation, only_operands)
        fits = {}
        for k, name in enumerate(case.names):
            if name in wrong:
                fit = None if values is None else _fit(case, k, values, wrong[name])
                if fit is None or fit.remaining > MARGIN or not _is_beyond(case, k, wrong[name]):
                    break
                fits[k] = fit
        else:
            if fits:
                named = {k: wrong[case.names[k]] for k in fits}
                sketched = _sketched(case, verdict.explanation, named, only_operands=only_operands)
                worst = {k: fit.distance for k, fit in fits.items()}
                of_terms = _of_terms(case, fits[0], named[0]) if fits.keys() == {0} else None
                return _Known(verdict, only_operands, fits, worst, of_terms, sketched)
    return None


def _explained(case: Case, known: _Known, diffs: dict[int, TensorDiff]) -> dict[int, _Fit] | None:
    """How the results lie, if rounded inputs explain them as well as they did: by sketches, or by the results."""
    then = known.sketched
    if then is None:
        return _alike(case, known, diffs)
    now = _sketched(case, known.verdict.explanation, diffs, only_operands=known.only_operands)
    if now is not None and all(_is_alike(now[k], fit) for k, fit in then.items()):
        return now
    found = _alike(case, known, diffs)
    if found is not None and now is not None:
        # They were too coarse: later ones may be as coarse as what the results have confirmed.
        known.sketched = _widest(now, then)
    return found


def _alike(case: Case, known: _Known, diffs: dict[int, TensorDiff]) -> dict[int, _Fit] | None:
    """How the results lie, if rounded inputs explain them as well as they did."""
    values = _on_rounded_inputs(case, known.verdict.explanation, known.only_operands)
    if values is None:
        return None
    found = {}
    for k, fit in known.fits.items():
        now = _fit(case, k, values, diffs[k])
        if now is None or not _is_alike(now, fit):
            return None
        found[k] = now
    return found


def _sketched(
    case: Case, explanation: str, diffs: dict[int, TensorDiff], *, only_operands: bool
) -> dict[int, _Fit] | None:
    """How the results of a product or convolution lie, by their sketches; None where these would be too coarse."""
    rounding = rounding_named(explanation)
    floats = [t for t in tensors(case.args, case.kwargs) if t.is_floating_point()]
    if rounding is None or any(t.dtype is not torch.float32 or t.layout is not torch.strided for t in floats):
        return None
    try:
        if case.facts.convolution:
            sketches = sketch_convolution(case, diffs, rounding, only_operands=only_operands)
        else:
            sketches = {0: sketch_product(case, case.actual[0], rounding, only_operands=only_operands)}
    except RuntimeError:  # no memory, say
        return None
    found = {}
    for k, d in diffs.items():
        sketch = sketches.get(k)
        measured = None if sketch is None else _distance(case, k, d)
        if sketch is None or measured is None or not sketch.greatest <= CLEAR * d.max_abs:
            return None
        distance, size = measured
        found[k] = _Fit(distance / size, sketch.norm / distance, sketch.greatest / d.max_abs, d.n_different)
    return found


def _is_worse(case: Case, known: _Known, now: _Fit, d: TensorDiff) -> bool:
    """Whether a result is farther from the reference for another reason than that its terms cancel."""
    of_terms = None if known.of_terms is None else _of_terms(case, now, d)
    return of_terms is None or known.of_terms is None or of_terms > WORSE * known.of_terms


def _of_terms(case: Case, fit: _Fit, d: TensorDiff) -> float | None:
    """A product's distance relative to its norm and that of its terms, as an excess is; None of other operators.

    An element of k terms of either sign is about as great as the norms of its row and column divided by the root of k,
    and what a rounding of the factors changes in it is a share of that, however small it is itself.
    """
    factors = factors_of(case)
    if not factors or not fit.distance:
        return None
    distance = d.rmse * d.n_elements**0.5
    left, right = (float(torch.linalg.vector_norm(t.detach())) for t in factors)
    size = distance / fit.distance + left * right / max(1, factors[0].shape[-1]) ** 0.5
    return distance / size if 0.0 < size < math.inf else None


def _distance(case: Case, position: int, d: TensorDiff) -> tuple[float, float] | None:
    """Norms of a result's difference and of the reference; None where a value is not finite, or nothing differs."""
    e = flat_values(case.expected[position])
    size, distance = float(torch.dot(e, e)) ** 0.5, d.rmse * float(e.numel() ** 0.5)
    return (distance, size) if 0.0 < size < float("inf") and 0.0 < distance < float("inf") else None


def _is_beyond(case: Case, position: int, d: TensorDiff) -> bool:
    limit = rounding_bound(case.facts, 23, n_terms=n_terms(case, position))
    return d.excess_actual > BEYOND * max(limit, RATIO * d.excess_expected)


def _is_alike(now: _Fit, then: _Fit) -> bool:
    # Nor may an element be off for another reason.
    far_off = now.distance > then.distance / 2
    return far_off and now.remaining <= min(GROWN * then.remaining, MARGIN) and now.greatest <= 2 * then.greatest


def _diffs(case: Case, wrong: dict[int, _Fit]) -> dict[int, TensorDiff] | None:
    """Statistics of the results that differ; None where others do than those, or other classes of values."""
    found = {}
    for k, (name, a, e) in enumerate(zip(case.names, case.actual, case.expected, strict=True)):
        if not isinstance(a, torch.Tensor) or not isinstance(e, torch.Tensor):
            return None
        if plainly_equal(a, e):
            continue
        d = diff(name, a, e) if k in wrong else None
        if d is None or d.detail or d.n_nan or d.n_inf:
            return None
        found[k] = d
    return found if found.keys() == wrong.keys() else None


def _on_rounded_inputs(case: Case, explanation: str, only_operands: bool) -> tuple[Value, ...] | None:
    """Results of the operator in its own dtype, on inputs rounded as an explanation says."""
    change = rounding_named(explanation)
    floats = [t for t in tensors(case.args, case.kwargs) if t.is_floating_point()]
    if change is None or any(t.dtype is not torch.float32 or t.layout is not torch.strided for t in floats):
        return None

    is_operand = operands_of(case)

    def changed(t: torch.Tensor) -> torch.Tensor:
        if not t.is_floating_point() or (only_operands and not is_operand(t)):
            return t.detach()
        return change(t.detach())

    try:
        names, values = evaluate(case, *case.fresh_inputs(changed))
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None
    return values if names == case.names else None


def _fit(case: Case, position: int, values: tuple[Value, ...], d: TensorDiff) -> _Fit | None:
    value = values[position]
    if not isinstance(value, torch.Tensor):
        return None
    a, e, p = (flat_values(v) for v in (case.actual[position], case.expected[position], value))
    if not a.dtype == e.dtype == p.dtype == torch.float32 or not a.numel() == e.numel() == p.numel() > 0:
        return None
    to_rounded = diff(d.name, a, p)
    measured = _distance(case, position, d)
    # Not finite where a value is not: the ladder knows classes.
    if measured is None or to_rounded.n_nan or to_rounded.n_inf:
        return None
    distance, size = measured
    rest = to_rounded.rmse * float(a.numel() ** 0.5)
    # Not `sum`: it takes ten times as long over truth values.
    explained = int(torch.count_nonzero((a - p).abs_() < (a - e).abs_()))
    return _Fit(distance / size, rest / distance, to_rounded.max_abs / d.max_abs, explained)
