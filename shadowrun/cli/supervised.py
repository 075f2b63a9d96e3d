"""Runs a command in a child process, so that a kernel that ends its process ends it with a message.

`explain`, `repro`, `slowdown` and `replay` run calls of a file. Inputs of such a call can make a kernel divide by zero
or read where there is no memory, and then no exception is raised. The child is forked before torch is imported: a later
fork would inherit locks of threads, and an accelerator that it cannot use.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

from shadowrun.errors import ShadowrunError

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["in_child"]

_FORWARDED = ("SIGTERM", "SIGHUP")
_ENDED_BY_CALLS = ("SIGSEGV", "SIGFPE", "SIGBUS", "SIGILL", "SIGABRT", "SIGTRAP", "SIGSYS", "SIGKILL")


def in_child() -> int | None:
    """Fork, and wait for the child.

    Returns:
        None in the child, and where processes cannot be forked; its exit status in the parent.

    Raises:
        ShadowrunError: A signal of a kernel ended the child.
        KeyboardInterrupt: Ctrl-C ended it.
    """
    if not hasattr(os, "fork"):
        return None
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        return None
    # Ctrl-C goes to both; the child decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def forward(number: int, _: FrameType | None) -> None:
        os.kill(pid, number)

    for name in _FORWARDED:
        signal.signal(getattr(signal, name), forward)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status >= 0:
        return status
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if -status == signal.SIGINT:
        raise KeyboardInterrupt
    names = {int(getattr(signal, name)): name for name in _ENDED_BY_CALLS if hasattr(signal, name)}
    if -status not in names:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    raise ShadowrunError(
        f"{names.get(-status, f'Signal {-status}')} ended the process while it worked on the file: a call of it has "
        "inputs that a kernel does not check, or took all memory. `shadowrun report` runs no call.",
        slug="calls-ended-process",
    )
