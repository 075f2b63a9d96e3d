"""Reports of sweeps as `Document`: one sweep, several platforms, the changes between two; and failures as `Issues`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shadowrun.report.bars import stacked_bars
from shadowrun.report.document import (
    Block,
    Cell,
    Column,
    Document,
    Entries,
    Entry,
    Fact,
    Facts,
    Filter,
    Limits,
    Note,
    Records,
    Section,
    Table,
    status_span,
)
from shadowrun.report.sanitize import clip
from shadowrun.studies.sweep.cases import FAILURES, Kind, Support
from shadowrun.studies.sweep.reports.issues import known_line
from shadowrun.studies.sweep.reports.support import Direction

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shadowrun.analysis import KnownIssues
    from shadowrun.report.issues import Issues
    from shadowrun.studies.sweep.coverage_file import SweepInfo
    from shadowrun.studies.sweep.reports.support import (
        Change,
        Changes,
        FailingPart,
        OperatorSupport,
        Platforms,
        SupportRow,
        SupportTable,
        Sweep,
    )

__all__ = ["changes_document", "support_document", "support_share", "sweep_document"]

FORMAT = 1
"""Version of the three JSON forms. History: 1, first version."""
MAX_ENTRIES = 20
MAX_ROWS = 60
MAX_WHY = 160
# More than any sweep has: `Limits` has no value for "all".
ALL = 1_000_000
_REST = "-f csv lists all"
_NAME = Column("operator", "name")

# Columns of the table of cases.
_KINDS = {
    "pass": (Kind.PASS,),
    "unsupported": (Kind.UNSUPPORTED, Kind.UNSUPPORTED_DTYPE),
    "error": (Kind.ERROR, Kind.MISSING_ERROR, Kind.WRONG_ERROR),
    "mismatch": (Kind.MISMATCH, Kind.FORM),
    "fallback": (Kind.SILENT_FALLBACK, Kind.WARNED_FALLBACK),
    "crash": (Kind.CRASH, Kind.TIMEOUT, Kind.OUT_OF_MEMORY),
    "unverified": (Kind.UNVERIFIED, Kind.REFERENCE),
    "not valid": (Kind.NOT_VALID,),
    "harness": (Kind.HARNESS,),
}


def sweep_document(
    table: SupportTable,
    info: SweepInfo,
    *,
    everything: bool = False,
    script: str = "",
    issues: Issues | None = None,
    ledger: KnownIssues | None = None,
) -> Document:
    """Report of one sweep: cases by dtype and part, and the failures.

    Args:
        table: Results of the sweep.
        info: Platforms and options of the sweep.
        everything: In a terminal, list all failures, not only the first `MAX_ENTRIES`.
        script: Command that writes scripts for the failures; empty for none.
        issues: The failures for CI services.
        ledger: Known issues, which fail nothing.
    """
    state = "" if info.complete else ", not complete"
    counts = table.by_support
    blocks: list[Block] = [
        Note(
            f"{sum(table.totals.values())} cases, seed {info.seed}, {info.source}, torch "
            f"{info.versions.get('torch', '?')}; {info.wall_s:.0f} s, {info.cpu_s:.0f} s of processor time{state}"
        ),
        Note(tuple(status_span(s, f"{counts[s]} {s}") for s in Support), label="operators"),
        Note(support_share(table)),
        *stacked_bars([("operators", _named(counts))], "Operators by support", "operators"),
        _cases(table),
    ]
    failures = _failures(table, ledger)
    if failures:
        limits = Limits(ALL if everything else MAX_ENTRIES, ALL, ALL)
        noun = "" if everything else "failures: --all, or -o FILE, lists all"
        blocks.append(Section("Failures", (Entries(failures, noun=noun, limits=limits),), count=len(failures)))
    if script:
        blocks.append(Facts((Fact("scripts", script, command=True),)))
    if table.not_invariant:
        names = ", ".join(table.not_invariant)
        n = len(table.not_invariant)
        blocks.append(Note(f"not batch-invariant, which is no failure: {n} operators ({names})"))
    title = f"{info.target} against {info.ref}"
    return Document(title, tuple(blocks), _sweep_data(table, info), _records(table), issues=issues)


def _named(counts: Mapping[Support, int]) -> dict[str, int]:
    return {str(support): n for support, n in counts.items()}


def support_share(table: SupportTable) -> str:
    """``641 of 653 operators full (98.2 %)``."""
    counts = table.by_support
    # What could not be tested counts neither for the target nor against it.
    tested = sum(n for support, n in counts.items() if support is not Support.UNTESTED)
    share = f" ({100 * counts[Support.FULL] / tested:.1f} %)" if tested else ""
    return f"{counts[Support.FULL]} of {tested} operators full{share}"


def _cases(table: SupportTable) -> Table:
    """Cases by dtype, part and kind."""
    columns = (Column("dtype"), Column("part"), *(Column(name, "number") for name in _KINDS))
    counted = (
        (dtype, part, [sum(counts.get(kind, 0) for kind in kinds) for kinds in _KINDS.values()])
        for (dtype, part), counts in table.counts.items()
    )
    rows = tuple((dtype, str(part), *(str(n or "") for n in counts)) for dtype, part, counts in counted)
    return Table(columns, rows, limits=Limits(ALL, ALL, ALL))


def _failures(table: SupportTable, ledger: KnownIssues | None) -> tuple[Entry, ...]:
    """One entry for each operator and reason, the worst kinds first; parts with the same reason share an entry."""
    failures = [(operator, f) for operator in table.operators for f in operator.failing]
    failures.sort(key=lambda pair: (FAILURES.index(pair[1].finding.kind), pair[0].name))
    grouped: dict[tuple[str, ...], list[FailingPart]] = {}
    for operator, f in failures:
        where = f.finding.kernel or f.finding.op
        grouped.setdefault((operator.name, operator.support, f.finding.kind, where, _reason(f)), []).append(f)
    entries = []
    for (name, support, kind, where, why), parts in grouped.items():
        place = f" in {where}" if where and where != name else ""
        first = parts[0]
        facts: tuple[Fact, ...] = (
            Fact("cases", ", ".join(f"{f.dtype} {f.part} {f.n}/{f.of}" for f in parts)),
            Fact("why", why, "strong"),
            Fact("first", f"sample {first.first.sample} of {first.part}, {first.inputs or 'no inputs'}"),
        )
        known = known_line(first.finding, name, ledger)
        if known is not None:
            facts += (Fact("known", f"{known.reason} ({known.origin})"),)
        # A fallback computes the right result.
        tone = "dim" if known else "warn" if kind in (Kind.SILENT_FALLBACK, Kind.WARNED_FALLBACK) else "bad"
        facets = (
            ("status", (str(kind), *(("known",) if known else ()))),
            ("operator", (name,)),
            ("cause", tuple(sorted({str(f.finding.cause) for f in parts if f.finding.cause}))),
            ("dtype", tuple(dict.fromkeys(f.dtype for f in parts))),
            ("part", tuple(dict.fromkeys(str(f.part) for f in parts))),
        )
        ranks = (("cases", float(sum(f.n for f in parts))), ("parts", float(len(parts))))
        detail = f"[{support}]: {kind}{place}"
        entries.append(Entry(name, facts, detail, tone=tone, facets=facets, ranks=ranks))
    return tuple(entries)


def _reason(f: FailingPart) -> str:
    words = [w for w in (f.finding.cause, f.finding.explanation) if w]
    return f"{': '.join(words)}{' (' + f.finding.message + ')' if f.finding.message else ''}"


def _records(table: SupportTable) -> Records:
    """One row for each operator, dtype and part, with all its reasons for failing."""
    rows = []
    for operator in table.operators:
        for (dtype, part), support in operator.parts.items():
            failing = [f for f in operator.failing if (f.dtype, f.part) == (dtype, part)]
            kinds = "; ".join(dict.fromkeys(f.finding.kind for f in failing))
            why = "; ".join(_reason(f) for f in failing)
            rows.append((operator.name, str(operator.support), dtype, str(part), str(support), kinds, why))
    return Records(("operator", "operator_support", "dtype", "part", "support", "failing", "why"), tuple(rows))


def _sweep_data(table: SupportTable, info: SweepInfo) -> dict[str, Any]:
    """Described in ``docs/howto/sweep.md``."""
    return {
        "format": FORMAT,
        "info": info,
        "operators_by_support": table.by_support,
        "cases_by_kind": table.totals,
        "cases": [
            {"dtype": dtype, "part": part, "kinds": {k: n for k, n in kinds.items() if n}}
            for (dtype, part), kinds in table.counts.items()
        ],
        "operators": [_operator_data(operator) for operator in table.operators],
    }


def _operator_data(operator: OperatorSupport) -> dict[str, Any]:
    return {
        "name": operator.name,
        "support": operator.support,
        "parts": [{"dtype": d, "part": p, "support": s} for (d, p), s in operator.parts.items()],
        "kinds": {kind: n for kind, n in operator.counts.items() if n},
        "failing": [
            {
                "dtype": f.dtype,
                "part": f.part,
                "finding": f.finding,
                "n": f.n,
                "of": f.of,
                "first_sample": f.first.sample,
                "inputs": f.inputs,
            }
            for f in operator.failing
        ],
    }


def support_document(platforms: Platforms, issues: Issues | None = None) -> Document:
    """Support of operators on several platforms.

    Args:
        platforms: The sweeps.
        issues: Their failures, for CI services.
    """
    shares = [(s.label, _named(s.table.by_support)) for s in platforms.sweeps]
    blocks: list[Block] = [_totals(platforms.sweeps), *stacked_bars(shares, "Operators by support", "operators")]
    blocks += [Note(f"the sweep of {s.label} is not complete", "warn") for s in platforms.sweeps if not s.info.complete]
    differing = f"{platforms.n_differing} of {len(platforms.rows)} operators are not alike on all"
    if len(platforms.sweeps) > 1:
        blocks.append(Note(differing))
    blocks.append(Section("Operators", (_operators(platforms),)))
    labels = tuple(s.label for s in platforms.sweeps)
    data = {
        "format": FORMAT,
        "platforms": [
            {
                "label": s.label,
                "info": s.info,
                "operators_by_support": s.table.by_support,
                "percent_full": s.percent_full,
            }
            for s in platforms.sweeps
        ],
        "n_differing": platforms.n_differing,
        "operators": [
            {"name": row.name, "support": list(row.supports), "differs": row.differs, "why": _first_reason(row)}
            for row in platforms.rows
        ],
    }
    rows = tuple((row.name, *(str(s or "") for s in row.supports), _first_reason(row)) for row in platforms.rows)
    records = Records(("operator", *labels, "first reason"), rows)
    return Document("operator coverage", tuple(blocks), data, records, issues=issues)


def _totals(sweeps: Sequence[Sweep]) -> Table:
    numbers = (*Support, "full, %", "cases")
    columns = (Column("platform"), Column("reference"), *(Column(n, "number") for n in numbers), Column("torch"))
    rows = tuple(
        (
            s.label,
            s.info.ref,
            *(str(n) for n in s.table.by_support.values()),
            f"{s.percent_full:.1f}",
            str(sum(s.table.totals.values())),
            str(s.info.versions.get("torch", "?")),
        )
        for s in sweeps
    )
    return Table(columns, rows, limits=Limits(ALL, ALL, ALL))


def _operators(platforms: Platforms) -> Table:
    """Operators that most platforms lack first. Terminal and Markdown show only these, HTML all with a filter."""
    rows = tuple(map(_support_cells, platforms.rows))
    n_lacking = sum(bool({Support.NONE, Support.PARTIAL} & set(row.supports)) for row in platforms.rows)
    columns = (_NAME, *(Column(s.label) for s in platforms.sweeps), Column("first reason"))
    tags = tuple(
        (*(str(s) for s in row.supports if s), *(("differs",) if row.differs else ())) for row in platforms.rows
    )
    return Table(
        columns,
        rows,
        noun=f"operators: {_REST}",
        limits=Limits(min(n_lacking, MAX_ROWS), n_lacking, ALL),
        filter=Filter(tuple(f"{s}" for s in Support), "differs", "only those that differ"),
        tags=tags,
    )


def _support_cells(row: SupportRow) -> tuple[Cell, ...]:
    supports = ((status_span(s or "-"),) for s in row.supports)
    return (row.name, *supports, clip(_first_reason(row), MAX_WHY))


def _first_reason(row: SupportRow) -> str:
    """The worst failure of the first platform that has one."""
    for operator in row.cells:
        if operator is not None and operator.failing:
            f = operator.failing[0]
            words = ": ".join(filter(None, (f.finding.kind, f.finding.kernel or f.finding.op, f.finding.explanation)))
            return f"{f.dtype} {f.part}, {words}"
    return ""


def changes_document(changes: Changes, issues: Issues | None = None) -> Document:
    """Changes between two sweeps.

    Args:
        changes: The changes.
        issues: The regressions, for CI services.
    """
    counts = {direction: len(changes.in_direction(direction)) for direction in Direction}
    numbers = ", ".join(f"{n} {direction}" for direction, n in counts.items())
    blocks: list[Block] = [Note(f"{numbers}, of {changes.n_compared} parts that both tested")]
    for which, names in ((changes.before, changes.only_before), (changes.after, changes.only_after)):
        if names:
            blocks.append(Note(clip(f"only in {which}: {len(names)} operators, {', '.join(names)}", MAX_WHY)))
    rows = tuple(map(_change_texts, changes.changes))
    head = ("change", "operator", "dtype", "part", "support", "failures", "why")
    if rows:
        columns = tuple(_NAME if name == "operator" else Column(name) for name in head)
        cells: list[tuple[Cell, ...]] = [((status_span(row[0]),), *row[1:-1], clip(row[-1], MAX_WHY)) for row in rows]
        table = Table(columns, tuple(cells), noun=f"changes: {_REST}", limits=Limits(MAX_ROWS, ALL, ALL))
        blocks.append(Section("Changes", (table,), count=len(rows)))
    data = {"format": FORMAT, "n": counts, **{name: getattr(changes, name) for name in changes.__slots__}}
    return Document(f"{changes.before} → {changes.after}", tuple(blocks), data, Records(head, rows), issues=issues)


def _change_texts(c: Change) -> tuple[str, ...]:
    kinds = f"{', '.join(c.kinds_before) or 'pass'} → {', '.join(c.kinds_after) or 'pass'}"
    return str(c.direction), c.name, c.dtype, str(c.part), f"{c.before} → {c.after}", kinds, c.why
