"""How many units of rounding a correct implementation may be off: the constants of the verdict.

Chosen on 87 pairs of right implementations and 35 faults with one seed (forward and backward operators, other
orders, blocks, formulas and kernels; the table is in `tests/judge/test_judge.py`), then looked at with three further
seeds and on every operator of `op_db` computed in float64 and rounded. Greatest excess of a right implementation /
least excess of a fault, over those further seeds, on 2 CPU cores, torch 2.13:

* short arithmetic: 3 / 64 (Adam with a learning rate 1.001 times too great); bound 16.
* other element-wise float32: 21 (remainder by the quotient) / 731 (one element in a million off by 1e-4); bound 32.
* float32 sums and products: 50 (matrix product term by term, 1024 terms) / 80 (layer norm with another epsilon) and
  880 (positive tf32 products of 1024 terms); bound 32 + sqrt(n). Recursive summation of n positive terms reaches
  0.84 sqrt(n): without the root it would be a mismatch. Recursive summation of 262144 *equal* terms, whose errors all
  have one sign, reaches 41000 and is a mismatch; no library sums so.
* 16-bit element-wise: 2.4 (each step rounded); bound 8.
* 16-bit sums and products: 3.5 (attention with rounded probabilities) / 10 (accumulated in 16 bits); bound 4. A
  shorter sum in 16 bits (2.5 to 3.5) shows in its mean square only, and not always: about 1 of 3 seeds passes.

The reference itself reached 128 (weight gradient of a convolution, before perturbation), hence `RATIO`.

Also here: how many intermediate roundings a right 16-bit kernel may make (`partial_sums`), and errors that are absolute
(`floor`).
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from shadowrun.judge.oracle import n_terms
from shadowrun.judge.rounding.rounding_bounds import (
    FAST_CONVOLUTION_PEAK,
    FAST_CONVOLUTION_RMS,
    FULL_MANTISSA,
    is_made_of_sums,
    rounding_bound,
)
from shadowrun.operators.case import tensors
from shadowrun.operators.facts import absolute_error, ulp_bound

if TYPE_CHECKING:
    from shadowrun.judge.result_diff import ResultDiff
    from shadowrun.numerics.excess import Array
    from shadowrun.operators.case import Case
    from shadowrun.operators.facts import OpFacts

__all__ = [
    "OUTLIER",
    "RATIO",
    "REFERENCE_RATIO",
    "bound",
    "floor",
    "has_one_stage",
    "is_coarse",
    "is_fast_convolution",
    "outlier",
    "partial_sums",
]


def has_one_stage(case: Case) -> bool:
    """Whether the operator is one sum or one short formula, so that nothing but its result has to be rounded.

    Kernels of several stages (attention, convolutions by col2im or Winograd, gradients of norms and losses) keep what
    lies between these in float32 or in the dtype of their tensors. No change of the inputs shows what that does to an
    element where it cancels, so no element can stand out there.
    """
    row = case.facts
    if row.accumulates:
        return row.one_stage
    return row.arithmetic or ulp_bound(case.op, [torch.float32]) is not None


def partial_sums(case: Case, position: int) -> int:
    """How many partial sums may be added up in the memory of a 16-bit result, each addition rounded; 1: none is.

    * torch's own transposed convolutions, and the gradients of others, add a product for each element of the kernel
      (col2im); gradients of the weight add one for each sample.
    * Its gradients of the weight and bias of a norm add one for each row, in a buffer of their dtype.
    * What is added at an index is added in memory, by an atomic operation on accelerators.
    """
    row, named = case.facts, case.arguments()
    # torch's own kernels do this (col2im), so a mismatch here would blame correct code.
    if row.convolution:
        return _of_convolution(row, named, position)
    # Position 0 is the gradient of the input, which has no sum over rows.
    if row.norm_gradient and position > 0:
        return _elements(named.get("input", named.get("X"))) // max(_elements(case.expected[position]), 1)
    return _equal_indices(named[row.adds_at]) if row.adds_at else 1


def _equal_indices(given: object) -> int:
    """How often an index is met at most; for indices of several dimensions, in the one with the least of that."""
    several = [t for t in (given if isinstance(given, (list, tuple)) else [given]) if isinstance(t, torch.Tensor)]
    if any(t.dtype in (torch.bool, torch.uint8) for t in several):
        return 1  # A mask meets each element once.
    counts = [np.unique(t.detach().numpy(), return_counts=True)[1] for t in several if t.numel()]
    return min((int(c.max()) for c in counts), default=1)


def _of_convolution(row: OpFacts, named: dict[str, object], position: int) -> int:
    weight, x = named.get("weight"), named.get("input")
    if not isinstance(weight, torch.Tensor) or not isinstance(x, torch.Tensor):
        return 1
    if row.backward and position > 0:
        return x.shape[0] if position == 1 else 1
    transposed = bool(named.get("transposed")) or row.transposed
    return prod(weight.shape[2:]) if row.backward != transposed else 1


def _elements(value: object) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else 0


COARSE_SUM_RMS: Final = 1.0
"""And in the root mean square over the result; one rounding to nearest gives 0.4, two 0.6."""
COARSE_SUM_ROOT: Final = 0.25
"""Further units of root mean square for each root of the partial sums that a right kernel may add in 16 bits, and
`ROOT` for the greatest: 9 to 1024 of them, of 1 or 64 terms, reach 0.27 and 0.91 times the root (up to 256 positive
ones: with 1024, additions to a great sum are lost, which no library should do)."""
COARSE_PRODUCT_RMS: Final = 0.6
COARSE_PRODUCT_RATIO: Final = 5.0
"""The same for plain 16-bit products, against the reference's own. Partial sums of 2 to 8 blocks rounded to 16 bits
(split-K) reach 0.40 and 3.3 times the reference with factors of any sign; sums of 512 terms rounded after each 8
reach 0.78 and 6 times (`tests/judge/test_judge.py`). With positive factors `COARSE_SUM_RMS` decides."""
OUTLIER: Final = 2.0
OUTLIER_RATIO: Final = 12.0
"""One element of a 16-bit result may be this many units off (or times the reference's greatest, if that is more than
one rounding), and this many times the median of the elements that are off: the greatest of 10**7 normal deviates is 8
times their median."""
RATIO: Final = 4.0
"""How many times the reference's own greatest excess the target may have."""
REFERENCE_RATIO: Final = 16.0
"""How many bounds the reference must be off before it is called wrong."""


