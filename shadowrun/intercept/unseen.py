"""Threads whose operators are not compared: those that ran before, and those that Python's `threading` does not know.

No mode can be put on a thread that runs already, and nothing tells of an operator that is called there. What can be
told: which threads there are, at the beginning, after each step and at the end; whether one of them was then inside
torch; and whether one of them calls a module, since `nn.Module.__call__` is wrapped for all threads.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shadowrun.intercept import torchapi

if TYPE_CHECKING:
    from collections.abc import Container, Iterator
    from types import FrameType

__all__ = ["OwnThread", "Unseen"]

_TORCH = str(Path(torch.__file__).parent) + os.sep
_CALLING = tuple(_TORCH + folder + os.sep for folder in ("nn", "optim", "autograd"))
_STARTING = ("threading", "shadowrun.intercept.threads")
_MAX_NAMES = 5
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
"""Modules whose threads serve: they wait, show, log and send, and call no operators of the program's."""


class OwnThread(threading.Thread):
    """A thread of shadowrun itself, whose operators are not the program's."""


class Unseen:
    """Collects the names of threads that are not followed.

    Attributes:
        running: Those that were there, whatever they did.
        calling: Those that called operators.
    """

    def __init__(self) -> None:
        self.running: dict[str, None] = {}
        self.calling: dict[str, None] = {}
        self._noticed: set[int] = set()

    def look(self, followed: Container[int]) -> None:
        """See which threads there are now."""
        known = {t.ident: t for t in threading.enumerate() if t.ident is not None}
        frames, compiling = sys._current_frames(), torchapi.compiling_threads()
        for ident in (*known, *(frames.keys() - known.keys())):  # in the order in which they were started
            thread = known.get(ident)
            if ident in followed or isinstance(thread, OwnThread):
                continue
            stack = list(_outwards(frames.get(ident)))
            if thread is None and _begin(stack) is None:  # it is just starting or ending
                continue
            if any(f.f_code.co_filename.startswith(_CALLING) for f in stack):
                self.calling[_name(thread, stack)] = None
            elif not _serves(stack) and thread not in compiling:
                self.running[_name(thread, stack)] = None

    def notice(self) -> None:
        """This thread, which has no mode, calls a module."""
        ident = threading.get_ident()
        if ident in self._noticed:
            return
        self._noticed.add(ident)
        # Not `current_thread()`: that would make a thread known to `threading` that is not.
        thread = next((t for t in threading.enumerate() if t.ident == ident), None)
        if not isinstance(thread, OwnThread):
            self.calling[_name(thread, list(_outwards(sys._getframe(2))))] = None

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


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
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
