"""The Markdown report: for job summaries and issues."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shadowrun.report.content import Content, Source
from shadowrun.report.words import (
    KNOWN_LEAD,
    REGIONS_LEAD,
    SHOWN,
    clip,
    describe,
    describe_record,
    describe_region,
    deviation,
    duration,
    excuse,
    figure,
    listed,
    outcome,
    region_outcomes,
    short_site,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["MarkdownReport"]

MAX_OPERATORS = 50
MAX_FINDINGS = 20


class MarkdownReport:
    """Headings, tables and lists of GitHub's dialect."""

    extension = "md"

    def render(self, run: Source) -> str:
        """The report as text."""
        return "\n".join(_lines(Content.of(run))) + "\n"


def _lines(content: Content) -> Iterator[str]:
    info = content.info
    yield f"# {_text(info.target)} against {_text(info.ref)}\n"
    yield f"**{_text(content.gate.line)}**\n"
    yield f"On {_text(info.target)} the program {_text(content.coverage.verdict)}.\n"
    yield from (f"> {_text(remark)}\n" for remark in content.remarks)
    yield " · ".join(f"{n:,} {status}" for status, n in content.counts) + "\n"
    yield from _table(("", ""), ((label, text) for label, text in content.facts))
    if content.first_divergence is not None:
        yield "## First divergence\n"
        yield from _items(describe_record(content.first_divergence, content.first_finding, content.first_origin))
    if content.drift.rows:
        yield "## Accumulated error\n"
        rows = ((str(d.step), figure(d.drift_abs), figure(d.drift_rel), d.op, d.module) for d in content.drift.rows)
        yield from _table(("Step", "Max abs", "Relative", "Worst at", "Module"), rows, content.drift.n_more)
    for section in content.sections:
        yield f"## {section.heading} ({section.n})\n"
        yield f"{section.lead}\n"
        for finding in section.findings.rows[:MAX_FINDINGS]:
            yield f"### {finding.number}. {_text(finding.op)}: {finding.n_calls:,} of {finding.n_calls_of_op:,} calls\n"
            yield from _items(describe(finding))
        if section.n > MAX_FINDINGS:
            yield f"… and {section.n - MAX_FINDINGS:,} more\n"
    if content.known.rows:
        yield f"## Known ({len(content.known.rows) + content.known.n_more})\n"
        yield f"{KNOWN_LEAD}\n"
        known = ((f.op, f.kind, *excuse(f), f"{f.n_calls:,}") for f in content.known.rows)
        yield from _table(("Operator", "Kind", "Reason", "Until", "Calls"), known, content.known.n_more)
    yield "## Operators\n"
    shown = content.operators.rows[:MAX_OPERATORS]
    yield from _table(
        ("Operator", "Calls", "Match", "Mismatch", "Unsupported", "Fallback", "Error", "Unverified", "Max abs",
         "Max rel", "Max ULP", "Reference", "Target"),
        (
            (op.op, *(f"{n:,}" for n in (op.n_calls, op.n_match, op.n_mismatch, op.n_unsupported, op.n_fallback,
                                         op.n_error, op.n_unverified)),
             deviation(op), figure(op.max_rel), f"{op.max_ulp:,}", duration(op.ref_median_us),
             duration(op.target_median_us))
            for op in shown
        ),
        content.operators.n_more + len(content.operators.rows) - len(shown),
    )  # fmt: skip
    yield from _regions(content)
    yield from _coverage(content)
    if content.notes.rows:
        yield "## Notes\n"
        notes = (
            (n.op, str(n.status), outcome(n.cause, n.explanation, n.evidence, 1), f"{n.n_calls:,}")
            for n in content.notes.rows
        )
        yield from _table(("Operator", "Status", "Why", "Calls"), notes, content.notes.n_more)
    if content.skipped.rows:
        yield "## Skipped on purpose\n"
        yield from _table(
            ("Operator", "Reason", "Calls"),
            ((s.op, s.reason, f"{s.n:,}") for s in content.skipped.rows),
            content.skipped.n_more,
        )
    if content.own_failures.rows:
        yield "## shadowrun's own failures\n"
        yield "These calls could not be compared because shadowrun failed; the target is not to blame.\n"
        failures = (
            (n.op, outcome(None, n.explanation, n.evidence, 1), f"{n.n_calls:,}") for n in content.own_failures.rows
        )
        yield from _table(("Operator", "What happened", "Calls"), failures, content.own_failures.n_more)
    yield f"**{_text(content.gate.line)}**"


def _regions(content: Content) -> Iterator[str]:
    if not content.regions.rows and not content.regions_skipped.rows:
        return
    yield "## Compiled regions\n"
    yield f"{REGIONS_LEAD}\n"
    yield f"**{_text(content.regions_line)}**\n"
    rows = (
        (
            r.name, r.phase, f"{r.n_calls:,}", ", ".join(f"{n:,} {s}" for n, s in region_outcomes(r)),
            "-" if r.worst is None else figure(r.worst.max_abs), f"{r.n_operators:,}" if r.n_operators >= 0 else "-",
            r.backend, short_site(r.site),
        )
        for r in content.regions.rows
    )  # fmt: skip
    head = ("Region", "Phase", "Calls", "Outcome", "Max abs", "Operators", "Backend", "Line")
    yield from _table(head, rows, content.regions.n_more)
    for region in content.regions.rows[:MAX_FINDINGS]:
        lines = describe_region(region)
        if lines:
            yield f"### {_text(region.name)} {region.phase}\n"
            yield from _items(lines)
    for skip in content.regions_skipped.rows:
        yield f"> Not compared: {skip.n:,} calls of {_text(skip.op)}, {_text(skip.reason)}\n"


def _coverage(content: Content) -> Iterator[str]:
    coverage = content.coverage
    yield "## Coverage\n"
    yield (
        f"{coverage.n_by_state['supported']:,} of {coverage.n_operators:,} operators "
        f"({coverage.percent_operators:.1f} %), "
        f"{coverage.n_supported_calls:,} of {coverage.n_calls:,} calls ({coverage.percent_calls:.1f} %)\n"
    )
    if coverage.missing_kernels:
        rows = ((k.kernel, f"{k.n_calls:,}", listed(k.ops)) for k in coverage.missing_kernels[:MAX_OPERATORS])
        yield from _table(("Missing kernel", "Calls", "Needed by"), rows, len(coverage.missing_kernels) - MAX_OPERATORS)


def _items(lines: Iterable[tuple[str, str]]) -> Iterator[str]:
    for label, text in lines:
        yield f"- **{label}**: {_code(text) if label == SHOWN else _text(text)}"
    yield ""


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]], n_more: int = 0) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(_text(cell) for cell in row)} |"
    yield f"\n… and {n_more:,} more\n" if n_more > 0 else ""


def _code(text: str) -> str:
    """A code span, in which nothing is markup, of a text on one line."""
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    space = " " if len(fence) > 1 else ""
    return f"{fence}{space}{text}{space}{fence}"


def _text(text: str) -> str:
    """Names from the user's program must not become markup."""
    text = clip(text)
    for char in "\\`*_<>|[]":
        text = text.replace(char, f"&#{ord(char)};" if char in "<>|" else f"\\{char}")
    return text
