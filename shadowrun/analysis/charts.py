"""Series for the pictures of a report: errors along the graph, by module and step, and where the time went.

Read in the pass that groups the calls, and in one over their differences. The result is bounded, whatever the run.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shadowrun.analysis.call_groups import CallGroups
from shadowrun.analysis.drift_effects import DriftTrace
from shadowrun.store.codec import decode_float
from shadowrun.store.groups import PIECE
from shadowrun.store.records import REGION
from shadowrun.types import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shadowrun.analysis.call_groups import Context, Step
    from shadowrun.analysis.drift_effects import Effects
    from shadowrun.store.datafile import DataFile
    from shadowrun.store.groups import Calls
    from shadowrun.types import OpRecord, Phase

__all__ = [
    "FAILING",
    "CallReader",
    "Charts",
    "ChartsReader",
    "GraphPoint",
    "HeatCell",
    "HeatMap",
    "Module",
    "StepGraph",
    "StepTimes",
]

MAX_POINTS = 400
# One step of a program that marks none may be the whole run: what is kept of it is bounded.
MAX_STEP_CALLS = 40_000
MAX_COLUMNS = 40
MAX_DEPTH = 12
"""Of the tree of modules: what is deeper is one module of the last level."""
MAX_CALLS = 3_000_000
"""Calls that are read: some five seconds. The pictures of a longer run are of its beginning."""
FAILING = (Status.UNSUPPORTED, Status.ERROR, Status.MISMATCH, Status.FALLBACK)

_DIFFS = f"""
select diff.seq, step, context_id, outcome_id, max(max_abs), max(max_ulp), max(excess_actual)
from diff cross join call on call.seq = diff.seq join verdict on verdict.id = verdict_id
where diff.seq > ? and diff.seq <= ? group by diff.seq order by diff.seq limit {PIECE}
"""  # noqa: S608


@dataclass(frozen=True, slots=True)
class GraphPoint:
    """A call of a step, or the worst of several that follow each other.

    Attributes:
        place: Number of the call within the step.
        n_calls: Calls that the point stands for.
        seq: Number of the call in the run.
        op, module, phase, status: Those of the call.
        isolated: Greatest absolute difference of its results, of inputs that were equal; 0 for identical bits.
        accumulated: Greatest accumulated absolute error among the calls; -1 where none was measured.
    """

    place: int
    n_calls: int
    seq: int
    op: str
    module: str
    phase: Phase
    status: Status
    isolated: float
    accumulated: float


@dataclass(frozen=True, slots=True)
class StepGraph:
    """The calls of one step, in their order.

    Attributes:
        step: Its number.
        n_calls: Its calls.
        points: At most `MAX_POINTS`.
        first: Number of the first divergence, if it is in this step; else -1.
    """

    step: int
    n_calls: int
    points: tuple[GraphPoint, ...]
    first: int


@dataclass(frozen=True, slots=True)
class HeatCell:
    """Calls of a module in some steps: their greatest error, and how many failed."""

    error: float
    n_failed: int
    n_calls: int


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Errors by module and step.

    Attributes:
        is_accumulated: Whether the errors are accumulated ones, relative; else isolated ones, absolute.
        steps: First and last step of each column.
        modules: Rows, in the order of their first call.
        cells: Row and column to what is there.
    """

    is_accumulated: bool
    steps: tuple[tuple[int, int], ...]
    modules: tuple[str, ...]
    cells: Mapping[tuple[int, int], HeatCell]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of some steps: how long they took, and the calls in them on both platforms."""

    first: int
    last: int
    wall_s: float
    ref_s: float
    target_s: float


@dataclass(slots=True)
class Module:
    """A module with all that it contains.

    Attributes:
        path: ``Net.features.0``; empty for calls outside any module.
        n_calls: Calls in it, those of its children included, as in all figures.
        statuses: Calls by status.
        n_wrong: Elements beyond rounding.
        target_us, ref_us: Time of its calls.
        children: Modules in it, in the order of their first call.
    """

    path: str
    n_calls: int = 0
    statuses: Counter[Status] = field(default_factory=Counter)
    n_wrong: int = 0
    target_us: float = 0.0
    ref_us: float = 0.0
    children: dict[str, Module] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Charts:
    """What the pictures of a run are made of; None, or empty, where the file lacks it.

    Attributes:
        graph: The step with the first divergence, or the first step.
        heat: Errors by module and step, of two steps or modules at least.
        times: By step.
        ref_s, target_s: Time of all calls on each side.
        modules: The outermost modules.
        effects: What the accumulated error says on each finding; None where it was not recorded.
        contexts: Operator and module of each context.
        excess, ulp: Context and outcome of mismatching calls to a histogram: power of two to number of calls.
        n_calls: Calls that were read.
        is_whole: Whether these are all.
    """

    graph: StepGraph | None
    heat: HeatMap | None
    times: tuple[StepTimes, ...]
    ref_s: float
    target_s: float
    modules: tuple[Module, ...]
    effects: Effects | None
    contexts: Mapping[int, Context]
    excess: Mapping[tuple[int, int], Counter[int]]
    ulp: Mapping[tuple[int, int], Counter[int]]
    n_calls: int
    is_whole: bool


class ChartsReader:
    """Reads the series of a run, as a `SeriesReader` of its calls.

    Args:
        data: Its file.
        first: Its first divergence.
    """

    def __init__(self, data: DataFile, first: OpRecord | None) -> None:
        self._data = data
        self.contexts: Mapping[int, Context] = {}
        self._statuses: Mapping[int, Status] = {}
        self._regions: set[int] = set()
        self._failing: set[int] = set()
        low, high = next(data.query("select coalesce(min(step), 0), coalesce(max(step), 0) from call"))
        # By steps and not by calls: two runs of one program have the same columns.
        self._low, self._width = low, max(1, math.ceil((high - low + 1) / MAX_COLUMNS))
        self._high = high
        self._first = first.call.seq if first is not None else -1
        self._step = first.call.step if first is not None else low
        # In a combined file each run has a block of call numbers: the step of one rank is meant, not of all.
        self._source = self._first // data.block if first is not None else 0
        self._of_step: list[tuple[int, int, int, float]] = []
        self._n_of_step = 0
        self._isolated: dict[int, float] = {}
        # Module and column to error, failing calls and calls.
        self._drift: dict[tuple[str, int], float] = {}
        self._errors: dict[tuple[str, int], float] = {}
        self._n: Counter[tuple[str, int]] = Counter()
        self._n_failed: Counter[tuple[str, int]] = Counter()
        self.us: dict[int, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        self.excess: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
        self.ulp: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
        self.drift_trace = DriftTrace()
        self.has_drift = False
        self.n_calls = 0
        self._is_whole = True
        self._last = -1

    def begin(self, contexts: Mapping[int, Context], statuses: Mapping[int, Status]) -> None:
        """As in `SeriesReader`."""
        self.contexts, self._statuses = contexts, statuses
        self._regions = {n for n, context in contexts.items() if context.op.startswith(REGION)}
        self._failing = {number for number, status in statuses.items() if status in FAILING}

    def add(self, rows: list[tuple[Any, ...]] | Calls) -> None:
        """As in `SeriesReader`."""
        if self.n_calls >= MAX_CALLS:
            self._is_whole = False
            return
        self._last = int(rows[-1][0])
        self.n_calls += len(rows)
        if isinstance(rows, list):
            self._count(rows)
            self._keep_series(rows)
        else:
            self._add_array(rows)

    def _add_array(self, calls: Calls) -> None:
        """Count in numpy, and look at those calls only of which more is kept."""
        from shadowrun.store.packed_rows import sums_by  # imports numpy, which small files do without

        columns = (calls[:, 1] - self._low) // self._width
        for (_, step, context, outcome), n, (_, ref_ns, _), (_, target_ns, _) in sums_by(calls, columns):
            self._add(step, context, outcome, n, ref_ns / 1e3, target_ns / 1e3)
        of_step = (calls[:, 1] == self._step) & (calls[:, 0] // self._data.block == self._source)
        looked_at = calls[of_step | ~(calls[:, 7] == -1)]
        self._keep_series([
            (*map(int, row[:4]), *row[4:6], *(None if drift == -1 else drift for drift in row[6:]))
            for row in looked_at.tolist()
        ])  # fmt: skip

    def _count(self, rows: list[tuple[Any, ...]]) -> None:
        for _, step, context, outcome, ref_ns, target_ns, *_ in rows:
            self._add(step, context, outcome, 1, (ref_ns or 0) / 1e3, (target_ns or 0) / 1e3)

    def _add(self, step: int, context: int, outcome: int, n: int, ref_us: float, target_us: float) -> None:
        if context in self._regions:
            return
        column = self._column(step)
        key = self.contexts[context].module, column
        self._n[key] += n
        if outcome in self._failing:
            self._n_failed[key] += n
        sums = self.us[column]
        self.us[column] = sums[0] + ref_us, sums[1] + target_us

    def _keep_series(self, rows: list[tuple[Any, ...]]) -> None:
        """Keep the accumulated errors, and the calls of the step that is drawn."""
        regions, block = self._regions, self._data.block
        for seq, step, context, outcome, _, _, drift_abs, drift_rel in rows:
            # A whole compiled graph has no place among single operators.
            if context in regions:
                continue
            if drift_rel is not None:
                key = self.contexts[context].module, self._column(step)
                drift = decode_float(drift_abs or 0.0), decode_float(drift_rel)
                self._drift[key] = _greater(self._drift.get(key, 0.0), drift[1])
                called = self.contexts[context]
                # The gradient of the loss with respect to itself: the backward pass begins there.
                is_root = called.op == "aten::ones_like"
                place = seq // block, step
                self.drift_trace.add(place, called.phase, seq, (context, outcome), drift, is_root=is_root)
                self.has_drift = True
            if step == self._step and seq // block == self._source:
                self._n_of_step += 1
                # One step of a program that marks none may be the whole run.
                if len(self._of_step) < MAX_STEP_CALLS:
                    accumulated = -1.0 if drift_abs is None else decode_float(drift_abs)
                    self._of_step.append((seq, context, outcome, accumulated))

    def charts(self, table: CallGroups) -> Charts:
        """The series, once all calls were added.

        Args:
            table: The calls, grouped.
        """
        self._differences()
        # In the order of their first call, and without those of calls that were only skipped.
        self.contexts = {row.group.context_id: row.context for row in table.rows}
        return Charts(
            self._graph(),
            self._heat_map(),
            self._times(table.steps),
            sum(us for us, _ in self.us.values()) / 1e6,
            sum(us for _, us in self.us.values()) / 1e6,
            _modules(table),
            self.drift_trace.effects() if self.has_drift else None,
            self.contexts,
            self.excess,
            self.ulp,
            self.n_calls,
            self._is_whole,
        )

    def _differences(self) -> None:
        last = -1
        of_step = {seq for seq, *_ in self._of_step}
        while rows := list(self._data.query(_DIFFS, (last, self._last))):
            last = rows[-1][0]
            for seq, step, context, outcome, max_abs, max_ulp, excess in rows:
                if context in self._regions:
                    continue
                error, key = decode_float(max_abs), (self.contexts[context].module, self._column(step))
                self._errors[key] = _greater(self._errors.get(key, 0.0), error)
                if seq in of_step:
                    self._isolated[seq] = error
                if self._statuses[outcome] is Status.MISMATCH:
                    # Distances beyond 64 bits are floats in a file.
                    # A histogram by powers of two: its size does not depend on the number of calls.
                    self.ulp[context, outcome][math.frexp(max_ulp)[1] if 0 < max_ulp < math.inf else 0] += 1
                    value = -1.0 if excess is None else decode_float(excess)
                    if 0 <= value < math.inf:
                        self.excess[context, outcome][max(-4, math.frexp(value)[1]) if value else -4] += 1

    def _column(self, step: int) -> int:
        return int((step - self._low) // self._width)

    def _graph(self) -> StepGraph | None:
        if len(self._of_step) < 2:
            return None
        size = math.ceil(len(self._of_step) / MAX_POINTS)
        points = tuple(self._point(at, size) for at in range(0, len(self._of_step), size))
        first = self._first if any(seq == self._first for seq, *_ in self._of_step) else -1
        return StepGraph(self._step, self._n_of_step, points, first)

    def _point(self, start: int, size: int) -> GraphPoint:
        rows = self._of_step[start : start + size]

        def rank(row: tuple[int, int, int, float]) -> tuple[bool, bool, float]:
            # A picture must not lose the call that everything is about.
            error = self._isolated.get(row[0], 0.0)
            error = math.inf if math.isnan(error) else error
            return row[0] == self._first, self._statuses[row[2]] in FAILING, error

        at = max(range(len(rows)), key=lambda i: rank(rows[i]))
        seq, context, outcome, _ = rows[at]
        where, drift = self.contexts[context], -1.0
        for row in rows:
            drift = _greater(drift, row[3])
        isolated = self._isolated.get(seq, 0.0)
        status = self._statuses[outcome]
        return GraphPoint(
            start + at, len(rows), seq, where.op, where.module, where.phase, status, isolated, drift
        )  # fmt: skip

    def _heat_map(self) -> HeatMap | None:
        # The accumulated error grows along the program, which is the question; the isolated one is what there is
        # without it.
        errors = self._drift or self._errors
        modules = list(dict.fromkeys(context.module for context in self.contexts.values() if context.module))
        with_errors = {module for module, _ in errors}
        modules = [module for module in modules if module in with_errors]
        n_columns = self._column(self._high) + 1
        if not modules or (len(modules) < 2 and n_columns < 2):
            return None
        rows = {module: number for number, module in enumerate(modules)}
        cells = {
            (rows[module], column): HeatCell(errors.get((module, column), 0.0), self._n_failed[module, column], n)
            for (module, column), n in self._n.items()
            if module in rows
        }
        return HeatMap(bool(self._drift), tuple(self._spans(n_columns)), tuple(modules), cells)

    def _spans(self, n_columns: int) -> Iterator[tuple[int, int]]:
        for column in range(n_columns):
            start = self._low + column * self._width
            yield start, min(self._high, start + self._width - 1)

    def _times(self, steps: Sequence[Step]) -> tuple[StepTimes, ...]:
        """Of those steps whose duration is known; none in a run without steps."""
        found: dict[int, list[Step]] = defaultdict(list)
        for step in steps:
            # A file from anyone may have any numbers here, and a picture has to be drawn of them.
            if self._low <= step.step <= self._high and 0 <= step.wall_s < math.inf:
                found[self._column(step.step)].append(step)
        return tuple(
            StepTimes(
                of[0].step,
                of[-1].step,
                sum(step.wall_s for step in of),
                self.us[column][0] / 1e6,
                self.us[column][1] / 1e6,
            )
            for column, of in sorted(found.items())
        )


class CallReader:
    """Reads the calls of a data file, which takes most of the time of a report, once until the file changes.

    Args:
        data: The file.

    Attributes:
        table: The calls, grouped, once they were read.
        charts: The series for pictures, if they were asked for.
    """

    def __init__(self, data: DataFile) -> None:
        self._data = data
        self._version: tuple[int, int] | None = None
        self.table: CallGroups | None = None
        self.charts: Charts | None = None

    def read(self, first_divergence: Callable[[], OpRecord | None] | None = None) -> CallGroups:
        """Read the calls if the file has changed since.

        Args:
            first_divergence: Finds the first call that mismatched; given where the series for pictures are wanted,
                which are read in the same pass.
        """
        version = self._data.version
        if self.table is None or self._version != version or (first_divergence is not None and self.charts is None):
            reader = None if first_divergence is None else ChartsReader(self._data, first_divergence())
            # One pass for tables and pictures: reading ten million calls takes 10 s.
            self._version, self.table = version, CallGroups.read(self._data, reader)
            self.charts = None if reader is None else reader.charts(self.table)
        return self.table


def _greater(a: float, b: float) -> float:
    """The greater one; NaN is greater than any number."""
    return b if math.isnan(b) or b > a else a


def _modules(table: CallGroups) -> tuple[Module, ...]:
    root: dict[str, Module] = {}
    # A name may have megabytes, and many rows: it is split once.
    branches: dict[str, list[Module]] = {}
    for row in table.rows:
        if row.context.op.startswith(REGION):
            continue
        branch = branches.get(row.context.module)
        if branch is None:
            branch = branches[row.context.module] = _branch(root, row.context.module)
        for module in branch:
            _count(module, row)
    return tuple(root.values())


def _branch(root: dict[str, Module], name: str) -> list[Module]:
    """A module and those around it, the outermost first; new ones are added below `root`."""
    path, inside, found = "", root, []
    for part in name.split(".", MAX_DEPTH):
        path = f"{path}.{part}" if path else part
        module = inside.setdefault(path, Module(path))
        found.append(module)
        inside = module.children
    return found


def _count(module: Module, row: Any) -> None:
    group = row.group
    module.n_calls += group.n
    module.statuses[row.outcome.status] += group.n
    module.n_wrong += group.n_mismatched
    module.target_us += group.target_us_total if group.n_target else 0.0
    module.ref_us += group.ref_us_total if group.n_ref else 0.0
