"""The line of the user's program that is being executed: the first frame outside torch and shadowrun.

What a frame is follows from the file of its code, which is looked at once. Some twenty frames lie between an operator
and the user's line in nested modules, and 70 ns each are too much. What lies above a frame that has not returned yet
does not move, so it is found once
* for each module call: the search ends at the innermost that is under way;
* for each function of an optimizer, which calls a dozen operators for each parameter: its frame gets a mark. The mark
  lies where a debugger keeps its trace function of this frame, goes with the frame, and is never put over another's.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from types import CodeType, FrameType, TracebackType

__all__ = ["Found", "Mark", "Sites", "site_of"]

Found = tuple[str, bool, "CodeType | None"]
"""A site, empty if there is none; whether an optimizer's frame came before it; the code of that line, kept alive."""

_LIBRARY, _USER, _OPTIM = 0, 1, 2
_TORCH = str(Path(torch.__file__).parent) + os.sep
_OWN = str(Path(__file__).parents[1]) + os.sep
_OPTIM_DIR = str(Path(torch.__file__).parent / "optim") + os.sep
_NO_GRAD = str(Path(torch.__file__).parent / "utils" / "_contextlib.py")
_STDLIB = str(Path(threading.__file__).parent) + os.sep
_PACKAGES = str(Path(torch.__file__).parents[1]) + os.sep
_OWN_PARENT = str(Path(__file__).parents[2]) + os.sep
_DEMO = _OWN + f"cli{os.sep}demo"
_NOWHERE: Found = ("", False, None)
_MOST = 100_000


_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Mark:
    """What was found from a frame on. False and callable, as a debugger that comes later expects of what lies here."""

    __slots__ = ("found",)

    def __init__(self, found: Found) -> None:
        self.found = found

    def __bool__(self) -> bool:
        return False

    def __call__(self, *_: object) -> None:
        """Trace nothing."""


class Sites:
    """Finds sites. Safe to ask from any thread.

    Attributes:
        module_call: Code of the function through which modules are called while a comparison runs.
        kinds: What a frame is, by the file of its code.
        known: Sites by the id of a code and the offset in it.
    """

    def __init__(self) -> None:
        self.module_call: CodeType | None = None
        self.kinds: dict[str, int] = {}
        # By the code's id, which is its own while the entry holds it: to hash a code object is to hash all its
        # constants, 0.9 µs for a long one.
        self.known: dict[tuple[int, int], Found] = {}

    def find(self, frame: FrameType | None, above: list[Found | None], level: int) -> Found:
        """The first user frame from here on, and whether an optimizer's frame came before it.

        Args:
            frame: Where to begin.
            above: For each module call that is under way on this thread, outermost first, what was found above its
                frame, or None where nobody asked yet; filled in here.
            level: Number of the innermost of them whose frame may come from here on; -1 if there is none.
        """
        kinds = self.kinds
        module_call = self.module_call
        while frame is not None:
            code = frame.f_code
            try:
                kind = kinds[code.co_filename]
            except KeyError:
                kind = kinds[code.co_filename] = _kind(code.co_filename)
            if kind == _LIBRARY:
                if code is module_call and level >= 0:
                    found = above[level]
                    if found is None:
                        found = above[level] = self.find(frame.f_back, above, level - 1)
                    return found
            elif kind == _USER:
                return self.known.get((id(code), frame.f_lasti)) or self._new(code, frame)
            else:
                mark = frame.f_trace
                if type(mark) is Mark:
                    return mark.found
                return self._in_optimizer(frame, self.find(frame.f_back, above, level))
            frame = frame.f_back
        return _NOWHERE

    def _in_optimizer(self, frame: FrameType, above: Found) -> Found:
        """What is found from an optimizer's frame on; it gets a mark that says so."""
        found = above[0], True, above[2]
        # A generator may go on below another caller.
        if frame.f_trace is None and not frame.f_code.co_flags & _GENERATORS and sys.gettrace() is None:
            frame.f_trace = Mark(found)
        return found

    def _new(self, code: CodeType, frame: FrameType) -> Found:
        if len(self.known) >= _MOST:  # a program that makes code as it goes
            self.known.clear()
        site = f"{_shown(code.co_filename)}:{frame.f_lineno} in {code.co_qualname}"
        found = self.known[id(code), frame.f_lasti] = site, _steps_an_optimizer(frame), code
        return found


def site_of(traceback: TracebackType | None) -> str:
    """The last line of the user's that an exception came through; empty where there is none."""
    site = ""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if _kind(code.co_filename) == _USER:
            site = f"{_shown(code.co_filename)}:{traceback.tb_lineno} in {code.co_qualname}"
        traceback = traceback.tb_next
    return site


def _kind(filename: str) -> int:
    if filename.startswith(_DEMO):
        return _USER
    if filename.startswith(_OPTIM_DIR):
        return _OPTIM
    if filename.startswith((_TORCH, _OWN, "<frozen", "<eval_with_key>")):
        return _LIBRARY
    if filename.startswith(_STDLIB) and "site-packages" not in filename:
        return _LIBRARY
    return _USER


def _shown(filename: str) -> str:
    """A path as short as it stays clear: from the working directory, or from the folder of packages."""
    for folder in (_PACKAGES, _OWN_PARENT):
        if filename.startswith(folder):
            return filename.removeprefix(folder)
    try:
        relative = os.path.relpath(filename)
    except (OSError, ValueError):
        return filename
    return filename if relative.startswith(os.pardir) else relative


def _steps_an_optimizer(frame: FrameType) -> bool:
    """Whether a user's function is the `step` of his own optimizer: torch wraps that, so its caller is torch's.

    A closure is called by an optimizer too, but not by that wrapper.
    """
    caller = frame.f_back
    while caller is not None and caller.f_code.co_filename == _NO_GRAD:
        caller = caller.f_back
    return caller is not None and caller.f_code.co_filename == _OPTIM_DIR + "optimizer.py"
