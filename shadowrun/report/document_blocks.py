"""The blocks of a report: values that say what is shown, and no format."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = [
    "TONES",
    "Bar",
    "Block",
    "Cell",
    "Code",
    "CodeLine",
    "Column",
    "Entries",
    "Entry",
    "Fact",
    "Facts",
    "Figure",
    "Filter",
    "Later",
    "Limits",
    "Listing",
    "Note",
    "Prose",
    "Section",
    "Span",
    "Table",
    "Tree",
    "TreeNode",
    "naming",
    "plain",
    "shown",
    "status_span",
    "visible",
]

TONES = {
    **dict.fromkeys(("match", "full", "ok", "kernel", "present", "gained", "supported"), "good"),
    **dict.fromkeys(("mismatch", "unsupported", "error", "none", "absent", "regressed", "finding"), "bad"),
    **dict.fromkeys(("compile error", "runtime error"), "bad"),
    **dict.fromkeys(("fallback", "unverified", "slow", "partial", "own failures", "fails differently"), "warn"),
    **dict.fromkeys(("recompile storm", "graph break", "slower than eager"), "warn"),
    **dict.fromkeys(("skipped", "untested", "unknown", "specific", "-"), "dim"),
}  # fmt: skip
"""Status, support or state to its tone: one table, so that all reports and formats agree."""


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of text in a tone.

    Attributes:
        text: The text.
        tone: One of good, bad, warn, dim; empty for none.
        link: Anchor in the same document, for formats that have links.
        opens: What a text with ``… and 8 more`` leaves out: HTML shows it on a click.
    """

    text: str
    tone: str = ""
    link: str = ""
    opens: tuple[str, ...] = ()


Cell = str | tuple[Span, ...]
"""Text, or pieces of it in tones."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        name: Its heading.
        kind: ``text``, ``number`` (right-aligned, never wrapped) or ``name`` (an operator: in code, heading its row).
        detail: 0: shown everywhere; 1: not on narrow terminals; 2: in HTML only.
        help: What it means, in words; empty for that of its name in `help_texts`.
    """

    name: str
    kind: str = "text"
    detail: int = 0
    help: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """Rows of a table, or entries, that each format shows at most; the rest is counted.

    Attributes:
        terminal, markdown, html: Rows shown.
        opened: Rows that HTML has at most, those after the first `html` behind ``… and 8 more``.
    """

    terminal: int = 12
    markdown: int = 50
    html: int = 50
    # Bounds the page: with all rows of a model with 100,000 shapes it would not open in a browser.
    opened: int = 2000


@dataclass(frozen=True, slots=True)
class Filter:
    """A filter over the rows of a table, in HTML: by name, by tag, and a switch.

    Attributes:
        choices: Tags that can be chosen; a row shows if it has one of them.
        only: A tag; the switch hides rows without it.
        label: Text of the switch.
    """

    choices: tuple[str, ...]
    only: str = ""
    label: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells.

    Attributes:
        columns: Its columns.
        rows: Its rows, each as long as `columns`.
        n_more: Rows that were left out of `rows`.
        noun: Plural noun for the rows, for ``… and 12 more operators``.
        limits: Rows that each format shows.
        compact: In a terminal and on a phone: without headings; a terminal cuts each row to one line.
        filter: In HTML: its filter, None for none.
        tags: Tags of each row, for `filter`.
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    n_more: int = 0
    noun: str = ""
    limits: Limits = Limits()
    compact: bool = False
    filter: Filter | None = None
    tags: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Fact:
    """A labelled line.

    Attributes:
        label: Its label.
        text: Its text.
        tone: ``action`` for the next step, ``strong`` for the cause; empty for others.
        command: A shell command: never wrapped or cut.
        short: A terminal cuts it to one line.
        opens: As of `Span`.
    """

    label: str
    text: str
    tone: str = ""
    command: bool = False
    short: bool = False
    opens: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Facts:
    """Labelled lines; HTML shows those with a title in a box that can be closed."""

    rows: tuple[Fact, ...]
    title: str = ""


@dataclass(frozen=True, slots=True)
class Note:
    """A paragraph.

    Attributes:
        text: Its text; several spans are listed, as counts are.
        tone: ``warn``: to be noticed; ``dim``: an aside.
        label: Put before it in plain text.
    """

    text: Cell
    tone: str = ""
    label: str = ""


@dataclass(frozen=True, slots=True)
class Listing:
    """Lines of code or output, printed as they are.

    Attributes:
        code: The lines.
        language: For highlighting: ``python``, ``console``.
        title: In HTML and below an entry: what opens it.
    """

    code: tuple[str, ...]
    language: str = ""
    title: str = ""


