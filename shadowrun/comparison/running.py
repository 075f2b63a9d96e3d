"""The one comparison or recording that runs in this process, and the hooks of the process that it needs.

Neither can be nested in another, and a forked child abandons that of its parent.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

from shadowrun.errors import NestingError
from shadowrun.intercept import forks, torch_compiler
from shadowrun.intercept.dispatch import ShadowMode

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import TracebackType

    from shadowrun.comparison.steps import Steps

__all__ = ["Running", "Startable", "begin", "end", "prepare_process", "running"]

F = TypeVar("F", bound=Callable[..., Any])


class Startable:
    """What a comparison and a recording have in common for a user: a context manager, a decorator, marks of steps.

    A subclass has `start`, `stop` and `_end_step`.
    """

    _made_by: str  # "compare"
    _mode: ShadowMode | None
    _steps: Steps
    _marks_steps: bool

    def start(self) -> Self:
        """Begin to intercept the operator calls of this thread."""
        raise NotImplementedError

    def _end_step(self) -> None:
        raise NotImplementedError

    def step(self) -> None:
        """Mark the end of a training step.

        In a program without this call, each step of its optimizer ends a step.
        """
        if not self._steps.marked:
            self._marks_steps = True
            self._steps.mark()
        self._end_step()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        raise NotImplementedError

    def __call__(self, function: F) -> F:
        """Decorate a function: each call of it is intercepted, and is a step unless it calls `step` itself."""
        made_by = self._made_by
        if not callable(function):
            raise TypeError(f"{made_by}(...) decorates functions, not {type(function).__name__}")
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise TypeError(
                f"{made_by}(...) cannot decorate a coroutine or generator: use `with {made_by}(...)` inside it"
            )
        self._marks_steps = True

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self._mode is not None:  # recursion: the outer call is intercepted already
                return function(*args, **kwargs)
            with self:
                result = function(*args, **kwargs)
                if not self._steps.marked:
                    self.step()
                return result

        wrapper.run = self  # type: ignore[attr-defined]
        return wrapper  # type: ignore[return-value]


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
