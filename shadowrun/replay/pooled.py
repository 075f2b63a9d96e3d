"""Errors that no call proves, but many calls of one kind together do: small results that are all off by one factor.

A loss or a norm is one number: whether it is right or a little too great, only many of them tell. The errors of right
kernels have either sign, whatever their size, so the factor by which they follow the results goes to nothing with the
number of calls. Calls on nearly the same values have nearly the same errors, and count once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from shadowrun.numerics.precision import FORMATS
from shadowrun.replay.finding import flat_values, op_name
from shadowrun.replay.oracle import tensors
from shadowrun.replay.systematic import DEVIATIONS, ENOUGH, units
from shadowrun.types import Cause, Status, Verdict

if TYPE_CHECKING:
    from shadowrun.replay.case import Case
    from shadowrun.replay.finding import Finding

__all__ = ["Pool"]

SUSPICIOUS: Final = 16
"""Calls of one kind after which the target may look off beside the reference: from then on, the oracle is asked."""
CERTAIN: Final = 8
"""Calls with the oracle's answer before the next is called wrong."""
OTHER: Final = 1e-4
"""Relative distance of inputs whose errors have nothing to do with each other, in half of the elements."""
SAMPLE: Final = 64
"""Elements of an input that are kept to tell."""
RECENT: Final = 8
MOST_KINDS: Final = 256


@dataclass(slots=True)
class _Sums:
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
        if self.pp * self.pp < CERTAIN * self.pppp or not self.pp:
            return float("inf")
        b = self.factor
        return float(max(self.ppzz - 2 * b * self.pppz + b * b * self.pppp, 0.0) ** 0.5) / self.pp


@dataclass(slots=True)
class _Kind:
    between: _Sums = field(default_factory=_Sums)
    ours: _Sums = field(default_factory=_Sums)
    theirs: _Sums = field(default_factory=_Sums)
    recent: list[torch.Tensor] = field(default_factory=list)


class Pool:
    """What was seen in the calls of a run."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[object, ...], _Kind] = {}

    def note(self, case: Case, position: int) -> bool:
        """Count one result.

        Returns:
            Whether the results of such calls look off, so that the oracle has to be asked.
        """
        limit = _limit(case, position)
        kind = None if limit is None else self._kind(case, position)
        if limit is None or kind is None:
            return False
        actual, expected = (flat_values(v[position]).to(torch.float64) for v in (case.actual, case.expected))
        size = _size(case)
        if size > 0.0 and _new(kind, case):
            p, z = _pair(actual - expected, expected, size, case, position)
            kind.between.add(p, z)
        return kind.between.n >= SUSPICIOUS and _off(kind.between, limit)

    def verdict(self, case: Case, finding: Finding) -> Verdict | None:
        """Judge a result that passed by itself, among all of its kind.

        Args:
            case: The call; it was noted.
            finding: The result; its `truth` is known.

        Returns:
            A MISMATCH, with `finding.bad` all elements that differ; None where there is nothing to see.
        """
        limit = _limit(case, finding.position)
        kind = None if limit is None else self._kind(case, finding.position)
        if limit is None or kind is None or finding.truth is None or kind.between.n < SUSPICIOUS:
            return None
        truth, size = torch.from_numpy(finding.truth.value), _size(case)
        if not size > 0.0 or not _off(kind.between, limit):
            return None
        for sums, values in ((kind.ours, finding.actual), (kind.theirs, finding.expected)):
            sums.add(*_pair(values.to(torch.float64) - truth, truth, size, case, finding.position))
        one, other = kind.ours, kind.theirs
        if one.n < CERTAIN or not _off(one, limit) or abs(one.factor) <= 2 * abs(other.factor):
            return None
        finding.bad = finding.where
        roundoff = FORMATS[finding.actual.dtype].roundoff
        evidence = (
            f"{finding.name}: {kind.between.n} calls of this kind together are off by a factor of 1 "
            f"{'+' if one.factor > 0 else '-'} {abs(one.factor) * roundoff:.2g}, {abs(one.factor):.2g} units of "
            f"rounding where {limit + DEVIATIONS * one.error:.2g} may be chance; {other.factor:.2g} on the reference"
        )
        return Verdict(Status.MISMATCH, Cause.IMPLEMENTATION, "one factor in many calls", evidence, 0.5)

    def _kind(self, case: Case, position: int) -> _Kind | None:
        key = (op_name(case), position, *((t.dtype, t.shape) for t in tensors(case.args, case.kwargs)))
        if key not in self._kinds and len(self._kinds) >= MOST_KINDS:
            return None
        return self._kinds.setdefault(key, _Kind())


def _limit(case: Case, position: int) -> float | None:
    """Unit roundoffs by which all calls may be off; None for results that tell by themselves, or of other kinds."""
    actual, expected = case.actual[position], case.expected[position]
    if not isinstance(expected, torch.Tensor) or not isinstance(actual, torch.Tensor):
        return None
    if not 0 < expected.numel() < ENOUGH or expected.is_complex() or actual.dtype != expected.dtype:
        return None
    fmt = FORMATS.get(expected.dtype)
    # Over many calls, the errors of a sum are no more of one sign than over many rows.
    return None if fmt is None or fmt.mantissa > 23 else units(case, position, fmt.roundoff, None)


def _off(sums: _Sums, limit: float) -> bool:
    return abs(sums.factor) > limit + DEVIATIONS * sums.error


def _pair(errors: torch.Tensor, result: torch.Tensor, size: float, case: Case, position: int) -> tuple[float, float]:
    """One call's result and the error along it, in units of its size."""
    value = case.expected[position]
    assert isinstance(value, torch.Tensor)
    norm = float(torch.linalg.vector_norm(result))
    if not 0.0 < norm < float("inf") or not bool(torch.isfinite(errors).all()):
        return 0.0, 0.0
    return norm / size, float(torch.dot(errors, result)) / norm / (size * FORMATS[value.dtype].roundoff)


def _first(case: Case) -> torch.Tensor | None:
    first = next((t for t in tensors(case.args, case.kwargs) if t.is_floating_point()), None)
    return None if first is None or first.layout is not torch.strided else first.detach()


def _size(case: Case) -> float:
    first = _first(case)
    if first is None:
        return 0.0
    size = float(torch.linalg.vector_norm(first.to(torch.float32) if first.itemsize < 4 else first))
    return size if size < float("inf") else 0.0


def _new(kind: _Kind, case: Case) -> bool:
    """Whether the call's values are others than those of the calls before."""
    first = _first(case)
    if first is None or not first.is_contiguous():
        return False
    sample = first.view(-1)[:: max(first.numel() // SAMPLE, 1)].to(torch.float64)
    if any(float(((sample - s).abs() > OTHER * s.abs()).to(torch.float64).mean()) < 0.5 for s in kind.recent):
        return False
    kind.recent = [*kind.recent[-RECENT + 1 :], sample]
    return True
