"""Rows of cells as text: columns for a terminal, a Markdown table, CSV. Imports nothing but the standard library."""

from __future__ import annotations

import csv
import io
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["cell", "clip", "columns", "comma_separated", "pipes"]


_BEGINS_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?(inf|nan)", re.ASCII)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines in which each column is as wide as its longest cell; at least one row, all of one length."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def pipes(rows: Iterable[Iterable[object]]) -> list[str]:
    """Lines of a Markdown table; the first row is its head."""
    shown = [[cell(text) for text in row] for row in rows]
    head, *rest = (f"| {' | '.join(row)} |" for row in shown)
    return [head, "|" + "---|" * len(shown[0]), *rest]


def cell(text: object) -> str:
    """Text that neither ends a cell nor begins a tag."""
    return str(text).replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def clip(text: str, most: int) -> str:
    """The text, cut to `most` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"


def comma_separated(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """CSV with a head."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([_harmless(value) for value in row] for row in (head, *rows))
    return out.getvalue()


def _harmless(value: object) -> object:
    """A text that a spreadsheet would take for a formula begins with an apostrophe; numbers stay numbers."""
    if isinstance(value, str) and value[:1] in _BEGINS_FORMULA and len(value) > 1 and not _NUMBER.fullmatch(value):
        return f"'{value}"
    return value
