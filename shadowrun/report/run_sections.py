"""The sections of the report on a run, and its tables for notebooks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

from shadowrun.analysis import Change
from shadowrun.analysis.findings import without_numbers
from shadowrun.report.bars import region_strip
from shadowrun.report.document import Span
from shadowrun.report.document_blocks import (
    TONES,
    Block,
    Cell,
    Column,
    Entries,
    Entry,
    Fact,
    Facts,
    Filter,
    Later,
    Limits,
    Note,
    Section,
    Table,
    status_span,
)
from shadowrun.report.finding_details import FindingDetails, facets, ranks, repair_blocks
from shadowrun.report.formatting import (
    describe_cause,
    duration,
    finding_facts,
    first_few_cell,
    float_text,
    known_issue_texts,
    max_abs_text,
    record_facts,
    region_facts,
    short_site,
)
from shadowrun.report.sanitize import clip, sanitize
from shadowrun.store.combine.combined_runs import name_runs
from shadowrun.store.records import REGION

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from shadowrun import analysis
    from shadowrun.analysis import (
        Coverage,
        DriftStep,
        Finding,
        FindingChange,
        FindingInRun,
        LedgerUse,
        OperatorSummary,
        Regions,
        RegionSummary,
        SinceBaseline,
        Skipped,
    )
    from shadowrun.analysis.drift_effects import Repair
    from shadowrun.store.combine.combined_runs import SourceRun
    from shadowrun.types import OpRecord

__all__ = [
    "baseline_section",
    "change_counts",
    "change_table",
    "coverage_section",
    "drift_section",
    "finding_sections",
    "findings_table",
    "first_divergence_facts",
    "first_divergence_section",
    "internal_failures_section",
    "known_section",
    "notes_section",
    "operator_table",
    "regions_section",
    "skipped_section",
]

MAX_FINDINGS = 300
"""Of each kind, in full: HTML opens those after the first 50, and leaves out what its limit of size does not take."""
# A data file may have any number of rows: lists of a report end here.
MAX_OPERATORS = 1000
MAX_ROWS = 1000
MAX_LISTED = 2000
MAX_STEPS = 12
MAX_REGIONS = 12
MAX_CELL = 120

_KNOWN_LEAD = "Listed in the ledger of known issues: they fail nothing, and no other section lists them as findings."
_REGIONS_LEAD = (
    "Graphs of torch.compile: the program ran them compiled, and each was run eagerly on the same inputs, as a whole."
)
_KINDS = {
    "unsupported": ("Unsupported operators", "The target has no kernel for these calls."),
    "error": ("Errors", "The target raised where the reference did not."),
    "mismatch": ("Mismatches", "The target returned what no correct implementation could have returned."),
    "fallback": ("Fallbacks", "The target returned a result that was computed on the CPU."),
    "slow": ("Slow operators", "Times of single calls, launch included: a hint where to profile, not a benchmark."),
}
_NAME, _CALLS = Column("operator", "name"), Column("calls", "number")


def first_divergence_section(
    first: OpRecord | None, findings: list[Finding], sources: tuple[SourceRun, ...]
) -> Section | None:
    """The first call that mismatched."""
    if first is None:
        return None
    origin, finding = clip(_origin(first, sources)), sanitize(_finding_of(first, findings))
    facts = record_facts(sanitize(first), finding, origin)
    return Section("First divergence", (Entries((Entry(clip(first.call.op), facts, tone="bad"),)),), anchor="first")


def first_divergence_facts(first: OpRecord | None, sources: tuple[SourceRun, ...]) -> tuple[Fact, ...]:
    """The same in few lines, for the digest."""
    if first is None:
        return ()
    of_run = _origin(first, sources)
    verdict, call = first.verdict, sanitize(first).call
    why = ": ".join(filter(None, (str(verdict.cause or ""), verdict.explanation)))
    rows = (
        ("first", f"{call.op}, call {call.seq:,} in step {call.step:,}" + (f", {of_run}" if of_run else "")),
        ("", " · ".join(filter(None, (call.module, str(call.phase), short_site(call.site))))),
        ("", why),
    )
    return tuple(Fact(label, clip(text), short=True) for label, text in rows if text)


def drift_section(steps: list[DriftStep], repairs: Mapping[str, Repair]) -> Section | None:
    """The accumulated error by step."""
    if not steps:
        return None
    # A long run has thousands of steps: the first or last few would show no trend.
    rows = _drift_rows(_evenly_spread(steps))
    numbers = (Column("step", "number"), Column("max abs", "number"), Column("relative", "number"))
    table = Table((*numbers, Column("worst at"), Column("module")), rows, len(steps) - len(rows), "steps")
    lead = "Between the target's own chain of results and the reference's, by step."
    blocks: list[Block] = [table]
    if len(steps) > len(rows):
        everything = Table(table.columns, _drift_rows(steps[:MAX_LISTED]), max(0, len(steps) - MAX_LISTED), "steps")
        blocks.append(Later(lambda: (everything,), f"All {len(steps):,} steps"))
    blocks += repair_blocks(repairs)
    return Section("Accumulated error", tuple(blocks), lead, anchor="drift")


def _drift_rows(steps: list[DriftStep]) -> tuple[tuple[Cell, ...], ...]:
    return tuple(
        (f"{d.step:,}", float_text(d.drift_abs), float_text(d.drift_rel), d.op, d.module) for d in sanitize(steps)
    )


def finding_sections(findings: list[Finding], details: FindingDetails) -> Iterator[Section]:
    """A section for each kind of finding."""
    for kind, (title, lead) in _KINDS.items():
        of_kind = [finding for finding in findings if finding.kind == kind]
        entries = tuple(
            Entry(
                f.op,
                finding_facts(f),
                f"{f.n_calls:,} of {f.n_calls_of_op:,} calls, first is number {f.first_seq:,} in step {f.first_step:,}",
                str(f.number),
                TONES[kind],
                f"finding-{f.number}",
                facets=facets(f),
                ranks=ranks(f),
                inside=details.blocks(f),
            )
            for f in sanitize(of_kind[:MAX_FINDINGS])
        )
        if entries:
            block = Entries(entries, len(of_kind) - len(entries))
            yield Section(title, (block,), lead, len(of_kind), TONES[kind], kind)


def known_section(known: LedgerUse) -> Section | None:
    """Findings that the ledger excuses."""
    if not known.findings:
        return None
    rows = tuple(
        (f.op, f"{f.n_calls:,}", f.kind, *known_issue_texts(f), first_few_cell(f.modules, f.n_modules, 1, MAX_CELL))
        for f in sanitize(known.findings[:MAX_ROWS])
    )
    columns = (
        _NAME,
        _CALLS,
        Column("kind"),
        Column("reason"),
        Column("until"),
        Column("module", detail=2),
    )
    n = len(known.findings)
    return Section("Known issues", (Table(columns, rows, n - len(rows)),), _KNOWN_LEAD, n, anchor="known")


def findings_table(findings: Sequence[Finding]) -> Table:
    """One row for each finding, for notebooks."""
    rows = tuple(
        (str(f.number), f.op, f.kind, f.cause_text, f"{f.n_calls:,}", f.sites[0] if f.sites else "", f.next_step)
        for f in sanitize(findings[:MAX_ROWS])
    )
    columns = (
        Column("number", "number"), _NAME, Column("kind"), Column("cause"), _CALLS, Column("line"), Column("next step"),
    )  # fmt: skip
    return Table(columns, rows, len(findings) - len(rows))


def operator_table(operators: Sequence[OperatorSummary]) -> Table:
    """One row for each operator, those that need work first."""
    rows = tuple(map(_operator, sanitize(operators[:MAX_OPERATORS])))
    columns = (
        _NAME, _CALLS, Column("outcome"), Column("max abs", "number"), Column("max rel", "number", 1),
        Column("ULP", "number", 1), Column("bits", "number", 1), Column("ref", "number"), Column("target", "number"),
        Column("dtypes", detail=1), Column("shapes", detail=2),
    )  # fmt: skip
    tags = tuple(tuple(_counts_of(operator)) for operator in operators[:MAX_OPERATORS])
    choices = tuple(status for status in TONES if any(status in tag for tag in tags))
    return Table(
        columns, rows, len(operators) - len(rows), "operators", Limits(25, 50, 100),
        filter=Filter(choices) if len(choices) > 1 else None, tags=tags,
    )  # fmt: skip


def _counts_of(op: OperatorSummary) -> dict[str, int]:
    """Calls by outcome, where there are any."""
    counts = {
        "unsupported": op.n_unsupported, "error": op.n_error, "mismatch": op.n_mismatch, "fallback": op.n_fallback,
        "unverified": op.n_unverified + op.n_own_failures, "match": op.n_match,
    }  # fmt: skip
    return {status: n for status, n in counts.items() if n}


def _operator(op: OperatorSummary) -> tuple[Cell, ...]:
    bits = str(op.remaining_bits) if op.remaining_bits >= 0 else "-"
    compared = op.worst_seq >= 0
    figures = (max_abs_text(op), float_text(op.max_rel), f"{op.max_ulp:,}", bits) if compared else ("-",) * 4
    shapes = first_few_cell(op.shapes, len(op.shapes) + op.n_more_shapes, 2, 90)
    times = duration(op.ref_median_us), duration(op.target_median_us)
    return (op.op, f"{op.n_calls:,}", _outcomes(_counts_of(op)), *figures, *times, first_few_cell(op.dtypes), shapes)


def _outcomes(counts: dict[str, int]) -> Cell:
    return tuple(status_span(status, f"{n:,} {status}") for status, n in counts.items() if n)


def regions_section(regions: Regions) -> Section | None:
    """Graphs of torch.compile."""
    if not (regions.rows or regions.skipped):
        return None
    rows = sanitize(regions.rows[:MAX_ROWS])
    columns = (
        Column("region", "name"), Column("phase"), _CALLS, Column("outcome"), Column("max abs", "number"),
        Column("operators", "number"), Column("backend"), Column("line"),
    )  # fmt: skip
    n_more = len(regions.rows) - len(rows)
    table = Table(columns, tuple(map(_region, rows)), n_more, "regions", Limits(terminal=25))
    described = [(row, region_facts(row)) for row in rows]
    entries = tuple(Entry(row.name, facts, row.phase, tone=TONES[row.status]) for row, facts in described if facts)
    skipped = sanitize(_by_reason(regions.skipped)[:MAX_ROWS])
    strips: dict[str, list[tuple[str, str, int]]] = {}
    for row in sorted(rows, key=lambda row: row.name):
        strips.setdefault(str(row.phase), []).append((row.name, str(row.status), row.n_operators))
    strip = region_strip(list(strips.items()), "Compiled regions by phase")
    blocks: list[Block] = [
        Note(clip(regions.line)),
        *strip,
        table,
        Entries(entries, limits=Limits(MAX_REGIONS, 20, 50)),
    ]
    blocks += [Note(f"not compared: {s.n:,} calls of {s.op}, {s.reason}", "warn") for s in skipped[:MAX_REGIONS]]
    return Section("Compiled regions", tuple(blocks), _REGIONS_LEAD, len(regions.rows), anchor="regions")


def _region(region: RegionSummary) -> tuple[Cell, ...]:
    counts = {
        "mismatch": region.n_mismatch, "error": region.n_error, "unverified": region.n_unverified,
        "match": region.n_match,
    }  # fmt: skip
    max_abs = "-" if region.worst is None else float_text(region.worst.max_abs)
    n_operators = f"{region.n_operators:,}" if region.n_operators >= 0 else "-"
    site = clip(short_site(region.site), MAX_CELL)
    return (
        region.name, region.phase, f"{region.n_calls:,}", _outcomes(counts), max_abs, n_operators, region.backend, site,
    )  # fmt: skip


def coverage_section(coverage: Coverage) -> Section:
    """What the target supports, and the kernels that it lacks."""
    n, percents = coverage.n_by_state["supported"], (coverage.percent_operators, coverage.percent_calls)
    facts = (
        Fact("operators", f"{n:,} of {coverage.n_operators:,} ({percents[0]:.1f} %) run on the target"),
        Fact("calls", f"{coverage.n_supported_calls:,} of {coverage.n_calls:,} ({percents[1]:.1f} %)"),
    )
    kernels = sanitize(coverage.missing_kernels[:MAX_ROWS])
    rows = tuple((kernel.kernel, f"{kernel.n_calls:,}", first_few_cell(kernel.ops)) for kernel in kernels)
    columns = (Column("kernel to write", "name"), _CALLS, Column("needed by"))
    table = Table(columns, rows, len(coverage.missing_kernels) - len(rows), "kernels")
    return Section("Coverage", (Facts(facts), table) if rows else (Facts(facts),))


def notes_section(notes: Sequence[analysis.Note]) -> Section | None:
    """Calls that could not be verified, and matches with a cause worth knowing."""
    rows = tuple(
        (n.op, f"{n.n_calls:,}", (status_span(n.status),), clip(describe_cause(n.cause, n.explanation, n.evidence, 1)))
        for n in sanitize(notes[:MAX_ROWS])
    )
    table = Table((_NAME, _CALLS, Column("status"), Column("why")), rows, len(notes) - len(rows))
    return Section("Not verified, or worth knowing", (table,), anchor="notes") if rows else None


def skipped_section(coverage: Coverage) -> Section | None:
    """Calls that were skipped on purpose."""
    skipped = _by_reason(s for s in coverage.skipped if not s.op.startswith(REGION))
    rows = tuple((s.op, f"{s.n:,}", s.reason) for s in sanitize(skipped[:MAX_ROWS]))
    table = Table((_NAME, _CALLS, Column("reason")), rows, len(skipped) - len(rows))
    return Section("Skipped on purpose", (table,), anchor="skipped") if rows else None


def internal_failures_section(failures: Sequence[analysis.Note]) -> Section | None:
    """Calls that shadowrun itself failed to compare."""
    rows = tuple(
        (n.op, f"{n.n_calls:,}", clip(describe_cause(None, n.explanation, n.evidence, 1)))
        for n in sanitize(failures[:MAX_ROWS])
    )
    table = Table((_NAME, _CALLS, Column("error")), rows, len(failures) - len(rows))
    lead = "shadowrun failed to compare these calls; they say nothing about the target."
    return Section("shadowrun's own failures", (table,), lead, anchor="own-failures") if rows else None


def _by_reason(skipped: Iterable[Skipped]) -> list[Skipped]:
    """One row for each operator and reason, summed over devices, such as those of several ranks."""
    rows: dict[tuple[str, str], Skipped] = {}
    for row in skipped:
        seen = rows.get((row.op, row.reason))
        rows[row.op, row.reason] = row if seen is None else dataclasses.replace(seen, n=seen.n + row.n)
    return sorted(rows.values(), key=lambda row: -row.n)


def _finding_of(first: OpRecord | None, findings: list[Finding]) -> Finding | None:
    """The finding that has a record."""
    if first is None:
        return None
    key = (first.call.op, first.verdict.cause, without_numbers(first.verdict.explanation))
    same = (f for f in findings if f.kind == "mismatch" and (f.op, f.cause, without_numbers(f.explanation)) == key)
    return next(same, None)


def _origin(first: OpRecord | None, sources: tuple[SourceRun, ...]) -> str:
    """The run of a combined file that a call is from, and its number in it."""
    if first is None or not sources:
        return ""
    # Combining renumbers the calls: each run has a range, in the order of the files.
    source = next(source for source in reversed(sources) if source.first_seq <= first.call.seq)
    name = name_runs(sources, [source.number]).removesuffix(" only")
    return f"{name} first, as its call {first.call.seq - source.first_seq:,}"


def _evenly_spread(steps: list[DriftStep]) -> list[DriftStep]:
    """At most `MAX_STEPS`, with the first and the last."""
    if len(steps) <= MAX_STEPS:
        return steps
    return [steps[i] for i in sorted({round(i * (len(steps) - 1) / (MAX_STEPS - 1)) for i in range(MAX_STEPS)})]


# What became of the findings of a baseline, as a section of a report and as a table of `shadowrun diff`.

_MAX_CHANGES: Final = 50
_TONES: Final = {Change.NEW: "bad", Change.WORSE: "bad", Change.GONE: "good", Change.SAME: "dim"}
_CHANGE_LIMITS: Final = Limits(40, 100, 1000)


def change_counts(changes: Sequence[FindingChange]) -> Note:
    """``2 new  0 worse  1 same  0 gone``."""
    counts = {change: sum(c.change is change for c in changes) for change in Change}
    return Note(tuple(Span(f"{n:,} {change}", _TONES[change] if n else "dim") for change, n in counts.items()))


def change_table(changes: Sequence[FindingChange], limit: int) -> Table:
    """One row for each finding of either run."""
    rows = tuple(
        (
            (Span(str(c.change), _TONES[c.change]),),
            *c.signature,
            _calls(c.before),
            _calls(c.after),
            c.after.known if c.after else "",
        )
        for c in changes[:limit]
    )
    columns = (
        *(Column("change"), Column("kind"), Column("operator", "name"), Column("module"), Column("phase", detail=1)),
        *(Column("cause"), Column("before", "number"), Column("after", "number"), Column("known issue", detail=2)),
    )
    return Table(columns, rows, len(changes) - len(rows), "findings", _CHANGE_LIMITS)


def baseline_section(since: SinceBaseline | None) -> Section | None:
    """Findings that are new, worse or gone since the baseline."""
    if since is None:
        return None
    blocks: list[Block] = [change_counts(since.changes)]
    if since.platforms:
        blocks.append(Note(f"the baseline is of other platforms: {since.platforms}", "warn"))
    changed = [c for c in since.changes if c.change is not Change.SAME]
    if changed:
        blocks.append(change_table(changed, _MAX_CHANGES))
    lead = "Calls affected, of all calls of the operator there." if changed else ""
    return Section(f"Since {since.name}", tuple(blocks), lead, anchor="baseline")


def _calls(seen: FindingInRun | None) -> str:
    return "" if seen is None else f"{seen.n_calls:,} of {seen.n_calls_of_op:,}"
