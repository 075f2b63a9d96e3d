"""Report of a campaign: a `Document` of stages, platforms, oracles and throughput; its root causes as `Issues`."""

from __future__ import annotations

import dataclasses
import shlex
from typing import TYPE_CHECKING, Any, Final

from shadowrun.analysis.wording import plural
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
    Figure,
    GateLine,
    Limits,
    Listing,
    Note,
    Records,
    Section,
    Span,
    Table,
)
from shadowrun.report.issues import Issue, Issues
from shadowrun.report.sanitize import clip
from shadowrun.studies.campaign.causes.cause_report import cause_data, other_forms, target_name
from shadowrun.studies.campaign.causes.root_causes import PUBLISHED_CAUSES, published_cause, without_flaws
from shadowrun.studies.campaign.oracles import RULES
from shadowrun.studies.campaign.summary import DEFINITIONS, upper_bound
from shadowrun.studies.sweep.cases import Kind

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from shadowrun.studies.campaign.causes.root_causes import RootCause
    from shadowrun.studies.campaign.summary import Platform, Summary

__all__ = ["campaign_document", "campaign_issues"]

FORMAT: Final = 1
"""Version of the JSON's form."""
_LIMITS: Final = Limits(20, 200, 1000)
_UNSUPPORTED: Final = (Kind.UNSUPPORTED, Kind.UNSUPPORTED_DTYPE)
_RATE: Final = (
    "Starts of the campaign: variants by the clock, duplicates and invalid ones too, and processor time of each."
)
_BOUND: Final = "at most {:.2g} % at 95 %"


def campaign_document(summary: Summary, *, folder: str = "DIR", fail_on: frozenset[str] = frozenset()) -> Document:
    """The report.

    Args:
        summary: Figures of the campaign.
        folder: Of the campaign, for the commands.
        fail_on: Verdicts among the root causes that fail it.
    """
    causes = list(enumerate(summary.root_causes, 1))
    known = [(n, c) for n, c in causes if str(c.signature) in summary.known]
    blocks: list[Block] = [
        Facts(tuple(_headline(summary))),
        _causes_section("Root causes", [p for p in causes if p not in known and not p[1].is_missing], summary, folder),
        *([_causes_section("Known issues", known, summary, folder)] if known else []),
        *([_gone(summary)] if summary.gone else []),
        Section(
            "Platforms",
            (*_statuses(summary), _platforms(summary)),
            f"{_sentence('support')} Fewer: {DEFINITIONS['fewer']}.",
        ),
        Section("Discrepancy rate by oracle", tuple(_oracle_blocks(summary)), f"{_sentence('discrepancy rate')}"),
        Section(
            "Causes",
            (_published(summary),),
            "Findings by the three causes that the published study names; the folding is ours.",
        ),
    ]
    if compiled := [p for p in summary.platforms if p.is_compiled]:
        lead = f"Failure: {DEFINITIONS['compile failure']}. Difference: {DEFINITIONS['compile difference']}."
        blocks.append(Section("Compiled code", (_compiled(compiled),), lead))
    if missing := [pair for pair in causes if pair not in known and pair[1].is_missing]:
        lead = "One line for each operator that a platform has no kernel for, or computes on the CPU."
        blocks.append(Section("Unsupported operators", (_missing(missing, summary),), lead, len(missing)))
    blocks += [
        Section("Stages", (_stages(summary),), "What went in and out of each stage."),
        Section("Mutators", (_mutators(summary),), f"Valid: {DEFINITIONS['valid']}."),
        *([Section("Throughput", (_throughput(summary),), _RATE)] if summary.sessions else []),
        Section("Definitions", (Facts(tuple(Fact(k, v) for k, v in DEFINITIONS.items())),)),
    ]
    return Document(
        f"campaign: {without_flaws(summary.title)}",
        tuple(blocks),
        _data(summary),
        _records(summary),
        _gate(summary, fail_on),
        campaign_issues(summary, fail_on, folder),
    )


