"""GNU OpenMP and `fork`: a thread pool that was used before a fork hangs the child that uses it.

The pool belongs to the thread that used it, and the child has that thread but not the pool's. A replay with other
threads than the program's makes a pool that the program itself may never have made; so it is let go before a fork, and
made anew by the next operator that wants it, on both sides. (libgomp of gcc 9 and later, which is what torch's wheels
for Linux bring; the OpenMP of LLVM and Intel looks after itself.)
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["let_go_of_threads"]

_SOFT = 1  # omp_pause_soft: settings stay as they are


def let_go_of_threads() -> bool:
    """End this thread's OpenMP pool, as far as there is one.

    Returns:
        False where that cannot be done: another OpenMP, or this thread is in a parallel region.
    """
    pause = _pause()
    return pause is not None and pause(_SOFT) == 0


@functools.cache
def _pause() -> Callable[[int], int] | None:
    try:
        here = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows
        return None
    if hasattr(here, "kmp_set_blocktime"):  # LLVM's and Intel's have the same names, and more
        return None
    return getattr(here, "omp_pause_resource_all", None)
