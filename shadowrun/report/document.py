"""`Document`: the content of a report without its format. Commands build one; renderers turn it into text.

A new format is a module with a function from `Document` to text, and a line in `RENDERERS`: then every command that
prints a report has it.
"""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shadowrun.errors import UsageError
from shadowrun.report.document_blocks import (
    TONES,
    Bar,
    Block,
    Cell,
    Code,
    CodeLine,
    Column,
    Entries,
    Entry,
    Fact,
    Facts,
    Figure,
    Filter,
    Later,
    Limits,
    Listing,
    Note,
    Prose,
    Section,
    Span,
    Table,
    Tree,
    TreeNode,
    plain,
    shown,
    status_span,
    visible,
)
from shadowrun.report.sanitize import MAX_WHOLE, clip, sanitize

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shadowrun.report.issues import Issues

__all__ = [
    "ISSUE_FORMATS",
    "RENDERERS",
    "TONES",
    "Bar",
    "Block",
    "Cell",
    "Code",
    "CodeLine",
    "Column",
    "Document",
    "Entries",
    "Entry",
    "Fact",
    "Facts",
    "Figure",
    "Filter",
    "GateLine",
    "Later",
    "Limits",
    "Listing",
    "Note",
    "Prose",
    "Records",
    "Section",
    "Span",
    "Table",
    "Tree",
    "TreeNode",
    "View",
    "plain",
    "render",
    "render_view",
    "shown",
    "status_span",
    "visible",
]

RENDERERS = {
    "txt": "terminal:render_text",
    "md": "markdown:render_markdown",
    "json": "json_csv:render_json",
    "csv": "json_csv:render_csv",
    "html": "html:render_html",
    "terminal": "terminal:render_terminal",
    "junit": "junit:render_junit",
    "sarif": "sarif:render_sarif",
    "github": "annotations:render_github",
    "codequality": "annotations:render_code_quality",
}
"""Format to module and function: only the formats that need rich and jinja2 import them."""

ISSUE_FORMATS = ("junit", "sarif", "github", "codequality")
"""Formats of CI services: those of reports that have findings."""


@dataclass(frozen=True, slots=True)
class GateLine:
    """The first and last line of a report: whether the run passed."""

    line: str
    passed: bool


@dataclass(frozen=True, slots=True)
class Records:
    """The rows of the CSV: numbers stay numbers, and no row is left out."""

    head: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]


@dataclass(frozen=True, slots=True)
class Document:
    """A report.

    Attributes:
        title: ``npu against cpu``.
        blocks: Its parts, in order.
        data: All data, for programs: the JSON.
        records: The CSV.
        gate: Whether the run passed; None without a gate.
        issues: The findings for CI services; None for a report that has none by its nature.
        digest: What a terminal shows unless it is asked for details: as much as a screen takes. Empty: all blocks.
    """

    title: str
    blocks: tuple[Block, ...]
    data: Mapping[str, Any] = field(repr=False)
    records: Records = field(repr=False)
    gate: GateLine | None = None
    issues: Issues | None = field(default=None, repr=False)
    digest: tuple[Block, ...] = ()


@dataclass(frozen=True, slots=True)
class View:
    """What a terminal shows of a document.

    Attributes:
        details: All blocks, not the digest alone.
        everything: All rows of each table, and all entries.
        digest_last: The digest below the details, where no scrolling is needed to see it.
        hint: Where to find more; put below the digest.
    """

    details: bool = True
    everything: bool = False
    digest_last: bool = False
    hint: str = ""


def render_view(document: Document, view: View) -> str:
    """A document for a terminal, as `render` does."""
    from shadowrun.report.formats.terminal import render_terminal  # imports rich

    return render_terminal(_safe(document, "terminal"), view=view)


def render(document: Document, format: str) -> str:  # noqa: A002 - as in Run.write
    """A document as text.

    All texts are sanitised here, for all formats: one line each, without control sequences. JSON escapes such
    characters itself and keeps texts as they are.

    Args:
        document: The document.
        format: ``txt``, ``md`` (or ``markdown``), ``json``, ``csv``, ``html``, or ``terminal`` (coloured and as wide as
            the terminal where standard output is one); with findings also ``junit``, ``sarif``, ``github``
            (annotations) and ``codequality`` (GitLab).

    Raises:
        UsageError: Unknown format, or one of findings for a report that has none.
    """
    name = "md" if format == "markdown" else format
    if name not in RENDERERS:
        raise UsageError(
            f"There is no report format {format!r}; use one of {', '.join(RENDERERS)}.", slug="unknown-format"
        )
    if name in ISSUE_FORMATS and document.issues is None:
        raise UsageError(
            f"The format {name} is for findings, and this report has none: use another.", slug="unknown-format"
        )
    module, function = RENDERERS[name].split(":")
    # Imported here: JSON and CSV need neither rich nor jinja2.
    found = importlib.import_module(f"shadowrun.report.formats.{module}")
    renderer: Callable[[Document], str] = getattr(found, function)
    return renderer(_safe(document, name))


def _safe(document: Document, format: str) -> Document:  # noqa: A002 - as in render
    # JSON escapes control characters itself, and programs need the texts unchanged.
    if format == "json":
        return document
    # Its renderer reads nothing else.
    if format == "csv":
        return dataclasses.replace(document, records=sanitize(document.records, whole=True))
    gate = sanitize(document.gate, longest=MAX_WHOLE)
    if format in ISSUE_FORMATS:
        return dataclasses.replace(document, gate=gate, issues=sanitize(document.issues, longest=MAX_WHOLE))
    blocks, digest = (sanitize(blocks, longest=MAX_WHOLE) for blocks in (document.blocks, document.digest))
    title = clip(document.title, MAX_WHOLE)
    return dataclasses.replace(document, title=title, blocks=blocks, digest=digest, gate=gate)