def _headline(summary: Summary) -> Iterator[Fact]:
    yield Fact("variants", f"{summary.n_variants:,} distinct, {plural(summary.n_duplicates, 'duplicate')} skipped")
    if summary.is_simulated:
        yield Fact("planted flaws", ", ".join(summary.flaws) or "none")
    for platform in summary.platforms:
        counted = ", ".join(f"{n:,} {status}" for status, n in sorted(platform.statuses.items(), key=lambda i: -i[1]))
        yield Fact(without_flaws(platform.name), counted or "nothing was run")
    wrong = list(summary.findings)
    n_flaws = sum(c.is_framework for c in wrong)
    counted = f"{plural(len(wrong) - n_flaws, 'platform issue')}, {plural(n_flaws, 'framework flaw')}"
    yield Fact("root causes", counted, "strong")
    if missing := [c for c in summary.root_causes if c.is_missing]:
        n_here = sum(c.signature.kind.endswith("fallback") for c in missing)
        yield Fact("unsupported", f"{plural(len(missing), 'operator')}, of which the CPU computes {n_here:,}")
    if summary.new is not None:
        yield Fact("since then", f"{len(summary.new):,} new, {len(summary.gone):,} not found again")
    # The bound is as weak as the platform with the fewest comparisons; a compiled one is another question.
    n = min((p.n_compared for p in summary.platforms if not p.is_compiled), default=0)
    if (bound := upper_bound(len(wrong), n)) is not None:
        yield Fact("no finding", f"in {n:,} compared variants: {_BOUND.format(100 * bound)}")
    if summary.cpu_s:
        rate = sum(p.n_run for p in summary.platforms) / summary.cpu_s * 3600
        wall = f"; {summary.wall_s / 60:.1f} minutes by the clock" if summary.wall_s else ""
        yield Fact("throughput", f"{rate:,.0f} variants an hour of processor time{wall}")


def _causes_section(title: str, causes: list[tuple[int, RootCause]], summary: Summary, folder: str) -> Section:
    entries = Entries(
        tuple(_cause(n, cause, summary, folder) for n, cause in causes),
        noun="root causes",
        limits=Limits(15, 100, 300),
    )
    blocks: list[Block] = [entries] if causes else [Note("None.", "dim")]
    lead = "Accepted by the ledger; they fail no gate." if title == "Known issues" else _sentence("root cause")
    return Section(title, tuple(blocks), lead, len(causes))


def _missing(causes: list[tuple[int, RootCause]], summary: Summary) -> Table:
    columns = (
        Column("number", "number"),
        Column("operator", "name"),
        Column("what"),
        Column("platform"),
        Column("variants", "number"),
        Column("evidence", detail=1),
    )
    rows: list[tuple[Cell, ...]] = [
        (
            str(n),
            f"{c.signature.op} {c.signature.dtype}".strip(),
            c.signature.kind,
            ", ".join(without_flaws(target_name(summary, t)) for t in c.targets),
            f"{c.n_variants:,}",
            c.smallest.finding.message,
        )
        for n, c in causes
    ]
    return Table(columns, tuple(rows), noun="operators", limits=_LIMITS)


def _gone(summary: Summary) -> Section:
    table = Table((Column("root cause"),), tuple((text,) for text in summary.gone), noun="root causes", limits=_LIMITS)
    return Section("Not found again", (table,), "Only the earlier campaign has these.", len(summary.gone))


