"""Sanitise texts of programs and files for output: short, on one line, without terminal control sequences.

Names of modules and operators and messages come from the user's program or from a data file: they may contain escape
sequences, line breaks, bidirectional marks, characters that nothing shows, and lone surrogates.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import re
import sys
import unicodedata
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "MAX_WHOLE",
    "clip",
    "code_line",
    "one_line",
    "print_line",
    "replacing_unencodable",
    "sanitize",
    "write_to_stdout",
]

MAX_NAME = 120
MAX_TEXT = 400
MAX_WHOLE = 10_000
"""Characters of any text of a report but CSV, however it was made: a file may have names of megabytes."""
# Fields with names of operators: shorter than texts, since tables have a column of them.
_NAMES = frozenset({"op", "ops", "kernel", "missing_kernels", "missing_kernel"})
_PICTURES = frozenset({"svg"})
# Fields with lines of code, in which blanks count.
_CODE = frozenset({"code"})

# Names of commands with a hyphen are refused anywhere, since a pager may fold a text; `aten::error` is an operator.
# What services read in a job's log as commands: GitHub's ``::set-output`` at the start of a line, and anywhere
# ``##[add-matcher]``, Azure's ``##vso[task.setvariable]``, and in JUnit files ``[[ATTACHMENT|path]]``.
# Each way begins with its character, for which `re` searches several times as fast as for a place.
_COMMANDS: Final = re.compile(r":(?:(?<!\S:)(?=:[A-Za-z])|(?=:[A-Za-z]+-))|#(?=#\w*\[)|\[(?=\[(?i:ATTACHMENT))")
# What `str.isprintable` takes for printable and no font shows: what Unicode calls default-ignorable and is no format
# character, and blanks that are no spaces. Python has no table of them, but their names say what they are.
_INVISIBLE: Final = re.compile(r"\b(?:SELECTOR|FILLER|JOINER|INHERENT|BLANK(?! SYMBOL)|NULL NOTEHEAD)\b")

T = TypeVar("T")


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


def sanitize(value: T, *, whole: bool = False, longest: int = 0) -> T:
    """A copy of a nested value (dataclasses, tuples, lists, dictionaries) with sanitised texts.

    Args:
        value: The value to show.
        whole: Do not shorten texts.
        longest: Shorten texts to so many characters, whatever they are; pictures stay whole.
    """

    def cleaned(text: str, field: str | None) -> str:
        if field in _CODE:
            return code_line(text, MAX_WHOLE)
        if whole or field in _PICTURES:
            return one_line(text)
        return clip(text, longest or (MAX_NAME if field in _NAMES else MAX_TEXT))

    copy: T = _sanitized(value, None, cleaned)
    return copy


def _sanitized(value: Any, field: str | None, cleaned: Callable[[str, str | None], str]) -> Any:
    if isinstance(value, enum.Enum):  # before str: `Status` is one, and would become plain text
        return value
    if isinstance(value, str):
        return cleaned(value, field)
    if isinstance(value, (tuple, list)):
        return type(value)(_sanitized(item, field, cleaned) for item in value)
    if isinstance(value, Mapping):
        # Keys too: an untrusted file names them as well, as in fingerprints.
        return {_sanitized(k, field, cleaned): _sanitized(v, field, cleaned) for k, v in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f.name for f in dataclasses.fields(value)]
        return dataclasses.replace(value, **{name: _sanitized(getattr(value, name), name, cleaned) for name in fields})
    return value


def print_line(text: str, *, error: bool = False) -> None:
    """Print one line, to standard output or error: names of files and platforms are a file's, or its sender's."""
    print(clip(text, MAX_WHOLE), file=sys.stderr if error else sys.stdout)


def write_to_stdout(text: str) -> None:
    """Write to standard output; characters that its encoding lacks are replaced."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    # A terminal in an 8-bit encoding would raise on the first arrow or box character.
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))


@contextlib.contextmanager
def replacing_unencodable() -> Iterator[None]:
    """While inside, standard output and error replace characters that their encodings lack, and warnings are clean.

    Not while the user's program runs: its output must stay unchanged.
    """
    changed, plain = [], warnings.formatwarning

    def cleaned(*what: Any, **more: Any) -> str:
        # Python warns of the escape in a text of a file that is parsed, and prints it.
        return clip(plain(*what, **more), MAX_WHOLE) + "\n"

    warnings.formatwarning = cleaned
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            changed.append((reconfigure, stream.errors))
            reconfigure(errors="replace" if stream is sys.stdout else "backslashreplace")
    try:
        yield
    finally:
        warnings.formatwarning = plain
        for reconfigure, errors in changed:
            reconfigure(errors=errors)
