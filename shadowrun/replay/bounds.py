"""How many units of rounding a correct implementation may be off: the constants of the verdict.

Chosen on 87 pairs of right implementations and 35 faults with one seed (forward and backward operators, other
orders, blocks, formulas and kernels; the table is in `tests/replay/test_judge.py`), then looked at with three further
seeds and on every operator of `op_db` computed in float64 and rounded. Greatest excess of a right implementation /
least excess of a fault, over those further seeds, on 2 CPU cores, torch 2.13:

* short arithmetic: 3 / 64 (Adam with a learning rate 1.001 times too great); bound 16.
* other element-wise float32: 21 (remainder by the quotient) / 731 (one element in a million off by 1e-4); bound 32.
* float32 sums and products: 50 (matrix product term by term, 1024 terms) / 80 (layer norm with another epsilon) and
  880 (positive tf32 products of 1024 terms); bound 32 + sqrt(n). Recursive summation of n positive terms reaches
  0.84 sqrt(n): without the root it would be condemned. Recursive summation of 262144 *equal* terms, whose errors all
  have one sign, reaches 41000 and is condemned; no library sums so.
* 16-bit element-wise: 2.4 (each step rounded); bound 8.
* 16-bit sums and products: 3.5 (attention with rounded probabilities) / 10 (accumulated in 16 bits); bound 4. A
  shorter sum in 16 bits (2.5 to 3.5) is told by its mean square only, and not always: about 1 of 3 seeds passes.

The reference itself reached 128 (weight gradient of a convolution, before perturbation), hence `RATIO`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from shadowrun.numerics.tolerance import absolute_error, accumulates, base_name, is_arithmetic
from shadowrun.replay.finding import Finding, op_name
from shadowrun.replay.oracle import n_terms, tensors
from shadowrun.replay.stages import partial_sums
from shadowrun.replay.undefined import arguments

if TYPE_CHECKING:
    from shadowrun.numerics.excess import Array
    from shadowrun.replay.case import Case

__all__ = [
    "BOUND",
    "COARSE_SUM_BOUND",
    "OUTLIER",
    "RATIO",
    "REFERENCE_RATIO",
    "bound",
    "floor",
    "is_coarse",
    "is_fast_convolution",
    "outlier",
    "sums",
]

BOUND: Final = 32.0
"""Units of rounding within which any implementation is correct, if the operator is none of the kinds below."""
ARITHMETIC_BOUND: Final = 16.0
"""The same for short chains of IEEE operations."""
COARSE_BOUND: Final = 8.0
"""The same for results of 16 and 8 bits: they may be rounded to these a few times on the way."""
COARSE_SUM_BOUND: Final = 4.0
"""The same for 16-bit sums and products, which are accumulated in float32."""
COARSE_SUM_RMS: Final = 1.0
"""And in the root mean square over the result; one rounding to nearest gives 0.4, two 0.6."""
COARSE_SUM_ROOT: Final = 0.25
"""Further units of root mean square for each root of the partial sums that a right kernel may add in 16 bits, and
`ROOT` for the greatest: 9 to 1024 of them, of 1 or 64 terms, reach 0.27 and 0.91 times the root (up to 256 positive
ones: with 1024, additions to a great sum are lost, and nobody should call that right)."""
COARSE_PRODUCT_RMS: Final = 0.6
COARSE_PRODUCT_RATIO: Final = 5.0
"""The same for plain 16-bit products beside the reference's own. Partial sums of 2 to 8 blocks rounded to 16 bits
(split-K) reach 0.40 and 3.3 times the reference with factors of any sign; sums of 512 terms rounded after each 8
reach 0.78 and 6 times (`tests/replay/test_judge.py`). With positive factors `COARSE_SUM_RMS` decides."""
OUTLIER: Final = 2.0
OUTLIER_RATIO: Final = 12.0
"""One element of a 16-bit result may be this many units off (or times the reference's greatest, if that is more than
one rounding), and this many times the median of the elements that are off: the greatest of 10**7 normal deviates is 8
times their median."""
FAST_CONVOLUTION_RMS: Final = 64.0
FAST_CONVOLUTION_PEAK: Final = 60.0
"""A fast convolution (Winograd, FFT) has larger errors, spread like noise: NNPACK's reach a root mean square of 31 and
a peak of 1585, at most 30 times that mean once the spread is known (15 shapes and seeds); tf32 has a mean of 1500,
and one wrong element a peak of 1000 times the mean."""
ROOT: Final = 1.0
"""Further units for each root of the number of terms (Higham & Mary 2019: errors grow as sqrt(n) u)."""
RATIO: Final = 4.0
"""How many times the reference's own greatest excess the target may have."""
REFERENCE_RATIO: Final = 16.0
"""How many bounds the reference must be off before it is called wrong."""


_SPECTRAL: Final = {"_linalg_eigh": 0, "_linalg_svd": 1, "linalg_eig": 0, "linalg_eigvals": 0, "_linalg_eigvals": 0}
"""Operators that give eigenvalues or singular values, and where."""


