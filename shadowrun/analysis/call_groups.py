"""`CallGroups`: the calls of a data file, grouped by context and outcome: the input of every analysis."""

from __future__ import annotations

import random
import statistics
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from shadowrun.store.codec import decode_float
from shadowrun.store.groups import Group, read_groups
from shadowrun.types import Cause, Phase, Status

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shadowrun.store.combine.combined_runs import SourceRun
    from shadowrun.store.datafile import DataFile
    from shadowrun.store.groups import Calls, Times

__all__ = ["CallGroups", "Context", "Medians", "Outcome", "Row", "SeriesReader", "Skipped", "Step", "read_contexts"]


MAX_TIMES: Final = 2**14
"""Times kept of one operator on one platform; of more, an evenly spread sample."""
_MAX_NEW: Final = 4096


class Medians:
    """Median times of operators, in bounded memory; `shadowrun.store.groups.read_groups` feeds it.

    Args:
        ops: Context to operator.
    """

    def __init__(self, ops: Mapping[int, str]) -> None:
        self._ops = ops
        # A fixed seed: reports on the same file are equal.
        self._random = random.Random(0)  # noqa: S311 - no cryptography
        self._times: dict[str, tuple[_Times, _Times]] = {}

    def observe(self, context: int, refs: Times, targets: Times) -> None:
        """Add times of calls of a context in nanoseconds, on reference and target."""
        op = self._ops[context]
        times = self._times.get(op)
        if times is None:
            times = self._times[op] = (_Times(self._random), _Times(self._random))
        times[0].add(refs)
        times[1].add(targets)

    def by_op(self) -> dict[str, tuple[float, float]]:
        """Operator to its median time in microseconds on reference and target; -1 if not timed."""
        medians = {op: (ref.median_us(), target.median_us()) for op, (ref, target) in sorted(self._times.items())}
        return {op: pair for op, pair in medians.items() if pair != (-1.0, -1.0)}


class _Times:
    """All times, or a sample: sorted and thinned, which moves the median by a rank or two of thousands."""

    __slots__ = ("_kept", "_new", "_one_of", "_random")

    def __init__(self, source: random.Random) -> None:
        # 8 bytes a time; a list of floats takes 32.
        self._kept, self._new = array("d"), array("d")
        self._one_of = 1
        self._random = source

    def add(self, times: Times) -> None:
        if isinstance(times, list):
            self._new.extend(times)
        else:  # an array: number by number takes ten times as long
            self._new.frombytes(times.tobytes())
        # Some thousand at once: a large file has its times in pieces of some hundred.
        if len(self._new) >= _MAX_NEW:
            self._take(is_array=not isinstance(times, list))

    def median_us(self) -> float:
        self._take()
        return statistics.median(self._kept) / 1e3 if self._kept else -1.0

    def _take(self, *, is_array: bool = False) -> None:
        self._kept.extend(self._one_in(self._one_of, self._new, is_array) if self._one_of > 1 else self._new)
        self._new = array("d")
        while len(self._kept) > MAX_TIMES:
            self._kept = self._one_in(2, self._kept, is_array)
            # Half of the sample goes when it is full, so memory is bounded and every call had the same chance.
            self._one_of *= 2

    def _one_in(self, n: int, times: array[float], is_array: bool) -> array[float]:
        # A random start: with few times per call of `add`, a fixed one would always keep or always drop them.
        start = self._random.randrange(n)
        if is_array:
            import numpy as np  # is there, since the times came from it; it sorts them without an object for each

            return array("d", np.sort(np.frombuffer(times))[start::n].tobytes())
        return array("d", sorted(times)[start::n])


@dataclass(frozen=True, slots=True)
class Context:
    """Operator, inputs and origin of calls."""

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
    """Status and cause of a call, without figures."""

    status: Status
    cause: Cause | None
    explanation: str
    missing_kernel: str

    @property
    def is_own_failure(self) -> bool:
        """Whether shadowrun failed to compare the call; this says nothing about the target."""
        return self.cause is Cause.HARNESS


