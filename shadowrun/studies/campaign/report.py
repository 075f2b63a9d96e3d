"""Report of a campaign as a `Document`: stages, platforms, oracles side by side, root causes, throughput."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

from shadowrun.analysis.wording import plural
from shadowrun.report.document import (
    Block,
    Cell,
    Column,
    Document,
    Entries,
    Entry,
    Fact,
    Facts,
    GateLine,
    Limits,
    Note,
    Records,
    Section,
    Span,
    Table,
)
from shadowrun.studies.campaign.findings import PUBLISHED_CAUSES, published_cause
from shadowrun.studies.campaign.summary import DEFINITIONS, upper_bound

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shadowrun.studies.campaign.findings import RootCause
    from shadowrun.studies.campaign.summary import Platform, Summary

__all__ = ["campaign_document", "issue_page"]

FORMAT: Final = 1
"""Version of the JSON's form."""
_LIMITS: Final = Limits(20, 200, 1000)
_BOUND: Final = "at most {:.2g} % at 95 %"


def campaign_document(summary: Summary, *, fail_on: frozenset[str] = frozenset()) -> Document:
    """The report.

    Args:
        summary: Figures of the campaign.
        fail_on: Verdicts among the root causes that fail it.
    """
    blocks: list[Block] = [
        Facts(tuple(_headline(summary))),
        Section("Root causes", (_causes(summary),), DEFINITIONS["root cause"], len(summary.root_causes)),
        Section(
            "Platforms", (_platforms(summary),), f"Support: {DEFINITIONS['support']}. Fewer: {DEFINITIONS['fewer']}."
        ),
        Section("Discrepancy rate by oracle", tuple(_oracle_blocks(summary)), DEFINITIONS["discrepancy rate"]),
        Section(
            "Causes",
            (_published(summary),),
            "Findings by the three causes that the published study names; the folding is ours.",
        ),
    ]
    if compiled := [p for p in summary.platforms if p.is_compiled]:
        lead = f"Failure: {DEFINITIONS['compile failure']}. Difference: {DEFINITIONS['compile difference']}."
        blocks.append(Section("Compiled code", (_compiled(compiled),), lead))
    if missing := [(p.name, op) for p in summary.platforms for op in p.missing]:
        columns = (Column("operator", "name"), Column("platform"))
        rows = tuple((op, name) for name, op in missing)
        blocks.append(
            Section("Missing operators", (Table(columns, rows, noun="operators", limits=_LIMITS),), count=len(rows))
        )
    blocks += [
        Section("Stages", (_stages(summary),), "What went in and out of each stage."),
        Section("Mutators", (_mutators(summary),), f"Valid: {DEFINITIONS['valid']}."),
        Section("Definitions", (Facts(tuple(Fact(k, v) for k, v in DEFINITIONS.items())),)),
    ]
    return Document(
        f"campaign: {summary.title}", tuple(blocks), _data(summary), _records(summary), _gate(summary, fail_on)
    )


def issue_page(number: int, cause: RootCause, summary: Summary) -> str:
    """A root cause as Markdown, to be pasted into an issue tracker."""
    s = cause.signature
    f = cause.smallest.finding
    where = ", ".join(_target_name(summary, t) for t in cause.targets)
    lines = [
        f"## {s.op or 'A program'}: {s.kind} on {where}",
        "",
        (
            f"Root cause {number} of a campaign of {summary.n_variants:,} variants ({summary.title}), seen in "
            f"{cause.n_variants:,} of them."
        ),
        "",
        f"- dtype: {s.dtype or 'several'}",
        f"- cause: {', '.join(filter(None, (s.cause, *cause.explanations[:3]))) or 'not known'}",
        f"- evidence: {f.message or f.explanation or 'see the script'}",
        f"- {'flaw of the framework: ' if cause.is_framework else ''}seen on {where}",
    ]
    text = summary.texts.get(str(s))
    if text:
        lines += ["", "```python", text.rstrip(), "```"]
    return "\n".join(lines) + "\n"