def bound(case: Case, result_diff: ResultDiff) -> float:
    """Units of rounding that a correct implementation may be off."""
    assert result_diff.fmt is not None
    row = case.facts
    mantissa, position = result_diff.fmt.mantissa, result_diff.position
    if mantissa < FULL_MANTISSA:
        return rounding_bound(row, mantissa, n_partial_sums=partial_sums(case, position) if is_made_of_sums(row) else 1)
    return rounding_bound(row, mantissa, n_terms=n_terms(case, position) if row.accumulates else 1.0)


def limit(bound: float, excess_expected: Array, ratio: float = RATIO) -> float:
    """Units of rounding that the target may be off: the bound, or what the reference itself is off by `ratio`."""
    # A reference that is itself far off shows an ill-conditioned call, which the spread may understate.
    return max(bound, ratio * float(excess_expected[np.isfinite(excess_expected)].max(initial=0.0)))


def is_coarse(row: OpFacts, actual: float, expected: float, added: int) -> bool:
    """Whether a 16-bit sum was accumulated in 16 bits, by the root mean squares of both sides' excess.

    Args:
        row: Of the operator.
        actual: Of the target.
        expected: Of the reference.
        added: How many additions a right kernel may round (`partial_sums`, less one).
    """
    # Fused attention keeps its probabilities in 16 bits or not, and its backward has a factor of 2 between the two.
    limit = COARSE_SUM_RMS + COARSE_SUM_ROOT * float(added**0.5)
    if actual > max(limit, (RATIO if row.attention else 1.5) * expected):
        return True
    # Split-K with partial sums in 16 bits is allowed, and reaches 0.40 and 3.3 times the reference.
    return row.plain_product and actual > max(COARSE_PRODUCT_RMS, COARSE_PRODUCT_RATIO * expected)


def outlier(actual: Array, own: float) -> float:
    """Excess from which an element of a 16-bit result stands out from the rest.

    Args:
        actual: Excess of all elements of the target.
        own: Greatest excess of the reference.
    """
    # The median of all elements would be 0 where most are equal, and then any rounding would stand out.
    noisy = actual[actual > 0]
    level = float(np.median(noisy)) if noisy.size else 0.0
    return max(OUTLIER * max(1.0, own), OUTLIER_RATIO * level)


