"""The user's lines with the findings in the margin, as coverage.py shows what ran: a section of the HTML report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shadowrun.report.document import TONES, Block, Code, CodeLine, Later, Note, Section, Span
from shadowrun.report.formatting import short_site
from shadowrun.report.sanitize import clip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shadowrun.analysis import Finding, SourceFile, SourceLine, SourceText

__all__ = ["line_links", "source_section"]

MAX_MARKS = 4
MAX_UNREAD = 10
_LEAD = (
    "Lines that made calls with a finding, and those around them. Red: calls are wrong, unsupported or raised; amber: "
    "they fell back, are slow or could not be verified; green: all calls match."
)
_ORDER = ("bad", "warn", "good", "dim")


def source_section(findings: Sequence[Finding], source: Callable[[], SourceText]) -> Later:
    """The section, made when a page asks for it."""
    return Later(lambda: tuple(_section({f.number: f for f in findings}, source())))


def line_links(sites: Sequence[str], text: SourceText, limit: int = 8) -> tuple[Span, ...]:
    """Links to the lines of `text` that are at `sites`."""
    anchors = {f"{file.path}:{line.number}": _anchor(number, line) for number, file, line in _all(text)}
    found = {clip(short_site(s).partition(" in ")[0], 80): anchors[key] for s in sites if (key := _key(s)) in anchors}
    return tuple(Span(name, link=anchor) for name, anchor in list(found.items())[:limit])


def _key(site: str) -> str:
    from shadowrun.analysis import split_site

    found = split_site(site)
    return f"{found[0]}:{found[1]}" if found else ""


def _all(text: SourceText) -> Iterator[tuple[int, SourceFile, SourceLine]]:
    for number, file in enumerate(text.files):
        for line in file.lines:
            if line.findings:
                yield number, file, line


def _anchor(file: int, line: SourceLine) -> str:
    return f"source-{file}-{line.number}"


def _section(findings: Mapping[int, Finding], text: SourceText) -> Iterator[Block]:
    blocks: list[Block] = [_code(number, file, findings) for number, file in enumerate(text.files)]
    blocks += [Note(clip(f"Not shown: {path}: {why}."), "dim") for path, why in text.unread[:MAX_UNREAD]]
    n_more = text.n_left_out + max(0, len(text.unread) - MAX_UNREAD)
    blocks += [Note(f"{n_more:,} more files are not shown.", "dim")] if n_more else []
    if blocks:
        yield Section("Source", tuple(blocks), _LEAD, anchor="source")


def _code(number: int, file: SourceFile, findings: Mapping[int, Finding]) -> Code:
    notes = ["The file was written after the run started: its lines may be others than those that ran."]
    notes = notes if file.is_changed else []
    notes += [f"{file.n_left_out:,} more lines with findings are not shown."] if file.n_left_out else []
    return Code(file.path, tuple(_line(number, line, findings) for line in file.lines), " ".join(notes))


def _line(file: int, line: SourceLine, findings: Mapping[int, Finding]) -> CodeLine:
    # Known issues have no entry that a mark could lead to.
    shown = [findings[number] for number in line.findings if number in findings]
    marks = [
        Span(f"{f.number} {clip(f.op, 60).removeprefix('aten::')}", TONES[f.kind], f"finding-{f.number}") for f in shown
    ]
    if len(marks) > MAX_MARKS:
        rest = tuple(mark.text for mark in marks[MAX_MARKS:])
        marks = [*marks[:MAX_MARKS], Span(f"… and {len(rest)} more", opens=rest)]
    tones = {TONES[f.kind] for f in shown} | {TONES[status] for status, n in line.statuses if n}
    tone = next((tone for tone in _ORDER if tone in tones), "")
    title = ", ".join(f"{n:,} {status}" for status, n in line.statuses)
    anchor = _anchor(file, line) if line.findings else ""
    return CodeLine(line.number, line.code, tuple(marks), tone, title, anchor)
