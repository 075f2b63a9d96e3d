"""The least tolerance with which calls that mismatched would pass, as `torch.testing.assert_close` counts it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowrun.store.codec import decode_float

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shadowrun.store.datafile import DataFile

__all__ = ["NOTHING", "MinTolerance", "least", "min_tolerances"]

_SLACK = 1 + 2.0**-18
"""Statistics of f32 are computed in f32; the judge counts in f64. A tolerance that is given must not fall short."""

_SQL = """
select context_id, outcome_id, max(max_abs), max(max_rel), max(n_from_zero),
    max(detail <> '' or n_nan + n_inf > 0 or (e.dtype not glob '[fc]*' and e.dtype not glob 'bf*' and n_different > 0))
from diff cross join call on call.seq = diff.seq join verdict on verdict.id = verdict_id
join outcome on outcome.id = outcome_id join form e on e.id = expected_id
where status = 'mismatch' group by context_id, outcome_id
"""


@dataclass(frozen=True, slots=True)
class MinTolerance:
    """Two ways to let results pass.

    Attributes:
        rtol: Least relative tolerance if the absolute one is 0; infinite where none helps.
        atol: Least absolute tolerance if the relative one is 0; infinite where none helps: forms, NaN, infinities
            and integers are judged whatever the tolerance.
    """

    rtol: float
    atol: float


NOTHING = MinTolerance(math.inf, math.inf)


def min_tolerances(data: DataFile) -> dict[tuple[int, int], MinTolerance]:
    """By context and outcome, for all calls that mismatched."""
    return {
        (context, outcome): _least(decode_float(max_abs), decode_float(max_rel), zeros, bool(other))
        for context, outcome, max_abs, max_rel, zeros, other in data.query(_SQL)
    }


def least(tolerances: Iterable[MinTolerance]) -> MinTolerance:
    """The least with which all pass; none is known where nothing was compared."""
    found = list(tolerances)
    return MinTolerance(max(t.rtol for t in found), max(t.atol for t in found)) if found else NOTHING


def _least(max_abs: float, max_rel: float, n_from_zero: int, other: bool) -> MinTolerance:
    if other:
        return NOTHING
    # Without a count of zeros (-1, schema 1), whether a relative tolerance is enough is not known.
    return MinTolerance(_above(max_rel) if n_from_zero == 0 else math.inf, _above(max_abs))


def _above(value: float) -> float:
    return value * _SLACK if math.isfinite(value) else math.inf
