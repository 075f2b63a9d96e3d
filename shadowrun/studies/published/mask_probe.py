"""Masks that make a kernel show the order in which it adds.

Summand i is +M, summand j is -M, and the others are ones, where M is so large that M + 1 rounds to M. A one that is
added before M and -M have met is lost; a one that is added afterwards counts. The result is the number of summands
outside the smallest subtree that has both i and j (the method of FPRev, arXiv 2411.00442; this is own code).

The result has to count exactly and M has to swallow ones, for each dtype in its own way:

- float16 ends at 65504, and sums of it may be kept in float32: M is 2^15 and the "one" is 2^-14, its smallest normal
  number, which no mode flushes. Only 16 ones at a time are put in, the others are zeros, so that they stay below the
  rounding of M in float32; the counts are added up.
- bfloat16 counts exactly to 256 only: 128 ones at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shadowrun.studies.published.summation_tree import Contradiction, SummationTree, build_tree

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    Counts = npt.NDArray[np.int32]
    Floats = npt.NDArray[np.floating]

__all__ = ["DTYPES", "MaskProbe", "NoOrder", "Order", "SumKernel", "confirm", "orders"]

MAX_CALLS = 50_000
"""Calls for one kernel: a sum from the last summand to the first needs n (n - 1) / 2."""
MAX_TREES = 8
"""Different orders among the elements of one result; a transform such as Winograd's may give each element its own."""
TRIALS = 8
"""Random inputs that a tree must reproduce bit for bit."""


class NoOrder(Exception):  # noqa: N818 - a result of the experiment, not a failure of the program
    """The method does not work for this kernel; the text is the reason."""


@dataclass(frozen=True, slots=True)
class _Mask:
    """Values of a mask: M, the unit that stands for one, and how many units may be put in at a time."""

    big: float
    unit: float
    at_once: int


# M occurs once with each sign, so that it may be near the greatest number: no partial sum exceeds it.
_MASKS = {
    torch.float64: _Mask(2.0**1000, 1.0, 1 << 20),
    torch.float32: _Mask(2.0**120, 1.0, 1 << 20),
    torch.bfloat16: _Mask(2.0**120, 1.0, 128),
    torch.float16: _Mask(2.0**15, 2.0**-14, 16),
}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _MASKS}
"""Dtypes that have masks, by name."""


