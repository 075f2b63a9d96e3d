"""Takes our mode off for steps that nobody watches, and puts it back."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from shadowrun.intercept import torchapi

if TYPE_CHECKING:
    from shadowrun.intercept.attribution import Attribution
    from shadowrun.intercept.dispatch import ShadowMode

__all__ = ["Watching"]


class Watching:
    """The mode on the stack of the thread that it was made on.

    Attributes:
        on: Whether it is there.
        kept_out: Whether it could not be put back once, since the program had entered a mode of its own meanwhile.
    """

    def __init__(self, mode: ShadowMode, attribution: Attribution) -> None:
        self._mode = mode
        self._attribution = attribution
        self._thread = threading.get_ident()
        self._below: list[Any] = []
        self.on = False
        self.kept_out = False

    def begin(self) -> None:
        """Put it on top."""
        self._mode.__enter__()
        self.on = True

    def end(self) -> None:
        """Take it off for good; nobody can take it off the stack of another thread, so there it goes blind."""
        if self._thread != threading.get_ident():
            self._mode.go_blind()
        elif self.on:
            self._mode.__exit__(None, None, None)
        self.on = False

    @property
    def can_leave(self) -> bool:
        """Whether it can be taken off now: not from another thread, and not from under a mode of the user's."""
        return self.on and torchapi.top_mode() is self._mode and self._thread == threading.get_ident()

    @property
    def can_turn(self) -> bool:
        """Whether it can be taken off or put back now."""
        return self.can_leave if self.on else self._can_return

    @property
    def _can_return(self) -> bool:
        """Leaving a mode takes the top one off, whichever that is: the program's own would take ours."""
        return self._thread == threading.get_ident() and _same(torchapi.modes(), self._below)

    def turn(self, wanted: bool) -> bool:
        """Have it on or off, if that can be.

        Returns:
            Whether it is on.
        """
        if wanted is self.on:
            return self.on
        if wanted:
            self._return()
        elif self.can_leave:
            self._mode.__exit__(None, None, None)
            self._attribution.pause()
            self._below = torchapi.modes()
            self.on = False
        return self.on

    def _return(self) -> None:
        if not self._can_return:
            self.kept_out = self.kept_out or self._thread == threading.get_ident()
            return
        self._attribution.resume()
        self.begin()


def _same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))
