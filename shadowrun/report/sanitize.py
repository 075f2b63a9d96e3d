"""Sanitise values with texts of programs and files for output, as `shadowrun.visible_text` does one text."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import sys
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from shadowrun.visible_text import MAX_TEXT, MAX_WHOLE, clip, code_line, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "MAX_TEXT",
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
# Fields with names of operators: shorter than texts, since tables have a column of them.
_NAMES = frozenset({"op", "ops", "kernel", "missing_kernels", "missing_kernel"})
_PICTURES = frozenset({"svg"})
# Fields with lines of code, in which blanks count.
_CODE = frozenset({"code"})

T = TypeVar("T")


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
