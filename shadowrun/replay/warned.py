"""Warnings of replays, which are not the user's: they never reach him.

Torch collects the warnings of C++ code and gives them when the outermost of its Python functions returns: those of
the user's call and of its replay together. So replays run inside `torchapi.unheard`, which collects for itself and
gives them at a line of ours, where `WarningFilter` drops them.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shadowrun.errors import ShadowrunWarning

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

__all__ = ["WarningFilter"]

_HERE = str(Path(__file__).parent) + os.sep
_FALLBACK = str(Path(__file__).parents[1] / "platforms" / "fallback.py")


class WarningFilter:
    """In place while a comparison runs. It looks only at warnings that are shown: calls without any pay nothing.

    Args:
        handler: The dispatch mode's handler: its caller is the user's program.
        user_codes: Functions of ours that run the user's own call. One that also replays does so once it has a
            local variable ``out``.
    """

    def __init__(self, handler: CodeType, user_codes: frozenset[CodeType]) -> None:
        self._handler = handler
        self._user_codes = user_codes
        self._original: Callable[[warnings.WarningMessage], None] | None = None
        self._patched: Callable[[warnings.WarningMessage], None] | None = None

    def start(self) -> None:
        """Take over what Python calls for each warning that passes the user's filters."""
        original = warnings._showwarnmsg  # type: ignore[attr-defined]

        def show(message: warnings.WarningMessage) -> None:
            if issubclass(message.category, ShadowrunWarning) or not self._is_replay(sys._getframe(1)):
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

    def _is_replay(self, frame: FrameType | None) -> bool:
        while frame is not None and frame.f_code.co_filename == _FALLBACK:
            frame = frame.f_back
        # Given by `unheard` itself, which our functions call for replays only.
        if frame is not None and frame.f_code.co_filename.startswith(_HERE):
            return True
        while frame is not None and frame.f_code is not self._handler:
            code = frame.f_code
            if code.co_filename.startswith(_HERE) and (code not in self._user_codes or "out" in frame.f_locals):
                return True
            frame = frame.f_back
        return False
