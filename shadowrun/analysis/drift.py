"""How the accumulated error grows over the steps of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowrun.store.codec import decode_float

if TYPE_CHECKING:
    from shadowrun.store.datafile import DataFile

__all__ = ["DriftStep", "trace_drift"]


@dataclass(frozen=True, slots=True)
class DriftStep:
    """Greatest accumulated error within a step.

    Attributes:
        step: Training step.
        drift_abs: Greatest absolute difference between the two chains of results.
        drift_rel: Greatest RMSE relative to the RMS of the reference.
        op, module, seq: The call with the greatest `drift_rel`.
    """

    step: int
    drift_abs: float
    drift_rel: float
    op: str
    module: str
    seq: int


_DRIFT = """
with ranked as (
    select *, row_number() over (partition by step order by drift_rel desc, drift_abs desc, seq) as place,
        coalesce(max(drift_abs) over (partition by step), -1) as greatest
    from call where drift_rel >= 0
)
select step, greatest, drift_rel, name, module, seq
from ranked join context on context.id = context_id join op on op.id = op_id
where place = 1 order by step
"""


def trace_drift(data: DataFile) -> list[DriftStep]:
    """The worst accumulated error of each step; nothing where it was not measured."""
    return [
        DriftStep(step, decode_float(greatest), decode_float(rel), op, module, seq)
        for step, greatest, rel, op, module, seq in data.query(_DRIFT)
    ]
