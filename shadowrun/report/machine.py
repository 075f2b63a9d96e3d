"""JSON and CSV: complete, for other programs."""

from __future__ import annotations

import csv
import io
import json
import re
from typing import TYPE_CHECKING

from shadowrun.store.codec import jsonable

if TYPE_CHECKING:
    from shadowrun.report.document import Document

__all__ = ["render_csv", "render_json"]

# OWASP's list for CSV injection: with these a spreadsheet evaluates a cell.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
# The text of a figure, such as -0.5, begins like a formula, and must stay a number.
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?|[+-]?(inf|nan)", re.ASCII)


def render_json(document: Document) -> str:
    """Sorted, so that two reports can be compared; non-finite numbers are strings."""
    # `allow_nan=False`: NaN and Infinity are no JSON, and other parsers refuse them.
    return json.dumps(jsonable(document.data), indent=1, sort_keys=True, allow_nan=False) + "\n"


def render_csv(document: Document) -> str:
    """A heading and one row for each record."""
    out = io.StringIO()
    # csv writes "\r\n" by default, and line-based tools would see a "\r" in the last column.
    writer = csv.writer(out, lineterminator="\n")
    rows = (document.records.head, *document.records.rows)
    writer.writerows([_without_formula(value) for value in row] for row in rows)
    return out.getvalue()


def _without_formula(value: object) -> object:
    """Put an apostrophe before text that a spreadsheet would evaluate as a formula."""
    if isinstance(value, str) and value[:1] in _FORMULA and len(value) > 1 and not _NUMBER.fullmatch(value):
        return f"'{value}"
    return value