def _headline(summary: Summary) -> Iterator[Fact]:
    yield Fact("variants", f"{summary.n_variants:,} distinct, {summary.n_duplicates:,} duplicates skipped")
    if summary.flaws:
        yield Fact("planted flaws", ", ".join(summary.flaws))
    for platform in summary.platforms:
        counted = ", ".join(f"{n:,} {status}" for status, n in sorted(platform.statuses.items(), key=lambda i: -i[1]))
        yield Fact(platform.name, counted)
    wrong = list(summary.findings)
    n_flaws = sum(c.is_framework for c in wrong)
    counted = f"{plural(len(wrong) - n_flaws, 'platform issue')}, {plural(n_flaws, 'framework flaw')}"
    yield Fact("findings", counted, "strong")
    n = min((p.n_compared for p in summary.platforms if not p.is_compiled), default=0)
    if (bound := upper_bound(len(wrong), n)) is not None:
        yield Fact("no finding", f"in {n:,} compared variants: {_BOUND.format(100 * bound)}")
    if summary.cpu_s:
        rate = sum(p.n_run for p in summary.platforms) / summary.cpu_s * 3600
        wall = f"; {summary.wall_s / 60:.1f} minutes by the clock with {summary.jobs} workers" if summary.wall_s else ""
        yield Fact("throughput", f"{rate:,.0f} variants an hour of processor time{wall}")


def _causes(summary: Summary) -> Entries:
    entries = []
    for number, cause in enumerate(summary.root_causes, 1):
        s, f = cause.signature, cause.smallest.finding
        facts = [
            Fact(
                "seen in",
                f"{cause.n_variants:,} variants, first in number {cause.first}, smallest in number "
                f"{cause.smallest.number} ({cause.smallest.size} calls)",
            ),
            Fact(
                "where",
                ", ".join(_target_name(summary, t) for t in cause.targets)
                + (" (a flaw of the framework)" if cause.is_framework else ""),
            ),
        ]
        if why := ", ".join(filter(None, (s.cause, *cause.explanations[:2]))):
            facts.append(Fact("why", why, "strong"))
        if f.message:
            facts.append(Fact("evidence", f.message, short=True))
        if summary.new is not None and str(s) in summary.new:
            facts.append(Fact("new", "the earlier campaign does not have it"))
        facts.append(Fact("script", f"shadowrun campaign repro DIR --finding {number}", "action", command=True))
        entries.append(
            Entry(
                s.op or "the program as a whole",
                tuple(facts),
                f"{s.kind} {s.dtype}".strip(),
                str(number),
                _tone(s.kind),
                f"cause-{number}",
            )
        )
    return Entries(tuple(entries), noun="root causes", limits=Limits(15, 100, 300))


def _tone(kind: str) -> str:
    return "warn" if kind.endswith("fallback") or kind == "reference" else "bad"


def _platforms(summary: Summary) -> Table:
    columns = (
        Column("platform", "name"),
        Column("valid", "number"),
        Column("operators", "number"),
        Column("missing", "number"),
        Column("fewer", "number"),
        Column("fallback", "number"),
        Column("with a finding", "number"),
        Column("unverified", "number"),
    )
    rows: list[tuple[Cell, ...]] = [
        (
            p.name,
            f"{p.n_run:,}",
            f"{sum(p.ops.values()):,}",
            f"{p.ops.get('unsupported', 0):,}",
            f"{100 * p.fewer:.1f} %",
            f"{p.ops.get('fallback', 0):,}",
            f"{p.statuses.get('finding', 0):,}",
            f"{p.statuses.get('unverified', 0):,}",
        )
        for p in summary.platforms
        if not p.is_compiled
    ]
    return Table(columns, tuple(rows), noun="platforms", limits=_LIMITS)


def _oracle_blocks(summary: Summary) -> Iterator[Block]:
    for p in summary.platforms:
        if p.is_compiled or not p.n_compared:
            continue
        columns = [Column("oracle", "name"), Column("differ", "number"), Column("rate", "number")]
        if summary.is_simulated:
            columns += [
                Column("missed", "number"),
                Column("false negatives", "number"),
                Column("false positives", "number"),
            ]
        rows = []
        for o in p.oracles:
            row = [o.name, f"{o.n_differ:,}", _share(o.n_differ, p.n_compared)]
            if summary.is_simulated:
                clean = p.n_compared - p.n_fired
                row += [f"{o.n_missed:,}", _share(o.n_missed, p.n_fired), _share(o.n_alone, clean)]
            rows.append(tuple(row))
        yield Note(
            f"{p.name}: {p.n_compared:,} variants compared"
            + (f"; an operator returned other bits in {p.n_fired:,} of them" if p.n_fired else "")
        )
        yield Table(tuple(columns), tuple(rows), noun="oracles", limits=_LIMITS)
    if summary.is_simulated:
        yield Note(
            "The simulated device's right kernels are the CPU's: any other bit comes from a planted flaw. A false "
            "negative is a variant with such a bit in which the oracle saw nothing; some flaws stay below the rounding "
            "of the operator, and some never reach the program's result, which all oracles but ours read.",
            "dim",
        )
    else:
        yield Note(
            "On a correct device, which rounds in another way, each difference that an oracle reports is a false "
            "positive.",
            "dim",
        )


