"""Asynchronous comparison: a bounded queue, one thread, what only a calling thread may do, and records in order.

One thread, not several: jobs are done in the order in which they came, which is the order of the records; operators
that are worth a second core take it themselves.

The queue is drained at the end of each step, before a fork, and before anything is read. An interrupt while it is
drained drops what waits, with a record for each.

Operators of the CPU depend on more than their inputs: `ThreadLocalState` takes the modes and settings of a call to that
thread.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

import torch

from shadowrun.intercept.threads import OwnThread
from shadowrun.intercept.torchapi import as_in_handler
from shadowrun.platforms import torchplatform

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shadowrun.replay.context import RecordSink

__all__ = ["Job", "OrderedSink", "Pipeline", "ThreadLocalState"]

_NUMBER_UNKNOWN = -1


@dataclass(slots=True)
class ThreadLocalState:
    """The modes of a thread, and settings of the process.

    Attributes:
        grad, inference: Modes of the calling thread.
        default_dtype, deterministic: Settings of the process.
    """

    grad: bool
    inference: bool
    default_dtype: torch.dtype
    deterministic: tuple[bool, bool]

    @staticmethod
    def current() -> ThreadLocalState:
        """As it is on this thread."""
        return ThreadLocalState(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_dtype(),
            torchplatform.deterministic_state(),
        )

    def still_holds(self) -> bool:
        """Whether the settings of the process are the same; those of the thread are put in place by `entered`."""
        return (
            self.default_dtype is torch.get_default_dtype()
            and self.deterministic == torchplatform.deterministic_state()
        )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """As inside a dispatch mode's handler on the calling thread."""
        with contextlib.ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            stack.enter_context(torchplatform.below_autograd())
            yield


P = ParamSpec("P")
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
    """Runs jobs on one thread, in their order.

    Args:
        max_waiting: Jobs that may wait; a thread that submits one more waits for the oldest.

    Attributes:
        work_ns: Processor time that the thread took, in nanoseconds; waiting for the device takes none.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self.work_ns = 0
        self._reset()
        _running.add(self)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        # A job holds copies only: a waiting job must not keep a tensor of the program alive.
        self._jobs: deque[Job] = deque()
        # Streams, the fallback detector and warning filters belong to the calling threads, so jobs ask these.
        self._requests: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._busy = False
        self._open = False
        # One thread: it keeps the order of records. An operator worth a second core uses torch's own threads.
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
        # A full queue makes the program wait: no call is left out.
        elif self._requests or len(self._jobs) > self._max_waiting:
            self._wait(lambda: len(self._jobs) <= self._max_waiting)

    def wait_for_oldest(self) -> bool:
        """Wait until a job is done; False where there is none."""
        if self.idle:
            return False
        # The job in hand counts: its copies are freed only when it ends.
        before = len(self._jobs) + self._busy
        self._wait(lambda: len(self._jobs) + self._busy < before)
        return True

    def drain(self) -> None:
        """Wait until all is done. An interrupt drops what waits and is raised again."""
        if self.idle:
            return
        try:
            self._wait(lambda: self.idle)
        except BaseException as error:
            # The user wants to stop, and to compare what waits may take long.
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
            # A thread that joins itself raises.
            if thread is not None and thread is not threading.current_thread():
                thread.join(_LOOK_AGAIN_S)

    def forked(self) -> None:
        """In a forked child: the thread is not there, and what waited is its parent's."""
        self._reset()

    def run_on_calling_thread(self, function: Callable[[], T]) -> T:
        """From a job: have a calling thread run a function, at its next call or while it waits."""
        # `_run_here` runs jobs on a calling thread: a request to itself would wait for ever.
        if threading.current_thread() is not self._thread:
            return function()
        future: Future[T] = Future()
        with self._changed:
            self._requests.append((function, future))
            self._changed.notify_all()
        return future.result()

    def _start(self) -> bool:
        """The thread runs; False where the process starts no more threads."""
        # The thread may have died, as at the end of the process.
        if self._thread is not None and self._thread.is_alive():
            return True
        thread = OwnThread(target=self._work, name="shadowrun-replays", daemon=True)
        self._open, self._thread = True, thread
        try:
            thread.start()
        except RuntimeError:
            # Python starts no thread while the interpreter shuts down: jobs then run on the calling thread.
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
            # Processor time: waiting for the device's event is not work.
            began = time.thread_time_ns()
            with contextlib.suppress(Exception):
                job.run()
            self.work_ns += time.thread_time_ns() - began
            del job  # else its copies would live until the next one comes

    def _wait(self, done: Callable[[], bool]) -> None:
        """Wait, and answer the requests of jobs until then."""
        while True:
            with self._changed:
                while not self._requests and not done():
                    if self._thread is None or not self._thread.is_alive():
                        break
                    # With a limit: a thread that died does not notify.
                    self._changed.wait(_LOOK_AGAIN_S)
                # The request runs without the condition: it may call torch, which may run for long.
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
            # The calling thread has modes on its stack: replays would be recorded as calls of the program.
            with contextlib.suppress(Exception), as_in_handler():
                self._jobs.popleft().run()

    def _drop(self, reason: str) -> None:
        with self._changed:
            dropped, self._jobs = self._jobs, deque()
            requests, self._requests = self._requests, deque()
        # A job that waits for an answer would hang the thread for ever.
        for _, future in requests:
            future.set_exception(RuntimeError(reason))
        for job in dropped:
            with contextlib.suppress(Exception):
                job.drop(reason)


