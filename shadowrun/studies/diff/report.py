"""Report of the difference of two recordings, as a `Document` and as `Issues`."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shadowrun.recording.kernel_paths import path_of
from shadowrun.recording.model import NONE, Kind
from shadowrun.report.document import (
    Block,
    Column,
    Document,
    Fact,
    Facts,
    Limits,
    Note,
    Section,
    Span,
    Table,
)
from shadowrun.report.issues import Issue, Issues
from shadowrun.report.sanitize import clip
from shadowrun.studies.diff.compare import Outcome
from shadowrun.studies.diff.report_data import DiffData, effects, kernel, precision_figure
from shadowrun.studies.diff.rounding import Rounding

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from shadowrun.recording.model import Recording
    from shadowrun.report.document import Cell
    from shadowrun.studies.diff.recordings import RecordingDiff

__all__ = ["recording_issues", "recordings_document"]

_LIMITS: Final = Limits(20, 50, 1000)
_MAX_PARENTS: Final = 8
_MAX_LISTED: Final = 1000
_TONES: Final = {Rounding.YES: "good", Rounding.NO: "bad", Rounding.UNKNOWN: "dim"}
_OUTCOME_TONES: Final = {
    Outcome.EQUAL: "good",
    Outcome.KERNEL: "warn",
    Outcome.ALGORITHM: "bad",
    Outcome.ARGUMENTS: "bad",
    Outcome.FORM: "bad",
    Outcome.UNKNOWN: "dim",
    Outcome.OTHER_CALLS: "warn",
}
_MEANING: Final = {
    Outcome.EQUAL: "results are equal in all bits",
    Outcome.INPUT: "inputs differ already",
    Outcome.KERNEL: "equal inputs, other results; another kernel, operator or device",
    Outcome.ALGORITHM: "equal inputs, other results, and no known difference of kernels",
    Outcome.ARGUMENTS: "equal inputs; arguments that are no tensors differ",
    Outcome.FORM: "equal inputs; dtype, shape, strides or placement of the result differ",
    Outcome.UNKNOWN: "a result or an input has no digest",
    Outcome.OTHER_CALLS: "inputs differ; calls that one recording lacks made them of equal inputs",
}


def recordings_document(
    found: RecordingDiff, limit: int, replays: Sequence[str] = (), issues: Issues | None = None
) -> Document:
    """Report of two recordings.

    Args:
        found: What was found.
        limit: Rows of each table and list.
        replays: Commands that judge the first divergence in full.
        issues: The differences for CI services.
    """
    return dataclasses.replace(_Report(found, limit, replays).document(), issues=issues)


class _Report:
    def __init__(self, found: RecordingDiff, limit: int, replays: Sequence[str]) -> None:
        self._found = found
        self._replays = tuple(replays)
        self._data = DiffData(found, limit, replays)
        self._limit = limit
        self._difference = found.difference
        self._a, self._b = found.difference.first.recording, found.difference.second.recording
        self._depths = found.flow.depth

    def document(self) -> Document:
        found = self._found
        blocks: list[Block] = [Note(text, "warn") for text in self._headline()]
        blocks += [Note(self._summary()), self._outcomes(), *precision_figure(found)]
        if found.flow.origins:
            blocks.append(Section("First divergence", tuple(self._first())))
            # Each of them, not the first alone: behind the first divergence, inputs differ, and a second fault would go
            # unseen.
            blocks.append(self._arising())
        if any(output.n_differ for output in found.outputs):
            blocks.append(self._outputs())
        if counterparts := self._data.counterparts():
            blocks.append(_counterpart_section(counterparts, self._limit))
        if found.n_missing:
            blocks.append(self._missing())
        blocks += map(self._rows, range(len(found.rows)))
        if found.provenance.facts:
            facts = tuple((f.name, f.first, f.second) for f in found.provenance.facts)
            table = Table((Column("fact", "name"), *map(Column, found.labels)), facts, noun="facts", limits=_LIMITS)
            blocks.append(Section("Platforms", (table,), "Facts in which they differ.", count=len(facts)))
        title = f"{found.labels[0]} against {found.labels[1]}"
        return Document(title, tuple(blocks), self._data.data(title), self._data.records())

    # -- blocks --------------------------------------------------------------------------------------

    def _headline(self) -> Iterator[Cell]:
        provenance = self._found.provenance
        # First of all: hardware is credited with nothing where something else that went in differs.
        if not provenance.is_same:
            text = f"PROVENANCE DIFFERS: {provenance.line}. No difference below is credited to the platforms."
            yield (Span(text, opens=provenance.unnamed),) if provenance.unnamed else text
        if provenance.versions:
            listed = ", ".join(f"{v.name} {v.first} and {v.second}" for v in provenance.versions)
            yield f"VERSIONS DIFFER: {listed}. No difference below is credited to the hardware."
        yield from self._found.warnings

    def _summary(self) -> str:
        n, equal = len(self._difference.alignment.pairs), self._difference.count(Outcome.EQUAL)
        text = f"{n:,} calls matched, {equal:,} of them equal"
        missing = self._found.n_missing
        text += f"; {missing:,} in one recording only" if missing else ""
        # Without a call where a difference arises, all that differs came in from outside: rounding is not the question.
        if not self._found.flow.origins:
            given, unknown = (self._difference.count(o) for o in (Outcome.INPUT, Outcome.UNKNOWN))
            text += f"; {given:,} differ by what they were given" if given else ""
            return text + (f"; {unknown:,} could not be compared" if unknown else "")
        counts = ", ".join(f"{r} {self._found.count_rounding(r):,}" for r in Rounding if self._found.count_rounding(r))
        n = len(self._found.flow.origins)
        return f"{text}; differences arise in {n:,} call{'s' if n > 1 else ''} (rounding-sized: {counts})"

    def _outcomes(self) -> Table:
        rows: list[tuple[Cell, ...]] = [
            ((_outcome(outcome),), f"{self._difference.count(outcome):,}", self._meaning(outcome))
            for outcome in Outcome
            if self._difference.count(outcome)
        ]
        alignment = self._difference.alignment
        for calls, label in ((alignment.only_first, "first"), (alignment.only_second, "second")):
            if len(calls):
                rows.append(((Span(f"only in the {label}", "warn"),), f"{len(calls):,}", "no call of the other fits"))
        return Table((Column("outcome"), Column("calls", "number"), Column("meaning")), tuple(rows))

    def _meaning(self, outcome: Outcome) -> str:
        # Another version of a library may have another kernel under the same name, or under none.
        if outcome is Outcome.ALGORITHM and self._found.provenance.versions:
            return "equal inputs, other results; versions differ, and no other kernel is known"
        return _MEANING[outcome]

    def _first(self) -> Iterator[Block]:
        origin = self._found.flow.origins[0]
        pair = origin.pair
        x, y = (int(c) for c in self._difference.alignment.pairs[pair])
        a, b = self._a.context_of(x), self._b.context_of(y)
        judged = self._found.judgements.get(pair)
        rows = [
            Fact("operator", a.op if a.op == b.op else f"{a.op}; {b.op} in the second", "strong"),
            Fact("module", _two(a.module or "-", b.module or "-")),
            Fact("where", f"step {self._a.calls['step'][x]}, {a.phase}; {_two(a.site or '-', b.site or '-')}"),
            Fact("outcome", f"{self._difference.outcome(pair)}: {self._meaning(self._difference.outcome(pair))}"),
            Fact("device", _two(a.device, b.device)),
        ]
        kernels = [kernel(r, c) for r, c in ((self._a, x), (self._b, y))]
        if any(kernels):
            rows.append(Fact("kernel", _two(*(k or "not recorded" for k in kernels))))
        if any(paths := [path_of(k) for k in kernels]):
            rows.append(Fact("path", _two(*(path or "not known" for path in paths))))
        if self._difference.outcome(pair) is Outcome.ARGUMENTS:
            rows.append(Fact("arguments", _two(a.arguments, b.arguments)))
        placements = [", ".join(_placements(r, c)) for r, c in self._data.calls(pair)]
        # Shards of another split are other tensors: their digests cannot be equal.
        if placements[0] != placements[1]:
            rows.append(Fact("placement", _two(*(p or "none" for p in placements))))
        if self._difference.undeclared[pair]:
            rows.append(
                Fact("memory", _two(*(", ".join(effects(r, c)) or "as declared" for r, c in self._data.calls(pair))))
            )
        rows.append(Fact("distance", self._distance(pair)))
        if judged is not None:
            rows.append(Fact("rounding", f"{judged.rounding}: {judged.why}"))
            if judged.classes:
                rows.append(Fact("classes", ", ".join(f"{c}: {m:,} and {n:,}" for c, m, n in judged.classes)))
        parents = self._found.flow.parents_of(pair)
        texts = [f"{self._a.context_of(c).op} [{c}]" for c in parents[:_MAX_LISTED]]
        left, n_left = tuple(texts[_MAX_PARENTS:]), len(parents) - _MAX_PARENTS
        named = ", ".join(texts[:_MAX_PARENTS]) + (f" … and {n_left:,} more" if left else "")
        rows.append(Fact("inputs from", named or "what the program was given", opens=left))
        rows.append(Fact("reaches", f"{origin.n_reached:,} later calls, {origin.depth} deep"))
        rows += [Fact("replay", command, "action", command=True) for command in self._replays]
        yield Facts(tuple(rows))
        graph = self._graph(pair)
        if graph.rows:
            yield Section("What it reaches", (graph,), count=origin.n_reached)

    def _graph(self, origin: int) -> Table:
        """Calls that differ because the first divergence did, with the calls that their inputs come from."""
        flow, pairs = self._found.flow, self._difference.alignment.pairs
        reached = np.flatnonzero(flow.origin == origin)
        reached = reached[reached != origin]
        rows: list[tuple[Cell, ...]] = []
        for pair in reached[: self._limit].tolist():
            call = int(pairs[pair, 0])
            context = self._a.context_of(call)
            parents = ", ".join(str(c) for c in flow.parents_of(pair)[:_MAX_PARENTS])
            rows.append((
                str(call), str(int(self._depths[pair])), context.op, context.module, str(context.phase), parents,
                _bits(int(self._difference.remaining[pair])),
            ))  # fmt: skip
        columns = (
            *(Column("call", "number"), Column("depth", "number"), Column("operator", "name"), Column("module")),
            *(Column("phase", detail=1), Column("inputs from"), Column("bits left", "number")),
        )
        return Table(columns, tuple(rows), len(reached) - len(rows), "calls", _LIMITS)

    def _outputs(self) -> Section:
        differ = [output for output in self._found.outputs if output.n_differ]
        rows: list[tuple[Cell, ...]] = []
        for o in differ[: self._limit]:
            call = int(self._difference.alignment.pairs[o.pair, 0])
            context = self._a.context_of(call)
            name = f"{context.op} [{o.position}]" if o.position else context.op
            rows.append((
                *(str(self._a.calls["step"][call]), str(call), name, context.module),
                *(f"{o.n_differ:,} of {o.n_elements:,}", _exact(o.ulp, ",.0f")),
                *(_exact(o.relative, ".3g"), _exact(o.absolute, ".3g")),
            ))  # fmt: skip
        columns = (
            *(Column("step", "number"), Column("call", "number"), Column("operator", "name"), Column("module")),
            *(Column("elements that differ", "number"), Column("ULP", "number"), Column("relative", "number")),
            Column("absolute", "number", 1),
        )
        table = Table(columns, tuple(rows), len(differ) - len(rows), "results", _LIMITS)
        n_equal = len(self._found.outputs) - len(differ)
        lead = f"Exact: both recordings have all elements. Greatest differences; {n_equal:,} more are equal."
        return Section("Results of each step's last call", (table,), lead, count=len(differ))

    def _arising(self) -> Section:
        origins = self._found.flow.origins
        rows = tuple(self._arising_row(o.pair, o.n_reached) for o in origins[: self._limit])
        columns = (
            *(Column("call", "number"), Column("step", "number", 1), Column("operator", "name"), Column("module")),
            *(Column("line", detail=2), Column("outcome"), Column("bits left", "number"), Column("ULP", "number")),
            *(Column("rounding"), Column("reaches", "number", 1)),
        )
        table = Table(columns, rows, len(origins) - len(rows), "calls", _LIMITS)
        lead = "Inputs are equal, or made of equal inputs; results are not. Each is a start of its own."
        return Section("Where differences arise", (table,), lead, count=len(origins))

    def _arising_row(self, pair: int, n_reached: int) -> tuple[Cell, ...]:
        call = int(self._difference.alignment.pairs[pair, 0])
        context, judged = self._a.context_of(call), self._found.judgements.get(pair)
        rounding = judged.rounding if judged else Rounding.UNKNOWN
        return (
            str(call),
            str(self._a.calls["step"][call]),
            context.op,
            context.module,
            context.site,
            (_outcome(self._difference.outcome(pair)),),
            _bits(int(self._difference.remaining[pair])),
            _ulps(judged.min_ulp, judged.max_ulp) if judged else "",
            (Span(str(rounding), _TONES[rounding]), *((Span(judged.why),) if judged else ())),
            f"{n_reached:,}",
        )

    def _missing(self) -> Section:
        rows = tuple(
            (self._found.labels[side], str(call), *_place(recording, call))
            for side, recording, call in self._data.missing_calls()
        )
        columns = (Column("only in"), Column("call", "number"), Column("operator", "name"), Column("module"),
                   Column("phase", detail=1), Column("line"))  # fmt: skip
        table = Table(columns, rows, self._found.n_missing - len(rows), "calls", _LIMITS)
        lead = "Inserted, removed or fused: no call of the other recording fits."
        return Section("Calls of one recording only", (table,), lead, count=self._found.n_missing)

    def _rows(self, number: int) -> Section:
        found = self._found.rows[number]
        different = [pair for pair in found.pairs if not pair.equal]
        rule = found.rule
        lead = (
            f"{len(found.pairs):,} rows compared ({found.n_first:,} and {found.n_second:,}), {len(different):,} differ"
        )
        lead += f"; bits left: {found.least} at least" if found.least != NONE else ""
        lead += f"; {found.n_other_form:,} have another dtype or length" if found.n_other_form else ""
        if found.alone:
            lead += f"; modules of one recording only: {', '.join(found.alone[:3])}{', …' * (len(found.alone) > 3)}"
        rows = tuple(
            (
                *((p.module,) if found.has_modules else ()),
                *(str(p.number), f"{p.first[0]} row {p.first[1]}", f"{p.second[0]} row {p.second[1]}"),
                _bits(p.remaining),
            )
            for p in different[: self._limit]
        )
        columns = (
            *((Column("module"),) if found.has_modules else ()),
            Column("row", "number"),
            Column("first: call"),
            Column("second: call"),
            Column("bits left", "number"),
        )
        table = Table(columns, rows, len(different) - len(rows), "rows", _LIMITS)
        return Section(f"Rows of {rule.module} {rule.op}", (table,) if rows else (), lead + ".", count=len(different))

    def _distance(self, pair: int) -> str:
        judged = self._found.judgements.get(pair)
        remaining = int(self._difference.remaining[pair])
        parts = [f"{remaining} bits left"] if remaining != NONE else []
        if judged is not None:
            ulps = _ulps(judged.min_ulp, judged.max_ulp)
            parts += [f"{ulps} ULP"] if ulps else []
            least = "" if judged.is_exact else "at least "
            parts += [] if math.isnan(judged.relative) else [f"relative {least}{judged.relative:.3g}"]
            parts += ["exact, by all elements"] if judged.is_exact else []
        return "; ".join(parts) or "not measured"


def _counterpart_section(rows: list[dict[str, Any]], limit: int) -> Section:
    columns = (
        *(Column("in the first", "name"), Column("in the second", "name"), Column("calls", "number")),
        *(Column("equal", "number"), Column("first call", "number")),
    )
    names = ("first", "second", "n_calls", "n_equal", "call")
    cells: tuple[tuple[Cell, ...], ...] = tuple(
        tuple(value if isinstance(value, str) else f"{value:,}" for value in (row[name] for name in names))
        for row in rows[:limit]
    )
    table = Table(columns, cells, len(rows) - len(cells), "operators", _LIMITS)
    lead = "Calls that correspond, though devices or versions of torch have different operators for them."
    return Section("Counterparts", (table,), lead, count=len(rows))


def _place(recording: Recording, call: int) -> tuple[str, str, str, str]:
    context = recording.context_of(call)
    return context.op, context.module, str(context.phase), context.site


def _placements(recording: Recording, call: int) -> Iterator[str]:
    """Mesh and placements of what a call made."""
    for row in recording.results_of(call):
        if recording.results["kind"][row] != Kind.LEAF and (text := recording.form_of(row).placement):
            yield text


def _two(first: str, second: str) -> str:
    return first if first == second else f"{first} in the first, {second} in the second"


def _outcome(outcome: Outcome) -> Span:
    return Span(str(outcome), _OUTCOME_TONES.get(outcome, ""))


def _bits(remaining: int) -> str:
    return "" if remaining == NONE else str(remaining)


def _exact(value: float, form: str) -> str:
    return "" if math.isnan(value) else format(value, form)


def _ulps(least: float, most: float) -> str:
    if math.isnan(least) and math.isnan(most):
        return ""
    if least == most:
        return f"{least:,.0f}"
    if math.isnan(most):
        return f"at least {least:,.0f}"
    return f"at most {most:,.0f}" if math.isnan(least) else f"{least:,.0f} to {most:,.0f}"


_KINDS: Final = {Outcome.KERNEL: "kernel", Outcome.ALGORITHM: "algorithm"}


def recording_issues(found: RecordingDiff, fail_on: Collection[str], limit: int, file: str) -> Issues:
    """One issue for each operator, module and outcome in which a difference arises.

    Args:
        found: The difference of two recordings.
        fail_on: Of `recordings.FAIL_ON`.
        limit: Calls to look at.
        file: Name of the second recording.
    """
    pairs = found.difference.alignment.pairs
    recording = found.difference.first.recording
    rows: dict[tuple[str, ...], Issue] = {}
    for origin in found.flow.origins[:limit]:
        outcome, judged = found.difference.outcome(origin.pair), found.judgements.get(origin.pair)
        context = recording.context_of(int(pairs[origin.pair, 0]))
        key = (str(outcome), context.op, context.module, str(context.phase))
        not_rounding = judged is not None and judged.rounding is Rounding.NO
        fails = {"any", _KINDS.get(outcome, ""), *(("not-rounding",) if not_rounding else ())} & set(fail_on)
        why = f", rounding-sized: {judged.rounding}" if judged is not None else ""
        issue = Issue(
            kind=f"differs by {outcome}",
            cause="",
            name=context.op,
            message=clip(f"{context.op}: {found.labels[1]} differs from {found.labels[0]} by {outcome}{why}"),
            level="error" if fails else "warning",
            key=key,
            lines=(("where", ", ".join(filter(None, (context.module, str(context.phase))))),),
            sites=(context.site,) if context.site else (),
        )
        # The worst of equal ones: a module is called in each step.
        if key not in rows or (issue.level == "error" and rows[key].level != "error"):
            rows[key] = issue
    return Issues(f"{found.labels[1]} since {found.labels[0]}", tuple(rows.values()), file=file)
