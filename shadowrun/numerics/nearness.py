"""Elements of a float result that are farther from the reference's than a bound, and what all elements are off by.

`shadowrun.native` reads float32 on the CPU once; other results, and those that lie on a device, are compared by torch.
The places are the same in both, since each element is compared in the dtype of the result; the sums differ in their
order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from shadowrun.native import core

__all__ = ["Nearness", "nearness"]

_NO_PLACE = torch.empty(0, dtype=torch.int64)


class Nearness(NamedTuple):
    """How two results lie to each other.

    Attributes:
        far: (k,), int64, ascending: flat indices of the elements that are farther apart than the bound; NaN is.
        factor: By which the first result is greater than the second, less 1, as by least squares; NaN where the second
            one is zero.
        weighted: The same with relative differences, and elements below the root mean square weighted less; 0 where it
            was not asked for, NaN where there is none.
    """

    far: torch.Tensor
    factor: float
    weighted: float


def nearness(
    actual: torch.Tensor, expected: torch.Tensor, relative: float, absolute: float, *, weighted: bool
) -> Nearness:
    """Compare two flat results of one float dtype.

    Args:
        actual: (n,), the target's.
        expected: (n,), the reference's, on the same device.
        relative: Of the bound: the factor of an element's magnitude.
        absolute: Of the bound: what is added to that.
        weighted: Whether to compute the weighted factor.
    """
    found = None if core is None else core.nearness(actual, expected, relative, absolute, weighted)
    if found is None:
        return _by_torch(actual, expected, relative, absolute, weighted=weighted)
    places, gap, size, factor = found
    far = torch.frombuffer(places, dtype=torch.int64) if places else _NO_PLACE
    level = (size / expected.numel()) ** 0.5 if expected.numel() else 0.0
    return Nearness(far, _ratio(gap, size), factor if 0.0 < level < float("inf") or not weighted else float("nan"))


def _by_torch(
    actual: torch.Tensor, expected: torch.Tensor, relative: float, absolute: float, *, weighted: bool
) -> Nearness:
    gap = actual - expected
    excess = gap.abs().sub_(expected.abs().mul_(relative).add_(absolute))
    expected = expected.to(gap.dtype)  # a device that computes in float64 may have returned it
    far = _NO_PLACE
    # Not `all` of a comparison, which takes longer; NaN is within none.
    if excess.numel() and not float(excess.max()) <= 0.0:
        far = (excess <= 0.0).logical_not_().nonzero().flatten()
    size = float(torch.dot(expected, expected))
    factor = _ratio(float(torch.dot(gap, expected)), size)
    if not weighted:
        return Nearness(far, factor, 0.0)
    level = (size / max(expected.numel(), 1)) ** 0.5
    if not 0.0 < level < float("inf"):
        return Nearness(far, factor, float("nan"))
    unit = expected.abs().clamp_min_(level)
    weight = expected / unit
    of_gap = float(torch.dot(torch.div(gap, unit, out=unit), weight))
    return Nearness(far, factor, of_gap / float(torch.dot(weight, weight)))


def _ratio(gap: float, size: float) -> float:
    return gap / size if size > 0.0 else float("nan")
