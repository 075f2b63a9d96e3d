"""Work that is done behind the program: a bounded queue, one thread, and what only a calling thread may do.

One thread, not several: jobs are done in the order in which they came, which is the order of the records; operators
that are worth a second core take it themselves.

Nobody waits for ever. The queue is drained at the end of each step, before a fork, and before anything is read. An
interrupt while it is drained drops what waits, with a record for each.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from shadowrun.intercept.torchapi import as_in_handler
from shadowrun.intercept.unseen import OwnThread

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Job", "Pipeline"]

T = TypeVar("T")
_LOOK_AGAIN_S = 0.5


class Job(Protocol):
    """One piece of work."""

    def run(self) -> None:
        """Do it; raises nothing."""
        ...

    def drop(self, reason: str) -> None:
        """Do not do it, and record why."""
        ...


class Pipeline:
    """Runs jobs on a thread of its own.

    Args:
        most: Jobs that may wait; who brings one more waits for the oldest.

    Attributes:
        work_ns: Processor time that the thread took, in nanoseconds; waiting for the device takes none.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.work_ns = 0
        self._reset()
        _running.add(self)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._requests: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._busy = False
        self._open = False
        self._thread: threading.Thread | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing is being done."""
        return not self._jobs and not self._busy

    def submit(self, job: Job) -> None:
        """Hand over a job. Waits while too many wait, and does what the jobs ask of a calling thread."""
        with self._changed:
            self._jobs.append(job)
            started = self._start()
            self._changed.notify_all()
        if not started:
            self._run_here()
        elif self._requests or len(self._jobs) > self._most:
            self._wait(lambda: len(self._jobs) <= self._most)

    def wait_for_oldest(self) -> bool:
        """Wait until a job is done; False where there is none."""
        if self.idle:
            return False
        before = len(self._jobs) + self._busy
        self._wait(lambda: len(self._jobs) + self._busy < before)
        return True

    def drain(self) -> None:
        """Wait until all is done. An interrupt drops what waits and goes on as it came."""
        if self.idle:
            return
        try:
            self._wait(lambda: self.idle)
        except BaseException as error:
            self._drop(f"{type(error).__name__} while the call waited to be compared")
            raise

    def close(self) -> None:
        """Drain, and end the thread; the next job starts another."""
        try:
            self.drain()
        finally:
            with self._changed:
                self._open = False
                thread, self._thread = self._thread, None
                self._changed.notify_all()
            if thread is not None and thread is not threading.current_thread():
                thread.join(_LOOK_AGAIN_S)

    def forked(self) -> None:
        """In a forked child: the thread is not there, and what waited is its parent's."""
        self._reset()

    def ask(self, function: Callable[[], T]) -> T:
        """From a job: have a calling thread run a function, when one comes by."""
        if threading.current_thread() is not self._thread:
            return function()
        future: Future[T] = Future()
        with self._changed:
            self._requests.append((function, future))
            self._changed.notify_all()
        return future.result()

    def _start(self) -> bool:
        """The thread runs; False where the process starts no more threads."""
        if self._thread is not None and self._thread.is_alive():
            return True
        thread = OwnThread(target=self._work, name="shadowrun-replays", daemon=True)
        self._open, self._thread = True, thread
        try:
            thread.start()
        except RuntimeError:
            self._open, self._thread = False, None
            return False
        return True

    def _work(self) -> None:
        changed = self._changed
        while True:
            with changed:
                self._busy = False
                changed.notify_all()
                while not self._jobs and self._open:
                    changed.wait()
                if not self._jobs or self._thread is not threading.current_thread():
                    return
                job = self._jobs.popleft()
                self._busy = True
            began = time.thread_time_ns()
            with contextlib.suppress(Exception):
                job.run()
            self.work_ns += time.thread_time_ns() - began
            del job  # else its copies would live until the next one comes

    def _wait(self, done: Callable[[], bool]) -> None:
        """Wait, and answer the jobs' requests meanwhile."""
        while True:
            with self._changed:
                while not self._requests and not done():
                    if self._thread is None or not self._thread.is_alive():
                        break
                    self._changed.wait(_LOOK_AGAIN_S)
                request = self._requests.popleft() if self._requests else None
            if request is not None:
                _answer(*request)
            elif done():
                return
            else:  # the thread has died, as at the end of the process
                self._busy = False
                self._run_here()

    def _run_here(self) -> None:
        while self._jobs:
            with contextlib.suppress(Exception), as_in_handler():
                self._jobs.popleft().run()

    def _drop(self, reason: str) -> None:
        with self._changed:
            dropped, self._jobs = self._jobs, deque()
            requests, self._requests = self._requests, deque()
        for _, future in requests:
            future.set_exception(RuntimeError(reason))
        for job in dropped:
            with contextlib.suppress(Exception):
                job.drop(reason)


def _answer(function: Callable[[], Any], future: Future[Any]) -> None:
    try:
        with as_in_handler():
            result = function()
        future.set_result(result)
    except Exception as error:  # it is the job's, which knows what to make of it
        future.set_exception(error)
    except BaseException as error:
        future.set_exception(RuntimeError(f"{type(error).__name__} meanwhile"))
        raise


_running: weakref.WeakSet[Pipeline] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A program that never stopped its comparison has its last records written."""
    for pipeline in list(_running):
        with contextlib.suppress(Exception):
            pipeline.close()
