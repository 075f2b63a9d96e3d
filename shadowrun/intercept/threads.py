"""Threads of the program: a dispatch mode is seen by one thread only, so each thread that starts gets its own.

`threading.Thread` runs everything in its method `_bootstrap_inner`, which is wrapped while a comparison runs: pools of
`concurrent.futures`, timers and subclasses with a `run` of their own come by there too, and nothing that the program
can look at (target, name, `run`, exceptions) changes. Threads that ran before cannot be reached: they are named.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from shadowrun.intercept import torchapi
from shadowrun.intercept.dispatch import Observer, ShadowMode

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.intercept.attribution import Attribution

__all__ = ["OwnThread", "Threads"]


class OwnThread(threading.Thread):
    """A thread of shadowrun itself, whose operators are not the program's."""


class Threads:
    """Follows the threads that start while a comparison runs.

    Args:
        observer: What the modes of the threads hand calls to.
        attribution: Told of each new thread.

    Attributes:
        unseen: Names of the threads that ran already.
    """

    def __init__(self, observer: Observer, attribution: Attribution) -> None:
        self._observer = observer
        self._attribution = attribution
        self._modes: set[ShadowMode] = set()
        self._running = False
        self._original: Callable[[threading.Thread], None] | None = None
        self._patched: Callable[[threading.Thread], None] | None = None
        self.unseen: dict[str, None] = {}

    def start(self) -> None:
        """Begin to follow threads."""
        here = threading.current_thread()
        self.unseen.update(dict.fromkeys(t.name for t in threading.enumerate() if t is not here))
        original: Callable[[threading.Thread], None] = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

        def _bootstrap_inner(self_: threading.Thread) -> None:
            mode = None if isinstance(self_, OwnThread) else self._enter()
            try:
                original(self_)
            finally:
                if mode is not None:
                    self._leave(mode)

        self._original, self._patched, self._running = original, _bootstrap_inner, True
        threading.Thread._bootstrap_inner = _bootstrap_inner  # type: ignore[attr-defined]

    def stop(self) -> None:
        """Follow no more; threads that go on are not compared from here on."""
        self._running = False
        if self._original is not None and threading.Thread._bootstrap_inner is self._patched:  # type: ignore[attr-defined]
            threading.Thread._bootstrap_inner = self._original  # type: ignore[attr-defined]
        self._original = None
        for mode in list(self._modes):
            mode.go_blind()
        self._modes.clear()

    def _enter(self) -> ShadowMode | None:
        if not self._running:  # somebody wrapped our wrapper, and keeps it
            return None
        try:
            mode = ShadowMode(self._observer)
            self._attribution.enter_thread()
            self._modes.add(mode)
            torchapi.push_mode(mode)
        except Exception:  # the thread of the user starts, whatever happens to us
            return None
        self._check(mode)
        return mode

    def _check(self, mode: ShadowMode) -> None:
        if not self._running:  # stopped meanwhile, by another thread
            mode.go_blind()

    def _leave(self, mode: ShadowMode) -> None:
        with contextlib.suppress(Exception):
            self._modes.discard(mode)
            self._attribution.leave_thread()
            torchapi.pop_mode(mode)
