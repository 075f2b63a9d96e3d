"""Seven rules that say whether two results differ, applied to the same results.

The share of variants that differ depends on the rule more than on the platforms, so a report has all of them side by
side. Each takes the results of the whole program: actual of the target, expected of the reference, and, where there is
one, the same in float64.

=================  ==================================================================================================
rule               two results differ if
=================  ==================================================================================================
``bitwise``        any bit differs
``shadowrun``      the judge condemns any operator of the program, from the same inputs of that operator
``allclose 1e-4``  ``torch.allclose`` fails with rtol = atol = 1e-4 (NaN equal)
``nnsmith``        the same with rtol = 1e-2, atol = 1e-3, NNSmith's defaults
``dynamo``         ``torch._dynamo.utils.same`` fails with its default tol = 1e-4: allclose, else the root mean square
                   distance to float64 is over 2 to 3 times the reference's, plus tol / 10
``backendbench``   ``torch.testing.assert_close`` fails with rtol = atol = 1e-2 (NaN equal)
``torchfuzz``      the sums of all elements differ by more than 1.0 and by more than 5 %
=================  ==================================================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from shadowrun.numerics.bits import Uncomparable, bits_equal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["FIRED", "ORACLES", "RULES", "differing", "from_mask", "to_mask"]

FIRED: Final = "an operator's bits"
"""Whether any operator returned other bits than the reference from the same inputs: on a simulated device, whose right
kernels are the CPU's, this says that a planted flaw had an effect. No oracle: it takes one pass over all operators."""
ORACLES: Final = ("bitwise", "shadowrun", "allclose 1e-4", "nnsmith", "dynamo", "backendbench", "torchfuzz")


RULES: Final = {
    "bitwise": "any bit differs",
    "shadowrun": "the judge condemns an operator, from the same inputs of that operator",
    "allclose 1e-4": "torch.allclose fails with rtol = atol = 1e-4",
    "nnsmith": "torch.allclose fails with rtol = 1e-2, atol = 1e-3",
    "dynamo": "torch._dynamo.utils.same fails with tol = 1e-4",
    "backendbench": "torch.testing.assert_close fails with rtol = atol = 1e-2",
    "torchfuzz": "the sums of all elements differ by more than 1.0 and by more than 5 %",
}
"""When two results differ by each oracle, for reports."""


def differing(
    actual: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    exact: Callable[[], Sequence[torch.Tensor] | None],
    *,
    condemned: bool,
) -> frozenset[str]:
    """The rules by which two results of a program differ.

    Args:
        actual: Results of the target, on the CPU.
        expected: Results of the reference, likewise.
        exact: Makes the same in float64, where the program runs in it; called only where results differ.
        condemned: Whether the judge condemned an operator.

    Returns:
        Names among `ORACLES`.
    """
    names = {"shadowrun"} if condemned else set()
    if [(t.shape, t.dtype) for t in actual] != [(t.shape, t.dtype) for t in expected]:
        # Another shape or dtype: each rule raises or says that they differ.
        return frozenset({*ORACLES} - {"shadowrun"} | names)
    if _same_bits(actual, expected):
        return frozenset(names)  # by no rule do equal bits differ
    from shadowrun.compiled.torchcompile import same_for_dynamo  # imports Dynamo, which takes a second

    names.add("bitwise")
    pairs = list(zip(actual, expected, strict=True))
    if not all(_close(a, e, 1e-4, 1e-4) for a, e in pairs):
        names.add("allclose 1e-4")
    if not all(_close(a, e, 1e-2, 1e-3) for a, e in pairs):
        names.add("nnsmith")
    if not all(_close(a, e, 1e-2, 1e-2) for a, e in pairs):
        names.add("backendbench")
    # Computed only here: float64 takes another run of the program, and most variants have equal bits.
    truths = exact()
    if truths is None or len(truths) != len(expected):
        truths = expected
    if not all(same_for_dynamo(e, a, t) for (a, e), t in zip(pairs, truths, strict=True)):
        names.add("dynamo")
    if _sums_differ(actual, expected):
        names.add("torchfuzz")
    return frozenset(names)


def to_mask(names: frozenset[str]) -> int:
    """The rules as bits, in the order of `ORACLES`; `FIRED` is the last."""
    return sum(1 << k for k, name in enumerate((*ORACLES, FIRED)) if name in names)


def from_mask(mask: int) -> frozenset[str]:
    """The inverse of `to_mask`."""
    return frozenset(name for k, name in enumerate((*ORACLES, FIRED)) if mask >> k & 1)


def _same_bits(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    try:
        return all(map(bits_equal, actual, expected))
    except Uncomparable:
        return all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def _close(actual: torch.Tensor, expected: torch.Tensor, rtol: float, atol: float) -> bool:
    return torch.allclose(_plain(actual), _plain(expected), rtol=rtol, atol=atol, equal_nan=True)


def _plain(t: torch.Tensor) -> torch.Tensor:
    """A dtype in which torch can subtract."""
    if t.is_complex():
        return t.to(torch.complex128)
    # A difference in float16 would overflow, and one of unsigned integers would wrap.
    return t.to(torch.float64) if t.is_floating_point() else t.to(torch.int64)


def _sums_differ(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """The rule of torchfuzz (`tools/experimental/torchfuzz/checks.py`): of the sum over all results."""
    a, e = (sum((_total(t) for t in tensors), 0.0) for tensors in (actual, expected))
    difference = abs(a - e)
    # NaN: comparisons are false, as they are there.
    return difference > 1.0 and difference > 0.05 * abs(e)


def _total(t: torch.Tensor) -> float:
    if t.is_complex():
        t = torch.view_as_real(t.resolve_conj())
    return float(t.sum(dtype=torch.float64))