def _cause(number: int, cause: RootCause, summary: Summary, folder: str) -> Entry:
    s, f = cause.signature, cause.smallest.finding
    # Of compiled code, no call is counted.
    calls = f" ({plural(cause.smallest.size, 'call')})" if cause.smallest.size else ""
    where = ", ".join(without_flaws(target_name(summary, t)) for t in cause.targets)
    facts = [
        Fact(
            "seen in",
            f"{plural(cause.n_variants, 'variant')}, first in number {cause.first}, smallest in number "
            f"{cause.smallest.number}{calls}",
        ),
        Fact("where", f"{where} (a flaw of the framework)" if cause.is_framework else where),
    ]
    if cause.others:
        facts.append(Fact("also as", other_forms(cause)))
    if why := ", ".join(filter(None, (s.cause, *cause.explanations[:2]))):
        facts.append(Fact("why", why, "strong"))
    if f.message:
        facts.append(Fact("evidence", f.message, short=True))
    if reason := summary.known.get(str(s)):
        facts.append(Fact("known", reason))
    if summary.new is not None and str(s) in summary.new:
        facts.append(Fact("new", "the earlier campaign does not have it", "strong"))
    made = summary.scripts.get(str(s))
    if made is None:
        facts.append(Fact("script", _command("repro", folder, str(number)), "action", command=True))
    else:
        facts += [Fact("note", note) for note in made.notes[:2]]
        facts.append(Fact("page", _command("report", folder, "--cause", str(number)), "action", command=True))
    return Entry(
        s.op or "the program as a whole",
        tuple(facts),
        f"{s.kind} {s.dtype}".strip(),
        str(number),
        _tone(s.kind),
        f"cause-{number}",
        Listing(tuple(made.text.rstrip().splitlines()), "python", "script") if made is not None and made.text else None,
        facets=(
            ("status", (s.kind,)),
            ("operator", (s.op,) if s.op else ()),
            ("cause", (s.cause,) if s.cause else ()),
            ("dtype", (s.dtype,) if s.dtype else ()),
            ("platform", tuple(without_flaws(target_name(summary, t)) for t in cause.targets)),
        ),
        ranks=(("variants", float(cause.n_variants)), ("first variant", -float(cause.first))),
    )


def _command(name: str, folder: str, *words: str) -> str:
    # A folder that begins with a hyphen would be read as an option.
    return shlex.join(["shadowrun", "campaign", name, f"./{folder}" if folder.startswith("-") else folder, *words])


def _sentence(term: str) -> str:
    text = DEFINITIONS[term]
    return f"{text[0].upper()}{text[1:]}."


def _tone(kind: str) -> str:
    # What a platform lacks gives no wrong number: it is work to do, and no fault.
    return "warn" if kind.endswith("fallback") or kind in (Kind.REFERENCE, *_UNSUPPORTED) else "bad"


def _statuses(summary: Summary) -> tuple[Figure, ...]:
    rows = [(without_flaws(p.name), {str(s): n for s, n in p.statuses.items()}) for p in summary.platforms]
    return stacked_bars(rows, "Variants by their outcome", "variants")


def _platforms(summary: Summary) -> Table:
    columns = (
        Column("platform", "name"),
        Column("valid", "number"),
        Column("operators", "number"),
        Column("run", "number"),
        Column("fewer", "number"),
        Column("fallback", "number"),
        Column("with a finding", "number"),
        Column("discrepancy rate", "number"),
        Column("unverified", "number"),
    )
    rows: list[tuple[Cell, ...]] = [
        (
            without_flaws(p.name),
            f"{p.n_run:,}",
            f"{p.n_ops_of_reference:,}",
            f"{p.n_ops_of_reference - p.ops.get('unsupported', 0):,}",
            f"{100 * p.fewer:.1f} %",
            f"{p.ops.get('fallback', 0):,}",
            f"{p.statuses.get('finding', 0):,}",
            _share(next((o.n_differ for o in p.oracles if o.name == "shadowrun"), 0), p.n_compared),
            f"{p.statuses.get('unverified', 0):,}",
        )
        for p in summary.platforms
        if not p.is_compiled
    ]
    return Table(columns, tuple(rows), noun="platforms", limits=_LIMITS)