class _DeferredRecord:
    """A record that waits for the calls before it."""

    __slots__ = ("_record",)

    def __init__(self, record: Callable[[], int]) -> None:
        self._record = record

    def run(self) -> None:
        self._record()

    def drop(self, reason: str) -> None:  # noqa: ARG002 - it costs nothing: nothing is lost
        self.run()


class Queue(Protocol):
    """Jobs that are done one after another."""

    @property
    def idle(self) -> bool:
        """Whether a record needs not wait."""
        ...

    def submit(self, job: Job) -> None:
        """Hand over a job."""
        ...


class OrderedSink:
    """A `RecordSink` that writes to another one, after the calls that are still being compared.

    Args:
        sink: The one that writes.
        pipeline: The calls that come first.
    """

    def __init__(self, sink: RecordSink, pipeline: Queue) -> None:
        self._pipeline = pipeline
        self.match, self.verdict = self._in_order(sink.match), self._in_order(sink.verdict)
        # What needs no order goes straight to the sink; a context is numbered while the call still runs.
        # The context needs the Python stack of the call, which does not exist any more when the job runs.
        self.context = sink.context
        self.keep_inputs = sink.keep_inputs
        self.reserve = sink.reserve
        self.bytes_for_inputs = sink.bytes_for_inputs
        self.skip = sink.skip
        self.flush = sink.flush

    def _in_order(self, record: Callable[P, int]) -> Callable[P, int]:
        """As `record`, in the order of the calls; returns -1 where the number of the record is not known yet."""
        pipeline = self._pipeline

        def in_order(*args: P.args, **kwargs: P.kwargs) -> int:
            # With nothing pending the order holds already: the record takes the fast path.
            if pipeline.idle:
                return record(*args, **kwargs)
            pipeline.submit(_DeferredRecord(partial(record, *args, **kwargs)))
            # The sink numbers records as it writes them: waiting for a number would be a wait for the device.
            return _NUMBER_UNKNOWN

        return in_order


def _answer(function: Callable[[], Any], future: Future[Any]) -> None:
    try:
        with as_in_handler():
            result = function()
        future.set_result(result)
    except Exception as error:  # it is the job's, which knows what to make of it
        future.set_exception(error)
    # An interrupt belongs to the program; the job still gets an answer, or it would wait for ever.
    except BaseException as error:
        future.set_exception(RuntimeError(f"{type(error).__name__} in a calling thread"))
        raise


# Weak: a comparison that is forgotten is freed at once and not at the end of the process.
_running: weakref.WeakSet[Pipeline] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A program that never stopped its comparison has its last records written."""
    for pipeline in list(_running):
        with contextlib.suppress(Exception):
            pipeline.close()
