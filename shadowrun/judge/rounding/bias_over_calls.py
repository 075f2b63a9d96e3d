"""Bias over many calls of one kind: small results that are all off by one factor, which no single call proves.

A loss or a norm is one number, so only many calls show whether it is a little too great. The errors of right kernels
have either sign, whatever their size, so the factor by which they follow the results tends to zero with the number of
calls. Calls on nearly the same values have nearly the same errors, and count once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from shadowrun.judge.result_diff import flat_values
from shadowrun.judge.rounding.bias import DEVIATIONS, ENOUGH, bias_limit
from shadowrun.numerics.precision import FORMATS
from shadowrun.operators.case import tensors
from shadowrun.types import Cause, Status, Verdict

if TYPE_CHECKING:
    from shadowrun.judge.result_diff import ResultDiff
    from shadowrun.operators.case import Case

__all__ = ["BiasOverCalls", "is_counted"]

SUSPICIOUS: Final = 16
"""Calls of one kind from which on a bias against the reference is checked with the oracle."""
CERTAIN: Final = 8
"""Calls with the oracle's answer before the next is called wrong."""
OTHER: Final = 1e-4
"""Relative distance of inputs whose errors have nothing to do with each other, in half of the elements."""
SAMPLE: Final = 64
"""Elements of an input that are kept to recognise it."""
RECENT: Final = 8
# A program with changing shapes has a new kind in each call.
MAX_KINDS: Final = 256


@dataclass(slots=True)
class _Regression:
    """A regression of errors on results over many calls, both in units of the call's size."""

    n: int = 0
    pp: float = 0.0
    pz: float = 0.0
    ppzz: float = 0.0
    pppz: float = 0.0
    pppp: float = 0.0

    def add(self, p: float, z: float) -> None:
        self.n += 1
        self.pp += p * p
        self.pz += p * z
        self.ppzz += p * p * z * z
        self.pppz += p * p * p * z
        self.pppp += p**4

    @property
    def factor(self) -> float:
        return self.pz / self.pp if self.pp else 0.0

    @property
    def error(self) -> float:
        """Standard error; infinite where a few calls outweigh all others."""
        # The standard error of a few great calls is itself uncertain.
        if self.pp * self.pp < CERTAIN * self.pppp or not self.pp:
            return float("inf")
        # White's standard error, written in sums of powers: no call has to be kept for it.
        b = self.factor
        return float(max(self.ppzz - 2 * b * self.pppz + b * b * self.pppp, 0.0) ** 0.5) / self.pp


@dataclass(slots=True)
class _Kind:
    between: _Regression = field(default_factory=_Regression)
    actual: _Regression = field(default_factory=_Regression)
    expected: _Regression = field(default_factory=_Regression)
    recent: list[torch.Tensor] = field(default_factory=list)


