"""Texts of programs and of files, made safe to show: short, on one line, with nothing that a terminal obeys.

Each output has its texts from here: what a module, an operator or a message is called is not ours, and may hold escape
sequences, line breaks, marks that turn the direction of writing, and halves of characters that no encoding has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["clip", "forgiving", "one_line", "show", "tame"]

MAX_NAME = 120
MAX_TEXT = 400
_NAMES = frozenset({"op", "ops", "kernel", "missing_kernels", "missing_kernel"})

T = TypeVar("T")


def one_line(text: str) -> str:
    """All of it on one line, without what a terminal would obey."""
    text = " ".join(text.split())
    return text if text.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in text)


def clip(text: str, length: int = MAX_TEXT) -> str:
    """The same, of at most `length` characters."""
    text = one_line(text[: 4 * length])
    return text if len(text) <= length else text[: length - 1] + "…"


def tame(value: T, *, whole: bool = False) -> T:
    """A copy of a value, of dataclasses, tuples, lists and dictionaries all the way down, with its texts made safe.

    Args:
        value: What is to be shown.
        whole: Leave texts as long as they are.
    """
    copy: T = _tame(value, None, whole=whole)
    return copy


def _tame(value: Any, field: str | None, *, whole: bool) -> Any:
    if isinstance(value, enum.Enum):
        return value
    if isinstance(value, str):
        if whole:
            return one_line(value)
        return clip(value, MAX_NAME) if field in _NAMES else clip(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_tame(item, field, whole=whole) for item in value)
    if isinstance(value, Mapping):
        pairs = ((_tame(k, field, whole=whole), _tame(v, field, whole=whole)) for k, v in value.items())
        return dict(pairs)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f.name for f in dataclasses.fields(value)]
        return dataclasses.replace(value, **{name: _tame(getattr(value, name), name, whole=whole) for name in fields})
    return value


def show(text: str) -> None:
    """Write to standard output; a character that its encoding lacks is replaced."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))


@contextlib.contextmanager
def forgiving() -> Iterator[None]:
    """Meanwhile, standard output and error replace characters that their encodings lack.

    Not while a program of the user's runs: what it prints there is its own affair.
    """
    changed = []
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            changed.append((reconfigure, stream.errors))
            reconfigure(errors="replace" if stream is sys.stdout else "backslashreplace")
    try:
        yield
    finally:
        for reconfigure, errors in changed:
            reconfigure(errors=errors)
