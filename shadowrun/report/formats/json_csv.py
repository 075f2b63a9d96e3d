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
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
# Within a text too: where the separator is a semicolon, a cell begins behind each, whatever is quoted. Quotation marks
# at its start are then those of a cell, and no part of it.
_NEW_CELL = re.compile('(?<=[;\t\r\n])(?="*[=+@\uff1d\uff0b\uff0d\uff20-])')
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

    class Lines:
        @staticmethod
        def write(line: str) -> int:
            # Line-based tools would see a "\r" in the last column.
            return file.write(line.removesuffix("\r\n") + "\n")

    # With "\n" for the end of lines, Python up to 3.12 quotes no "\r" in a text: a row would begin behind it.
    writer = csv.writer(Lines, lineterminator="\r\n")
    return lambda row: writer.writerow([_without_formula(value) for value in row])


def _without_formula(value: object) -> object:
    """Put an apostrophe before text that a spreadsheet would evaluate as a formula."""
    if not isinstance(value, str):
        return value
    begins = value[:1] in _FORMULA and len(value) > 1 and not _NUMBER.fullmatch(value)
    return _NEW_CELL.sub("'", f"'{value}" if begins else value)