class BiasOverCalls:
    """Regressions of errors on results, one for each kind of call of a run."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[object, ...], _Kind] = {}

    def add_result(self, case: Case, position: int) -> bool:
        """Count one result.

        Returns:
            Whether the results of such calls look biased, so that the oracle is needed.
        """
        limit = _limit(case, position)
        kind = None if limit is None else self._kind(case, position)
        if limit is None or kind is None:
            return False
        actual, expected = (flat_values(v[position]).to(torch.float64) for v in (case.actual, case.expected))
        size = _size(case)
        # The same batch in each step of a training loop has the same error; counted each time, it would look certain.
        if size > 0.0 and _is_independent(kind, case):
            p, z = _result_and_error(actual - expected, expected, size, case, position)
            kind.between.add(p, z)
        return kind.between.n >= SUSPICIOUS and _is_biased(kind.between, limit)

    def verdict(self, case: Case, result_diff: ResultDiff) -> Verdict | None:
        """Judge a result that passed by itself, among all of its kind.

        Args:
            case: The call; it was noted.
            result_diff: The result; its `truth` is known.

        Returns:
            A MISMATCH, with `result_diff.bad` all elements that differ; None where there is no bias.
        """
        limit = _limit(case, result_diff.position)
        kind = None if limit is None else self._kind(case, result_diff.position)
        if limit is None or kind is None or result_diff.truth is None or kind.between.n < SUSPICIOUS:
            return None
        truth, size = torch.from_numpy(result_diff.truth.value), _size(case)
        if not size > 0.0 or not _is_biased(kind.between, limit):
            return None
        for sums, values in ((kind.actual, result_diff.actual), (kind.expected, result_diff.expected)):
            sums.add(*_result_and_error(values.to(torch.float64) - truth, truth, size, case, result_diff.position))
        actual, expected = kind.actual, kind.expected
        # The regression against the reference cannot say which side is biased; that against the oracle does.
        if actual.n < CERTAIN or not _is_biased(actual, limit) or abs(actual.factor) <= 2 * abs(expected.factor):
            return None
        result_diff.bad = result_diff.where
        roundoff = FORMATS[result_diff.actual.dtype].roundoff
        evidence = (
            f"{result_diff.name}: {kind.between.n} calls of this kind together are off by a factor of 1 "
            f"{'+' if actual.factor > 0 else '-'} {abs(actual.factor) * roundoff:.2g}, {abs(actual.factor):.2g} units "
            f"of rounding where {limit + DEVIATIONS * actual.error:.2g} may be chance; {expected.factor:.2g} on the "
            "reference"
        )
        return Verdict(Status.MISMATCH, Cause.IMPLEMENTATION, "one factor in many calls", evidence, 0.5)

    def _kind(self, case: Case, position: int) -> _Kind | None:
        key = (case.op, position, *((t.dtype, t.shape) for t in tensors(case.args, case.kwargs)))
        # Memory is bounded: a program with changing shapes has a new kind in each call.
        if key not in self._kinds and len(self._kinds) >= MAX_KINDS:
            return None
        return self._kinds.setdefault(key, _Kind())


def is_counted(case: Case, position: int) -> bool:
    """Whether calls of this kind are pooled: their results are too small for a test of bias in each."""
    return _limit(case, position) is not None


def _limit(case: Case, position: int) -> float | None:
    """Unit roundoffs by which all calls may be off; None for large results, and for other kinds."""
    actual, expected = case.actual[position], case.expected[position]
    if not isinstance(expected, torch.Tensor) or not isinstance(actual, torch.Tensor):
        return None
    if not 0 < expected.numel() < ENOUGH or expected.is_complex() or actual.dtype != expected.dtype:
        return None
    fmt = FORMATS.get(expected.dtype)
    # Over many calls, the errors of a sum are no more of one sign than over many rows.
    return None if fmt is None or fmt.mantissa > 23 else bias_limit(case, position, fmt.roundoff, None)


def _is_biased(sums: _Regression, limit: float) -> bool:
    return abs(sums.factor) > limit + DEVIATIONS * sums.error


def _result_and_error(
    errors: torch.Tensor, result: torch.Tensor, size: float, case: Case, position: int
) -> tuple[float, float]:
    """One call's result and the error along it, in units of its size."""
    value = case.expected[position]
    assert isinstance(value, torch.Tensor)
    norm = float(torch.linalg.vector_norm(result))
    if not 0.0 < norm < float("inf") or not bool(torch.isfinite(errors).all()):
        return 0.0, 0.0
    # Relative to the input, not to the result: a loss near zero has a relative error without bound.
    return norm / size, float(torch.dot(errors, result)) / norm / (size * FORMATS[value.dtype].roundoff)


def _first(case: Case) -> torch.Tensor | None:
    first = next((t for t in tensors(case.args, case.kwargs) if t.is_floating_point()), None)
    return None if first is None or first.layout is not torch.strided else first.detach()


def _size(case: Case) -> float:
    first = _first(case)
    if first is None:
        return 0.0
    # A norm computed in float16 overflows from 65,504 on.
    size = float(torch.linalg.vector_norm(first.to(torch.float32) if first.itemsize < 4 else first))
    return size if size < float("inf") else 0.0


def _is_independent(kind: _Kind, case: Case) -> bool:
    """Whether the values of the call differ from those of recent calls."""
    first = _first(case)
    if first is None or not first.is_contiguous():
        return False
    sample = first.view(-1)[:: max(first.numel() // SAMPLE, 1)].to(torch.float64)
    if 2 * len(set(sample.tolist())) < sample.numel():
        return False  # Sums of the same few values err alike.
    if any(float(((sample - s).abs() > OTHER * s.abs()).to(torch.float64).mean()) < 0.5 for s in kind.recent):
        return False
    kind.recent = [*kind.recent[-RECENT + 1 :], sample]
    return True
