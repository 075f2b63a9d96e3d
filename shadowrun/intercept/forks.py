"""Forks of the process: what must not be under way meanwhile, and what the child must not wait for."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

from shadowrun.platforms.openmp import let_go_of_threads

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

__all__ = ["watch"]


def watch(hold: Callable[[], AbstractContextManager[None] | None], begin_child: Callable[[], None]) -> None:
    """Watch the forks of this process from now on; that cannot be undone.

    Args:
        hold: Gives what is entered before a fork and left after it, on both sides.
        begin_child: Called in each child.
    """
    if not hasattr(os, "register_at_fork"):
        return
    held: dict[int, contextlib.ExitStack] = {}

    def before() -> None:
        stack = held[threading.get_ident()] = contextlib.ExitStack()
        with contextlib.suppress(Exception):  # the user forks, whatever happens to us
            context = hold()
            if context is not None:
                stack.enter_context(context)
            let_go_of_threads()

    def after() -> None:
        stack = held.pop(threading.get_ident(), None)  # none where the hooks came during a fork
        with contextlib.suppress(Exception):
            if stack is not None:
                stack.close()

    def in_child() -> None:
        after()
        held.clear()
        with contextlib.suppress(Exception):
            begin_child()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=in_child)
