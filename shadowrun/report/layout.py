"""Tables, labelled lines and colours of the terminal report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from shadowrun.report.words import SHOWN

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["COLOURS", "LABEL", "labelled", "table_of", "texts"]

LABEL = 12
"""Characters in the column of labels."""

COLOURS = {
    "match": "green", "mismatch": "red", "unsupported": "red", "error": "red", "fallback": "yellow",
    "unverified": "yellow", "slow": "yellow", "skipped": "dim",
}  # fmt: skip
_LABEL_STYLES = {"do": "bold cyan", "why": "bold"}


def labelled(lines: Iterable[tuple[str, str]]) -> Iterator[Table | Text]:
    """Label and text in two columns; then the commands, each on one line however long: a shell takes it so."""
    lines = list(lines)
    yield _grid((label, text) for label, text in lines if label != SHOWN)
    for label, text in lines:
        if label == SHOWN:
            yield Text.assemble((f"  {label:{LABEL - 1}}", "dim"), (text, "cyan"))


def _grid(lines: Iterable[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
    grid.add_column(width=LABEL, no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in lines:
        grid.add_row(Text(f"  {label}", _LABEL_STYLES.get(label, "dim")), Text(text, _LABEL_STYLES.get(label, "")))
    return grid


def table_of(*columns: tuple[str, str]) -> Table:
    """An empty table; a column's kind is ``number`` or empty."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for name, kind in columns:
        number = kind == "number"
        table.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold")
    return table


def texts(*cells: str) -> list[Text]:
    """Names from the user's program must not be read as rich's markup."""
    return [Text(cell) for cell in cells]
