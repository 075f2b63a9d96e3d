"""The report on a run, as a `Document`."""

from __future__ import annotations

import dataclasses
import os.path
from typing import TYPE_CHECKING, Protocol

from shadowrun.analysis.drift_effects import read_repairs
from shadowrun.analysis.wording import plural
from shadowrun.report.document import (
    Block,
    Cell,
    Column,
    Document,
    Fact,
    Facts,
    GateLine,
    Limits,
    Note,
    Records,
    Section,
    Span,
    Table,
    status_span,
)
from shadowrun.report.finding_details import FindingDetails
from shadowrun.report.formatting import (
    describe_cause,
    finding_facts,
    first_few_cell,
    overhead,
    short_reason,
    short_site,
)
from shadowrun.report.issues import Issue, Issues
from shadowrun.report.run_sections import (
    baseline_section,
    coverage_section,
    drift_section,
    finding_sections,
    first_divergence_facts,
    first_divergence_section,
    internal_failures_section,
    known_section,
    notes_section,
    operator_table,
    regions_section,
    skipped_section,
)
from shadowrun.report.sanitize import clip, sanitize
from shadowrun.report.source_report import source_section
from shadowrun.store.combine.combined_runs import are_ranks, name_runs
from shadowrun.store.datafile import ENDED_EARLY

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from shadowrun import analysis
    from shadowrun.analysis import (
        Charts,
        Coverage,
        DriftStep,
        Finding,
        FindingOrigin,
        LedgerUse,
        OperatorSummary,
        Regions,
        SinceBaseline,
        SourceText,
        Step,
    )
    from shadowrun.store.combine.combined_runs import SourceRun
    from shadowrun.types import OpRecord, RunInfo, Status

__all__ = ["Source", "run_document", "run_issues"]

FORMAT = 1
"""Version of the JSON's form. History: 1, first version."""
MAX_SUMMARY = 8  # with the head, the first screen of a terminal
MAX_LISTED = 2000
MAX_ARGV = 200
MAX_CELL = 120

_INCOMPLETE = "The run still records, was killed, or its disk was full: this is what it had recorded."


class Source(Protocol):
    """The part of `shadowrun.run.Run` that a report reads."""

    @property
    def info(self) -> RunInfo:
        """As in `Run`."""

    def summary(self) -> list[OperatorSummary]:
        """As in `Run`."""

    def regions(self) -> Regions:
        """As in `Run`."""

    def findings(self) -> list[Finding]:
        """As in `Run`."""

    def origins(self) -> Mapping[int, tuple[FindingOrigin, ...]]:
        """As in `Run`."""

    def source(self) -> SourceText:
        """As in `Run`."""

    def charts(self) -> Charts:
        """As in `Run`."""

    def read_calls(self, *, charts: bool) -> None:
        """As in `Run`."""

    def known(self) -> LedgerUse:
        """As in `Run`."""

    def notes(self) -> list[analysis.Note]:
        """As in `Run`."""

    def internal_failures(self) -> list[analysis.Note]:
        """As in `Run`."""

    def first_divergence(self) -> OpRecord | None:
        """As in `Run`."""

    def coverage(self) -> Coverage:
        """As in `Run`."""

    def counts(self) -> dict[Status, int]:
        """As in `Run`."""

    def steps(self) -> tuple[Step, ...]:
        """As in `Run`."""

    def drift(self) -> list[DriftStep]:
        """As in `Run`."""

    def sources(self) -> tuple[SourceRun, ...]:
        """As in `Run`."""

    def gate(self) -> analysis.Gate:
        """As in `Run`."""

    def since_baseline(self) -> analysis.SinceBaseline | None:
        """As in `Run`."""


