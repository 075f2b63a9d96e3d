"""A turn: no thread begins a call while it is held.

A class, since generators that are context managers take 6 µs, twice in each training step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

__all__ = ["Turn"]


class _Taken(Protocol):
    lock: threading.RLock

    def take_turn(self) -> bool: ...


class Turn:
    """Goes on all the same where another thread's call takes too long.

    Args:
        owner: Whose turns they are.
        settle: Done first. An interrupt in it comes at the end, and not over an exception of the body.
    """

    __slots__ = ("_got", "_interrupt", "_owner", "_settle")

    def __init__(self, owner: _Taken, settle: Callable[[], None] | None = None) -> None:
        self._owner = owner
        self._settle = settle
        self._interrupt: BaseException | None = None

    def __enter__(self) -> None:
        self._got = self._owner.take_turn()
        if self._settle is not None:
            try:
                self._settle()
            except BaseException as error:
                self._interrupt = error

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._got:
            self._owner.lock.release()
        if self._interrupt is not None and error is None:
            raise self._interrupt
