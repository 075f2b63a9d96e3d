"""C's functions on memory: addresses and a number of bytes.

Those for few bytes keep the interpreter's lock: to let go of it and to take it back takes longer than they do, and much
longer where other threads wait for it.
"""

from __future__ import annotations

import ctypes
import sys

__all__ = ["FEW", "differs", "few_differ", "move", "move_few"]

FEW = 64 << 10
"""Bytes that take some 2 µs."""

_free = ctypes.cdll.msvcrt if sys.platform == "win32" else ctypes.CDLL(None)
_held = ctypes.PyDLL(_free._name, handle=_free._handle)
_ARGUMENTS = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

differs, few_differ = _free.memcmp, _held.memcmp
"""``differs(left, right, n)``: 0 where all bytes are the same."""
move, move_few = _free.memmove, _held.memmove
"""``move(to, by, n)``."""

differs.argtypes = few_differ.argtypes = move.argtypes = move_few.argtypes = _ARGUMENTS
differs.restype = few_differ.restype = ctypes.c_int
move.restype = move_few.restype = None
