"""The distinct calls of a recorded run, and their counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowrun.intercept.op_allowlist import Refused
from shadowrun.repro.call_replayer import operator
from shadowrun.store.datafile import DataFile
from shadowrun.store.records import REGION
from shadowrun.studies.slowdown.measuring import OperatorJob
from shadowrun.studies.sweep.recorded import Unreadable, sample

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Call", "Mix", "read_mix"]

_CALLS = """
select op.name, inputs, max(shapes), sum(n) from (
    select context_id, count(*) as n from call group by context_id
    union all select context_id, n from folded
) join context on context.id = context_id join op on op.id = op_id
group by op.name, inputs order by 4 desc, 1, 2
"""


@dataclass(frozen=True, slots=True)
class Call:
    """A call signature of a run.

    Attributes:
        op: Operator, ``aten::add.Tensor``.
        inputs: As recorded, ``f32[8, 16], f32[16]``.
        n: Calls of it in the run.
        shapes: Shapes of all its tensors; `inputs` shortens long lists.
    """

    op: str
    inputs: str
    n: int
    shapes: str = ""

    @property
    def summary(self) -> Call:
        """The call itself, which is already short."""
        return self

    def job(self, seed: int) -> OperatorJob:
        """The call with newly sampled values.

        Raises:
            Unreadable: The call cannot be rebuilt.
        """
        try:
            plan = operator(self.op)
        except AttributeError:
            raise Unreadable(f"this process has no operator {self.op}") from None
        except Refused as why:
            raise Unreadable(str(why)) from None
        made = sample(self.op, self.inputs, seed, self.shapes)
        return OperatorJob(plan, made.args, dict(made.kwargs or {}))


@dataclass(frozen=True, slots=True)
class Mix:
    """The calls of a run, with their counts.

    Attributes:
        calls: The most frequent first.
        n_steps: Steps of the run, 1 if it recorded none.
        target, ref: Platforms of the run.
    """

    calls: tuple[Call, ...]
    n_steps: int
    target: str
    ref: str


def read_mix(path: Path) -> Mix:
    """Read the calls of a run, without compiled regions, whose kernels are no operators.

    Raises:
        DataFileError: Missing, or no data file.
    """
    data = DataFile.open(path)
    rows = data.query(_CALLS)
    calls = tuple(Call(op, inputs, n, shapes) for op, inputs, shapes, n in rows if not op.startswith(REGION))
    (n_steps,) = next(iter(data.query("select count(distinct step) from step")))
    return Mix(calls, max(1, n_steps), data.info.target, data.info.ref)
