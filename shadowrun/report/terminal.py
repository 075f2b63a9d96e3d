"""The report for people at a terminal, and the same as plain text."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from shadowrun.report.content import Content, Source
from shadowrun.report.layout import COLOURS, LABEL, labelled, table_of, texts
from shadowrun.report.terminal_regions import region_section
from shadowrun.report.words import (
    KNOWN_LEAD,
    REGIONS_LEAD,
    clip,
    describe,
    describe_record,
    deviation,
    duration,
    excuse,
    figure,
    listed,
    outcome,
    reason,
    short_site,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shadowrun.analysis import Finding, Note, OperatorSummary

__all__ = ["TerminalReport", "TextReport"]

TEXT_WIDTH = 100
MIN_WIDTH = 60
WIDE = 110
MAX_FINDINGS = 10
MAX_OPERATORS = 25
MAX_ROWS = 12


class TerminalReport:
    """Coloured and as wide as the terminal where standard output is one; NO_COLOR is obeyed."""

    extension = "txt"

    def render(self, run: Source, *, width: int | None = None, colour: bool | None = None) -> str:
        """The report as text, with colour codes where wanted."""
        colour = sys.stdout.isatty() if colour is None else colour
        if width is None and not sys.stdout.isatty():
            width = TEXT_WIDTH
        out = io.StringIO()
        console = Console(
            file=out, force_terminal=colour, width=width, highlight=False, emoji=False, legacy_windows=False
        )
        console.width = max(console.width, MIN_WIDTH)
        _Page(console, Content.of(run)).print()
        # Cells are padded to the width; nobody wants that in a log.
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


class TextReport:
    """Without colour, at a width that logs and mails can hold."""

    extension = "txt"

    def render(self, run: Source) -> str:
        """The report as text."""
        return TerminalReport().render(run, width=TEXT_WIDTH, colour=False)


class _Page:
    """One report on its way to a console."""

    def __init__(self, console: Console, content: Content) -> None:
        self.console = console
        self.content = content

    def print(self) -> None:
        content = self.content
        self._header()
        if content.first_divergence is not None:
            self._heading("First divergence")
            self._lines(describe_record(content.first_divergence, content.first_finding, content.first_origin))
        if content.drift.rows:
            self._drift()
        for section in content.sections:
            self._heading(f"{section.heading} ({section.n})", section.lead, COLOURS[section.kind])
            for finding in section.findings.rows[:MAX_FINDINGS]:
                self._finding(finding)
            self._more(section.n - MAX_FINDINGS)
        self._known()
        self._operators()
        self._regions()
        self._coverage()
        self._notes("Not verified, or worth knowing", "", content.notes.rows, content.notes.n_more)
        self._skipped()
        lead = "These calls could not be compared because shadowrun failed; the target is not to blame."
        self._notes("shadowrun's own failures", lead, content.own_failures.rows, content.own_failures.n_more)
        self.console.print()
        self._gate()

    def _header(self) -> None:
        info, content = self.content.info, self.content
        self.console.print(Text.assemble(("shadowrun", "bold"), f"  {info.target} against {info.ref}"))
        self._gate()
        counts = Text("  ").join(
            Text(f"{n:,} {status}", COLOURS.get(status, "magenta")) for status, n in content.counts
        )
        self.console.print(Text(f"On {info.target} the program {content.coverage.verdict}."))
        self.console.print(Text("calls: ") + counts)
        for remark in content.remarks:
            self.console.print(Text(f"! {remark}", "yellow"))
        self._digest()
        self.console.print()
        # One line each: what is wrong should be on the first screen; the HTML report has them in full.
        room = self.console.width - LABEL - 1
        self._lines((label, text if label == "overhead" else clip(text, room)) for label, text in content.facts)

    def _gate(self) -> None:
        gate = self.content.gate
        self.console.print(Text(gate.line, "bold green" if gate.passed else "bold red"), soft_wrap=True)

    def _heading(self, title: str, lead: str = "", colour: str = "") -> None:
        self.console.print()
        self.console.rule(Text(title, f"bold {colour}".strip()), align="left", style=colour or "dim", characters="─")
        if lead:
            self.console.print(Text(lead, "dim"))

    def _digest(self) -> None:
        """One line for each finding, so that the first screen says what is wrong and where."""
        findings = self.content.digest
        if not findings.rows:
            return
        self.console.print()
        # Kind and, unless it is absurd, operator are not cut short; place and reason share what is left.
        kind = max(len(f.kind) for f in findings.rows) + 2
        op = min(max(len(f.op) for f in findings.rows) + 2, self.console.width // 2)
        number = max(2, *(len(str(f.number)) for f in findings.rows))
        room = (self.console.width - 1 - number - kind - op) // 2
        places = [_place(f, room - 2) for f in findings.rows]
        place = max(map(len, places)) + 2
        for f, where in zip(findings.rows, places, strict=True):
            why = reason(f)
            name = clip(f.op, op - 2)
            head = f"{f.number:{number}} {f.kind:{kind}}"
            line = Text.assemble(head, (f"{name:{op}}", "bold"), f"{where:{place}}", (why, "dim"))
            line.stylize(COLOURS[f.kind], number + 1, number + 1 + kind)
            self.console.print(line, no_wrap=True, overflow="ellipsis")
        self._more(findings.n_more)

    def _lines(self, lines: Iterable[tuple[str, str]]) -> None:
        for part in labelled(lines):
            self.console.print(part, soft_wrap=isinstance(part, Text))

    def _finding(self, finding: Finding) -> None:
        self.console.print()
        head = Text.assemble(
            (f"{finding.number}. ", "dim"),
            (finding.op, f"bold {COLOURS[finding.kind]}"),
            (f"  {finding.n_calls:,} of {finding.n_calls_of_op:,} calls", ""),
            (f", first is number {finding.first_seq:,} in step {finding.first_step:,}", "dim"),
        )
        self.console.print(head)
        self._lines(describe(finding))

    def _drift(self) -> None:
        self._heading("Accumulated error", "Between the target's own chain of results and the reference's, by step.")
        table = table_of(
            ("step", "number"), ("max abs", "number"), ("relative", "number"), ("worst at", ""), ("module", "")
        )
        for row in self.content.drift.rows:
            table.add_row(*texts(f"{row.step:,}", figure(row.drift_abs), figure(row.drift_rel), row.op, row.module))
        self.console.print(table)
        self._more(self.content.drift.n_more, "steps")

    def _known(self) -> None:
        known = self.content.known
        if not known.rows:
            return
        self._heading(f"Known ({len(known.rows) + known.n_more})", KNOWN_LEAD)
        table = table_of(("operator", ""), ("calls", "number"), ("kind", ""), ("reason", ""), ("until", ""))
        for finding in known.rows[:MAX_ROWS]:
            table.add_row(*texts(finding.op, f"{finding.n_calls:,}", finding.kind, *excuse(finding)))
        self.console.print(table)
        self._more(len(known.rows) + known.n_more - MAX_ROWS)

    def _operators(self) -> None:
        wide = self.console.width >= WIDE
        self._heading("Operators", "Those that need work first. Times are medians of single calls, launch included.")
        wider = [("max rel", "number"), ("ULP", "number"), ("bits", "number")] if wide else []
        last = [("dtypes", "")] if wide else []
        table = table_of(
            ("operator", ""), ("calls", "number"), ("outcome", ""), ("max abs", "number"), *wider,
            ("ref", "number"), ("target", "number"), *last,
        )  # fmt: skip
        for op in self.content.operators.rows[:MAX_OPERATORS]:
            compared = op.worst_seq >= 0
            figures = [deviation(op)]
            if wide:
                figures += [
                    figure(op.max_rel),
                    f"{op.max_ulp:,}",
                    str(op.remaining_bits) if op.remaining_bits >= 0 else "-",
                ]
            table.add_row(
                Text(op.op),
                f"{op.n_calls:,}",
                _outcomes(op),
                *(figures if compared else ["-"] * len(figures)),
                duration(op.ref_median_us),
                duration(op.target_median_us),
                *([listed(op.dtypes)] if wide else []),
            )
        self.console.print(table)
        self._more(len(self.content.operators.rows) + self.content.operators.n_more - MAX_OPERATORS, "operators")

    def _regions(self) -> None:
        shown = list(region_section(self.content))
        if shown:
            self._heading("Compiled regions", REGIONS_LEAD)
        for part in shown:
            self.console.print(part, soft_wrap=isinstance(part, Text))

    def _coverage(self) -> None:
        coverage = self.content.coverage
        self._heading("Coverage")
        supported, total = coverage.n_by_state["supported"], coverage.n_operators
        self._lines(
            [
                (
                    "operators",
                    f"{supported:,} of {total:,} ({coverage.percent_operators:.1f} %) run on the target",
                ),
                ("calls", f"{coverage.n_supported_calls:,} of {coverage.n_calls:,} ({coverage.percent_calls:.1f} %)"),
            ]
        )
        if coverage.missing_kernels:
            self.console.print()
            table = table_of(("kernel to write", ""), ("calls", "number"), ("needed by", ""))
            for kernel in coverage.missing_kernels[:MAX_ROWS]:
                table.add_row(*texts(kernel.kernel, f"{kernel.n_calls:,}", listed(kernel.ops)))
            self.console.print(table)
            self._more(len(coverage.missing_kernels) - MAX_ROWS, "kernels")

    def _notes(self, title: str, lead: str, notes: tuple[Note, ...], n_more: int) -> None:
        if not notes:
            return
        self._heading(title, lead)
        table = table_of(("operator", ""), ("calls", "number"), ("status", ""), ("why", ""))
        for note in notes[:MAX_ROWS]:
            why = outcome(None if note.cause == "harness" else note.cause, note.explanation, note.evidence, 1)
            table.add_row(*texts(note.op, f"{note.n_calls:,}", note.status, why))
        self.console.print(table)
        self._more(len(notes) + n_more - MAX_ROWS)

    def _skipped(self) -> None:
        skipped = self.content.skipped
        if not skipped.rows:
            return
        self._heading("Skipped on purpose")
        table = table_of(("operator", ""), ("calls", "number"), ("reason", ""))
        for row in skipped.rows[:MAX_ROWS]:
            table.add_row(*texts(row.op, f"{row.n:,}", row.reason))
        self.console.print(table)
        self._more(len(skipped.rows) + skipped.n_more - MAX_ROWS)

    def _more(self, n: int, noun: str = "") -> None:
        if n > 0:
            self.console.print(Text(f"… and {n:,} more {noun}".rstrip(), "dim"))


def _place(finding: Finding, room: int) -> str:
    """Source line and, where both fit, module."""
    site = "".join(short_site(site).split(" in ")[0] for site in finding.sites[:1])
    both = " ".join(filter(None, [site, *finding.modules[:1]]))
    return both if len(both) <= room else clip(site or both, room)


def _outcomes(op: OperatorSummary) -> Text:
    counts = (
        (op.n_unsupported, "unsupported"), (op.n_error, "error"), (op.n_mismatch, "mismatch"),
        (op.n_fallback, "fallback"), (op.n_unverified + op.n_own_failures, "unverified"), (op.n_match, "match"),
    )  # fmt: skip
    return Text(", ").join(Text(f"{n:,} {status}", COLOURS[status]) for n, status in counts if n)
