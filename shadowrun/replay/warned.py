"""Warnings of replays, which are not the user's: they never reach him.

What C++ code warns of is collected and given when one of torch's functions returns, at the Python line that runs then.
Replays run inside `torchapi.unheard`, which is such a function, so theirs come at lines of ours; the program's own come
at the program's (see `shadowrun.intercept.own_call`). Python code warns where it runs: below the one or the other.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shadowrun.errors import ShadowrunWarning
from shadowrun.intercept.own_call import is_own_call

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

__all__ = ["WarningFilter"]

_HERE = str(Path(__file__).parent) + os.sep


class WarningFilter:
    """In place while a comparison runs. It looks only at warnings that are shown: calls without any pay nothing."""

    def __init__(self) -> None:
        self._original: Callable[[warnings.WarningMessage], None] | None = None
        self._patched: Callable[[warnings.WarningMessage], None] | None = None

    def start(self) -> None:
        """Take over what Python calls for each warning that passes the user's filters."""
        original = warnings._showwarnmsg  # type: ignore[attr-defined]

        def show(message: warnings.WarningMessage) -> None:
            if issubclass(message.category, ShadowrunWarning) or not _in_replay(sys._getframe(1)):
                original(message)
                return
            # Filters that show a text once remember it now: the user's own warning is still to come.
            once: dict[Any, Any] = warnings.onceregistry  # type: ignore[attr-defined]
            once.pop((str(message.message), message.category), None)

        self._original, self._patched = original, show
        warnings._showwarnmsg = show  # type: ignore[attr-defined]

    def stop(self) -> None:
        """Give it back, unless somebody else took it over meanwhile (then ours only passes warnings on)."""
        if self._original is not None and warnings._showwarnmsg is self._patched:  # type: ignore[attr-defined]
            warnings._showwarnmsg = self._original  # type: ignore[attr-defined]
        self._original = None


def _in_replay(frame: FrameType | None) -> bool:
    """Whether what runs there was called by ours, and by no call of the program's within."""
    while frame is not None and not is_own_call(frame.f_code):
        if frame.f_code.co_filename.startswith(_HERE):
            return True
        frame = frame.f_back
    return False
