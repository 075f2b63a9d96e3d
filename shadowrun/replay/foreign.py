"""Values that an operator which only moves values cannot have made."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from shadowrun.numerics.tolerance import ulp_bound
from shadowrun.replay.finding import flat_values, op_name
from shadowrun.replay.oracle import tensors

if TYPE_CHECKING:
    from shadowrun.replay.finding import Finding
    from shadowrun.replay.patterns import Suspect

__all__ = ["has_foreign_values"]


def has_foreign_values(suspect: Suspect) -> bool:
    """Whether most mismatched elements hold values that no input has, where the reference moves values only."""
    case = suspect.case
    inputs = list(tensors(case.args, case.kwargs))
    if ulp_bound(op_name(case), [t.dtype for t in inputs]) != 0:
        return False
    given = [flat_values(t) for t in inputs if t.layout == torch.strided and t.numel()]
    return all(_is_foreign(f, given) for f in suspect.findings)


def _is_foreign(finding: Finding, given: list[torch.Tensor]) -> bool:
    same = [_bits(t) for t in given if t.dtype == finding.expected.dtype]
    # One value may be anywhere by chance, and a buffer of zeros is what a device may return for nothing at all.
    if finding.fmt is None or finding.bad.size < 2 or not same:
        return False
    known = np.concatenate(same)
    actual = _bits(finding.actual)[finding.bad]
    return bool(np.isin(_bits(finding.expected), known).all()) and bool(
        2 * (~np.isin(actual, known)).sum() >= actual.size
    )


def _bits(flat: torch.Tensor) -> npt.NDArray[np.integer[np.typing.NBitBase]]:
    widths = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return flat.contiguous().view(widths[flat.element_size()]).numpy()
