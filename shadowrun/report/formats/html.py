"""HTML: one file, no network, bounded in size; whole without its script, which only filters, sorts and copies."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
import re
from collections import Counter
from importlib import resources
from typing import TYPE_CHECKING

from jinja2 import BytecodeCache, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from shadowrun.report.document import (
    Code,
    Document,
    Entries,
    Facts,
    Figure,
    Later,
    Listing,
    Note,
    Prose,
    Section,
    Table,
    Tree,
)
from shadowrun.report.formats.help_texts import HELP
from shadowrun.report.sanitize import MAX_WHOLE, sanitize

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import CodeType

    from jinja2.bccache import Bucket
    from jinja2.environment import TemplateModule

    from shadowrun.report.document import Block, Column, Entry

__all__ = ["MAX_BYTES", "render_html", "table_html"]

MAX_BYTES = 4_800_000
"""Of a page: browsers and mail gateways take 5 MB."""
_SMALLEST = 1 / 256
# Rows of a table from which on it has a search field.
_MIN_SEARCHED = 6
_SCRIPT = "report.js"
_KINDS = {
    Note: "note",
    Facts: "facts",
    Table: "table",
    Entries: "entries",
    Figure: "figure",
    Listing: "listing",
    Prose: "prose",
    Code: "code",
    Tree: "tree",
    Later: "later",
    Section: "section",
}
_MORE = re.compile(r"… and [\d,]+ more")


class _Compiled(BytecodeCache):
    """Templates of this process: to compile them takes longer than most pages."""

    def __init__(self) -> None:
        self._codes: dict[tuple[str, str], CodeType] = {}

    def load_bytecode(self, bucket: Bucket) -> None:
        bucket.code = self._codes.get((bucket.key, bucket.checksum))

    def dump_bytecode(self, bucket: Bucket) -> None:
        assert bucket.code is not None
        self._codes[bucket.key, bucket.checksum] = bucket.code


_COMPILED = _Compiled()


def render_html(document: Document) -> str:
    """The page; it is readable without styles too, which some CI servers remove."""
    document = dataclasses.replace(document, blocks=_made(document.blocks))
    share = 1.0
    while True:
        text = _Page(document, share).render()
        # Only what opens is left out, half of it at a time: what is shown at first is bounded by each report.
        if len(text.encode()) <= MAX_BYTES or share < _SMALLEST:
            return text
        share /= 4


def table_html(table: Table) -> str:
    """One table alone, for notebooks."""
    page = _Page(Document("", (), {}, records=None), 1.0)  # type: ignore[arg-type]
    module: TemplateModule = page.environment().get_template("blocks.html").module
    return str(module.table(sanitize(table, longest=MAX_WHOLE), bare=True))  # type: ignore[attr-defined]


def _made(blocks: Iterable[Block]) -> tuple[Block, ...]:
    """The blocks with what is made later, made: once, however often the page is rendered."""
    made = (_made_block(block) for block in blocks)
    # Without a title they are part of what is around them, such as sections of the page, which its head lists.
    nested = (block.make() if isinstance(block, Later) and not block.title else (block,) for block in made)
    return tuple(itertools.chain.from_iterable(nested))


def _made_block(block: Block) -> Block:
    if isinstance(block, Section):
        return dataclasses.replace(block, blocks=_made(block.blocks))
    if isinstance(block, Later):
        return _made_later(block)
    if isinstance(block, Entries):
        entries = (dataclasses.replace(e, inside=e.inside and _made_later(e.inside)) for e in block.entries)
        return dataclasses.replace(block, entries=tuple(entries))
    return block


def _made_later(later: Later) -> Later:
    blocks = _made(sanitize(later.make(), longest=MAX_WHOLE))
    return dataclasses.replace(later, make=lambda: blocks)


class _Page:
    """What the templates ask about one rendering of a document."""

    def __init__(self, document: Document, share: float) -> None:
        self._document = document
        self._share = share
        self._used: dict[str, str] = {}
        self._ids: Counter[str] = Counter()
        self._anchors: dict[int, str] = {}

    def render(self) -> str:
        document, n = self._document, sum(1 for _ in self._entries(self._document.blocks))
        return (
            self.environment()
            .get_template("document.html")
            .render(
                document=document,
                sections=[b for b in document.blocks if isinstance(b, Section)],
                n_entries=n,
                script=Markup(_script()),  # noqa: S704 - a file of the package
                script_hash=_script_hash(),
                used=self._used,
            )
        )

    def environment(self) -> Environment:
        environment = Environment(
            loader=PackageLoader("shadowrun.report.formats"),
            bytecode_cache=_COMPILED,
            # Names come from the user's program or from an untrusted file.
            autoescape=True,
            # A misspelt field would print nothing; strict, it raises.
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        # Jinja has no `isinstance`: the template asks for the name of a block's class.
        environment.globals.update(
            kind_of=_kind_of,
            parts=self._parts,
            anchor=self._anchor,
            entry_id=self._entry_id,
            help_id=self._help_id,
            has_entries=self._has_entries,
            opening=_opening,
            markdown=_markdown,
            min_searched=_MIN_SEARCHED,
        )
        return environment

    def _parts(self, block: Table | Entries) -> tuple[int, int, str, str]:
        """Rows shown at first, rows that the page has, the line that opens the others, and that on those it lacks."""
        n_rows = len(block.rows if isinstance(block, Table) else block.entries)
        first = min(n_rows, block.limits.html)
        if self._share < 1:
            first = min(first, max(10, int(first * 4 * self._share)))
        last = min(n_rows, max(first, int(block.limits.opened * self._share)))
        n_more, n_left = n_rows - first + block.n_more, n_rows - last + block.n_more
        noun = f" {block.noun}".rstrip()
        more = f"… and {n_more:,} more{noun}" if n_more > 0 else ""
        left = f"{n_left:,} more are not in this page, which is bounded: the JSON has all." if last > first else ""
        return first, last, more, left if n_left else ""

    def _anchor(self, section: Section) -> str:
        """One id for each section, though two may have the same title."""
        if id(section) not in self._anchors:
            self._anchors[id(section)] = self._new_id(section.anchor or _slug(section.title))
        return self._anchors[id(section)]

    def _entry_id(self, entry: Entry) -> str:
        if id(entry) not in self._anchors:
            self._anchors[id(entry)] = self._new_id(entry.anchor or f"entry-{_slug(entry.name)}")
        return self._anchors[id(entry)]

    def _new_id(self, name: str) -> str:
        self._ids[name] += 1
        return name if self._ids[name] == 1 else f"{name}-{self._ids[name]}"

    def _help_id(self, label: str | Column) -> str:
        """Id of a label's explanation, which then is among those at the page's end; empty if it has none."""
        name, own = (label, "") if isinstance(label, str) else (label.name, label.help)
        text = own or HELP.get(name, "")
        if not text:
            return ""
        self._used.setdefault(name, text)
        return f"help-{_slug(name)}"

    @classmethod
    def _entries(cls, blocks: Iterable[Block]) -> Iterator[Entry]:
        for block in blocks:
            if isinstance(block, Section):
                yield from cls._entries(block.blocks)
            elif isinstance(block, Entries):
                yield from block.entries

    def _has_entries(self, block: Block) -> bool:
        return next(self._entries((block,)), None) is not None


def _kind_of(block: Block) -> str:
    """Name of the macro that shows a block."""
    return _KINDS[type(block)]


def _markdown(lines: tuple[str, ...]) -> Markup:
    """Markdown of the package as HTML."""
    from markdown_it import MarkdownIt

    # HTML in it would be shown as text: no page has any.
    return Markup(MarkdownIt("commonmark", {"html": False}).enable("table").render("\n".join(lines)))  # noqa: S704


def _opening(text: str, target: str) -> Markup:
    """A text whose ``… and 8 more`` leads to where all are."""
    if not target:
        return escape(text)
    pieces, last = [], 0
    for found in _MORE.finditer(text):
        pieces += [escape(text[last : found.start()]), Markup('<a href="#{}">{}</a>').format(target, found[0])]
        last = found.end()
    return Markup("").join([*pieces, escape(text[last:])])


def _slug(text: str) -> str:
    return re.sub(r"\W+", "-", text.lower()).strip("-") or "part"


def _script() -> str:
    file = resources.files("shadowrun.report.formats").joinpath("templates", _SCRIPT)
    return file.read_text(encoding="utf-8").strip()


def _script_hash() -> str:
    """For the page's content security policy: no other script can run, whatever a name of a file contains."""
    # The text between the tags, line breaks of the template included.
    digest = hashlib.sha256(f"\n{_script()}\n".encode()).digest()
    return base64.b64encode(digest).decode()
