"""The pages of the documentation that come with the package, and the entries of the page of messages.

A wheel has them in the folder `pages`, which the build fills from ``docs/``; a source tree has ``docs/`` itself.
"""

from __future__ import annotations

import posixpath
import re
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from shadowrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Text", "find", "names"]

_PACKAGE: Final = Path(__file__).parents[1]
_MESSAGES: Final = "messages"
_ENTRY: Final = re.compile(r"^### (\S+)\n(.*?)(?=^#{1,3} |\Z)", re.MULTILINE | re.DOTALL)
_LINK: Final = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_N_NEAR: Final = 5


class Text(NamedTuple):
    """A text of the documentation.

    Attributes:
        name: Of the entry or page.
        body: Its Markdown, without the heading; links lead to a command or an address.
    """

    name: str
    body: str


def find(name: str) -> Text | None:
    """The entry of a message (``unknown-device``) or a page (``howto/drift``); None if the word can be an operator.

    Raises:
        UsageError: It can be no operator, and nothing has this name.
    """
    if not re.fullmatch(r"[a-z0-9_/-]+(\.md)?", name):
        return None
    pages, entries = _pages(), _entries()
    page = name.removesuffix(".md")
    if name in entries:
        return Text(name, _with_commands(entries[name], _MESSAGES, pages))
    if page in pages:
        _, _, body = pages[page].read_text(encoding="utf-8").partition("\n")
        return Text(page, _with_commands(re.sub(r"<!--.*?-->\n?", "", body), page, pages))
    if "-" in name or "/" in name:  # in no operator's name
        raise UsageError(
            f"No message and no page of the documentation is called {name!r}. {_near(name, [*entries, *pages])}",
            slug="unknown-message",
        )
    return None


def names() -> tuple[list[str], list[str]]:
    """Names of all entries, and of all pages."""
    return list(_entries()), sorted(_pages())


def _near(name: str, known: Iterable[str]) -> str:
    # The last part alone too: `explain drift` should find `howto/drift`.
    by_word = {word: whole for whole in known for word in (whole, whole.rpartition("/")[2])}
    near = dict.fromkeys(by_word[word] for word in get_close_matches(name, by_word, _N_NEAR, 0.5))
    if not near:
        return "`shadowrun explain --list` lists all."
    return f"Did you mean {' or '.join(map(repr, near))}? `shadowrun explain --list` lists all."


def _pages() -> dict[str, Path]:
    """Pages by name: ``messages``, ``howto/drift``."""
    inside = _PACKAGE / "pages"
    root = inside if inside.is_dir() else _PACKAGE.parent / "docs"
    files = (file for folder in ("", "howto", "design") for file in (root / folder).glob("*.md"))
    return {file.relative_to(root).with_suffix("").as_posix(): file for file in files if file.stem != "index"}


def _entries() -> dict[str, str]:
    pages = _pages()
    # Without the pages (files copied by hand), an error still has its message.
    text = pages[_MESSAGES].read_text(encoding="utf-8") if _MESSAGES in pages else ""
    return {slug: body.strip() for slug, body in _ENTRY.findall(text)}


def _with_commands(text: str, page: str, pages: dict[str, Path]) -> str:
    """Links between pages as the commands that print them; pictures are left out."""

    def command(found: re.Match[str]) -> str:
        picture, label, target = found.groups()
        if picture:
            return ""
        if "://" in target:
            return found[0]
        path, _, anchor = target.partition("#")
        name = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)).removesuffix(".md") if path else page
        name = anchor if name == _MESSAGES and anchor else name
        return f"{label} (`shadowrun explain {name}`)" if name in pages or name == anchor else label

    return _LINK.sub(command, text)