def is_fast_convolution(row: OpFacts, result_diff: ResultDiff) -> bool:
    """Whether a convolution has the noise of a fast algorithm: everywhere a little, nowhere much more."""
    if (
        not row.fast_convolution
        or result_diff.fmt is None
        or result_diff.fmt.mantissa != 23
        or result_diff.excess_actual is None
    ):
        return False
    # Over all elements, equal ones included: the share of wrong elements distinguishes a fast algorithm from one wrong
    # tile.
    mean = float(np.sqrt(np.sum(np.square(result_diff.excess_actual)) / result_diff.actual.numel()))
    return mean <= FAST_CONVOLUTION_RMS and float(result_diff.excess_actual.max()) <= FAST_CONVOLUTION_PEAK * mean


def floor(case: Case, result_diff: ResultDiff) -> Array | float:
    """Absolute error to add to the unit of each differing element (`operators.facts.absolute_error`)."""
    assert result_diff.fmt is not None
    row = case.facts
    if result_diff.position == row.spectrum:
        return _spectral(case, result_diff)[result_diff.where]
    result = case.expected[result_diff.position]
    shape = tuple(result.shape) if isinstance(result, torch.Tensor) else ()
    named = case.arguments()
    grad = named.get("grad_output")
    # No change of the output near 0 shows the error of this difference, so it is computed here.
    if row.log_likelihood_gradient:
        return _likelihood(named, result_diff)[result_diff.where]
    # A gradient is a factor of the whole result: errors are relative to it, whatever the size of the other inputs.
    grads = [grad] if isinstance(grad, torch.Tensor) else []
    others = [t for t in tensors(case.args, case.kwargs) if t is not grad]
    size, greatest, extent = _magnitudes(others, shape, result_diff.actual.numel(), least=1.0 if grads else 0.0)
    if grads:
        factor, greatest_factor, further = _magnitudes(grads, shape, result_diff.actual.numel())
        size, greatest, extent = size * factor, greatest * greatest_factor, max(extent, further)
    error = absolute_error(case.op, result_diff.fmt.roundoff, greatest, size.numpy(), extent)
    return error[result_diff.where] if isinstance(error, np.ndarray) else float(error)


def _likelihood(named: dict[str, Any], result_diff: ResultDiff) -> Array:
    """Rounding of ``exp(o) * sum(g)`` in ``g - exp(o) * sum(g)``: near *o* = 0 the terms cancel, however exact *o*."""
    assert result_diff.fmt is not None
    grad, output = (named[name].detach().cpu().to(torch.float64) for name in ("grad_output", "output"))
    term = output.exp() * grad.sum(named["dim"], keepdim=True)
    error: Array = result_diff.fmt.roundoff * term.abs().nan_to_num(posinf=0.0).reshape(-1).numpy()
    return error


def _spectral(case: Case, result_diff: ResultDiff) -> Array:
    """Rounding of a whole matrix for each of its eigenvalues: moving it by u moves them by as much (Weyl)."""
    assert result_diff.fmt is not None
    matrix = next(tensors(case.args, case.kwargs)).detach()
    # An infinite matrix adds nothing: an infinite floor would accept any result.
    norms = torch.linalg.matrix_norm(matrix.abs().to(torch.float64)).nan_to_num(posinf=0.0).reshape(-1)
    error: Array = (
        result_diff.fmt.roundoff * norms.repeat_interleave(result_diff.actual.numel() // max(norms.numel(), 1)).numpy()
    )
    return error


def _magnitudes(
    inputs: list[torch.Tensor], shape: tuple[int, ...], n: int, least: float = 0.0
) -> tuple[torch.Tensor, float, int]:
    """Greatest magnitude at each element of the result and of all, not below `least`; greatest spatial size."""
    size = torch.full((n,), least, dtype=torch.float64)
    greatest, extent = least, max((1, *shape[-2:]))
    for t in inputs:
        extent = max((extent, *t.shape[-2:]))
        if t.is_floating_point() and t.numel() and t.layout == torch.strided:
            magnitude = t.detach().to(torch.float64).abs().nan_to_num_(posinf=0.0)
            greatest = max(greatest, float(magnitude.max()))
            # A broadcast input has no element for each element of the result; it counts by its greatest only.
            if t.numel() == n and t.shape == shape:
                size = torch.maximum(size, magnitude.reshape(-1))
    return size, greatest, extent