def _oracle_blocks(summary: Summary) -> Iterator[Block]:
    for p in summary.platforms:
        # Fused code rounds in another way than eager: no rule but bounds of whole graphs says which difference is
        # wrong.
        if p.is_compiled or not p.n_compared:
            continue
        columns = [Column("oracle", "name"), Column("differ", "number"), Column("rate", "number")]
        # Only a planted flaw can be missed: without one, each difference is a false positive, as on a correct device.
        is_flawed = without_flaws(p.name) != p.name
        if is_flawed:
            columns += [
                Column("missed", "number"),
                Column("false negatives", "number"),
                Column("false positives", "number"),
            ]
        columns.append(Column("two results differ if", detail=1))
        rows = []
        for o in p.oracles:
            row = [o.name, f"{o.n_differ:,}", _share(o.n_differ, p.n_compared)]
            if is_flawed:
                # Of the variants in which no flaw acted: only there is a difference surely false.
                clean = p.n_compared - p.n_fired
                row += [f"{o.n_missed:,}", _share(o.n_missed, p.n_fired), _share(o.n_alone, clean)]
            rows.append((*row, RULES.get(o.name, "")))
        yield Note(
            f"{without_flaws(p.name)}: {p.n_compared:,} variants compared"
            + (f"; an operator returned other bits in {p.n_fired:,} of them" if p.n_fired else "")
        )
        yield Table(tuple(columns), tuple(rows), noun="oracles", limits=_LIMITS)
    if summary.flaws:
        yield Note(
            "The simulated device's right kernels are the CPU's: from the same inputs, any other bit comes from a "
            "planted flaw. A false negative is a variant in which an operator returned other bits, and the oracle saw "
            "nothing: some flaws stay below the rounding of the operator, and some never reach the program's result, "
            "which all oracles but ours read. A false positive is one in which none did, and the results differ by the "
            "oracle: torch splits attention into other operators on each device.",
            "dim",
        )
    else:
        yield Note(
            "On a correct device, each difference that an oracle reports is a false positive: such a device may round "
            "in another way, and its kernels may depend on where memory is aligned.",
            "dim",
        )


def _share(n: int, of: int) -> str:
    return f"{100 * n / of:.2f} %" if of else "-"