def _share(n: int, of: int) -> str:
    return f"{100 * n / of:.2f} %" if of else "-"


def _published(summary: Summary) -> Table:
    columns = (Column("published cause", "name"), Column("ours"), Column("platform"), Column("findings", "number"))
    rows: list[tuple[Cell, ...]] = [
        (name, cause or "none named", p.name, f"{n:,}")
        for name in PUBLISHED_CAUSES
        for p in summary.platforms
        for cause, n in sorted(p.causes.items(), key=lambda item: -item[1])
        if published_cause(cause) == name
    ]
    return Table(columns, tuple(rows), noun="causes", limits=_LIMITS)


def _compiled(platforms: list[Platform]) -> Table:
    columns = (
        Column("platform and backend", "name"),
        Column("compiled", "number"),
        Column("failure", "number"),
        Column("difference", "number"),
        Column("unverified", "number"),
    )
    rows = []
    for p in platforms:
        other = p.statuses.get("finding", 0) - p.n_failed
        rows.append(
            (
                p.name,
                f"{p.n_run:,}",
                _share(p.n_failed, p.n_run),
                _share(other, p.n_run),
                f"{p.statuses.get('unverified', 0):,}",
            )
        )
    return Table(columns, tuple(rows), noun="platforms", limits=_LIMITS)


def _stages(summary: Summary) -> Table:
    columns = (Column("stage", "name"), Column("in", "number"), Column("out", "number"), Column("left out"))
    rows: list[tuple[Cell, ...]] = [
        (name, f"{n_in:,}", f"{n_out:,}", ", ".join(f"{n:,} {why}" for why, n in list(left.items())[:6]) or "-")
        for name, n_in, n_out, left in summary.stages
    ]
    return Table(columns, tuple(rows), noun="stages", limits=_LIMITS)


def _mutators(summary: Summary) -> Table:
    columns = (Column("mutator", "name"), Column("variants", "number"), Column("valid", "number"))
    rows: list[tuple[Cell, ...]] = [
        (name, f"{n:,}", (Span(_share(valid, n), "" if valid >= 0.99 * n else "warn"),))
        for name, (n, valid) in sorted(summary.validity.items())
    ]
    return Table(columns, tuple(rows), noun="mutators", limits=_LIMITS)


def _gate(summary: Summary, fail_on: frozenset[str]) -> GateLine | None:
    if not fail_on:
        return None
    failing = [c for c in summary.root_causes if any(c.signature.kind.startswith(kind) for kind in fail_on)]
    if not summary.n_variants or not any(p.n_run for p in summary.platforms):
        return GateLine("FAILED: no variant was run", passed=False)
    if failing:
        return GateLine(f"FAILED: {len(failing)} root causes", passed=False)
    return GateLine(f"passed: {summary.n_variants:,} variants", passed=True)


def _target_name(summary: Summary, target: int) -> str:
    return summary.platforms[target].name if 0 <= target < len(summary.platforms) else "the reference itself"


def _data(summary: Summary) -> dict[str, Any]:
    return {
        "format": FORMAT,
        **{f.name: getattr(summary, f.name) for f in dataclasses.fields(summary) if f.name != "new"},
        "new": sorted(summary.new) if summary.new is not None else None,
        "definitions": DEFINITIONS,
    }


def _records(summary: Summary) -> Records:
    head = ("number", "kind", "op", "dtype", "cause", "raised", "variants", "targets", "first", "smallest", "framework")
    rows = tuple(
        (
            k,
            *dataclasses.astuple(c.signature),
            c.n_variants,
            " ".join(map(str, c.targets)),
            c.first,
            c.smallest.number,
            c.is_framework,
        )
        for k, c in enumerate(summary.root_causes, 1)
    )
    return Records(head, rows)