@dataclass(frozen=True, slots=True)
class SumKernel:
    """An operator that adds, with inputs of a shape.

    Attributes:
        name: ``mm``.
        operator: Name of the overload: ``aten::mm``.
        shape: Its sizes, as `--shape` takes them.
        n: Number of summands of each element of its result.
        inputs: Its arguments from the summands, (n,): every element of the result is their sum.
    """

    name: str
    operator: torch._ops.OpOverload
    shape: tuple[int, ...]
    n: int
    inputs: Callable[[torch.Tensor], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Order:
    """The order that some elements of a result share.

    Attributes:
        tree: The order; None where the method cannot determine it.
        reason: Why not; empty with a tree.
        outputs: Flat positions of the elements.
        accumulator: Dtype in which the tree reproduces the kernel's result on random inputs, bit for bit; empty if none
            does.
    """

    tree: SummationTree | None
    reason: str
    outputs: tuple[int, ...]
    accumulator: str = ""


class MaskProbe:
    """Asks a kernel for the sizes of its subtrees.

    Args:
        kernel: The operator and its inputs.
        dtype: Of the inputs, one of `DTYPES`.
        run: Runs the operator on a platform, and returns its result on the CPU.

    Attributes:
        n_calls: Calls so far.
    """

    def __init__(self, kernel: SumKernel, dtype: torch.dtype, run: Callable[[tuple[Any, ...]], torch.Tensor]) -> None:
        self.kernel, self.dtype = kernel, dtype
        self.n_calls = 0
        self._mask = _MASKS[dtype]
        self._run = run
        self._known: dict[tuple[int, int], Counts] = {}

    def result(self, summands: torch.Tensor) -> Floats:
        """Each element of the kernel's result: (n_outputs,) float64.

        Args:
            summands: (n,), in the probe's dtype.
        """
        self.n_calls += 1
        return self._run(self.kernel.inputs(summands)).reshape(-1).double().numpy()

    def check_units(self) -> None:
        """Check that ones alone are counted.

        Raises:
            NoOrder: They are not.
        """
        n = min(self.kernel.n, self._mask.at_once)
        summands = torch.zeros(self.kernel.n, dtype=self.dtype)
        summands[:n] = self._mask.unit
        if not np.all(self.result(summands) == n * self._mask.unit):
            raise NoOrder("a sum of ones is not their number: units are flushed to zero, or inputs are transformed")

    def sizes(self, i: int, j: int) -> Counts:
        """Leaves below the lowest common ancestor of two summands, for each element of the result.

        Raises:
            NoOrder: A result is no count, or too many calls are needed.
        """
        if (i, j) not in self._known:
            # Kept for all elements of the result: an element with another order asks for the same pairs again.
            self._known[i, j] = self.kernel.n - self._outside(i, j)
        return self._known[i, j]

    def _outside(self, i: int, j: int) -> Counts:
        mask = self._mask
        ones = [k for k in range(self.kernel.n) if k not in (i, j)]
        total: Counts | int = 0
        for start in range(0, max(1, len(ones)), mask.at_once):
            if self.n_calls >= MAX_CALLS:
                raise NoOrder(f"more than {MAX_CALLS:,} calls are needed")
            summands = torch.zeros(self.kernel.n, dtype=self.dtype)
            part = ones[start : start + mask.at_once]
            summands[part] = mask.unit
            summands[i], summands[j] = mask.big, -mask.big
            counted = self.result(summands) / mask.unit
            if not np.all(np.isfinite(counted)):
                raise NoOrder("the masks overflow inside the kernel: it transforms its inputs")
            # Both tests before a tree is built: a kernel that transforms its inputs would have a tree that means
            # nothing.
            if not np.all((counted == np.floor(counted)) & (counted >= 0) & (counted <= len(part))):
                raise NoOrder("the result is no count: M and -M do not cancel, as in Winograd's or an FFT's sums")
            total = total + counted.astype(np.int32)
        assert not isinstance(total, int)
        return total


def orders(probe: MaskProbe) -> list[Order]:
    """The orders in which a kernel adds: elements of its result that share one are one item.

    Elements are distinguished by the sizes that building a tree asks for: these determine the tree.
    """
    n = probe.kernel.n
    try:
        probe.check_units()
        n_outputs = len(probe.sizes(0, 1)) if n > 1 else len(probe.result(torch.ones(1, dtype=probe.dtype)))
    except NoOrder as why:
        return [Order(None, str(why), ())]
    left = np.ones(n_outputs, bool)
    found: list[Order] = []
    while left.any():
        if len(found) == MAX_TREES:
            return [
                *found,
                Order(None, f"not examined: over {MAX_TREES} different orders", tuple(np.flatnonzero(left).tolist())),
            ]
        element = int(np.argmax(left))
        same = left.copy()

        # Defaults bind the values of this round: a closure would see those of the next.
        def size(i: int, j: int, element: int = element, same: npt.NDArray[np.bool_] = same) -> int:
            sizes = probe.sizes(i, j)
            same &= sizes == sizes[element]
            return int(sizes[element])

        tree, reason = None, ""
        try:
            tree = build_tree(n, size) if n > 1 else SummationTree(1, ())
        except Contradiction as contradiction:
            reason = _why_not(probe, element, str(contradiction))
        except NoOrder as unable:
            reason = str(unable)
        left &= ~same
        accumulator = confirm(probe, tree, element) if tree is not None else ""
        found.append(Order(tree, reason, tuple(np.flatnonzero(same).tolist()), accumulator))
    return found


def _why_not(probe: MaskProbe, element: int, why: str) -> str:
    n = probe.kernel.n
    if n > 3 and all(int(probe.sizes(0, j)[element]) == 2 for j in range(1, n)):
        return "M swallows no one: the accumulator is wider than the masks reach, or the sum is exact"
    return f"the counts are those of no tree: {why}"


def confirm(probe: MaskProbe, tree: SummationTree, element: int) -> str:
    """The dtype in which a tree reproduces the kernel's results on random inputs, bit for bit; empty if none does.

    The masks alone do not see a compensated sum, or partial sums that are rounded to another dtype in between.
    """
    if tree.widest > 2 or tree.n_leaves < 2:
        return ""
    summands = _cancelling(tree.n_leaves, probe.dtype)
    results = np.array([probe.result(torch.from_numpy(row).to(probe.dtype))[element] for row in summands])
    own = str(probe.dtype).removeprefix("torch.")
    # A kernel may accumulate in a wider dtype; the narrowest that reproduces it is the answer.
    for name in (own, *(wider for wider in ("float32", "float64") if _BITS[wider] > _BITS[own])):
        sums = _ROUNDING[own](tree.evaluate(summands, _ROUNDING[name]))
        if np.array_equal(sums.astype(np.float64), results):
            return name
    return ""


# Significant bits.
_BITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}


def _cancelling(n: int, dtype: torch.dtype) -> Floats:
    """Random summands whose exact sum is 0, so that a result is rounding error only: (TRIALS, n) float64."""
    # Seeded by n: two platforms are confirmed on the same summands.
    rng = np.random.default_rng(n)
    # Wide exponents: narrow ones would add without any rounding in a wider accumulator.
    low, high = (-12, 9) if dtype is torch.float16 else (-20, 20)
    half = rng.standard_normal((TRIALS, n // 2)) * 2.0 ** rng.integers(low, high, (TRIALS, n // 2))
    values = torch.from_numpy(half).to(dtype).double().numpy()
    both = np.concatenate((values, -values, np.zeros((TRIALS, n % 2))), axis=1)
    return rng.permuted(both, axis=1)


def _to_bfloat16(values: Floats) -> Floats:
    # As torch's kernels do it: the addition is one of float32, which is rounded.
    return torch.from_numpy(values.astype(np.float32)).bfloat16().float().numpy()


_ROUNDING: dict[str, Callable[[Floats], Floats]] = {
    "float64": lambda values: values.astype(np.float64),
    "float32": lambda values: values.astype(np.float32),
    # The sum of two float16 is exact in float64: one rounding.
    "float16": lambda values: values.astype(np.float16).astype(np.float64),
    "bfloat16": _to_bfloat16,
}
