"""Reports: a `Document` for each kind of report, and one renderer for each format."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shadowrun.errors import UsageError
from shadowrun.report.document import ISSUE_FORMATS, RENDERERS
from shadowrun.report.sanitize import write_to_stdout
from shadowrun.store.atomic_write import write_text

if TYPE_CHECKING:
    from os import PathLike

    from shadowrun.report.run_report import Source

__all__ = [
    "FORMATS",
    "ISSUE_FORMATS",
    "STDOUT",
    "Output",
    "append_to_summary",
    "format_of",
    "output_of",
    "render",
    "save",
    "summary_html",
    "write_to_stdout",
]

FORMATS = tuple(name for name in RENDERERS if name != "terminal" and name not in ISSUE_FORMATS)
"""Formats of files, by extension."""
STDOUT = "-"
_EXTENSIONS = {name: name for name in FORMATS} | {"xml": "junit", "sarif": "sarif"}
_SUMMARY = "GITHUB_STEP_SUMMARY"
# GitHub drops a larger summary as a whole.
_MAX_SUMMARY_BYTES = 1 << 20


class Output(NamedTuple):
    """A report to write.

    Attributes:
        format: One of `FORMATS` and `ISSUE_FORMATS`.
        path: Its file; `STDOUT` for standard output.
        appends: Whether it is GitHub's summary of a step, to which each command of the step adds.
    """

    format: str
    path: str
    appends: bool = False


def render(run: Source, format: str) -> str:  # noqa: A002 - as in Run.write
    """The report on a run as text; see `document.render` for the formats."""
    from shadowrun.report import document
    from shadowrun.report.run_report import run_document

    return document.render(run_document(run, pictures=format == "html"), format)


def output_of(text: str) -> Output:
    """Read ``report.html``, ``junit:results.xml`` or ``github:-``.

    Without a format, the extension names it, and before it may stand another: ``gl.codequality.json``.

    Raises:
        UsageError: It names no format.
    """
    name, colon, path = text.partition(":")
    if colon and name in (*FORMATS, *ISSUE_FORMATS) and path:  # `C:\\report.html` is a path
        return Output(name, path)
    if os.environ.get(_SUMMARY) and text == os.environ[_SUMMARY]:
        return Output("md", text, appends=True)
    return Output(format_of(text), text)


def format_of(path: str | PathLike[str]) -> str:
    """The format that a file's extension names.

    Raises:
        UsageError: It names no format.
    """
    *_, before, suffix = ("", "", *(s.lstrip(".").lower() for s in Path(path).suffixes))
    if before in ISSUE_FORMATS and suffix in ("json", "xml"):
        return before
    if suffix in _EXTENSIONS:
        return _EXTENSIONS[suffix]
    known = ", ".join(f".{name}" for name in _EXTENSIONS)
    raise UsageError(
        f"The extension of the report {str(path)!r} names no format: use one of {known}, or put the format before "
        "the file, as in junit:FILE.",
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


def append_to_summary(text: str, path: Path) -> None:
    """Add a report in Markdown to GitHub's summary of a step, as far as there is room for it.

    Raises:
        UsageError: The file cannot be written.
    """
    try:
        room = _MAX_SUMMARY_BYTES - (path.stat().st_size if path.exists() else 0)
        with path.open("a", encoding="utf-8", errors="replace", newline="\n") as file:
            file.write(_cut(text, room - 100))
    except OSError as error:
        raise UsageError(
            f"The summary {str(path)!r} cannot be written ({error.strerror}).", slug="unwritable-report"
        ) from error


def _cut(text: str, room: int) -> str:
    """The first lines of a text that have room."""
    if len(text.encode("utf-8", "replace")) <= room:
        return text
    kept: list[str] = []
    lines = text.splitlines(keepends=True)
    for line in lines:
        room -= len(line.encode("utf-8", "replace"))
        if room < 0:
            break
        kept.append(line)
    return "".join([*kept, f"\n… and {len(lines) - len(kept):,} more lines: a summary has 1 MiB.\n"])


def summary_html(run: Source) -> str:
    """The operator table alone, for notebooks."""
    from shadowrun.report.formats.html import table_html
    from shadowrun.report.run_sections import operator_table

    return table_html(operator_table(run.summary()))
