"""A pool of worker processes: assigns tasks, enforces limits of time and memory, and finds which case ended a process.

What the tasks are, and what becomes of a lost case, is up to a `Work`.
"""

from __future__ import annotations

import enum
import selectors
import subprocess
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from shadowrun.errors import PlatformError, ShadowrunError
from shadowrun.studies.isolation.process import WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shadowrun.studies.isolation.worker_progress import Step

__all__ = ["FailureKind", "Limits", "Pool", "RemainingTask", "Work", "WorkerFailure"]

T = TypeVar("T")

_LOOK_S: Final = 0.1  # interval of checks against the limits
# Against a worker that hangs at its start: its imports take seconds, and several workers import at once.
_START_LIMIT_S: Final = 300.0
_RESET_LIMIT_S: Final = 300.0
# A case that swaps is slow: from here on the message of a time-out has the memory too.
_MUCH_MEMORY: Final = 1 << 28
# Starts in a row that may fail where a command resets the device.
_STARTS: Final = 3


class FailureKind(enum.StrEnum):
    """How a case ended its process. The values are those of the sweep's `Kind`."""

    CRASH = "crash"
    TIMEOUT = "time-out"
    OUT_OF_MEMORY = "out of memory"
    DEVICE = "device lost"
    """The worker saw that the device answers no more, and ended itself."""


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """A process that ended.

    Attributes:
        kind: How.
        explanation: ``signal 11 (SIGSEGV)``; the limit that was exceeded.
        message: Last line of standard error, or what is known of the memory.
        step: What it did; without a case if it was between two.
    """

    kind: FailureKind
    explanation: str
    message: str
    step: Step


