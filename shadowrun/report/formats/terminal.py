"""Reports at a terminal, and the same as plain text."""

from __future__ import annotations

import io
import os
import re
import sys
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from shadowrun.report.document import View
from shadowrun.report.document_blocks import (
    Entries,
    Fact,
    Facts,
    Listing,
    Note,
    Prose,
    Section,
    Table,
    plain,
    shown,
    visible,
)
from shadowrun.report.sanitize import MAX_WHOLE, clip

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shadowrun.report.document import Document, GateLine
    from shadowrun.report.document_blocks import Block, Cell, Entry

__all__ = ["render_terminal", "render_text"]

TEXT_WIDTH = 100
MIN_WIDTH = 60
WIDE = 110
"""Width from which on tables show their columns of detail 1."""
MIN_FREE = 18
"""Characters that each text of a compact table must have, or its columns of detail 1 are left out."""
LABEL = 12
"""Characters in the column of labels."""

_INDENT = "  "
_WHOLE = View()
# Characters of a cell of a table: a terminal folds them into a column.
_MAX_CELL = 1000
# At the start of a line GitHub reads `::error` as a command, and no text can know where it is folded.
_COMMAND: Final = re.compile(r"^((?:\s|\x1b\[[\d;]*m)*?) ?:(?=:\w)")
_STYLES = {"good": "green", "bad": "red", "warn": "yellow", "dim": "dim", "action": "bold cyan", "strong": "bold"}


def render_terminal(
    document: Document, *, width: int | None = None, colour: bool | None = None, view: View = _WHOLE
) -> str:
    """Coloured and as wide as the terminal where standard output is one; NO_COLOR and FORCE_COLOR are obeyed."""
    # Logs of CI services show colours, though they are no terminals.
    forced = colour is None and bool(os.environ.get("FORCE_COLOR")) and not os.environ.get("NO_COLOR")
    colour = forced or (sys.stdout.isatty() if colour is None else colour)
    # In a pipe rich takes the width from the environment, and logs of two machines would differ.
    if width is None and not sys.stdout.isatty():
        width = TEXT_WIDTH
    out = io.StringIO()
    # No markup, emoji or highlighting: names from the program or a file must be printed as they are.
    console = Console(
        file=out,
        force_terminal=colour,
        color_system="standard" if forced else "auto",
        width=width,
        highlight=False,
        emoji=False,
        markup=False,
        legacy_windows=False,
    )
    # Narrower than that, rich would give columns no width; the terminal wraps the lines itself.
    console.width = max(console.width, MIN_WIDTH)
    _Page(console, view).print(document)
    # rich pads cells to the width of the console: trailing blanks in a log.
    return "\n".join(_COMMAND.sub(r"\1: ", line.rstrip()) for line in out.getvalue().splitlines()) + "\n"


def render_text(document: Document) -> str:
    """Without colour, at a width that fits logs and mails."""
    return render_terminal(document, width=TEXT_WIDTH, colour=False)