@dataclass(frozen=True, slots=True)
class Row:
    """The calls of one context that had one outcome."""

    context: Context
    outcome: Outcome
    group: Group


@dataclass(frozen=True, slots=True)
class Skipped:
    """Calls that were skipped on purpose, only counted."""

    op: str
    device: str
    reason: str
    n: int


@dataclass(frozen=True, slots=True)
class Step:
    """A training step; in a combined file, its earliest start and longest duration over all runs."""

    step: int
    started_s: float
    wall_s: float


class SeriesReader(Protocol):
    """What looks at each call while they are grouped."""

    def begin(self, contexts: Mapping[int, Context], statuses: Mapping[int, Status]) -> None:
        """All contexts, and the status of each outcome, by their numbers."""

    def add(self, rows: list[tuple[Any, ...]] | Calls) -> None:
        """Calls in their order; the columns are those of `shadowrun.store.groups.scan`."""


@dataclass(frozen=True, slots=True)
class CallGroups:
    """The calls of a run, grouped: its size does not grow with the number of calls.

    Attributes:
        rows: In the order of each group's first call.
        skipped: By operator, device and reason.
        steps: In order.
        medians: Operator to median time in microseconds of the calls recorded one by one, on reference and
            target; -1 if not timed.
        sources: The runs of a combined file; empty for a single run.
    """

    rows: tuple[Row, ...]
    skipped: tuple[Skipped, ...]
    steps: tuple[Step, ...]
    medians: dict[str, tuple[float, float]]
    sources: tuple[SourceRun, ...] = ()

    @classmethod
    def read(cls, data: DataFile, series: SeriesReader | None = None) -> CallGroups:
        """Group the calls of a data file.

        Args:
            data: The file.
            series: Gets each call, in the same pass.
        """
        ops, contexts = dict(data.query("select id, name from op")), read_contexts(data)
        outcomes = {
            number: Outcome(Status(status), Cause(cause) if cause else None, explanation, missing)
            for number, status, cause, explanation, missing in data.query("select * from outcome")
        }
        if series is not None:
            series.begin(contexts, {number: outcome.status for number, outcome in outcomes.items()})
        medians = Medians({number: context.op for number, context in contexts.items()})
        # One pass over the calls gives both: it takes most of the time of a report.
        groups = read_groups(data, medians.observe, None if series is None else series.add)
        return cls(
            rows=tuple(Row(contexts[g.context_id], outcomes[g.outcome_id], g) for g in groups),
            skipped=_skipped(data, ops),
            steps=tuple(
                Step(step, decode_float(started), decode_float(wall)) for step, started, wall in data.query(_STEPS)
            ),
            medians=medians.by_op(),
            sources=data.sources,
        )


def read_contexts(data: DataFile) -> dict[int, Context]:
    """All contexts of a data file, by their numbers."""
    # No joins: of a long name, each row would read all of it anew.
    ops, sites = dict(data.query("select id, name from op")), dict(data.query("select id, text from site"))
    return {
        number: Context(
            ops[op], inputs, tuple(filter(None, dtypes.split(","))), shapes, module, Phase(phase), sites[site], device
        )
        for number, op, inputs, dtypes, shapes, module, phase, site, device in data.query(_CONTEXTS)
    }


_CONTEXTS = "select id, op_id, inputs, dtypes, shapes, module, phase, site_id, device from context"


def _skipped(data: DataFile, ops: Mapping[int, str]) -> tuple[Skipped, ...]:
    """With a full order: reports on the same file are equal."""
    rank = {op: number for number, op in enumerate(sorted(ops, key=ops.__getitem__))}
    rows = data.query("select op_id, device, reason, n from skipped")
    return tuple(
        Skipped(ops[op], device, reason, n)
        for op, device, reason, n in sorted(rows, key=lambda row: (-row[3], rank[row[0]], *row[1:3]))
    )


_STEPS = "select step, min(started_s), max(wall_s) from step group by step order by step"
