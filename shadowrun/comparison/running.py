"""The one comparison or recording that runs in this process, and the hooks of the process that it needs.

Neither can be nested in another, and a forked child abandons that of its parent.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shadowrun.errors import NestingError
from shadowrun.intercept import forks, torch_compiler
from shadowrun.intercept.dispatch import ShadowMode

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

__all__ = ["Running", "begin", "end", "prepare_process", "running"]


@dataclass(frozen=True, slots=True)
class Running:
    """The comparison or recording that runs, and its fork handlers.

    Attributes:
        run: The `Comparison` or `RecordRun` itself.
        description: ``A comparison (sim against cpu)``.
        hold: Returns a context manager that is entered before a fork, and left after it in parent and child.
        abandon: Called in each forked child.
    """

    run: Any
    description: str
    hold: Callable[[], AbstractContextManager[None]]
    abandon: Callable[[], None]


_now: Running | None = None
_lock = threading.Lock()
_watching_forks = False
_dynamo_skips_us = False


def begin(begun: Running) -> None:
    """Register what begins to run.

    Raises:
        NestingError: A comparison or recording runs.
    """
    global _now  # noqa: PLW0603 - one in the process
    with _lock:
        if _now is not None:
            raise NestingError(
                f"{_now.description} is running already: comparisons and recordings cannot be nested, since each "
                "would see the other's calls. Stop the first, or use a separate run for each.",
                slug="nested-compare",
            )
        _now = begun


def end(run: object) -> None:
    """Unregister a comparison or recording, if it is the one that runs."""
    global _now  # noqa: PLW0603
    with _lock:
        if _now is not None and _now.run is run:
            _now = None


def running() -> Any:
    """The comparison or recording that runs; None if there is none."""
    return None if _now is None else _now.run


def prepare_process() -> None:
    """Set up process-wide hooks, once, before the first run; they cannot be removed."""
    _watch_forks()
    _keep_dynamo_off()


def _watch_forks() -> None:
    """Register the fork handlers: a forked child, such as a DataLoader worker, is not compared."""
    global _watching_forks  # noqa: PLW0603 - fork hooks of a process cannot be removed
    if not _watching_forks:
        _watching_forks = True
        forks.add_fork_hooks(lambda: _now.hold() if _now is not None else None, _begin_child)


def _begin_child() -> None:
    global _lock  # noqa: PLW0603
    # Another thread of the parent may have held the lock during the fork; in the child, it would never be released.
    _lock = threading.Lock()
    ShadowMode.forked()
    if _now is not None:
        _now.abandon()


def _keep_dynamo_off() -> None:
    """Exclude shadowrun from compilation: Dynamo would compile its handlers."""
    global _dynamo_skips_us  # noqa: PLW0603 - Dynamo's table is process-wide
    # Only if Dynamo is loaded: the call imports it, which takes 2 s.
    if not _dynamo_skips_us and "torch._dynamo" in sys.modules:
        torch_compiler.skip_compilation_of("shadowrun")
        _dynamo_skips_us = True
