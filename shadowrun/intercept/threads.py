"""Threads of the program: a dispatch mode is seen by one thread only, so each thread that starts gets its own.

`threading.Thread` runs everything in its method `_bootstrap_inner`, which is wrapped while a comparison runs: pools of
`concurrent.futures`, timers and subclasses with a `run` of their own come by there too, and nothing that the program
can look at (target, name, `run`, exceptions) changes. So are `_thread.start_new_thread` and the callbacks of torch's
futures, which threads of C++ may run: there, the traceback of an exception has one more line. Other threads cannot be
reached: they are named.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import threading
import time
from typing import TYPE_CHECKING, Any

from shadowrun.intercept import torchapi
from shadowrun.intercept.dispatch import Observer, ShadowMode
from shadowrun.intercept.patches import Patches
from shadowrun.intercept.unseen import OwnThread, Unseen

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.intercept.attribution import Attribution

__all__ = ["OwnThread", "Threads"]

_LOOK_S = 0.05
"""Threads of C++ come and go without being counted."""


class Threads:
    """Follows the threads that start while a comparison runs.

    Args:
        observer: What the modes of the threads hand calls to.
        attribution: Told of each new thread.

    Attributes:
        unseen: The threads that cannot be followed.
    """

    def __init__(self, observer: Observer, attribution: Attribution) -> None:
        self._observer = observer
        self._attribution = attribution
        self._modes: set[ShadowMode] = set()
        self._followed: set[int] = set()
        self._running = False
        self._patches = Patches()
        self._n_seen, self._looked_at = 0, 0.0
        self.unseen = Unseen()

    def start(self) -> None:
        """Begin to follow threads."""
        self._followed = {threading.get_ident()}
        self.look()
        self._running = True
        self._attribution.unfollowed = self._notice
        self._patches.put(threading.Thread, "_bootstrap_inner", self._following)
        self._patches.put(_thread, "start_new_thread", self._following_its_function)
        for name in torchapi.FUTURE_CALLBACKS:
            self._patches.put(torchapi.Future, name, self._following_its_callback)

    def stop(self) -> None:
        """Follow no more; threads that go on are not compared from here on."""
        self._running = False
        self._attribution.unfollowed = _nothing
        self._patches.take_back()
        for mode in list(self._modes):
            mode.go_blind()
        self._modes.clear()

    def look_again(self) -> None:
        """As `look`, where there may be something new: it takes as long as some ten operators."""
        if _thread._count() != self._n_seen or time.monotonic() - self._looked_at > _LOOK_S:
            self.look()

    def look(self) -> None:
        """Name the threads that are not followed."""
        self._n_seen, self._looked_at = _thread._count(), time.monotonic()
        with contextlib.suppress(Exception):  # frames and threads change under us
            self.unseen.look(self._followed)

    def enter(self) -> ShadowMode | None:
        """Follow this thread from here on; None where it is followed already, or cannot be."""
        if not self._running or _is_followed():
            return None
        try:
            mode = ShadowMode(self._observer)
            self._attribution.enter_thread()
            self._modes.add(mode)
            self._followed.add(threading.get_ident())
            torchapi.push_mode(mode)
        except Exception:  # the thread of the user starts, whatever happens to us
            return None
        self._check(mode)
        return mode

    def leave(self, mode: ShadowMode | None) -> None:
        """This thread ends, or is not the program's any more."""
        if mode is None:
            return
        with contextlib.suppress(Exception):
            self._modes.discard(mode)
            self._followed.discard(threading.get_ident())
            self._attribution.leave_thread()
            torchapi.pop_mode(mode)
            mode.go_blind()  # nothing of ours shall wait for the garbage collector

    def _check(self, mode: ShadowMode) -> None:
        if not self._running:  # stopped meanwhile, by another thread
            mode.go_blind()

    def _following(self, original: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
        def _bootstrap_inner(self_: threading.Thread) -> None:
            mode = None if isinstance(self_, OwnThread) else self.enter()
            try:
                original(self_)
            finally:
                self.leave(mode)

        return _bootstrap_inner

    def _following_its_function(self, original: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(original)
        def start_new_thread(*args: Any, **kwargs: Any) -> int:
            if args and callable(args[0]):
                args = (_Followed(args[0], self), *args[1:])
            return original(*args, **kwargs)

        return start_new_thread

    def _following_its_callback(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def add(future: Any, callback: Any) -> Any:
            return original(future, _Followed(callback, self) if callable(callback) else callback)

        return functools.wraps(original)(add)

    def _notice(self) -> None:
        """A thread that was not entered calls a module: autograd's own have the modes of the thread they work for."""
        with contextlib.suppress(Exception):
            if not _is_followed():
                self.unseen.notice()


class _Followed:
    """A function that may be called on a thread that nobody follows."""

    __slots__ = ("__weakref__", "_function", "_threads")

    def __init__(self, function: Callable[..., Any], threads: Threads) -> None:
        self._function = function
        self._threads = threads

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mode = self._threads.enter()
        try:
            return self._function(*args, **kwargs)
        finally:
            self._threads.leave(mode)

    def __repr__(self) -> str:
        return repr(self._function)  # an exception that nobody catches is shown with it


def _is_followed() -> bool:
    return any(isinstance(mode, ShadowMode) and mode.sees for mode in torchapi.modes())


def _nothing() -> None:
    pass