def run_document(run: Source, *, pictures: bool = False) -> Document:
    """The report on a run.

    Args:
        run: The run.
        pictures: Whether HTML will be made of it: then what its pictures need is read together with the rest.
    """
    if pictures:
        run.read_calls(charts=True)
    info, coverage, findings, known = run.info, run.coverage(), run.findings(), run.known()
    gate, regions, first, operators = run.gate(), run.regions(), run.first_divergence(), run.summary()
    drift, steps, sources, counts = run.drift(), run.steps(), run.sources(), run.counts()
    notes, internal_failures, since = run.notes(), run.internal_failures(), run.since_baseline()
    # Keys of the JSON are a contract: names in the code may change, these may not.
    data = {
        "format": FORMAT,
        "info": info,
        "passed": gate.passed,
        "gate": {"line": gate.line, "fail_on": gate.fail_on},
        "counts": counts,
        "first_divergence": first,
        "drift": drift,
        "findings": findings,
        "known": known,
        "operators": operators,
        "regions": regions,
        "coverage": coverage,
        "percent_operators": coverage.percent_operators,
        "percent_calls": coverage.percent_calls,
        "notes": notes,
        "own_failures": internal_failures,
        "steps": steps,
        "sources": sources,
    }
    # Only with a baseline: without one, the JSON of a run stays as readers of format 1 know it.
    if since is not None:
        names = ("kind", "op", "module", "phase", "cause")
        rows = [
            {"change": c.change, **dict(zip(names, c.signature, strict=True)), "known": c.is_known}
            for c in since.changes
        ]
        data["since_baseline"] = {"name": since.name, "findings": rows}
    details = FindingDetails(run)
    n_own = sum(failure.n_calls for failure in internal_failures)
    sections = (
        first_divergence_section(first, findings, sources),
        baseline_section(since),
        drift_section(drift, sanitize(read_repairs(info))),
        details.effects(findings),
        *finding_sections(findings, details),
        source_section(findings, lambda: details.source),
        known_section(known),
        Section("Operators", (operator_table(operators),), "Those that need work first. Times are medians of single "
                "calls, launch included: a hint where to profile, not a benchmark."),
        regions_section(regions),
        coverage_section(coverage),
        notes_section(notes),
        skipped_section(coverage),
        internal_failures_section(internal_failures),
    )  # fmt: skip
    # Verdict, counts, remarks and findings come before all else: a first screen answers whether the run is right.
    head: list[Block | None] = [
        Note(f"On {info.target} the program {coverage.verdict}."),
        _counts(counts, n_own),
        *(Note(remark, "warn") for remark in _remarks(info, known, gate)),
        _summary(findings),
    ]
    blocks = [
        *head,
        Facts(tuple(_run_facts(sanitize(info), steps, sources)), "The run"),
        details.pictures(),
        *sections,
    ]
    brief = (*first_divergence_facts(first, sources), *_costs(info))
    digest = (*head, Facts(brief) if brief else None)
    return Document(
        f"{clip(info.target)} against {clip(info.ref)}",
        tuple(block for block in blocks if block is not None),
        data,
        _records(operators),
        GateLine(gate.line, gate.passed),
        run_issues(info, findings, known.findings, operators, gate.fail_on, since),
        tuple(block for block in digest if block is not None),
    )


def _records(operators: Sequence[OperatorSummary]) -> Records:
    """One row for each operator, with all figures."""
    from shadowrun.analysis import OperatorSummary as Row

    head = tuple(field.name for field in dataclasses.fields(Row))
    values = ([getattr(operator, name) for name in head] for operator in operators)
    return Records(head, tuple(tuple(", ".join(v) if isinstance(v, tuple) else v for v in row) for row in values))


def _counts(counts: dict[Status, int], n_own: int) -> Note | None:
    """Calls by status; shadowrun's own failures are not the target's errors."""
    shown = {**{str(status): n for status, n in counts.items()}, "own failures": n_own}
    # A failure to compare says nothing about the target.
    shown["error"] -= n_own
    spans = tuple(status_span(status, f"{n:,} {status}") for status, n in shown.items() if n)
    return Note(spans, label="calls") if spans else None


def _summary(findings: Sequence[Finding]) -> Table | None:
    """One line for each finding: the first screen says what is wrong, and where."""
    if not findings:
        return None
    rows = tuple(
        (
            (Span(str(f.number), link=f"finding-{f.number}"),),
            (status_span(f.kind),),
            f.op,
            clip(short_site(f.sites[0]).partition(" in ")[0], MAX_CELL) if f.sites else "",
            first_few_cell(f.modules, f.n_modules, 1, MAX_CELL),
            clip(short_reason(f), MAX_CELL),
            f"{f.n_calls:,}",
        )
        # Cut first: sanitising copies each finding, and a run may have thousands.
        for f in sanitize(findings[:MAX_LISTED])
    )
    columns = (
        Column("nr", "number"), Column("finding"), Column("operator", "name"), Column("line"),
        Column("module", detail=1), Column("why"), Column("calls", "number", 2),
    )  # fmt: skip
    shown = Limits(MAX_SUMMARY, MAX_SUMMARY, MAX_SUMMARY, MAX_LISTED)
    return Table(columns, rows, len(findings) - len(rows), limits=shown, compact=True)


def _remarks(info: RunInfo, known: LedgerUse, gate: analysis.Gate) -> Iterator[Cell]:
    """Notes that a reader must see before the figures."""
    # A run that stop_on or --fail-fast ended says so itself, with the call.
    if not (info.complete or any(note.startswith(ENDED_EARLY) for note in info.notes)):
        yield _INCOMPLETE
    if info.unselected and info.unselected not in gate.line:
        yield clip(f"Not found: {info.unselected}.")
    if info.budget:
        yield clip(f"Not all was compared, to keep within the overhead budget: {overhead(info)}.")
    yield from map(clip, info.notes)
    # A ledger that is never cleaned would excuse new faults.
    outdated = [use.remark for use in known.lines if use.remark]
    yield from map(clip, outdated[:MAX_SUMMARY])
    if left := outdated[MAX_SUMMARY:]:
        yield (Span(f"The ledger has {len(left)} more lines that are out of date.", opens=tuple(map(clip, left))),)


