"""The smallest tolerance with which mismatching calls would pass."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowrun.store.codec import decode_float

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shadowrun.store.datafile import DataFile

__all__ = ["NOTHING", "MinTolerance", "least_tolerance", "min_tolerances"]

# Statistics of f32 are computed in f32, the judge computes in f64: a printed tolerance must not be too small.
_SLACK = 1 + 2.0**-18

# Floats, complex numbers and bf16 have a tolerance; a difference in any other dtype passes with none.
_SQL = """
select context_id, outcome_id, max(max_abs), max(max_rel), max(n_from_zero),
    max(detail <> '' or n_nan + n_inf > 0 or (e.dtype not glob '[fc]*' and e.dtype not glob 'bf*' and n_different > 0))
from diff cross join call on call.seq = diff.seq join verdict on verdict.id = verdict_id
join outcome on outcome.id = outcome_id join tensor on tensor.id = tensor_id join form e on e.id = expected_id
where status = 'mismatch' group by context_id, outcome_id
"""


@dataclass(frozen=True, slots=True)
class MinTolerance:
    """The smallest tolerances with which results would pass, as `torch.testing.assert_close` applies them.

    Attributes:
        rtol: Smallest relative tolerance if the absolute one is 0; infinite if none helps.
        atol: Smallest absolute tolerance if the relative one is 0; infinite if none helps: metadata, NaN, infinities
            and integers are judged independently of the tolerance.
    """

    rtol: float
    atol: float


NOTHING = MinTolerance(math.inf, math.inf)


def min_tolerances(data: DataFile) -> dict[tuple[int, int], MinTolerance]:
    """Smallest tolerance by context and outcome, for all mismatching calls."""
    return {
        (context, outcome): _least(decode_float(max_abs), decode_float(max_rel), zeros, bool(independent))
        for context, outcome, max_abs, max_rel, zeros, independent in data.query(_SQL)
    }


def least_tolerance(tolerances: Iterable[MinTolerance]) -> MinTolerance:
    """The smallest tolerance that passes all; `NOTHING` without any."""
    found = list(tolerances)
    return MinTolerance(max(t.rtol for t in found), max(t.atol for t in found)) if found else NOTHING


def _least(max_abs: float, max_rel: float, n_from_zero: int, independent: bool) -> MinTolerance:
    # NaN, metadata and integers are judged independently of the tolerance: none passes them.
    if independent:
        return NOTHING
    # n_from_zero: results that differ from an expected zero pass with no rtol; -1 (schema 1) is unknown.
    return MinTolerance(_above(max_rel) if n_from_zero == 0 else math.inf, _above(max_abs))


def _above(value: float) -> float:
    return value * _SLACK if math.isfinite(value) else math.inf
