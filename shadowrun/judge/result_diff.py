"""One result of a judged call: its elements that differ, and their excess in units of rounding."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from shadowrun.numerics.elements import differing, plain
from shadowrun.numerics.excess import PART, Array, Truth, excess
from shadowrun.numerics.form import as_tensor
from shadowrun.numerics.precision import FORMATS, FloatFormat

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shadowrun.operators.case import Case, Value

__all__ = ["ResultDiff", "diff_results", "flat_values", "values_at"]

Indices = npt.NDArray[np.intp]


@dataclass(slots=True)
class ResultDiff:
    """One result, with the elements that differ.

    Attributes:
        position: Which result of the case.
        name: Its name.
        actual, expected: All elements, flat plain tensors of the result's (real) dtype.
        fmt: The float format, None for integers and bools.
        where: Indices of elements that differ in more than a NaN payload or an undefined sign of zero.
        zero_signs: Among them, those that differ in the sign of a zero only.
        classes: Among them, those with NaN or an infinity on one side only.
        bad: Indices of the elements that rounding does not explain.
        excess_actual, excess_expected: For `where`; None if the oracle was not run.
        floor: Absolute error, added to the unit.
        truth: The float64 result of the oracle, with spread.
        limit: Greatest excess that is still rounding.
        scales: A term is multiplied before it is added: one that underflows may leave either zero, by a fused
            multiplication and addition or without.
        exact: The operator rounds nothing: any other bit is wrong.
    """

    position: int
    name: str
    actual: torch.Tensor
    expected: torch.Tensor
    fmt: FloatFormat | None
    where: Indices
    zero_signs: npt.NDArray[np.bool_]
    classes: npt.NDArray[np.bool_]
    bad: Indices = field(default_factory=lambda: np.empty(0, np.intp))
    excess_actual: Array | None = None
    excess_expected: Array | None = None
    floor: Array | float = 0.0
    truth: Truth | None = None
    limit: float = 0.0
    scales: bool = False
    exact: bool = False

    def differing_values(self, values: torch.Tensor) -> Array:
        """The differing elements of a flat tensor, as float64."""
        return values_at(values, self.where).to(torch.float64).numpy()

    def measure(self) -> None:
        """Fill in the excess of both sides."""
        assert self.truth is not None
        assert self.fmt is not None
        self.excess_actual = self._excess(self.differing_values(self.actual))
        self.excess_expected = self._excess(self.differing_values(self.expected))

    def _excess(self, values: Array) -> Array:
        assert self.truth is not None
        assert self.fmt is not None
        found = excess(values, self.truth, self.fmt, self.where, self.floor)
        if self.zero_signs.any():
            # The sign of a zero is that of the truth, also where the truth only underflowed.
            truth = self.truth.value[self.where]
            wrong = np.signbit(values) != np.signbit(truth)
            if self.scales:
                wrong &= truth == 0
            found[self.zero_signs & wrong & ~self.truth.flips[self.where]] = np.inf
        return found

    def residual(self, alternative: torch.Tensor, *, only_bad: bool = True, most: float = np.inf) -> float:
        """Greatest distance of the target from an alternative truth, in units of rounding; infinite across classes.

        Args:
            alternative: What a hypothesis predicts, flat, all elements.
            only_bad: Look at the mismatched elements, else at all that differ.
            most: Beyond it, any distance will do: the rest is not looked at.
        """
        greatest = 0.0
        for distances in self._distances(alternative, self.bad if only_bad else self.where):
            greatest = max(greatest, float(distances.max()))
            if greatest > most:
                break
        return greatest

    def remaining_error(self, alternative: torch.Tensor) -> float:
        """Share of the root mean square distance from the truth that remains from an alternative, over all elements.

        Args:
            alternative: What a hypothesis predicts, flat, all elements.
        """
        everywhere = np.arange(self.actual.numel())
        truth = self.expected if self.truth is None else torch.from_numpy(self.truth.value)
        with np.errstate(all="ignore"):
            # The neighbour of infinity is a number: one class for another counts as much as all digits do.
            most = 1.0 / np.finfo(np.float64).eps
            to_alternative, to_truth = (
                np.minimum(np.concatenate([*self._distances(t, everywhere)]), most) for t in (alternative, truth)
            )
            # What overflows in the dtype and not in float64 is as far from both: it decides nothing.
            apart = (to_alternative < most) | (to_truth < most)
            apart[self.where] = True
            before, after = (float(np.sqrt(np.mean(np.square(d[apart])))) for d in (to_truth, to_alternative))
        return after / before if before > 0.0 else np.inf

    def _distances(self, alternative: torch.Tensor, where: Indices) -> Iterator[Array]:
        """Distances of the target from an alternative truth, some elements at a time."""
        floor = self.floor
        if isinstance(floor, np.ndarray):
            known = np.zeros(self.actual.numel())
            known[self.where] = floor
            floor = known
        is_whole = where.size == self.actual.numel()  # indices ascend
        for start in range(0, where.size, PART):
            part = slice(start, start + PART) if is_whole else where[start : start + PART]
            yield self._part(alternative, part, floor[part] if isinstance(floor, np.ndarray) else floor)

    def _part(self, alternative: torch.Tensor, part: slice | Indices, floor: Array | float) -> Array:
        index = part if isinstance(part, slice) else torch.from_numpy(part)
        a, h = _wide(self.actual[index]), _wide(alternative[index])
        if self.fmt is None:
            return np.where(a == h, 0.0, np.inf)
        # The spread of the truth stands for that of the alternative: the inputs condition both alike.
        spread: Array | float = 0.0 if self.truth is None else self.truth.spread[part]
        with np.errstate(all="ignore"):
            distance: Array = np.abs(a - h) / (spread + self.fmt.roundoff * np.abs(h) + self.fmt.smallest + floor)
            if np.isfinite(distance.max()):  # so is each of them, and what is equal is at 0
                return distance
        distance[(a == h) | (np.isnan(a) & np.isnan(h))] = 0.0
        return np.nan_to_num(distance, nan=np.inf)

    @property
    def has_only_classes(self) -> bool:
        """Whether all mismatched elements are NaN or infinite on one side only, or zeros of other sign."""
        if self.fmt is None or not self.bad.size:
            return False
        return bool(np.isin(self.bad, self.where[self.classes | self.zero_signs]).all())

    @property
    def tolerance(self) -> float:
        """Residual up to which a hypothesis explains the target; a few units for exact operators."""
        return max(self.limit, 4.0)


def flat_values(value: Value) -> torch.Tensor:
    """All elements of a result in index order, real: complex ones by components."""
    assert value is not None
    return plain(as_tensor(value)).reshape(-1)


def values_at(values: torch.Tensor, where: Indices) -> torch.Tensor:
    """Elements of a flat tensor at ascending indices; the tensor itself where these are all."""
    return values if where.size == values.numel() else values[torch.from_numpy(where)]


def diff_results(case: Case, position: int, n_different: int) -> ResultDiff:
    """Collect the elements of one result that differ, as many as `diff` counted; the forms must be the same.

    Raises:
        Uncomparable: If torch cannot give the values.
    """
    actual, expected = flat_values(case.actual[position]), flat_values(case.expected[position])
    # Saved statistics may be in another precision on one side; float64 holds both exactly.
    if actual.dtype != expected.dtype:
        actual, expected = actual.to(torch.float64), expected.to(torch.float64)
    fmt = FORMATS.get(actual.dtype)
    if fmt is None:
        where = np.flatnonzero(actual.numpy() != expected.numpy())
        nothing = np.zeros(where.size, bool)
        return ResultDiff(position, case.names[position], actual, expected, None, where, nothing, nothing)
    where, zeros, classes, nans = differing(actual, expected, fmt, n_different)
    # A sum may start from either zero, and of +0 and -0 a maximum is either.
    leave_out = nans if case.facts.keeps_zero_sign else nans | zeros
    if leave_out.any():
        keep = ~leave_out
        where, zeros, classes = where[keep], zeros[keep], classes[keep]
    scales = bool(zeros.any()) and case.facts.arithmetic and case.arguments().get("alpha", 1) not in (1, -1)
    return ResultDiff(position, case.names[position], actual, expected, fmt, where, zeros, classes, scales=scales)


def _wide(values: torch.Tensor) -> npt.NDArray[Any]:
    return values.to(torch.float64).numpy()
