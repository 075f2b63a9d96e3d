"""Report of determinism as a `Document`: one row for each operator, one column for each change."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from shadowrun.analysis.wording import plural
from shadowrun.report.document import Block, Cell, Column, Document, Limits, Note, Records, Section, Span, Table
from shadowrun.report.document_blocks import naming
from shadowrun.report.issues import Issue, Issues
from shadowrun.report.sanitize import clip
from shadowrun.studies.determinism.stability import Outcome, Stability
from shadowrun.studies.determinism.variants import Dimension

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from shadowrun.studies.determinism.processes import ProcessRun
    from shadowrun.studies.determinism.variants import ChangedVariant

__all__ = ["DIMENSIONS", "Determinism", "determinism_document", "determinism_issues"]

FORMAT: Final = 1
"""Version of the JSON's form."""
RUNS: Final = "run to run"
THREADS: Final = "threads"
DIMENSIONS: Final = (RUNS, Dimension.REPEATS, THREADS, Dimension.SLICES, Dimension.LAYOUTS)
_TONES: Final = {Outcome.HOLDS: "good", Outcome.BREAKS: "bad", Outcome.DOWNSTREAM: "dim", Outcome.NOT_TESTED: "dim"}
_MAX_PLACES: Final = 4
_MAX_INPUTS: Final = 60
_LIMITS: Final = Limits(30, 100, 400)


@dataclass(frozen=True, slots=True)
class Determinism:
    """What was found.

    Attributes:
        program: As it was given.
        runs: Fresh processes.
        by_dimension: Outcomes by dimension of `DIMENSIONS` and operator; a dimension that was not tested is absent.
        broken: Variants of calls that gave other bits.
        left_out: Calls that were not varied, by reason.
        n_missing: Calls that are not in every run of their thread count.
        differing: Names of the provenance that differ between runs of one thread count.
        n_load: Processes that kept the machine busy.
        random: Operators that draw random numbers.
    """

    program: str
    runs: Sequence[ProcessRun]
    by_dimension: Mapping[str, Mapping[str, Stability]]
    broken: Sequence[ChangedVariant]
    left_out: Mapping[str, int]
    n_missing: int
    differing: Sequence[str]
    n_load: int
    random: frozenset[str] = frozenset()

    @property
    def ops(self) -> list[str]:
        """Operators, those that break first, by name."""
        names = {op for outcomes in self.by_dimension.values() for op in outcomes}
        return sorted(names, key=lambda op: (not self.broken_in(op), op))

    def stability(self, dimension: str, op: str) -> Stability:
        """Outcome of an operator."""
        return self.by_dimension.get(dimension, {}).get(op, Stability())

    def broken_in(self, op: str) -> list[str]:
        """Dimensions in which an operator breaks."""
        return [d for d in DIMENSIONS if self.stability(d, op).outcome is Outcome.BREAKS]

    def n_breaking(self, dimension: str) -> int:
        """Operators that break in a dimension."""
        return sum(s.outcome is Outcome.BREAKS for s in self.by_dimension.get(dimension, {}).values())


def determinism_document(found: Determinism, issues: Issues | None = None) -> Document:
    """The report.

    Args:
        found: What was found.
        issues: The operators that break, for CI services.
    """
    blocks: list[Block] = [Note(line) for line in _summary(found)]
    blocks += [Note(line, "warn", "warning") for line in _warnings(found)]
    if found.ops:
        blocks.append(Section("Operators", (_operators(found),), count=len(found.ops)))
    if found.broken:
        blocks.append(Section("What breaks in one process", (_variants(found),), count=len(found.broken)))
    failed = [run for run in found.runs if run.status]
    if failed:
        rows = tuple((_threads(r.threads), f"{r.number}", f"{r.status}", r.message) for r in failed)
        columns = (Column("threads"), Column("run", "number"), Column("exit status", "number"), Column("last line"))
        blocks.append(Section("Processes that failed", (Table(columns, rows, noun="processes"),), count=len(failed)))
    if found.left_out:
        left = sorted(found.left_out.items(), key=lambda item: (-item[1], item[0]))
        table = Table(
            (Column("why"), Column("calls", "number")), tuple((why, f"{n:,}") for why, n in left), noun="reasons"
        )
        blocks.append(Section("Not varied", (table,), count=len(left)))
    return Document(f"determinism of {found.program}", tuple(blocks), _data(found), _records(found), issues=issues)


def _summary(found: Determinism) -> Iterator[str]:
    counts: dict[int, int] = {}
    for run in found.runs:
        counts[run.threads] = counts.get(run.threads, 0) + 1
    ran = ", ".join(f"{n} with {_threads(threads)}" for threads, n in counts.items())
    load = f", with {found.n_load} processes of load" if found.n_load else ""
    yield f"fresh processes: {ran}{load}"
    for dimension in DIMENSIONS:
        if dimension in found.by_dimension:
            outcomes = [s.outcome for s in found.by_dimension[dimension].values()]
            parts = (f"{outcomes.count(kind)} {kind.value}" for kind in (Outcome.BREAKS, Outcome.HOLDS))
            downstream = outcomes.count(Outcome.DOWNSTREAM)
            rest = f", {downstream} downstream of a difference only" if downstream else ""
            yield f"{dimension}: of {len(outcomes)} operators {', '.join(parts)}{rest}"


