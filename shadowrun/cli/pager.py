"""Long reports at a terminal, by the user's pager, as git shows its own: never in a pipe, a file or a CI service."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys

__all__ = ["command", "is_long", "page"]

_DEFAULT = "less"
# As git: quit if one screen is enough, show colours, leave the text on the screen.
_LESS, _LV = "FRX", "-c"


def command() -> list[str] | None:
    """The pager of SHADOWRUN_PAGER or PAGER, else less; None for none."""
    if os.environ.get("CI") or os.environ.get("TERM", "dumb") == "dumb":
        return None
    # Set and empty is a choice, as `cat` is.
    wanted = next((os.environ[name] for name in ("SHADOWRUN_PAGER", "PAGER") if name in os.environ), _DEFAULT)
    try:
        words = shlex.split(wanted)
    except ValueError:  # an open quotation mark
        return None
    if not words or words == ["cat"] or shutil.which(words[0]) is None:
        return None
    return words


def is_long(text: str) -> bool:
    """Whether a text has more lines than the screen."""
    return text.count("\n") >= shutil.get_terminal_size().lines


def page(text: str) -> bool:
    """Show a text by the pager, and wait for its end; False where it does not start."""
    words = command()
    if words is None:
        return False
    environment = {"LESS": _LESS, "LV": _LV, **os.environ}
    sys.stdout.flush()
    try:
        process = subprocess.Popen(  # noqa: S603 - the user's own choice, without a shell
            words, stdin=subprocess.PIPE, env=environment, encoding="utf-8", errors="replace"
        )
    except OSError:
        return False
    # The user may leave before the end, and Ctrl-C is the pager's: it ends a search.
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        process.communicate(text)
    while process.poll() is None:
        with contextlib.suppress(KeyboardInterrupt):
            process.wait()
    return True
