"""Which calls are timed: those that a recorded run made, and how often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowrun.intercept.untrusted import Refused
from shadowrun.repro.bench import operator
from shadowrun.slowdown.jobs import OperatorJob
from shadowrun.store.datafile import DataFile
from shadowrun.store.records import REGION
from shadowrun.sweep.recorded import Unreadable, sample

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
    """A call signature.

    Attributes:
        op: Operator, ``aten::add.Tensor``.
        inputs: As recorded, ``f32[8, 16], f32[16]``.
        n: Calls of it in the run.
        shapes: Of all its tensors, also of those that `inputs` leaves out of long lists.
    """

    op: str
    inputs: str
    n: int
    shapes: str = ""

    @property
    def told(self) -> Call:
        """What is kept of it: all."""
        return self

    def job(self, seed: int) -> OperatorJob:
        """The call with values drawn anew.

        Raises:
            Unreadable: It cannot be made again.
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
    """The calls of a run.

    Attributes:
        calls: The most frequent first.
        n_steps: Steps of the run, 1 where it told of none.
        target, ref: Platforms of the run.
    """

    calls: tuple[Call, ...]
    n_steps: int
    target: str
    ref: str


def read_mix(path: Path) -> Mix:
    """The calls of a recorded run; compiled regions are none, their kernels run outside of torch's operators.

    Raises:
        DataFileError: Missing, or no data file.
    """
    data = DataFile.open(path)
    rows = data.query(_CALLS)
    calls = tuple(Call(op, inputs, n, shapes) for op, inputs, shapes, n in rows if not op.startswith(REGION))
    (n_steps,) = next(iter(data.query("select count(distinct step) from step")))
    return Mix(calls, max(1, n_steps), data.info.target, data.info.ref)