def bound(case: Case, finding: Finding) -> float:
    """Units of rounding that a correct implementation may be off."""
    assert finding.fmt is not None
    op = op_name(case)
    if finding.fmt.mantissa < 23:
        added = partial_sums(case, finding.position) - 1
        return COARSE_SUM_BOUND + ROOT * float(added**0.5) if sums(op) else COARSE_BOUND
    if accumulates(op):
        return BOUND + ROOT * float(n_terms(case, finding.position) ** 0.5)
    return ARITHMETIC_BOUND if is_arithmetic(op) else BOUND


def sums(op: str) -> bool:
    """Whether a 16-bit result is made of sums: gradients of a loss are a formula on each element."""
    return accumulates(op) and not base_name(op).endswith("loss_backward")


def is_coarse(op: str, actual: float, expected: float, added: int) -> bool:
    """Whether a 16-bit sum was accumulated in 16 bits, by the root mean squares of both sides' excess.

    Args:
        op: The operator.
        actual: Of the target.
        expected: Of the reference.
        added: How many additions a right kernel may round (`stages.partial_sums`, less one).
    """
    # Fused attention keeps its probabilities in 16 bits or not, and its backward has a factor of 2 between the two.
    limit = COARSE_SUM_RMS + COARSE_SUM_ROOT * float(added**0.5)
    if actual > max(limit, (RATIO if "attention" in op else 1.5) * expected):
        return True
    product = base_name(op) in {"mm", "bmm", "addmm", "baddbmm", "mv", "linear", "matmul"}
    return product and actual > max(COARSE_PRODUCT_RMS, COARSE_PRODUCT_RATIO * expected)


def outlier(actual: Array, own: float) -> float:
    """Excess from which an element of a 16-bit result stands out from the rest.

    Args:
        actual: Excess of all elements of the target.
        own: Greatest excess of the reference.
    """
    noisy = actual[actual > 0]
    level = float(np.median(noisy)) if noisy.size else 0.0
    return max(OUTLIER * max(1.0, own), OUTLIER_RATIO * level)


def is_fast_convolution(op: str, finding: Finding) -> bool:
    """Whether a convolution is off like a fast algorithm: everywhere a little, nowhere much more than that."""
    if "convolution" not in op or finding.fmt is None or finding.fmt.mantissa != 23 or finding.excess_actual is None:
        return False
    mean = float(np.sqrt(np.sum(np.square(finding.excess_actual)) / finding.actual.numel()))
    return mean <= FAST_CONVOLUTION_RMS and float(finding.excess_actual.max()) <= FAST_CONVOLUTION_PEAK * mean


def floor(case: Case, finding: Finding) -> Array | float:
    """Absolute error to add to the unit of each differing element (`numerics.tolerance.absolute_error`)."""
    assert finding.fmt is not None
    if finding.position == _SPECTRAL.get(base_name(op_name(case))):
        return _spectral(case, finding)[finding.where]
    result = case.expected[finding.position]
    shape = tuple(result.shape) if isinstance(result, torch.Tensor) else ()
    named = arguments(case)
    grad = named.get("grad_output")
    if base_name(op_name(case)) == "_log_softmax_backward_data":
        return _likelihood(named, finding)[finding.where]
    # A gradient is a factor of the whole result: errors are relative to it, whatever the size of the other inputs.
    grads = [grad] if isinstance(grad, torch.Tensor) else []
    others = [t for t in tensors(case.args, case.kwargs) if t is not grad]
    size, greatest, extent = _magnitudes(others, shape, finding.actual.numel(), least=1.0 if grads else 0.0)
    if grads:
        factor, greatest_factor, further = _magnitudes(grads, shape, finding.actual.numel())
        size, greatest, extent = size * factor, greatest * greatest_factor, max(extent, further)
    error = absolute_error(op_name(case), finding.fmt.roundoff, greatest, size.numpy(), extent)
    return error[finding.where] if isinstance(error, np.ndarray) else float(error)


def _likelihood(named: dict[str, Any], finding: Finding) -> Array:
    """Rounding of ``exp(o) * sum(g)`` in ``g - exp(o) * sum(g)``: near *o* = 0 the terms cancel, however exact *o*."""
    assert finding.fmt is not None
    grad, output = (named[name].detach().cpu().to(torch.float64) for name in ("grad_output", "output"))
    term = output.exp() * grad.sum(named["dim"], keepdim=True)
    error: Array = finding.fmt.roundoff * term.abs().nan_to_num(posinf=0.0).reshape(-1).numpy()
    return error


def _spectral(case: Case, finding: Finding) -> Array:
    """Rounding of a whole matrix for each of its eigenvalues: moving it by u moves them by as much (Weyl)."""
    assert finding.fmt is not None
    matrix = next(tensors(case.args, case.kwargs)).detach()
    norms = torch.linalg.matrix_norm(matrix.abs().to(torch.float64)).nan_to_num(posinf=0.0).reshape(-1)
    error: Array = (
        finding.fmt.roundoff * norms.repeat_interleave(finding.actual.numel() // max(norms.numel(), 1)).numpy()
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
            magnitude = t.detach().to(torch.float64).abs().nan_to_num(posinf=0.0)
            greatest = max(greatest, float(magnitude.max()))
            if t.numel() == n and t.shape == shape:
                size = torch.maximum(size, magnitude.reshape(-1))
    return size, greatest, extent
