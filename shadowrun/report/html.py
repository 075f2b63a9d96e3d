"""HTML: one file, no network; no script either, unless a table has a filter."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined

from shadowrun.report.document import Document, Entries, Facts, Figure, Listing, Note, Section, Table, shown
from shadowrun.report.sanitize import MAX_WHOLE, sanitize

if TYPE_CHECKING:
    from jinja2.environment import TemplateModule

    from shadowrun.report.document import Block

__all__ = ["render_html", "table_html"]


def render_html(document: Document) -> str:
    """The page; it is readable without styles too, which some CI servers remove."""
    template = _environment().get_template("document.html")
    return template.render(document=document, sections=[b for b in document.blocks if isinstance(b, Section)])


def table_html(table: Table) -> str:
    """One table alone, for notebooks."""
    module: TemplateModule = _environment().get_template("blocks.html").module
    return str(module.table(sanitize(table, longest=MAX_WHOLE)))  # type: ignore[attr-defined]


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("shadowrun.report"),
        # Names come from the user's program or from an untrusted file.
        autoescape=True,
        # A misspelt field would print nothing; strict, it raises.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Jinja has no `isinstance`: the template asks for the name of a block's class.
    environment.globals.update(kind_of=_kind_of, shown=shown, anchor=_anchor)
    return environment


def _kind_of(block: Block) -> str:
    """Name of the macro that shows a block."""
    kinds = {
        Note: "note",
        Facts: "facts",
        Table: "table",
        Entries: "entries",
        Figure: "figure",
        Listing: "listing",
        Section: "section",
    }
    return kinds[type(block)]


def _anchor(section: Section) -> str:
    return section.anchor or re.sub(r"\W+", "-", section.title.lower()).strip("-")
