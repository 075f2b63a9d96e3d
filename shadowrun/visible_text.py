"""Texts of programs and files for output: short, on one line, without terminal control sequences.

Names of modules and operators and messages come from the user's program or from a data file: they may contain escape
sequences, line breaks, bidirectional marks, characters that nothing shows, and lone surrogates.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from typing import Final

__all__ = ["MAX_TEXT", "MAX_WHOLE", "clip", "code_line", "one_line", "visible_lines"]

MAX_TEXT = 400
MAX_WHOLE = 10_000
"""Characters of any text of a report but CSV, however it was made: a file may have names of megabytes."""

# Names of commands with a hyphen are refused anywhere, since a pager may fold a text; `aten::error` is an operator.
# What services read in a job's log as commands: GitHub's ``::set-output`` at the start of a line, and anywhere
# ``##[add-matcher]``, Azure's ``##vso[task.setvariable]``, and in JUnit files ``[[ATTACHMENT|path]]``.
# Each way begins with its character, for which `re` searches several times as fast as for a place.
_COMMANDS: Final = re.compile(r":(?:(?<!\S:)(?=:[A-Za-z])|(?=:[A-Za-z]+-))|#(?=#\w*\[)|\[(?=\[(?i:ATTACHMENT))")
# Buildkite folds the log at lines that begin so.
_GROUPS: Final = ("--- ", "+++ ", "~~~ ", "^^^ ")
# What `str.isprintable` takes for printable and no font shows: what Unicode calls default-ignorable and is no format
# character, and blanks that are no spaces. Python has no table of them, but their names say what they are.
_INVISIBLE: Final = re.compile(r"\b(?:SELECTOR|FILLER|JOINER|INHERENT|BLANK(?! SYMBOL)|NULL NOTEHEAD)\b")


def one_line(text: str) -> str:
    """The text on one line, with characters replaced that nothing shows, and no command to a CI service."""
    # `split` first: a line break becomes a blank, and only then the rest a replacement character.
    return _shown(" ".join(text.split()))


def code_line(text: str, length: int) -> str:
    """A line of code of at most `length` characters, with its blanks; else as `one_line`."""
    return _shown(text[:length])


def _shown(text: str) -> str:
    if "::" in text or "##" in text or "[[" in text:  # of most long texts none
        text = _COMMANDS.sub(r"\g<0> ", text)
    if text.startswith(_GROUPS):
        text = f" {text}"
    if text.isascii() and text.isprintable():
        return text
    hidden = {ord(char): "\ufffd" for char in set(text) if not _is_visible(char)}
    return text.translate(hidden) if hidden else text


@functools.lru_cache(maxsize=1 << 14)
def _is_visible(char: str) -> bool:
    return char.isprintable() and not _INVISIBLE.search(unicodedata.name(char, ""))


def clip(text: str, length: int = MAX_TEXT) -> str:
    """`one_line` of at most `length` characters."""
    # Cut first: a text from a file may be megabytes long, and the result needs `length` characters of it.
    text = one_line(text[: 4 * length])
    return text if len(text) <= length else text[: length - 1] + "…"


def visible_lines(text: str) -> str:
    """The text with its line breaks and blanks, without characters that nothing shows."""
    return "\n".join(map(_shown, text.split("\n")))
