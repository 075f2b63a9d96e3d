"""Which calls have the memory of their arguments watched: `undeclared_writes` digests it before and after them.

The first calls of each signature (operator, shapes, dtypes, small numbers) are watched, and later ones ever more
seldom; an operator that made an undeclared write is watched in each call. Only counts decide, so that two recordings
of one program watch the same calls.

`native/watch_schedule.c` is the same in C. The fast path of a recording asks it for each of its calls, and leaves those
that are due to Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from shadowrun.native import core
from shadowrun.native import tensors as native
from shadowrun.recording.recorder import context_key
from shadowrun.replay.memory_effects import is_power

if TYPE_CHECKING:
    from shadowrun.intercept.attribution import Origin

__all__ = ["Schedule", "WatchSchedule", "make_schedule"]

FIRST: Final = 2
"""Calls of one signature that are watched; later, those whose number is a power of `RARER`."""
RARER: Final = 8
FREE: Final = 64
"""Calls of an operator that may be watched at once; later, at most one in `SHARE` of its calls.

A program whose shapes change makes new signatures for ever.
"""
SHARE: Final = 64
_MAX_SIGNATURES: Final = 50_000
_ANYWHERE: Final[Origin] = ("", "", "")  # type: ignore[assignment]
_CPU: Final = torch.device("cpu")


class Schedule(Protocol):
    """What `WatchSchedule` and its twin in C do. Not safe to use from several threads at once."""

    def is_due(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> bool:
        """Count a call of the operator with number `index`, and decide whether it is watched."""

    def watch_always(self, index: int, /) -> None:
        """An operator has made an undeclared write."""

    def is_always(self, index: int, /) -> bool:
        """Whether it has."""


class _Counts:
    """Calls of one operator."""

    __slots__ = ("always", "n_calls", "n_watched")

    def __init__(self) -> None:
        self.n_calls = self.n_watched = 0
        self.always = False


class WatchSchedule:
    """See `Schedule`."""

    def __init__(self) -> None:
        self._operators: dict[int, _Counts] = {}
        self._signatures: dict[Any, int] = {}

    def is_due(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> bool:
        """See `Schedule`."""
        counts = self._of(index)
        counts.n_calls += 1
        try:
            key = context_key(index, _CPU, _ANYWHERE, args, kwargs)
        except RuntimeError:  # a nested tensor has no sizes
            return False
        n = self._signatures[key] = self._signatures.get(key, 0) + 1
        if len(self._signatures) > _MAX_SIGNATURES:
            self._signatures.clear()
        if counts.always:
            return True
        if (n > FIRST and not is_power(n, RARER)) or counts.n_watched >= FREE + counts.n_calls // SHARE:
            return False
        counts.n_watched += 1
        return True

    def watch_always(self, index: int, /) -> None:
        """See `Schedule`."""
        self._of(index).always = True

    def is_always(self, index: int, /) -> bool:
        """See `Schedule`."""
        return self._of(index).always

    def _of(self, index: int) -> _Counts:
        counts = self._operators.get(index)
        if counts is None:
            counts = self._operators[index] = _Counts()
        return counts


def make_schedule() -> Schedule:
    """A schedule in C where there is the extension."""
    if core is None or native.context_key is None:
        return WatchSchedule()
    return core.WatchSchedule(FIRST, RARER, FREE, SHARE)  # type: ignore[no-any-return]
