"""Reports: one file for each format, all made from a run's analyses."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from shadowrun.errors import UsageError
from shadowrun.report.tame import show

if TYPE_CHECKING:
    from os import PathLike

    from shadowrun.report.content import Source

__all__ = ["FORMATS", "Reporter", "format_of", "render", "save", "show", "summary_html"]

FORMATS = {
    "json": "jsonfile:JsonReport",
    "md": "markdown:MarkdownReport",
    "html": "html:HtmlReport",
    "txt": "terminal:TextReport",
    "terminal": "terminal:TerminalReport",
}
"""Format to module and class: rich and jinja2 are imported by the formats that need them only."""


class Reporter(Protocol):
    """A format."""

    extension: str

    def render(self, run: Source) -> str:
        """The whole report as text."""
        ...


def render(run: Source, format: str) -> str:  # noqa: A002 - as in Run.write
    """Render a report.

    Args:
        run: What to report on.
        format: ``json``, ``md`` (or ``markdown``), ``html``, ``txt``, ``terminal`` (coloured and as wide as the
            terminal where standard output is one).

    Raises:
        UsageError: Unknown format.
    """
    name = "md" if format == "markdown" else format
    if name not in FORMATS:
        raise UsageError(
            f"There is no report format {format!r}; use one of {', '.join(FORMATS)}.", slug="unknown-format"
        )
    module, cls = FORMATS[name].split(":")
    reporter: Reporter = getattr(importlib.import_module(f"shadowrun.report.{module}"), cls)()
    return reporter.render(run)


def format_of(path: str | PathLike[str]) -> str:
    """The format that a file's extension stands for.

    Raises:
        UsageError: It stands for none.
    """
    suffix = Path(path).suffix.lstrip(".").lower()
    if suffix in FORMATS and suffix != "terminal":
        return suffix
    known = ", ".join(f".{name}" for name in FORMATS if name != "terminal")
    raise UsageError(
        f"The extension of the report {str(path)!r} picks its format; use one of {known}, or give format=.",
        slug="unknown-format",
    )


def save(text: str, path: Path) -> None:
    """Write a report, replacing an older one only once the new one is whole.

    Raises:
        UsageError: The file cannot be written.
    """
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, encoding="utf-8", errors="replace")  # of halves of characters
        part.replace(path)
    except OSError as error:
        if part.is_file():
            part.unlink()
        raise UsageError(
            f"The report {str(path)!r} cannot be written ({error.strerror}): its folder must exist and be writable.",
            slug="unwritable-report",
        ) from error


def summary_html(run: Source) -> str:
    """The operator table alone, for notebooks."""
    from shadowrun.report.html import summary_table

    return summary_table(run)
