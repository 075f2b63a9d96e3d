"""Threads of the program: a dispatch mode is seen by one thread only, so each thread that starts gets its own.

`threading.Thread` runs everything in its method `_bootstrap_inner`, which is wrapped while a comparison runs: pools of
`concurrent.futures`, timers and subclasses with a `run` of their own come by there too, and nothing that the program
can look at (target, name, `run`, exceptions) changes. So are `_thread.start_new_thread` and the callbacks of torch's
futures, which threads of C++ may run: there, the traceback of an exception has one more line. Other threads cannot be
reached: they are named.

Threads whose operators are not compared: those that ran before, and those that Python's `threading` does not know.

No mode can be put on a thread that runs already, and operators that are called there go unseen. What can be found out:
which threads there are, at the beginning, after each step and at the end; whether one of them was then inside torch;
and whether one of them calls a module, since `nn.Module.__call__` is wrapped for all threads.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.intercept import torch_compiler, torchapi
from shadowrun.intercept.dispatch import Observer, ShadowMode
from shadowrun.intercept.patches import Patches

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator
    from types import FrameType

    from shadowrun.intercept.attribution import Attribution

__all__ = ["OwnThread", "Threads", "UntrackedThreads"]


_TORCH = str(Path(torch.__file__).parent) + os.sep
_CALLING = tuple(_TORCH + folder + os.sep for folder in ("nn", "optim", "autograd"))
_STARTING = ("threading", "shadowrun.intercept.threads")
_MAX_NAMES = 5
# Modules whose threads serve: they wait, show, log and send, and call no operators of the program's.
_IDLE = (
    "IPython",
    "_pydevd_bundle",
    "debugpy",
    "execnet",
    "ipykernel",
    "logging",
    "multiprocessing.queues",
    "multiprocessing.resource_sharer",
    "pydevd",
    "tensorboard",
    "tqdm",
    "traitlets",
    "wandb",
    "zmq",
)


class OwnThread(threading.Thread):
    """A thread of shadowrun itself, whose operators are not the program's."""


class UntrackedThreads:
    """Collects the names of threads that are not followed.

    Attributes:
        running: Those that were there, whatever they did.
        calling: Those that called operators.
    """

    def __init__(self) -> None:
        self.running: dict[str, None] = {}
        self.calling: dict[str, None] = {}
        self._noticed: set[int] = set()

    def update(self, followed: Container[int]) -> None:
        """See which threads there are now."""
        # Not as a name here: this frame is one of them, and would keep itself and what its callers hold.
        self._look(followed, sys._current_frames())

    def _look(self, followed: Container[int], frames: dict[int, FrameType]) -> None:
        known = {t.ident: t for t in threading.enumerate() if t.ident is not None}
        compiling = torch_compiler.compiling_threads()
        # `threading` knows no thread that C++ or `_thread` has started; the frames show these.
        for ident in (*known, *(frames.keys() - known.keys())):  # in the order in which they were started
            thread = known.get(ident)
            if ident in followed or isinstance(thread, OwnThread):
                continue
            stack = list(_outer_frames(frames.get(ident)))
            if thread is None and _begin(stack) is None:  # it is just starting or ending
                continue
            if any(f.f_code.co_filename.startswith(_CALLING) for f in stack):
                self.calling[_name(thread, stack)] = None
            elif not _serves(stack) and thread not in compiling:
                self.running[_name(thread, stack)] = None

    def note_calling(self) -> None:
        """This thread, which has no mode, calls a module."""
        ident = threading.get_ident()
        if ident in self._noticed:
            return
        self._noticed.add(ident)
        # Not `current_thread()`: that would make a thread known to `threading` that is not.
        thread = next((t for t in threading.enumerate() if t.ident == ident), None)
        if not isinstance(thread, OwnThread):
            self.calling[_name(thread, list(_outer_frames(sys._getframe(2))))] = None

    def notes(self) -> Iterator[str]:
        """What a reader should know."""
        if self.calling:
            yield (
                f"Operators that {_count(self.calling)} called were not compared, since no thread can be followed that "
                f"ran before the comparison began, or that Python's threading did not start: {_list(self.calling)}."
            )
        others = {name: None for name in self.running if name not in self.calling}
        if others:
            yield (
                f"{_count(others)} {'was' if len(others) == 1 else 'were'} running before the comparison began, or "
                f"began unnoticed; operators called there are not compared: {_list(others)}."
            )


def _outer_frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _begin(stack: list[FrameType]) -> FrameType | None:
    """The frame of the function that a thread was started with."""
    return next((f for f in reversed(stack) if f.f_globals.get("__name__") not in _STARTING), None)


