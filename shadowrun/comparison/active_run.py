"""The one comparison or recording that runs in this process, and the hooks of the process that it needs.

Neither can be nested in another, and a forked child abandons that of its parent.

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
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

from shadowrun.errors import NestingError
from shadowrun.intercept import torch_compiler
from shadowrun.intercept.dispatch import ShadowMode

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import TracebackType

    from shadowrun.comparison.steps import Steps
    from shadowrun.intercept.attribution import Attribution
    from shadowrun.intercept.patches import SubclassConstructor
    from shadowrun.intercept.threads import Threads
    from shadowrun.recording.call_recorder import CallRecorder
    from shadowrun.recording.nonfinite import NonFiniteObserver

__all__ = [
    "OnePassRun",
    "RunHandle",
    "Running",
    "begin",
    "end",
    "prepare_process",
    "running",
]

F = TypeVar("F", bound=Callable[..., Any])


class RunHandle:
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
            self._steps.switch_to_marks()
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


class OnePassRun(RunHandle):
    """What a recording and a search for NaN have in common: one observer, and no second platform.

    A subclass has `_end_step`, `_describe`, `_prepare` and `_finish`.
    """

    _attribution: Attribution
    _constructor: SubclassConstructor
    _recorder: CallRecorder | NonFiniteObserver
    _threads: Threads

    def start(self) -> Self:
        """Begin to observe the operator calls of this thread, and of threads that start from now on.

        Raises:
            NestingError: A comparison or recording is running already.
            DataFileError: A file that is wanted cannot be written.
        """
        began_ns = time.perf_counter_ns()
        begin(Running(self, self._describe(), self._recorder.between_calls, self._stop_in_child))
        try:
            start_recorder = self._prepare()
            self._steps.start_detection(None if self._marks_steps else self._end_step)
            self._attribution.start()
            self._constructor.start()
            self._threads.start()
            ShadowMode.clear_detached()
            start_recorder()
            self._mode = ShadowMode(self._recorder)
            self._steps.begin(self._mode, began_ns)
        except BaseException:
            self._mode = None
            self._release()
            raise
        return self

    def stop(self) -> Self:
        """End it, and write or read what waits. Does nothing if it is not running."""
        mode, self._mode = self._mode, None
        if mode is None:
            return self
        self._threads.find_untracked()
        # The mode leaves the stack first: the calls below must not be intercepted.
        try:
            self._steps.leave()
        finally:
            with self._recorder.between_calls():
                self._release()
            self._steps.finish()
            self._finish()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _describe(self) -> str:
        """For the message to what would be nested in it."""
        raise NotImplementedError

    def _prepare(self) -> Callable[[], None]:
        """Set up what the observer needs; gives the function that starts it."""
        raise NotImplementedError

    def _finish(self) -> None:
        raise NotImplementedError

    def _release(self) -> None:
        self._threads.stop()
        self._recorder.stop()
        self._constructor.stop()
        self._attribution.stop()
        self._steps.release()
        end(self)

    def _stop_in_child(self) -> None:
        """Stop in a forked child; nothing of it is observed."""
        mode, self._mode = self._mode, None
        self._recorder.forked()
        if mode is not None:
            self._steps.stop_in_child(mode)
        with contextlib.suppress(Exception):
            self._release()


@dataclass(frozen=True, slots=True)
class Running:
    """The comparison or recording that runs, and its fork handlers.

    Attributes:
        run: The `Comparison` or `RecordRun` itself.
        description: ``A comparison (sim against cpu)``.
        hold: Returns a context manager that is entered before a fork, and left after it in parent and child.
        stop_in_child: Called in each forked child.
        stop_for_another: Called before another one begins: may stop this one. None if it never gives way.
    """

    run: Any
    description: str
    hold: Callable[[], AbstractContextManager[None]]
    stop_in_child: Callable[[], None]
    stop_for_another: Callable[[], None] | None = None


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
    if (now := _now) is not None and now.stop_for_another is not None:
        now.stop_for_another()
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
        _add_fork_hooks(lambda: _now.hold() if _now is not None else None, _begin_child)


def _begin_child() -> None:
    global _lock  # noqa: PLW0603
    # Another thread of the parent may have held the lock during the fork; in the child, it would never be released.
    _lock = threading.Lock()
    ShadowMode.forked()
    if _now is not None:
        _now.stop_in_child()


def _keep_dynamo_off() -> None:
    """Exclude shadowrun from compilation: Dynamo would compile its handlers."""
    global _dynamo_skips_us  # noqa: PLW0603 - Dynamo's table is process-wide
    # Only if Dynamo is loaded: the call imports it, which takes 2 s.
    if not _dynamo_skips_us and "torch._dynamo" in sys.modules:
        torch_compiler.skip_compilation_of("shadowrun")
        _dynamo_skips_us = True


_OMP_PAUSE_SOFT = 1  # settings stay as they are


def _release_openmp_threads() -> bool:
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


def _add_fork_hooks(hold: Callable[[], AbstractContextManager[None] | None], begin_child: Callable[[], None]) -> None:
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
            _release_openmp_threads()

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
