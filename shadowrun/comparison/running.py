"""The one comparison that runs in this process: none runs beside it, and a forked child leaves it behind."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shadowrun.errors import NestingError
from shadowrun.intercept import forks, torchapi
from shadowrun.intercept.dispatch import ShadowMode

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

__all__ = ["Running", "begin", "comparison", "end", "prepare_process"]


@dataclass(frozen=True, slots=True)
class Running:
    """A comparison that runs, and what a fork of the process does with it.

    Attributes:
        comparison: The comparison itself.
        description: ``sim against cpu``.
        hold: Gives what is entered before a fork and left after it, on both sides.
        abandon: Called in each child.
    """

    comparison: Any
    description: str
    hold: Callable[[], AbstractContextManager[None]]
    abandon: Callable[[], None]


_now: Running | None = None
_lock = threading.Lock()
_watching_forks = False
_told_dynamo = False


def begin(running: Running) -> None:
    """A comparison begins to run.

    Raises:
        NestingError: Another one runs.
    """
    global _now  # noqa: PLW0603 - one in the process
    with _lock:
        if _now is not None:
            raise NestingError(
                f"A comparison ({_now.description}) is running already: comparisons cannot be nested, since each "
                "would replay the other's replays. Stop the first, or compare more platforms in runs of their own.",
                slug="nested-compare",
            )
        _now = running


def end(comparison: object) -> None:
    """A comparison runs no more; nothing where another one does."""
    global _now  # noqa: PLW0603
    with _lock:
        if _now is not None and _now.comparison is comparison:
            _now = None


def comparison() -> Any:
    """The comparison that runs; None if there is none."""
    return None if _now is None else _now.comparison


def prepare_process() -> None:
    """What a process is told once, before its first comparison, and what cannot be taken back."""
    _watch_forks()
    _keep_dynamo_off()


def _watch_forks() -> None:
    """A forked child (a worker of a DataLoader) is another program: it is not compared, and waits for no lock."""
    global _watching_forks  # noqa: PLW0603 - hooks of the process cannot be taken away again
    if not _watching_forks:
        _watching_forks = True
        forks.watch(lambda: _now.hold() if _now is not None else None, _begin_child)


def _begin_child() -> None:
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()
    ShadowMode.forked()
    if _now is not None:
        _now.abandon()


def _keep_dynamo_off() -> None:
    """Once Dynamo is loaded it may compile our handlers; telling it loads it, so only then."""
    global _told_dynamo  # noqa: PLW0603 - Dynamo's table is process-wide
    if not _told_dynamo and "torch._dynamo" in sys.modules:
        torchapi.skip_compilation_of("shadowrun")
        _told_dynamo = True
