"""The line of the user's program that is being executed: the first frame outside torch and shadowrun.

What a frame is follows from the file of its code, which is looked at once. Some twenty frames lie between an operator
and the user's line in nested modules, and 70 ns each are too much. The frames above one that has not returned
stay the same, so they are searched once
* for each module call: the search ends at the innermost that is under way;
* for each function of an optimizer, which calls a dozen operators for each parameter: its frame gets a mark. The mark
  lies where a debugger keeps its trace function of this frame, goes with the frame, and is never put over another's.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from types import CodeType, FrameType, TracebackType

__all__ = ["CallSites", "FoundSite", "FrameMark", "site_of"]

FoundSite = tuple[str, bool, "CodeType | None"]
"""A site; empty if there is none; whether an optimizer's frame came before it; the code of that line, kept alive."""

_LIBRARY, _USER, _OPTIM = 0, 1, 2
_TORCH = str(Path(torch.__file__).parent) + os.sep
_OWN = str(Path(__file__).parents[1]) + os.sep
_OPTIM_DIR = str(Path(torch.__file__).parent / "optim") + os.sep
_NO_GRAD = str(Path(torch.__file__).parent / "utils" / "_contextlib.py")
_STDLIB = str(Path(threading.__file__).parent) + os.sep
_PACKAGES = str(Path(torch.__file__).parents[1]) + os.sep
_OWN_PARENT = str(Path(__file__).parents[2]) + os.sep
# The demo plays the program: its lines are the user's.
_DEMO = str(Path(_OWN, "cli", "commands", "demo"))
_CELL = re.compile(r"<ipython-input-(\d+)-")
_REACHED_FROM = " (first reached from "
_NOWHERE: FoundSite = ("", False, None)
_MAX_SITES = 100_000


_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class FrameMark:
    """What was found from a frame on. False and callable, as a debugger that comes later expects of what lies here."""

    __slots__ = ("found",)

    def __init__(self, found: FoundSite) -> None:
        self.found = found

    def __bool__(self) -> bool:
        return False

    def __call__(self, *_: object) -> None:
        """Trace nothing."""


class CallSites:
    """Finds sites. Safe to ask from any thread.

    Attributes:
        module_call: Code of the function through which modules are called while a comparison runs.
        kinds: What a frame is, by the file of its code.
        known: Sites by the id of a code and the offset in it.
    """

    def __init__(self) -> None:
        # Callers of a module call that has not returned do not change, so the search ends there.
        self.module_call: CodeType | None = None
        self.kinds: dict[str, int] = {}
        # By the code's id, which is its own while the entry holds it: to hash a code object is to hash all its
        # constants, 0.9 µs for a long one.
        self.known: dict[tuple[int, int], FoundSite] = {}

    def find(self, frame: FrameType | None, above: list[FoundSite | None], level: int) -> FoundSite:
        """The first user frame from here on, and whether an optimizer's frame came before it.

        Args:
            frame: Where to begin.
            above: For each module call that is under way on this thread, outermost first, what was found above its
                frame, or None where it was not looked for yet; filled in here.
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
                    # Searched once for each module call; all operators inside reuse it.
                    if found is None:
                        found = above[level] = self.find(frame.f_back, above, level - 1)
                    return found
            elif kind == _USER:
                return self.known.get((id(code), frame.f_lasti)) or self._new(code, frame)
            else:
                mark = frame.f_trace
                # A step calls a dozen operators for each parameter: without a mark each would search to the user's
                # line.
                if type(mark) is FrameMark:
                    return mark.found
                return self._in_optimizer(frame, self.find(frame.f_back, above, level))
            frame = frame.f_back
        return _NOWHERE

    def _in_optimizer(self, frame: FrameType, above: FoundSite) -> FoundSite:
        """What is found from an optimizer's frame on; it gets a mark that says so."""
        # Where a library steps the optimizer (accelerate, Lightning), its line does not show which one: the user's line
        # that led there comes first.
        site, in_optimizer, code = above
        if not in_optimizer and code is not None and _is_package(code.co_filename):
            own = _own_line(frame.f_back)
            site = f"{own} ({site.partition(_REACHED_FROM)[0]})" if own else site
        found = site, True, code
        # A generator may continue below another caller.
        # A debugger keeps its own function in `f_trace`: that one must stay.
        if frame.f_trace is None and not frame.f_code.co_flags & _GENERATORS and sys.gettrace() is None:
            frame.f_trace = FrameMark(found)
        return found

    def _new(self, code: CodeType, frame: FrameType) -> FoundSite:
        if len(self.known) >= _MAX_SITES:  # a program that makes code as it goes
            self.known.clear()
        site = _line(code, frame.f_lineno)
        # A library's line is the same for all its callers: the user's line that led here first is added.
        own = _own_line(frame.f_back) if _is_package(code.co_filename) else ""
        site += f"{_REACHED_FROM}{own})" if own else ""
        found = self.known[id(code), frame.f_lasti] = site, _steps_an_optimizer(frame), code
        return found


def site_of(traceback: TracebackType | None) -> str:
    """The last line of the user's that an exception came through; empty where there is none."""
    site = ""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if _kind(code.co_filename) == _USER:
            site = _line(code, traceback.tb_lineno)
        traceback = traceback.tb_next
    return site


def _line(code: CodeType, number: int) -> str:
    """``train.py:12 in step``; ``In [3], line 2 in <module>`` of a notebook."""
    cell = _cell(code.co_filename)
    where = f"In [{cell}], line {number}" if cell else f"{_shown(code.co_filename)}:{number}"
    return f"{where} in {code.co_qualname}"


def _cell(filename: str) -> int:
    """Number of the cell that IPython compiled under a file's name; 0 where it is none."""
    # `CachingCompiler._filename_map` is IPython's own, since 7.23; without it, the name of the file is shown.
    named = _CELL.match(filename)
    if named:
        return int(named[1])
    if "ipykernel" not in filename:
        return 0
    try:
        number: int = sys.modules["IPython"].get_ipython().compile._filename_map[filename]
    except (KeyError, AttributeError):
        return 0
    return number


def _own_line(frame: FrameType | None) -> str:
    """The first line from here on that is of no library."""
    while frame is not None:
        code = frame.f_code
        if _kind(code.co_filename) == _USER and not _is_package(code.co_filename):
            return _line(code, frame.f_lineno)
        frame = frame.f_back
    return ""


def _is_package(filename: str) -> bool:
    """Whether a file is of an installed package; the demo's never is."""
    if filename.startswith(_DEMO):
        return False
    # A virtual environment may use packages of the system, whose folder Debian calls `dist-packages`.
    return filename.startswith(_PACKAGES) or "site-packages" in filename or "dist-packages" in filename


def _kind(filename: str) -> int:
    if filename.startswith(_DEMO):
        return _USER
    if filename.startswith(_OPTIM_DIR):
        return _OPTIM
    # `<eval_with_key>` is code that torch.fx has generated: no line of a file.
    if filename.startswith((_TORCH, _OWN, "<frozen", "<eval_with_key>")):
        return _LIBRARY
    # `site-packages` lies in the folder of the standard library.
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
    """Whether a function is the `step` of an optimizer of the user: torch wraps that, so its caller is torch's."""
    # A closure is called by an optimizer too, but not by that wrapper.
    caller = frame.f_back
    while caller is not None and caller.f_code.co_filename == _NO_GRAD:
        caller = caller.f_back
    return caller is not None and caller.f_code.co_filename == _OPTIM_DIR + "optimizer.py"