class _Page:
    """Prints blocks to a console."""

    def __init__(self, console: Console, view: View) -> None:
        self.console = console
        self._view = view

    def print(self, document: Document) -> None:
        view = self._view
        self._wrapped(Text.assemble(("shadowrun", "bold"), f"  {document.title}"))
        blocks: Iterable[Block] = document.blocks
        if document.digest and not view.details:
            blocks = document.digest
        elif document.digest and view.digest_last:
            blocks = (*(block for block in document.blocks if isinstance(block, Section)), Note(""), *document.digest)
        else:
            self._gate(document.gate)
        for block in blocks:
            self._block(block, first=False)
        if view.hint and blocks is document.digest:
            self._facts((Fact("more", view.hint),))
        if document.gate is not None:
            self.console.print()
            self._gate(document.gate)

    def _shown(self, block: Table | Entries) -> tuple[int, str]:
        """Rows to show, and the line that counts the others."""
        if self._view.everything:
            return shown(block, len(block.rows if isinstance(block, Table) else block.entries))
        return shown(block, block.limits.terminal)

    def _gate(self, gate: GateLine | None) -> None:
        if gate is not None:  # not wrapped, so that grep finds the whole line
            self.console.print(Text(gate.line, "bold green" if gate.passed else "bold red"), soft_wrap=True)

    def _block(self, block: Block, *, first: bool) -> None:
        if isinstance(block, Facts | Table | Listing | Prose) and not first:
            self.console.print()
        if isinstance(block, Note):
            self._note(block)
        elif isinstance(block, Facts):
            self._facts(block.rows)
        elif isinstance(block, Table):
            self._table(block)
        elif isinstance(block, Entries):
            n, more = self._shown(block)
            for entry in block.entries[:n]:
                self._entry(entry)
            self._more(more)
        elif isinstance(block, Listing):
            self._listing(block)
        elif isinstance(block, Prose):
            self._prose(block)
        elif isinstance(block, Section):
            self._section(block)

    def _section(self, section: Section) -> None:
        title = f"{section.title} ({section.count:,})" if section.count >= 0 else section.title
        colour = _STYLES.get(section.tone, "")
        self.console.print()
        self.console.rule(Text(title, f"bold {colour}".strip()), align="left", style=colour or "dim", characters="─")
        if section.lead:
            self.console.print(Text(section.lead, "dim"))
        # Pictures, and what is made later, are for HTML alone.
        blocks = [b for b in section.blocks if isinstance(b, Note | Facts | Table | Entries | Listing | Section)]
        for number, block in enumerate(blocks):
            self._block(block, first=number == 0)

    def _listing(self, listing: Listing) -> None:
        """Indented, so that no line of it can look like a gate line, and not wrapped, to be copied."""
        for line in listing.code:
            self.console.print(Text(f"{_INDENT}{line}".rstrip()), soft_wrap=True)

    def _prose(self, prose: Prose) -> None:
        from rich.markdown import Markdown

        # Without colours of its own for code: they are chosen for a dark background.
        self.console.print(Markdown("\n".join(prose.code), code_theme="bw", hyperlinks=False, justify="left"))

    def _note(self, note: Note) -> None:
        mark = "! " if note.tone == "warn" else f"{note.label}: " if note.label else ""
        line = Text(mark) + _cell(note.text, "  ")
        line.stylize(_STYLES.get(note.tone, ""))
        self._wrapped(line)

    def _wrapped(self, text: Text) -> None:
        """Print wrapped, with continuation lines indented: no text of a data file can look like a gate line."""
        for number, line in enumerate(text.wrap(self.console, self.console.width - len(_INDENT))):
            self.console.print(Text(_INDENT if number else "") + line)

    def _facts(self, facts: Iterable[Fact]) -> None:
        """Label and text in two columns; then the commands, each on one line, to be copied."""
        facts = tuple(facts)
        grid = Grid.grid(padding=(0, 1, 0, 0), pad_edge=False)
        label = max([LABEL, *(len(fact.label) + 3 for fact in facts)])
        room = self.console.width - label - 1
        grid.add_column(width=label, no_wrap=True)
        grid.add_column(overflow="fold")
        for fact in facts:
            if not fact.command:
                style = _STYLES.get(fact.tone, "")
                text = clip(fact.text, room) if fact.short else fact.text
                grid.add_row(Text(f"  {fact.label}", style or "dim"), Text(text, style))
        self.console.print(grid)
        for fact in facts:
            if fact.command:
                line = Text.assemble((f"  {fact.label:{label - 1}}", "dim"), (fact.text, "cyan"))
                self.console.print(line, soft_wrap=True)

    def _entry(self, entry: Entry) -> None:
        number = f"{entry.number}. " if entry.number else ""
        detail = f"  {entry.detail}" if entry.detail else ""
        style = f"bold {_STYLES.get(entry.tone, '')}".strip()
        self.console.print()
        self._wrapped(Text.assemble((number, "dim"), (entry.name, style), detail))
        self._facts(entry.facts)

    def _table(self, table: Table) -> None:
        n, more = self._shown(table)
        if table.compact:
            self._compact(table, n)
        elif n:
            at = visible(table.columns, int(self.console.width >= WIDE))
            grid = Grid(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
            for i in at:
                number = table.columns[i].kind == "number"
                name = Text(table.columns[i].name)
                first = i == at[0]
                grid.add_column(name, justify="right" if number else "left", no_wrap=number or first, overflow="fold")
            # The first column does not wrap in rich: a long name would take the width of all others.
            for row in table.rows[:n]:
                cells = [_cell(row[i], longest=_MAX_CELL) for i in at]
                grid.add_row(_folded(cells[0], self.console.width // 2), *cells[1:])
            self.console.print(grid)
        self._more(more)

    def _compact(self, table: Table, n: int) -> None:
        """One line for each row: numbers, names and statuses have their width, texts share the rest and are cut."""
        # With too little room, columns of detail 1 are left out, and the others get theirs.
        for detail in (1, 0):
            at = visible(table.columns, detail)
            kinds = [table.columns[i].kind for i in at]
            rows = [[row[i] for i in at] for row in table.rows[:n]]
            widths, room = self._compact_widths(rows, kinds)
            if room >= MIN_FREE:
                break
        for row in rows:
            line = Text()
            for i, (cell, kind, width) in enumerate(zip(row, kinds, widths, strict=True)):
                text = clip(plain(cell), width)
                tone = cell[0].tone if isinstance(cell, tuple) and cell else ""
                style = "bold" if kind == "name" else _STYLES.get(tone, "")
                line.append(text.rjust(width) if kind == "number" else text.ljust(width), style)
                line.append("  " if i + 1 < len(row) else "")
            self.console.print(line, no_wrap=True, overflow="ellipsis")

    def _compact_widths(self, rows: list[list[Cell]], kinds: list[str]) -> tuple[list[int], int]:
        """Width of each column, and the room that each plain text had."""
        widths = [max(len(plain(row[i])) for row in rows) for i in range(len(kinds))]
        widths = [
            min(w, self.console.width // 2) if kind == "name" else w for w, kind in zip(widths, kinds, strict=True)
        ]
        free = [i for i, kind in enumerate(kinds) if kind == "text" and all(_is_plain(row[i]) for row in rows)]
        room = self.console.width - 2 * (len(kinds) - 1) - sum(w for i, w in enumerate(widths) if i not in free)
        share = room // len(free)
        # What a short text does not need goes to those after it.
        for n_before, i in enumerate(free):
            widths[i] = max(1, min(widths[i], room // (len(free) - n_before)))
            room -= widths[i]
        return widths, share

    def _more(self, text: str) -> None:
        if text:
            self.console.print(Text(text, "dim"))


def _is_plain(cell: Cell) -> bool:
    """Whether a cell is text that may be cut; a status is not."""
    return isinstance(cell, str) or not any(span.tone for span in cell)


def _cell(cell: Cell, separator: str = ", ", longest: int = MAX_WHOLE) -> Text:
    """A cell as rich's text, without markup: names come from the user's program."""
    if isinstance(cell, str):
        return Text(clip(cell, longest))
    return Text(separator).join(Text(clip(span.text, longest), _STYLES.get(span.tone, "")) for span in cell)


def _folded(text: Text, width: int) -> Text:
    """The first cell of a row, with its continuation lines indented as in `_Page._wrapped`."""
    pieces = text.divide(range(width, len(text), width - len(_INDENT))) if len(text) > width else [text]
    return Text(f"\n{_INDENT}").join(pieces)