def _published(summary: Summary) -> Table:
    columns = (Column("published cause", "name"), Column("ours"), Column("platform"), Column("findings", "number"))
    rows: list[tuple[Cell, ...]] = [
        (name, cause or "none named", without_flaws(p.name), f"{n:,}")
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
        # One outcome for a variant: a refusal is counted as a failure alone.
        other = p.statuses.get("finding", 0) - p.n_failed
        rows.append(
            (
                without_flaws(p.name),
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
        (name, f"{n_in:,}", f"{n_out:,}", _reasons(left)) for name, n_in, n_out, left in summary.stages
    ]
    return Table(columns, tuple(rows), noun="stages", limits=_LIMITS)


def _reasons(left: Mapping[str, int]) -> str:
    """What was left out, the most frequent reasons first."""
    most = sorted(((n, why) for why, n in left.items() if n), key=lambda pair: (-pair[0], pair[1]))
    more = f"; {len(most) - 6} more reasons" if len(most) > 6 else ""
    return "; ".join(f"{n:,} {why}" for n, why in most[:6]) + more or "-"


def _mutators(summary: Summary) -> Table:
    columns = (Column("mutator", "name"), Column("variants", "number"), Column("valid", "number"))
    rows: list[tuple[Cell, ...]] = [
        (name, f"{n:,}", (Span(_share(valid, n), "" if valid >= 0.99 * n else "warn"),))
        for name, (n, valid) in sorted(summary.validity.items())
    ]
    return Table(columns, tuple(rows), noun="mutators", limits=_LIMITS)


def _throughput(summary: Summary) -> Table:
    columns = (
        Column("start", "name"),
        Column("workers", "number"),
        Column("variants", "number"),
        Column("minutes", "number"),
        Column("an hour", "number"),
        Column("an hour and worker", "number"),
        Column("ms each", "number"),
    )
    rows: list[tuple[Cell, ...]] = []
    for s in summary.sessions:
        rate = 3600 * s.n_variants / s.wall_s if s.wall_s else 0.0
        each = 1e3 * s.cpu_s / s.n_variants if s.n_variants else 0.0
        rows.append(
            (
                s.started,
                f"{s.jobs:,}",
                f"{s.n_variants:,}",
                f"{s.wall_s / 60:,.1f}",
                f"{rate:,.0f}",
                f"{rate / max(s.jobs, 1):,.0f}",
                f"{each:,.1f}",
            )
        )
    return Table(columns, tuple(rows), noun="starts", limits=_LIMITS)


def _gate(summary: Summary, fail_on: frozenset[str]) -> GateLine | None:
    if not fail_on:
        return None
    failing = [
        c
        for c in summary.root_causes
        if str(c.signature) not in summary.known and any(c.signature.kind.startswith(kind) for kind in fail_on)
    ]
    excused = f", {plural(len(summary.known), 'known issue')}" if summary.known else ""
    if not summary.n_variants or not any(p.n_run for p in summary.platforms):
        return GateLine("FAILED: no variant was run", passed=False)
    if failing:
        return GateLine(f"FAILED: {plural(len(failing), 'root cause')}{excused}", passed=False)
    return GateLine(f"passed: {plural(summary.n_variants, 'variant')}{excused}", passed=True)


def _data(summary: Summary) -> dict[str, Any]:
    left_out = ("root_causes", "new", "scripts", "recipes")
    return {
        "format": FORMAT,
        **{f.name: getattr(summary, f.name) for f in dataclasses.fields(summary) if f.name not in left_out},
        "root_causes": [cause_data(n, c, summary) for n, c in enumerate(summary.root_causes, 1)],
        "new": sorted(summary.new) if summary.new is not None else None,
        "definitions": DEFINITIONS,
    }


def _records(summary: Summary) -> Records:
    keys = ("number", "kind", "op", "dtype", "cause", "raised", "n_variants", "first", "smallest", "is_framework")
    rows = []
    for n, cause in enumerate(summary.root_causes, 1):
        data = cause_data(n, cause, summary)
        rows.append((*(data[key] for key in keys), "; ".join(data["targets"]), data["known"] or ""))
    return Records((*keys, "targets", "known"), tuple(rows))


def campaign_issues(summary: Summary, fail_on: Collection[str], folder: str) -> Issues:
    """One issue for each root cause.

    Args:
        summary: Figures of the campaign.
        fail_on: Beginnings of verdicts that fail it.
        folder: Of the campaign: generated programs have no source line.
    """
    rows = tuple(_cause_issue(n, cause, summary, fail_on) for n, cause in enumerate(summary.root_causes, 1))
    return Issues(without_flaws(summary.title), rows, file=folder)


def _cause_issue(number: int, cause: RootCause, summary: Summary, fail_on: Collection[str]) -> Issue:
    s, f = cause.signature, cause.smallest.finding
    known = summary.known.get(str(s), "")
    where = ", ".join(without_flaws(target_name(summary, t)) for t in cause.targets)
    why = ", ".join(filter(None, (s.cause, *cause.explanations[:2], f.message)))
    name = s.op or "the program as a whole"
    change = "" if summary.new is None else "new" if str(s) in summary.new else "same"
    fails = any(s.kind.startswith(kind) for kind in fail_on)
    return Issue(
        kind=s.kind,
        cause=s.cause,
        name=f"{name} [{s.dtype}]" if s.dtype else name,
        message=clip(f"root cause {number}: {name} on {where}: {s.kind}{f', {why}' if why else ''}"),
        level="note" if known else "error" if fails else "warning",
        key=(s.kind, s.op, s.dtype, s.cause, s.raised),
        lines=(("seen in", f"{cause.n_variants:,} variants, smallest in number {cause.smallest.number}"),),
        known=known,
        change=change,
    )
