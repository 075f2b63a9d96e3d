"""The worker's side: reads tasks from standard input, and writes messages to a pipe, one line of JSON each."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from shadowrun.current_folder import leave_folder
from shadowrun.errors import ShadowrunError
from shadowrun.platforms.plugins import import_inherited
from shadowrun.studies.isolation.worker_progress import StepWriter

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Channel", "main"]


class Channel:
    """What a worker sends to its parent.

    Args:
        descriptor: Pipe for messages.
        page: Descriptor of the page for the step in hand.

    Attributes:
        step: What it does now.
    """

    def __init__(self, descriptor: int, page: int) -> None:
        self._descriptor = descriptor
        self.step = StepWriter(page)

    def send(self, line: Any) -> None:
        """Send a message: anything that JSON has."""
        text = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        # A full pipe takes a part only.
        while text:
            text = text[os.write(self._descriptor, text) :]


def main(entry: str, folder: str, settings: dict[str, Any], lines: int, lifeline: int, page: int) -> None:
    """Run tasks until standard input ends.

    Args:
        entry: ``module:function``, which makes the function for one task of settings and channel.
        folder: The current folder while it works, new and empty.
        settings: For it, without relative names.
        lines: File descriptor to write to.
        lifeline: Pipe that closes when the parent process ends.
        page: Descriptor of the page for the step in hand.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    for descriptor in (lines, lifeline, page):  # of no process that this one starts
        os.set_inheritable(descriptor, False)
    threading.Thread(target=_exit_with_parent, args=(lifeline,), daemon=True).start()
    channel = Channel(lines, page)
    module, _, name = entry.partition(":")
    # The collector would go through a million objects of torch several times while it is imported.
    gc.disable()
    try:
        import_inherited()  # `--import` registered devices in the parent only
        leave_folder(folder)
        run: Callable[[dict[str, Any]], None] = getattr(importlib.import_module(module), name)(settings, channel)
    except ShadowrunError as error:
        channel.send({"broken": str(error), "slug": error.slug})
        return
    gc.freeze()
    gc.enable()
    channel.send({"ready": os.getpid()})
    for line in sys.stdin:
        run(json.loads(line))
        channel.send({"end": True})


def _exit_with_parent(lifeline: int) -> None:
    os.read(lifeline, 1)
    # The compiler's processes of this one too: the parent made it the leader of a group.
    if os.getpgrp() == os.getpid():
        with contextlib.suppress(OSError):
            os.killpg(0, signal.SIGKILL)
    # Not `sys.exit`, which ends this thread only: the main thread may hang in a kernel.
    os._exit(0)
