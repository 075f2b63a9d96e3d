"""The exceptions that shadowrun raises, and the slugs that link them to the page of messages.

::

    ShadowrunError
    ├── UsageError            a wrong argument, option or combination of them
    │   ├── PlatformError     a platform that is unknown, absent or wrongly configured
    │   └── NestingError      compare() inside compare()
    ├── FindingsError         a run has findings: only from Run.raise_for_findings()
    ├── CallFindingError      a call is a finding: only where the program asked for it, compare(stop_on=)
    ├── NonFiniteError        NaN or infinities: only where the program asked for it, nan_track("raise")
    └── DataFileError         a data file that cannot be read or written

Only these reach a user, and only before the program starts or when results are read.
While the user's program runs, an internal failure becomes a record and one warning.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

from shadowrun.visible_text import one_line, visible_lines

__all__ = [
    "CallFindingError",
    "DataFileError",
    "FindingsError",
    "NestingError",
    "NonFiniteError",
    "PlatformError",
    "ShadowrunError",
    "ShadowrunWarning",
    "StoppedAtFinding",
    "UsageError",
    "brief",
]

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_MAX_SHOWN: Final = 200
_PACKAGE: Final = __file__.removesuffix("errors.py")


def brief(value: Any) -> str:
    """A value of a file for a message: as Python writes it, at most 200 characters of it."""
    try:
        text = repr(value)
    except ValueError:  # TOML has hexadecimal numbers of any length, of which Python prints 4300 decimal digits
        return "a number too long to print"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


class ShadowrunError(Exception):
    """Base of all exceptions that shadowrun raises on purpose.

    Args:
        message: What failed, with which value, and what to do.
        slug: Name of the message's entry in ``docs/messages.md``, which ``shadowrun explain SLUG`` prints.

    Attributes:
        slug: As given.
    """

    slug: str

    # A keyword without a default: no message can be written without its entry in the documentation.
    def __init__(self, message: str, *, slug: str) -> None:
        # Python prints the text of an exception as it is, and the values in it may be those of a file.
        super().__init__(visible_lines(message))
        self.slug = slug
        self.add_note(f"[{self.command}]")  # below the message of a traceback

    @property
    def command(self) -> str:
        """What prints the entry of the message."""
        return f"shadowrun explain {self.slug}"


class UsageError(ShadowrunError):
    """A wrong argument, option, or combination of them."""


class PlatformError(UsageError):
    """A platform that is unknown, absent on this machine, or wrongly configured."""


class NestingError(UsageError):
    """A comparison was started while another one is running."""


class DataFileError(ShadowrunError):
    """A data file that cannot be read or written."""

    def __init__(self, message: str, *, slug: str) -> None:
        # Python prints what it was raised from, too: the text of a library, which may be the file's.
        for error in _handled_by_package():
            error.args = tuple(one_line(a) if isinstance(a, str) else a for a in error.args)
        super().__init__(message, slug=slug)


def _handled_by_package() -> Iterator[BaseException]:
    """The exception that is being handled, and those before it, up to one that the program itself handles."""
    frame: FrameType | None = sys._getframe(1)
    outside: set[FrameType] = set()
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            outside.add(frame)
        frame = frame.f_back
    error = sys.exception()
    while error is not None and not (error.__traceback__ and error.__traceback__.tb_frame in outside):
        yield error
        error = error.__cause__ or error.__context__


class NonFiniteError(ShadowrunError, FloatingPointError):
    """Raised into the program by ``nan_track("raise")``, at the call that made NaN or infinities.

    Attributes:
        found: The `NonFinite`: operator, module, line, step, inputs.
    """

    def __init__(self, message: str, found: Any) -> None:
        super().__init__(message, slug="non-finite")
        self.found = found


class FindingsError(ShadowrunError, AssertionError):
    """Raised by `Run.raise_for_findings`.

    Attributes:
        findings: The findings that fail the run.
    """

    def __init__(self, message: str, findings: Any) -> None:
        super().__init__(message, slug="findings")
        self.findings = findings


class CallFindingError(ShadowrunError, AssertionError):
    """Raised into the program by ``stop_on``, at the call that is a finding.

    Attributes:
        finding: The `Finding`, of this call alone.
        names: Of the results that were compared; empty for a call without such, as for all that follow.
        actual: The target's results.
        expected: The reference's results.
    """

    def __init__(self, message: str, finding: Any, names: Any, actual: Any, expected: Any) -> None:
        super().__init__(message, slug="call-finding")
        self.finding = finding
        self.names, self.actual, self.expected = tuple(names), tuple(actual), tuple(expected)


class StoppedAtFinding(SystemExit):
    """Raised into the program with ``fail_fast``, at its next operator call after the first finding that fails."""


class ShadowrunWarning(UserWarning):
    """Something inside shadowrun failed; the user's program continued unchanged."""