@dataclass(frozen=True, slots=True)
class RemainingTask(Generic[T]):
    """What is left of a task whose process ended.

    Attributes:
        task: The rest.
        fresh: Whether it needs a process that has run nothing.
    """

    task: T
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a case.

    Attributes:
        seconds: Wall time.
        n_bytes: Growth of its process; the whole size of the process of a platform.
    """

    seconds: float
    n_bytes: int


class Work(Protocol[T]):
    """What a pool runs."""

    def next(self) -> T | None:
        """The next task; None if there is none now."""

    def line(self, task: T) -> dict[str, Any]:
        """A task as its worker gets it."""

    def receive(self, task: T, line: Any) -> None:
        """A message about a task."""

    def ended(self, task: T) -> None:
        """All of a task was run."""

    def lost(self, task: T, failure: WorkerFailure) -> RemainingTask[T] | None:
        """The process of a task has ended: record the outcome of the case in hand, and give the rest."""

    def pause(self) -> bool:
        """Called ten times a second; True to stop."""


class Pool(Generic[T]):
    """Runs tasks in worker processes.

    Args:
        entry: ``module:function`` of the workers, see `serving.main`.
        settings: For it.
        n_workers: Number of workers.
        limits: Limits of a case.
        work: The tasks; may be set before each `run`.
        reset_command: Run after a device was lost, before the next process starts.
        resets_always: Run it after each process that ended before its task did.

    Attributes:
        work: The tasks.
        n_lost: Processes that ended before their task did.
    """

    work: Work[T]

    def __init__(
        self,
        entry: str,
        settings: dict[str, Any],
        n_workers: int,
        limits: Limits,
        work: Work[T] | None = None,
        reset_command: Sequence[str] = (),
        *,
        resets_always: bool = False,
    ) -> None:
        self._entry, self._settings = entry, settings
        self._n_workers = n_workers
        self._limits = limits
        self._reset_command = reset_command
        self._resets_always = resets_always
        if work is not None:
            self.work = work
        self._workers: list[WorkerProcess] = []
        self._waiting: deque[RemainingTask[T]] = deque()
        self._selector = selectors.DefaultSelector()
        self._failed_starts = 0
        self.n_lost = 0

    def run(self) -> None:
        """Run all tasks, and return when they have ended; the processes stay for the next `run`.

        Raises:
            ShadowrunError: A worker cannot be started, for example because a platform is absent.
        """
        try:
            while self._has_work() and not self.work.pause():
                self._start_and_assign()
                for key, _ in self._selector.select(_LOOK_S):
                    self._receive(key.data)
                for worker in list(self._workers):
                    # `_replace` removes workers, hence the copy of the list.
                    self._enforce_limits(worker)
        # Also after Ctrl-C: processes that were left would go on, since each leads a session of its own.
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all processes."""
        for worker in list(self._workers):
            self._remove(worker)
        self._selector.close()

    def _has_work(self) -> bool:
        while len(self._waiting) < self._n_workers and (task := self.work.next()) is not None:
            self._waiting.append(RemainingTask(task))
        return bool(self._waiting) or any(worker.task is not None for worker in self._workers)

    def _start_and_assign(self) -> None:
        for worker in self._workers:
            # Only when it has started: its imports take seconds, which no case is to pay for.
            if worker.is_ready and worker.task is None:
                self._assign(worker)
        idle = [worker for worker in self._workers if worker.task is None]
        # Once a process was lost, one more is kept ready: the next loss then costs no wait.
        spare = int(self.n_lost > 0)
        lacks_fresh = sum(rest.fresh for rest in self._waiting) > sum(not worker.n_tasks for worker in idle)
        if not lacks_fresh and len(idle) >= len(self._waiting) + spare:
            return
        if len(self._workers) >= self._n_workers + spare:
            used = [worker for worker in idle if worker.n_tasks]
            if not (lacks_fresh and used):
                return
            self._remove(used[0])
        worker = WorkerProcess(self._entry, self._settings)
        self._workers.append(worker)
        self._selector.register(worker, selectors.EVENT_READ, worker)

    def _assign(self, worker: WorkerProcess) -> None:
        # A spare process must not run a task as well: the user named the number of processes.
        if sum(w.task is not None for w in self._workers) >= self._n_workers:
            return
        for at, rest in enumerate(self._waiting):
            if not rest.fresh or not worker.n_tasks:
                del self._waiting[at]
                worker.begin(rest.task, self.work.line(rest.task))
                return

    def _remove(self, worker: WorkerProcess) -> None:
        self._workers.remove(worker)
        self._selector.unregister(worker)
        worker.end()

    def _receive(self, worker: WorkerProcess) -> None:
        # Messages before the end: the last ones say which case ended the process.
        lines, closed = worker.read()
        for line in lines:
            self._read(worker, line)
        if closed:
            self._died(worker)

    def _read(self, worker: WorkerProcess, line: Any) -> None:
        if worker.task is None:
            if "ready" in line:
                worker.is_ready, self._failed_starts = True, 0
                worker.first_bytes = worker.memory_bytes()
            elif "broken" in line:
                self._failed_start(worker, ShadowrunError(line["broken"], slug=line["slug"]))
        elif isinstance(line, dict) and "end" in line:
            task, worker.task = worker.task, None
            self.work.ended(task)
            # What libraries keep of cases adds up.
            if worker.memory_bytes() - worker.first_bytes > self._limits.n_bytes // 2:
                self._remove(worker)
        elif isinstance(line, dict) and "lost" in line:
            worker.lost = line["lost"]
        else:
            self.work.receive(worker.task, line)

    def _enforce_limits(self, worker: WorkerProcess) -> None:
        """Kill a worker whose case exceeds a limit."""
        if not worker.is_ready:
            if time.monotonic() - worker.started > _START_LIMIT_S:
                self._remove(worker)
                raise PlatformError(f"A worker was not ready within {_START_LIMIT_S:g} s.", slug="no-worker")
            return
        if worker.has_exited:
            for line in worker.drain():
                self._read(worker, line)
            self._died(worker)
            return
        if worker.task is None:
            return
        step = worker.step
        took = time.monotonic() - step.since
        worker.kill_children_above(self._limits.n_bytes)
        worker.forget_printed()
        grown = worker.memory_bytes() - step.base_bytes
        # Between cases the worker generates inputs: that time does not count against the target.
        seconds = self._limits.seconds if step.case is not None else max(self._limits.seconds, _START_LIMIT_S)
        if grown > self._limits.n_bytes:  # before the time: a case that exhausts memory is slow too
            limit = f"more than {self._limits.n_bytes / 2**30:.3g} GiB"
            self._replace(worker, WorkerFailure(FailureKind.OUT_OF_MEMORY, limit, "", step))
        elif took > seconds:
            memory = f"it had taken {grown / 2**30:.2g} GiB by then" if grown > _MUCH_MEMORY else ""
            self._replace(worker, WorkerFailure(FailureKind.TIMEOUT, f"no end within {seconds:g} s", memory, step))

    def _died(self, worker: WorkerProcess) -> None:
        if worker not in self._workers:
            return
        how = worker.exit_reason()
        if not worker.is_ready:
            text = f"A worker did not start ({how}): {worker.stderr_tail() or 'it wrote nothing'}."
            self._failed_start(worker, PlatformError(text, slug="no-worker"))
        elif worker.lost:
            self._replace(worker, WorkerFailure(FailureKind.DEVICE, worker.lost, "", worker.step))
        else:
            self._replace(worker, WorkerFailure(FailureKind.CRASH, how, worker.stderr_tail(), worker.step))

    def _failed_start(self, worker: WorkerProcess, error: ShadowrunError) -> None:
        self._remove(worker)
        self._failed_starts += 1
        # A device that was lost may need the command before any process can use it.
        if not self._reset_command or not self.n_lost or self._failed_starts >= _STARTS:
            raise error
        self._reset()

    def _reset(self) -> None:
        if not self._reset_command:
            return
        text = ""
        try:
            done = subprocess.run(  # noqa: S603 - the user's own command
                self._reset_command, check=False, timeout=_RESET_LIMIT_S, capture_output=True, stdin=subprocess.DEVNULL
            )
            if done.returncode:
                tail = done.stderr.decode(errors="replace").strip().splitlines()
                text = f"exit status {done.returncode}: {tail[-1][:200] if tail else 'it wrote nothing'}"
        except (OSError, subprocess.TimeoutExpired) as error:
            text = str(error)
        if text:
            raise PlatformError(
                f"--reset-command {' '.join(self._reset_command)!r} failed ({text}): the device is lost. What was run "
                "is kept; resume when the device answers again.",
                slug="reset-failed",
            )

    def _replace(self, worker: WorkerProcess, failure: WorkerFailure) -> None:
        """Remove a worker, and queue the rest of its task."""
        worker.kill()
        # Verdicts of earlier cases may still be in its pipe.
        for line in worker.drain():
            self._read(worker, line)
        task = worker.task
        if worker in self._workers:
            self._remove(worker)
        self.n_lost += 1
        if task is None:
            self._reset_after(failure)
            return
        rest = self.work.lost(task, failure)
        if rest is not None:
            self._waiting.appendleft(rest)
        self._reset_after(failure)

    def _reset_after(self, failure: WorkerFailure) -> None:
        if self._resets_always or failure.kind is FailureKind.DEVICE:
            self._reset()
