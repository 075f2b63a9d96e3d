"""`Table`: the groups of a data file joined with what they refer to; every analysis starts from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowrun.analysis.medians import Medians
from shadowrun.store.codec import decode_float
from shadowrun.store.groups import Group, read_groups
from shadowrun.types import Cause, Phase, Status

if TYPE_CHECKING:
    from shadowrun.store.datafile import DataFile
    from shadowrun.store.sources import SourceRun

__all__ = ["Context", "Outcome", "Row", "Skipped", "Step", "Table"]


@dataclass(frozen=True, slots=True)
class Context:
    """Who called what, from where."""

    op: str
    inputs: str
    dtypes: tuple[str, ...]
    shapes: str
    module: str
    phase: Phase
    site: str
    device: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a call, without the figures."""

    status: Status
    cause: Cause | None
    explanation: str
    missing_kernel: str

    @property
    def is_own_failure(self) -> bool:
        """Whether shadowrun failed, not the target."""
        return self.cause is Cause.HARNESS


@dataclass(frozen=True, slots=True)
class Row:
    """The calls of one context that had one outcome."""

    context: Context
    outcome: Outcome
    group: Group


@dataclass(frozen=True, slots=True)
class Skipped:
    """Calls that were not compared on purpose, only counted."""

    op: str
    device: str
    reason: str
    n: int


@dataclass(frozen=True, slots=True)
class Step:
    """A training step; in a combined file, of the run that began first and of the one that took longest."""

    step: int
    started_s: float
    wall_s: float


@dataclass(frozen=True, slots=True)
class Table:
    """Everything of a run that does not grow with the number of calls.

    Attributes:
        rows: In the order of each group's first call.
        skipped: By operator, device and reason.
        steps: In order.
        medians: Operator to median time in microseconds of the calls kept one by one, on reference and
            target; -1 where none was timed.
        sources: The runs in a combined file; none in the file of one run.
    """

    rows: tuple[Row, ...]
    skipped: tuple[Skipped, ...]
    steps: tuple[Step, ...]
    medians: dict[str, tuple[float, float]]
    sources: tuple[SourceRun, ...] = ()

    @classmethod
    def read(cls, data: DataFile) -> Table:
        """Group the calls of a data file."""
        contexts = {
            number: Context(
                op, inputs, tuple(filter(None, dtypes.split(","))), shapes, module, Phase(phase), site, device
            )
            for number, op, inputs, dtypes, shapes, module, phase, site, device in data.query(_CONTEXTS)
        }
        outcomes = {
            number: Outcome(Status(status), Cause(cause) if cause else None, explanation, missing)
            for number, status, cause, explanation, missing in data.query("select * from outcome")
        }
        medians = Medians({number: context.op for number, context in contexts.items()})
        groups = read_groups(data, medians.observe)
        return cls(
            rows=tuple(Row(contexts[g.context_id], outcomes[g.outcome_id], g) for g in groups),
            skipped=tuple(Skipped(*row) for row in data.query(_SKIPPED)),
            steps=tuple(
                Step(step, decode_float(started), decode_float(wall)) for step, started, wall in data.query(_STEPS)
            ),
            medians=medians.by_op(),
            sources=data.sources,
        )


_CONTEXTS = """
select context.id, name, inputs, dtypes, shapes, module, phase, text, device
from context join op on op.id = op_id join site on site.id = site_id
"""

_SKIPPED = "select name, device, reason, n from skipped join op on op.id = op_id order by n desc, name, device, reason"

_STEPS = "select step, min(started_s), max(wall_s) from step group by step order by step"