def _name(thread: threading.Thread | None, stack: list[FrameType]) -> str:
    if thread is not None:
        return thread.name
    begin = _begin(stack)
    if begin is None:
        return "a thread without a name"
    code = begin.f_code
    return f"{code.co_name} ({Path(code.co_filename).name}:{code.co_firstlineno})"


def _serves(stack: list[FrameType]) -> bool:
    begin = _begin(stack)
    module = str(begin.f_globals.get("__name__", "")) if begin is not None else ""
    return any(module == name or module.startswith(name + ".") for name in _IDLE)


def _count(names: dict[str, None]) -> str:
    return "1 thread" if len(names) == 1 else f"{len(names)} threads"


def _list(names: dict[str, None]) -> str:
    more = len(names) - _MAX_NAMES
    return ", ".join(list(names)[:_MAX_NAMES]) + (f", {more} more" if more > 0 else "")


# Threads of C++ come and go without being counted.
_LOOK_S = 0.05


class Threads:
    """Follows the threads that start while a comparison runs.

    Args:
        observer: What the modes of the threads hand calls to.
        attribution: Follows each new thread too.

    Attributes:
        untracked: The threads that cannot be followed.
    """

    def __init__(self, observer: Observer, attribution: Attribution) -> None:
        self._observer = observer
        self._attribution = attribution
        self._modes: set[ShadowMode] = set()
        self._followed: set[int] = set()
        self._running = False
        self._patches = Patches()
        self._n_seen, self._looked_at = 0, 0.0
        self.untracked = UntrackedThreads()

    def start(self) -> None:
        """Begin to follow threads."""
        self._followed = {threading.get_ident()}
        self.find_untracked()
        self._running = True
        self._attribution.unfollowed = self._note_untracked
        # Below `run` and `target`: subclasses, pools and timers all come through here.
        self._patches.replace(threading.Thread, "_bootstrap_inner", self._following)
        # Threads that are started without `threading` have no `_bootstrap_inner`.
        self._patches.replace(_thread, "start_new_thread", self._following_its_function)
        for name in torchapi.FUTURE_CALLBACKS:
            self._patches.replace(torchapi.Future, name, self._following_its_callback)

    def stop(self) -> None:
        """Follow no more; threads that continue are not compared from here on."""
        self._running = False
        self._attribution.unfollowed = _nothing
        self._patches.restore()
        # A mode on another thread's stack stays there: detached, it only runs calls.
        for mode in list(self._modes):
            mode.detach()
        self._modes.clear()

    def find_untracked_if_new(self) -> None:
        """As `find_untracked`, where there may be something new: it takes as long as some ten operators."""
        if _thread._count() != self._n_seen or time.monotonic() - self._looked_at > _LOOK_S:
            self.find_untracked()

    def find_untracked(self) -> None:
        """Name the threads that are not followed."""
        self._n_seen, self._looked_at = _thread._count(), time.monotonic()
        with contextlib.suppress(Exception):  # frames and threads change under us
            self.untracked.update(self._followed)

    def enter(self) -> ShadowMode | None:
        """Follow this thread from here on; None where it is followed already, or cannot be."""
        # A thread may come by twice: a second mode would compare each call twice.
        if not self._running or _is_followed():
            return None
        try:
            mode = ShadowMode(self._observer)
            self._attribution.enter_thread()
            self._modes.add(mode)
            self._followed.add(threading.get_ident())
            # Not by `with`: that sets flags of the whole process, which threads leave in another order.
            torchapi.push_mode(mode)
        except Exception:  # the program's thread starts, whatever fails here
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
            mode.detach()  # nothing of shadowrun is left to the garbage collector

    def _check(self, mode: ShadowMode) -> None:
        if not self._running:  # stopped by another thread since
            mode.detach()

    def _following(self, original: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
        def _bootstrap_inner(self_: threading.Thread) -> None:
            # The comparing thread's operators are replays.
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
                # The function itself is wrapped, since the new thread runs nothing else of Python.
                args = (_Followed(args[0], self), *args[1:])
            return original(*args, **kwargs)

        return start_new_thread

    def _following_its_callback(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def add(future: Any, callback: Any) -> Any:
            return original(future, _Followed(callback, self) if callable(callback) else callback)

        return functools.wraps(original)(add)

    def _note_untracked(self) -> None:
        """A thread that was not entered calls a module: autograd's own have the modes of the thread they work for."""
        with contextlib.suppress(Exception):
            if not _is_followed():
                self.untracked.note_calling()


class _Followed:
    """A function that may be called on a thread that is not followed yet."""

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
        return repr(self._function)  # an uncaught exception is shown with it


def _is_followed() -> bool:
    return any(isinstance(mode, ShadowMode) and mode.observes for mode in torchapi.modes())


def _nothing() -> None:
    pass
