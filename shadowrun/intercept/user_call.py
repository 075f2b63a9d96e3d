"""The program's own call, made by Python code of shadowrun: its warnings come where the program made it.

Torch collects the warnings of C++ code and emits them at the line that runs when its outermost function returns, in
that file, under that file's ``__warningregistry__``. Up to 2.14 that function is the one that the program called. From
2.15 on, an operator's own binding collects too: the line would be one of shadowrun, and "once for each line" would be
once for all lines of the program. So there the operator is called by a function that has the line, the file and the
globals of the program.

Its code object also distinguishes the program's call from replays, whatever Python code runs in either of them.
"""

from __future__ import annotations

import functools
import sys
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

__all__ = ["is_own_call", "on_one_line", "own_call"]

# Name of that function: no function of a program can be called so.
_NAME = "<operator>"

_HANDLER = "__torch_dispatch__"


def _bare(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return run(*args, **kwargs)


def on_one_line(code: CodeType, name: str) -> CodeType:
    """The code with all of it on its first line: tracebacks would underline columns of this file in another text."""
    units = len(code.co_code) // 2
    # Objects/locations.md of CPython 3.11 to 3.14: kind 13, a line without columns, of up to 8 code units, is the same.
    table = b"".join(bytes((0x80 | 13 << 3 | min(8, units - at) - 1, 0)) for at in range(0, units, 8))
    return code.replace(co_name=name, co_qualname=name, co_linetable=table)


_CODE = on_one_line(_bare.__code__, _NAME)


@functools.lru_cache(maxsize=4096)
def _code_at(filename: str, line: int) -> CodeType:
    return _CODE.replace(co_filename=filename, co_firstlineno=line)


def _at_the_line(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator for the program, from below the mode's handler (0.6 µs on top of the call)."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != _HANDLER:
        frame = frame.f_back
    caller = None if frame is None else frame.f_back
    if caller is None:  # a thread of C++
        return _anywhere(run, args, kwargs)
    call = FunctionType(_code_at(caller.f_code.co_filename, caller.f_lineno or 0), caller.f_globals)
    del frame, caller
    return call(run, args, kwargs)


_anywhere: Callable[..., Any] = FunctionType(_CODE, globals())

# A nightly build is 2.15.0a0+git…: what comes after the second part is not compared.
_COLLECT = tuple(int(n) if n.isdigit() else 0 for n in str(torch.__version__).split(".")[:2]) >= (2, 15)

own_call: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Run an operator for the program."""
own_call = _at_the_line if _COLLECT else _anywhere


def is_own_call(code: CodeType) -> bool:
    """Whether a frame's code is that of the program's own call."""
    return code.co_name == _NAME
