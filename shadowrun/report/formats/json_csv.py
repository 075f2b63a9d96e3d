"""JSON and CSV: complete, for other programs."""

from __future__ import annotations

import csv
import io
import json
import re
from typing import TYPE_CHECKING, TextIO

from shadowrun.store.codec import jsonable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shadowrun.report.document import Document

__all__ = ["csv_writer", "render_csv", "render_json"]

# OWASP's list for CSV injection: with these a spreadsheet evaluates a cell.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
# The text of a figure, such as -0.5, begins like a formula, and must stay a number.
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?|[+-]?(inf|nan)", re.ASCII)


def render_json(document: Document) -> str:
    """Sorted, so that two reports can be compared; non-finite numbers are strings."""
    # `allow_nan=False`: NaN and Infinity are no JSON, and other parsers refuse them.
    text = json.dumps(jsonable(document.data), indent=1, sort_keys=True, allow_nan=False)
    # Texts are as they were recorded; but in the log of a CI job, `##[` would begin a command to the service.
    return text.replace("##", "#\\u0023") + "\n"


def render_csv(document: Document) -> str:
    """A heading and one row for each record."""
    out = io.StringIO()
    write = csv_writer(out)
    for row in (document.records.head, *document.records.rows):
        write(row)
    return out.getvalue()


def csv_writer(file: TextIO) -> Callable[[Iterable[object]], object]:
    """A function that writes one row, in which no spreadsheet finds a formula."""
    # csv writes "\r\n" by default, and line-based tools would see a "\r" in the last column.
    writer = csv.writer(file, lineterminator="\n")
    return lambda row: writer.writerow([_without_formula(value) for value in row])


def _without_formula(value: object) -> object:
    """Put an apostrophe before text that a spreadsheet would evaluate as a formula."""
    if isinstance(value, str) and value[:1] in _FORMULA and len(value) > 1 and not _NUMBER.fullmatch(value):
        return f"'{value}"
    return value
