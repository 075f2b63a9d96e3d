"""How many units of rounding a correct implementation may be off: the constants of the verdict.

MEASURED
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from shadowrun.numerics.tolerance import absolute_error, accumulates, is_arithmetic
from shadowrun.replay.finding import Finding, op_name
from shadowrun.replay.oracle import n_terms, tensors

if TYPE_CHECKING:
    from shadowrun.numerics.excess import Array
    from shadowrun.replay.case import Case

__all__ = ["BOUND", "COARSE_SUM_BOUND", "COARSE_SUM_RMS", "RATIO", "REFERENCE_RATIO", "bound", "floor"]

BOUND: Final = 32.0
"""Units of rounding within which any implementation is correct."""
ARITHMETIC_BOUND: Final = 16.0
"""The same for short chains of IEEE operations."""
COARSE_BOUND: Final = 8.0
"""The same for results of 16 and 8 bits: they may be rounded to these a few times on the way."""
COARSE_SUM_BOUND: Final = 4.0
"""The same for 16-bit sums and products, which are accumulated in float32."""
COARSE_SUM_RMS: Final = 1.0
"""And in the root mean square over the result; one rounding to nearest gives 0.4, two 0.6."""
ROOT: Final = 0.5
"""Further units for each root of the number of terms (Higham & Mary 2019: errors grow as sqrt(n) u)."""
RATIO: Final = 4.0
"""How many times the reference's own greatest excess the target may have."""
REFERENCE_RATIO: Final = 16.0
"""How many bounds the reference must be off before it is called wrong."""


def bound(case: Case, finding: Finding) -> float:
    """Units of rounding that a correct implementation may be off."""
    assert finding.fmt is not None
    op = op_name(case)
    if finding.fmt.mantissa < 23:
        return COARSE_SUM_BOUND if accumulates(op) else COARSE_BOUND
    if accumulates(op):
        return BOUND + ROOT * float(n_terms(case, finding.position) ** 0.5)
    return ARITHMETIC_BOUND if is_arithmetic(op) else BOUND


def floor(case: Case, finding: Finding) -> Array | float:
    """Absolute error to add to the unit of each differing element (`numerics.tolerance.absolute_error`)."""
    assert finding.fmt is not None
    result = case.expected[finding.position]
    shape = tuple(result.shape) if isinstance(result, torch.Tensor) else ()
    size = torch.zeros(finding.actual.numel(), dtype=torch.float64)
    greatest, extent = 0.0, max((1, *shape[-2:]))
    for t in tensors(case.args, case.kwargs):
        extent = max((extent, *t.shape[-2:]))
        if t.is_floating_point() and t.numel() and t.layout == torch.strided:
            magnitude = t.detach().abs().to(torch.float64).nan_to_num(posinf=0.0)
            greatest = max(greatest, float(magnitude.max()))
            if t.numel() == size.numel() and t.shape == shape:
                size = torch.maximum(size, magnitude.reshape(-1))
    error = absolute_error(op_name(case), finding.fmt.roundoff, greatest, size.numpy(), extent)
    return error[finding.where] if isinstance(error, np.ndarray) else float(error)