def _warnings(found: Determinism) -> Iterator[Cell]:
    if found.differing:
        after = "): seed its generators and its data before you blame an operator"
        yield naming("the program did not get the same in each run (", found.differing, _MAX_PLACES, after)
    # By name: an operator that draws breaks in each run of an unseeded program, which is the program's fault.
    drawing = sorted(op for op in found.random if RUNS in found.broken_in(op))
    if drawing:
        yield naming("", drawing, _MAX_PLACES, " draw random numbers: torch.manual_seed makes them repeat")
    if found.n_missing:
        yield f"{found.n_missing:,} calls are not in every run: the program takes another path, or a run was cut off"
    for dimension in (RUNS, Dimension.REPEATS):
        for op, stability in found.by_dimension.get(dimension, {}).items():
            if stability.is_unstable:
                yield (
                    f"{op}, {dimension}: its most frequent result came in {stability.mode} of {stability.n_runs} "
                    "(under 60 %), and does not stand for this platform"
                )


def _operators(found: Determinism) -> Table:
    dimensions = [d for d in DIMENSIONS if d in found.by_dimension]
    columns = (Column("operator", "name"), *(Column(d) for d in dimensions))
    rows = tuple((op, *(_cell(d, found.stability(d, op)) for d in dimensions)) for op in found.ops)
    return Table(columns, rows, noun="operators: -f csv lists all", limits=_LIMITS)


def _cell(dimension: str, stability: Stability) -> Cell:
    outcome = stability.outcome
    text = outcome.value
    if outcome is Outcome.BREAKS:
        places = list(stability.where)
        at = ", ".join(places[:_MAX_PLACES]) + (", …" if len(places) > _MAX_PLACES else "")
        if dimension in (RUNS, Dimension.REPEATS):
            share = 100 * stability.mode / max(stability.n_runs, 1)
            text = f"{stability.n_distinct} results in {stability.n_runs}, mode {stability.mode} ({share:.0f} %)"
        else:
            text = f"breaks at {at}"
    return (Span(text, _TONES[outcome]),)


def _variants(found: Determinism) -> Table:
    columns = (
        *(Column("operator", "name"), Column("change"), Column("at"), Column("results", "number")),
        *(Column("bits that agree", "number"), Column("inputs", detail=1)),
    )
    rows = tuple(
        (b.op, b.dimension, b.variant, f"{b.n_distinct}", _bits(b.bits), clip(b.inputs, _MAX_INPUTS))
        for b in found.broken
    )
    return Table(columns, rows, noun="variants: -f csv lists all operators", limits=_LIMITS)


def _bits(bits: tuple[int, int]) -> str:
    return f"{bits[0]} of {bits[1]}" if bits[1] else ""


def _threads(threads: int) -> str:
    return f"{threads} thread{'s' * (threads != 1)}" if threads else "torch's choice of threads"


def _data(found: Determinism) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "program": found.program,
        "load": found.n_load,
        "runs": [
            {"threads": r.threads, "number": r.number, "status": r.status, "message": r.message} for r in found.runs
        ],
        "provenance_differs": list(found.differing),
        "n_missing_calls": found.n_missing,
        "operators": [
            {"op": op, "random": op in found.random}
            | {d: _stability_data(found.stability(d, op)) for d in DIMENSIONS if d in found.by_dimension}
            for op in found.ops
        ],
        "broken": [dataclasses.asdict(b) for b in found.broken],
        "left_out": dict(found.left_out),
    }


def _stability_data(stability: Stability) -> dict[str, Any]:
    figures = {f.name: getattr(stability, f.name) for f in dataclasses.fields(stability) if f.name != "where"}
    return {"outcome": stability.outcome.value, "at": list(stability.where), **figures}


def _records(found: Determinism) -> Records:
    names = ("n_holds", "n_breaks", "n_downstream", "n_distinct", "mode", "n_runs")
    rows = tuple(
        (op, d, s.outcome.value, *(getattr(s, name) for name in names), "; ".join(s.where))
        for op in found.ops
        for d in DIMENSIONS
        if d in found.by_dimension
        for s in (found.stability(d, op),)
    )
    head = ("operator", "change", "outcome", "holds", "breaks", "downstream", "distinct", "mode", "runs", "at")
    return Records(head, rows)


# Operators that do not repeat themselves, as `Issues`.

_MAX_ISSUE_PLACES = 10


def determinism_issues(found: Determinism, fail_on: Collection[str]) -> Issues:
    """One issue for each operator and change under which it gave other bits, and for each process that failed.

    Args:
        found: What was found.
        fail_on: Dimensions that fail the command.
    """
    rows = [_issue(found, op, dimension, fail_on) for op in found.ops for dimension in found.broken_in(op)]
    rows += [
        Issue(
            kind="failed process",
            cause="",
            name=f"run {run.number}",
            message=clip(f"{found.program}: run {run.number} ended with status {run.status}: {run.message}"),
            level="error",
            key=("failed process", str(run.threads), str(run.number)),
        )
        for run in found.runs
        if run.status
    ]
    passed = tuple(op for op in found.ops if not found.broken_in(op))
    return Issues(f"determinism of {found.program}", tuple(rows), passed, found.program.partition(" ")[0])


def _issue(found: Determinism, op: str, dimension: str, fail_on: Collection[str]) -> Issue:
    stability = found.stability(dimension, op)
    places = list(stability.where)
    more = len(places) - _MAX_ISSUE_PLACES
    at = ", ".join(places[:_MAX_ISSUE_PLACES]) + (f" and {more} more" if more > 0 else "")
    n = stability.n_breaks
    return Issue(
        kind="not repeatable",
        cause=dimension,
        name=op,
        message=clip(f"{op} gives other bits, {dimension}: {plural(n, 'call')}, {stability.n_distinct} results"),
        level="error" if dimension in fail_on else "warning",
        key=("not repeatable", op, dimension),
        lines=(("breaks at", clip(at)),),
    )
