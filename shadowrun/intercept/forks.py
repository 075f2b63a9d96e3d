"""Hooks around `os.fork`: no call is half done while the process forks, and the child can use OpenMP.

With GNU OpenMP, a child that uses a thread pool from before the fork hangs: it has the thread that owned the pool, but
not the pool's threads. A replay with another number of threads than the program's makes a pool that the program alone
may never have made. So this thread's pool is released before a fork, and the next operator that needs one creates it
again, in the parent and in the child. (libgomp of gcc 9 and later, which torch's wheels for Linux bring; the OpenMP of
LLVM and Intel handles forks itself.)
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

__all__ = ["add_fork_hooks", "release_openmp_threads"]


_OMP_PAUSE_SOFT = 1  # settings stay as they are


def release_openmp_threads() -> bool:
    """Release this thread's OpenMP pool, if there is one.

    Returns:
        False if that is impossible: another OpenMP, or this thread is in a parallel region.
    """
    pause = _pause()
    return pause is not None and pause(_OMP_PAUSE_SOFT) == 0


@functools.cache
def _pause() -> Callable[[int], int] | None:
    try:
        here = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows
        return None
    # These runtimes handle forks themselves.
    if hasattr(here, "kmp_set_blocktime"):  # LLVM's and Intel's, which have GNU's names too
        return None
    return getattr(here, "omp_pause_resource_all", None)


def add_fork_hooks(hold: Callable[[], AbstractContextManager[None] | None], begin_child: Callable[[], None]) -> None:
    """Add hooks to all later forks of this process; they cannot be removed.

    Args:
        hold: Returns a context that is entered before a fork and left after it, in the parent and in the child.
        begin_child: Called in each child.
    """
    if not hasattr(os, "register_at_fork"):
        return
    # By thread: two threads may fork at once.
    held: dict[int, contextlib.ExitStack] = {}

    def before() -> None:
        stack = held[threading.get_ident()] = contextlib.ExitStack()
        with contextlib.suppress(Exception):  # the program forks, whatever fails here
            context = hold()
            if context is not None:
                stack.enter_context(context)
            # After the call in hand has ended: it may make a pool.
            release_openmp_threads()

    def after() -> None:
        stack = held.pop(threading.get_ident(), None)  # None if the hooks were added during a fork
        with contextlib.suppress(Exception):
            if stack is not None:
                stack.close()

    def in_child() -> None:
        after()
        # Other threads of the parent do not exist in the child, and cannot leave what they entered.
        held.clear()
        with contextlib.suppress(Exception):
            begin_child()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=in_child)