def _run_facts(info: RunInfo, steps: tuple[Step, ...], sources: tuple[SourceRun, ...]) -> Iterator[Fact]:
    # Reports are published: the folder of the program names a user and a machine.
    argv = " ".join([os.path.basename(info.argv[0]), *info.argv[1:]]) if info.argv else ""  # noqa: PTH119 - no path
    rows = [
        ("target", _pairs(info.target, info.target_fingerprint)),
        ("reference", _pairs(info.ref, info.ref_fingerprint)),
        ("overhead", overhead(info)),
        ("program", clip(argv, MAX_ARGV)),
        ("steps", f"{len(steps):,}, {sum(step.wall_s for step in steps):.3g} s" if steps else ""),
        ("rank", f"{info.rank} of {info.world_size}" if info.world_size > 1 and not sources else ""),
        ("combined", _combined(sources)),
        ("versions", ", ".join(f"{name} {version}" for name, version in info.versions.items())),
        ("options", ", ".join(f"{k}={v}" for k, v in info.config.items() if v is not None)),
        ("started", info.started),
    ]
    # In a terminal one line each but for the cost: the findings must be on the first screen. HTML has them in full.
    yield from (Fact(label, clip(text), short=label != "overhead") for label, text in rows if text)


def _costs(info: RunInfo) -> Iterator[Fact]:
    """What the run took, in the digest."""
    if text := overhead(info):
        yield Fact("overhead", clip(text))


def _combined(sources: tuple[SourceRun, ...]) -> str:
    if not sources:
        return ""
    names = name_runs(sources, range(len(sources))).removesuffix(" only")
    of = f" of {sources[0].info.world_size}" if are_ranks(sources) else ""
    return f"{plural(len(sources), 'file')}: {names}{of}"


def _pairs(spec: str, fingerprint: dict[str, object]) -> str:
    described = ", ".join(f"{key} {value}" for key, value in fingerprint.items() if value not in (None, ""))
    return f"{spec} ({described})" if described else spec


# The findings of a run as `Issues`.


def run_issues(
    info: RunInfo,
    findings: Sequence[Finding],
    known: Sequence[Finding],
    operators: Sequence[OperatorSummary],
    fail_on: Collection[str],
    since: SinceBaseline | None = None,
) -> Issues:
    """All findings, known issues included, and the operators without one.

    Args:
        info: Description of the run.
        findings: New findings.
        known: Findings that the ledger excuses.
        operators: All operators.
        fail_on: Kinds that fail the run; ``new`` and ``worse`` are those since the baseline.
        since: What became of the findings of a baseline.
    """
    changes = since.by_finding() if since is not None else {}
    change = {
        f.number: str(changes.get((f.kind, f.op, str(f.cause or ""), f.known is not None), ""))
        for f in (*findings, *known)
    }
    failing = {f.number for f in findings if {f.kind, change[f.number]} & set(fail_on)}
    rows = [_issue(f, info.target, "error" if f.number in failing else "warning", change[f.number]) for f in findings]
    rows += [_issue(f, info.target, "note", change[f.number]) for f in known]
    # JUnit wants passed tests too: an operator with a finding of any kind is none.
    named = {issue.name for issue in rows}
    passed = tuple(o.op for o in operators if o.n_match and o.op not in named)
    return Issues(info.target, tuple(rows), passed, info.argv[0] if info.argv else "")


def _issue(finding: Finding, target: str, level: str, change: str) -> Issue:
    why = describe_cause(finding.cause, finding.explanation, finding.evidence, finding.confidence)
    message = clip(f"{finding.op} on {target}: {finding.kind}{f', {why}' if why else ''}")
    facts = finding_facts(finding)
    # Without line and explanation, which change with the program while the fault stays: as `analysis.Signature`.
    key = (
        *(finding.kind, finding.op, str(finding.cause or "")),
        *(*finding.modules[:1], *map(str, finding.phases[:1])),
    )
    reason = finding.known.reason if finding.known is not None else ""
    return Issue(
        kind=finding.kind,
        cause=str(finding.cause or ""),
        name=finding.op,
        message=message,
        level=level,
        key=key,
        lines=tuple((fact.label, fact.text) for fact in facts if fact.label != "why"),
        sites=finding.sites,
        known=reason,
        change=change,
    )
