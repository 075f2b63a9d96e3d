"""Markdown, in GitHub's dialect: for job summaries and issues.

Texts are shown as they are: no markup in them is followed, and GitHub and GitLab make no link of a word in them, as far
as their documentation says what they look for. Left to GitLab are `project>`, a project of the same group, since every
`<lambda>` looks like one, and `[[page]]` in a wiki.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shadowrun.report.document import Entries, Facts, Listing, Note, Prose, Section, Table, plain, shown, visible

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shadowrun.report.document import Block, Document, Fact, GateLine

__all__ = ["Markdown", "pipe_table", "render_markdown"]

# GitHub scrolls wide tables, so there is room for more columns than in a terminal.
_DETAIL = 1

_WORD: Final = re.compile(r"[^\s|]+|\|")
# What GitHub and GitLab look for in the page that Markdown became, where no escape is left, but not in code: addresses,
# mentions, formulas, numbers of issues and names of labels, trackers' keys, commits, and pictures such as `:100:`. Of
# GitLab alone: `[work_item:1]`, but not a platform's `[env:A=1]`; `*iteration:1`; `group/project>`; the end of a
# difference, `[- gone -]`; a table of contents.
_LINKED: Final = re.compile(
    r"""//|[@$]|\bwww\.|[#!%~&][\w"]|\bgh-\d|(?-i:\b[A-Z]{2,}-\d)|\b[0-9a-f]{7,}\b|:([+-]1|(?!\d\d:)[a-z\d_-]+):"""
    r"""|\[(?!env:)[a-z_]+:|\*iteration:|[\w.-]/[\w.-]+>|[+-][]}]|\[toc]""",
    re.IGNORECASE,
)
_BEFORE: Final = "([{'\""
_AFTER: Final = ".,;:!?)]}'\""
# `#` everywhere: a line may begin with it, and a heading ends with it. As entities: `<` would begin HTML, which GitHub
# renders, `|` a cell, and `&` an entity, which may be a character that was removed from the text.
_ESCAPES: Final = {ord(c): f"\\{c}" for c in "\\`*_[]~#"} | {ord(c): f"&#{ord(c)};" for c in "&<>|"}
# A list, a line across the page, the line under a heading, or a command to GitLab (`/close`).
_BLOCK: Final = re.compile(r"^(?=[-+=/])|^(\d{1,9})(?=[.)](?:\s|$))")


class Markdown(str):
    """Text that is Markdown already, such as a code span: not escaped."""

    __slots__ = ()


def render_markdown(document: Document) -> str:
    """Headings, tables and lists."""
    lines = [f"# {_text(document.title)}\n", *_gate(document.gate)]
    lines += [line for block in document.blocks for line in _block(block, 2)]
    return "\n".join([*lines, *_gate(document.gate)]).rstrip() + "\n"


def _gate(gate: GateLine | None) -> list[str]:
    return [f"**{_text(gate.line)}**\n"] if gate is not None else []


def _block(block: Block, level: int) -> Iterator[str]:
    if isinstance(block, Note):
        text = _paragraph(plain(block.text, " · "))
        yield f"> {text}\n" if block.tone == "warn" else f"{text}\n"
    elif isinstance(block, Facts):
        yield from _facts(block.rows)
    elif isinstance(block, Table):
        yield from _table(block)
    elif isinstance(block, Entries):
        n, more = shown(block, block.limits.markdown)
        for entry in block.entries[:n]:
            number = f"{entry.number}. " if entry.number else ""
            detail = f": {_text(entry.detail)}" if entry.detail else ""
            yield f"{'#' * (level + 1)} {number}{_text(entry.name)}{detail}\n"
            yield from _facts(entry.facts)
            if entry.listing is not None:
                yield _listing(entry.listing)
        yield from [f"{_paragraph(more)}\n"] if more else []
    elif isinstance(block, Listing):
        yield _listing(block)
    elif isinstance(block, Prose):
        yield from block.code
    elif isinstance(block, Section):  # pictures, and what is made later, are for HTML alone
        yield from _section(block, level)


def _section(section: Section, level: int) -> Iterator[str]:
    count = f" ({section.count:,})" if section.count >= 0 else ""
    yield f"{'#' * level} {_text(section.title)}{count}\n"
    yield from [f"{_paragraph(section.lead)}\n"] if section.lead else []
    for block in section.blocks:
        yield from _block(block, level + 1 if isinstance(block, Section) else level)


def _facts(facts: Iterable[Fact]) -> Iterator[str]:
    for fact in facts:
        yield f"- **{_text(fact.label)}**: {_code(fact.text) if fact.command else _text(fact.text)}"
    yield ""  # a list ends at an empty line


def _listing(listing: Listing) -> str:
    """A fenced block, in which nothing is markup."""
    # CommonMark: a block ends at a fence that is as long as the one it began with.
    longest = max((len(run) for line in listing.code for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join([f"{fence}{listing.language}", *listing.code, f"{fence}\n"])


def _table(table: Table) -> Iterator[str]:
    n, more = shown(table, table.limits.markdown)
    at = visible(table.columns, _DETAIL)
    if n:
        head = [table.columns[i].name for i in at]
        yield from pipe_table([head, *([plain(row[i]) for i in at] for row in table.rows[:n])])
        yield ""
    yield from [f"{_paragraph(more)}\n"] if more else []


def pipe_table(rows: Iterable[Iterable[object]]) -> list[str]:
    """Lines of a table; the first row is its head."""
    lines = [[_text(cell if isinstance(cell, Markdown) else str(cell)) for cell in row] for row in rows]
    head, *rest = (f"| {' | '.join(row)} |" for row in lines)
    return [head, f"|{' --- |' * len(lines[0])}", *rest]


def _code(text: str) -> str:
    """A code span, in which nothing is markup."""
    # CommonMark: a span ends at a run of as many backticks as it began with.
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    space = " " if len(fence) > 1 else ""
    return f"{fence}{space}{text}{space}{fence}"


def _text(text: str) -> str:
    """A text from the user's program or from a file, shown as it is: within a line."""
    if isinstance(text, Markdown):
        return text
    return _WORD.sub(lambda found: _word(found[0]), text)


def _word(word: str) -> str:
    """A word, in code if a service would make a link of it; punctuation around it is none of the link."""
    start, end = len(word) - len(word.lstrip(_BEFORE)), len(word.rstrip(_AFTER))
    if start >= end or not _LINKED.search(word):
        return word.translate(_ESCAPES)
    return f"{word[:start].translate(_ESCAPES)}{_code(word[start:end])}{word[end:].translate(_ESCAPES)}"


def _paragraph(text: str) -> str:
    """`_text` of a line of its own."""
    return _BLOCK.sub(r"\1\\", _text(text))