@dataclass(frozen=True, slots=True)
class Prose:
    """Text in Markdown, of the package itself: its links and markup are followed.

    Attributes:
        code: Its lines, whose blanks count as in code.
    """

    code: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """A finding: a heading and labelled lines.

    Attributes:
        name: Operator or region; heads it.
        facts: The lines.
        detail: Follows the name.
        number: Precedes the name; empty for none.
        tone: Of the name.
        anchor: For links.
        listing: A script; terminals and plain text leave it out.
        facets: What HTML filters by: ``(("phase", ("forward",)), …)``.
        ranks: What HTML sorts by, the greatest first: ``(("calls", 12.0), …)``.
        inside: Blocks below the lines, in HTML only.
    """

    name: str
    facts: tuple[Fact, ...]
    detail: str = ""
    number: str = ""
    tone: str = ""
    anchor: str = ""
    listing: Listing | None = None
    facets: tuple[tuple[str, tuple[str, ...]], ...] = ()
    ranks: tuple[tuple[str, float], ...] = ()
    inside: Later | None = None


@dataclass(frozen=True, slots=True)
class Entries:
    """Findings below each other; the fields are those of `Table`."""

    entries: tuple[Entry, ...]
    n_more: int = 0
    noun: str = ""
    limits: Limits = Limits(10, 20, 50)


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture, which HTML alone shows: what it says is also in a table.

    Attributes:
        svg: An ``<svg>`` element, in which all texts are escaped.
        caption: Below it.
        title: Above it.
    """

    svg: str
    caption: str = ""
    title: str = ""


@dataclass(frozen=True, slots=True)
class Bar:
    """A share as a bar with its number.

    Attributes:
        share: 0 to 1.
        text: The number.
        tone: As of `Span`.
    """

    share: float
    text: str
    tone: str = ""


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A line of a tree.

    Attributes:
        name: Its name.
        chips: What became of it.
        bars: Its shares, one for each heading of the tree.
        children: Lines below it.
        n_more: Lines below it that were left out.
    """

    name: str
    chips: tuple[Span, ...]
    bars: tuple[Bar, ...]
    children: tuple[TreeNode, ...] = ()
    n_more: int = 0


@dataclass(frozen=True, slots=True)
class Tree:
    """Lines that open, which HTML alone shows.

    Attributes:
        title: Above it.
        heads: Headings: of the names, and of each bar.
        nodes: The outermost lines.
        caption: Below it.
    """

    title: str
    heads: tuple[str, ...]
    nodes: tuple[TreeNode, ...]
    caption: str = ""


@dataclass(frozen=True, slots=True)
class CodeLine:
    """A line of a program, with what was found in it.

    Attributes:
        number: From 1.
        code: Its text.
        marks: The findings, in the margin.
        tone: As of `Span`; empty for a line that called no operator.
        title: The tone in words.
        anchor: For links.
    """

    number: int
    code: str
    marks: tuple[Span, ...] = ()
    tone: str = ""
    title: str = ""
    anchor: str = ""


@dataclass(frozen=True, slots=True)
class Code:
    """Lines of a source file, which HTML alone shows.

    Attributes:
        title: Name of the file.
        lines: Its lines; where numbers do not follow each other, lines are left out.
        note: What a reader must know, such as that the file was changed.
    """

    title: str
    lines: tuple[CodeLine, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Later:
    """Blocks that HTML alone shows, made when it does: pictures and source lines take reading that other formats spare.

    Attributes:
        make: Makes them; their texts are sanitised afterwards.
        title: What opens them; empty to show them at once.
    """

    make: Callable[[], tuple[Block, ...]] = field(repr=False)
    title: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """Blocks under a heading.

    Attributes:
        title: The heading.
        blocks: The blocks.
        lead: One sentence below the heading.
        count: Put behind the heading; -1 for none.
        tone: Of the heading.
        anchor: For links.
    """

    title: str
    blocks: tuple[Block, ...]
    lead: str = ""
    count: int = -1
    tone: str = ""
    anchor: str = ""


Block = Note | Facts | Table | Entries | Figure | Listing | Prose | Code | Tree | Later | Section


def status_span(status: str, text: str = "", link: str = "") -> Span:
    """A status in its tone: ``3 mismatch``."""
    return Span(text or status, TONES.get(status, ""), link)


def naming(before: str, names: Sequence[str], shown: int, after: str = "") -> Cell:
    """A sentence that names the first of some things; HTML shows the others on a click."""
    left = tuple(names[shown:])
    text = f"{before}{', '.join(names[:shown])}{f' … and {len(left):,} more' if left else ''}{after}"
    return (Span(text, opens=left),) if left else text


def plain(cell: Cell, separator: str = ", ") -> str:
    """A cell without tones."""
    return cell if isinstance(cell, str) else separator.join(span.text for span in cell)


def shown(block: Table | Entries, limit: int) -> tuple[int, str]:
    """Number of rows of a block to show, and the line that counts the others; empty if there are none."""
    n_rows = len(block.rows if isinstance(block, Table) else block.entries)
    n = min(n_rows, limit)
    n_more = n_rows - n + block.n_more
    return n, f"… and {n_more:,} more {block.noun}".rstrip() if n_more > 0 else ""


def visible(columns: Iterable[Column], detail: int) -> list[int]:
    """Positions of the columns to show at a level of detail."""
    return [position for position, column in enumerate(columns) if column.detail <= detail]
