"""Reports: a `Document` for each kind of report, and one renderer for each format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shadowrun.errors import UsageError
from shadowrun.report.document import RENDERERS
from shadowrun.report.sanitize import show
from shadowrun.store.atomic_write import write_text

if TYPE_CHECKING:
    from os import PathLike

    from shadowrun.report.run_report import Source

__all__ = ["FORMATS", "format_of", "render", "save", "show", "summary_html"]

FORMATS = tuple(name for name in RENDERERS if name != "terminal")
"""Formats of files, by extension."""


def render(run: Source, format: str) -> str:  # noqa: A002 - as in Run.write
    """The report on a run as text; see `document.render` for the formats."""
    from shadowrun.report import document
    from shadowrun.report.run_report import run_document

    return document.render(run_document(run), format)


def format_of(path: str | PathLike[str]) -> str:
    """The format that a file's extension names.

    Raises:
        UsageError: It names no format.
    """
    suffix = Path(path).suffix.lstrip(".").lower()
    if suffix in FORMATS:
        return suffix
    known = ", ".join(f".{name}" for name in FORMATS)
    raise UsageError(
        f"The extension of the report {str(path)!r} names no format: use one of {known}.",
        slug="unknown-format",
    )


def save(text: str, path: Path) -> None:
    """Write a report; an older one is replaced once the new one is complete.

    Raises:
        UsageError: The file cannot be written.
    """
    try:
        write_text(path, text)
    except OSError as error:
        raise UsageError(
            f"The report {str(path)!r} cannot be written ({error.strerror}): its folder must exist and be writable.",
            slug="unwritable-report",
        ) from error


def summary_html(run: Source) -> str:
    """The operator table alone, for notebooks."""
    from shadowrun.report.html import table_html
    from shadowrun.report.run_report import operator_table

    return table_html(operator_table(run.summary()))
