"""A pool of worker processes for the cases of a sweep.

`Pool` assigns tasks, enforces the limits of time and memory, and turns a crash, a time-out or exhausted memory into the
outcome of the case. `WorkerProcess` is one process as the sweep controls it: start, tasks, messages, memory, end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shadowrun.errors import PlatformError, ShadowrunError
from shadowrun.studies.sweep.cases import Case, CaseFinding, CaseOutcome, Kind, Part, Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["Limits", "Pool", "Step", "WorkerProcess", "refuse_without_processes"]

_LOOK_S = 0.1  # interval of checks against the limits
# Against a worker that hangs at its start: its imports take seconds, and several workers import at once.
_START_LIMIT_S = 300.0
# A case that swaps is slow: from here on the message of a time-out has the memory too.
_MUCH_MEMORY = 1 << 28
_MAX_DEATHS = 3
"""Workers that may die in one part of an operator."""
# With the module path of this process: a worker has to find the same modules, those of `--import` too.
_START = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]);"
    "from shadowrun.studies.sweep.worker import main; main(json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))"
)
# The size of a pipe's buffer on Linux.
_PIECE = 1 << 16
_HAS_PIPES = os.name == "posix"


def refuse_without_processes() -> None:
    """Refuse a system whose child processes inherit no pipes.

    Raises:
        PlatformError: The system is Windows.
    """
    if not _HAS_PIPES:
        raise PlatformError(
            "A sweep runs in separate processes that inherit pipes, which only Linux and macOS support.",
            slug="no-worker",
        )


@dataclass(slots=True)
class Step:
    """Progress of a worker.

    Attributes:
        case: Part and sample of the current case; None between cases.
        inputs: Its inputs, printed.
        on_target: Whether it runs on the target; the reference has run it.
        since: `time.monotonic` when it began.
        base_bytes: Memory of the process then.
    """

    case: tuple[Part, int] | None = None
    inputs: str = ""
    on_target: bool = False
    since: float = field(default_factory=time.monotonic)
    base_bytes: int = 0


class WorkerProcess:
    """One worker process.

    Args:
        settings: Arguments of `worker.main`.

    Attributes:
        task: Its current task; None while idle.
        step: Its progress in it.
        parts: Finished parts of the task.
        done: Finished cases of the task.
        is_ready: Whether it has started and imported everything.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.task: Task | None = None
        self.parts: set[Part] = set()
        self.done: set[tuple[Part, int]] = set()
        self.step = Step()
        self.is_ready = False
        self._buffer = b""
        # A file, not a pipe: a worker that prints much would wait for a reader.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        self._lines, writable = os.pipe()
        # The worker exits when this pipe closes, also if the sweep is killed and cannot clean up.
        lifeline, self._life = os.pipe()
        os.set_inheritable(self._life, False)
        command = [
            sys.executable,
            "-P",  # a file of the current folder must not shadow a module
            "-c",
            _START,
            json.dumps(sys.path),
            json.dumps(settings),
            str(writable),
            str(lifeline),
        ]
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                command,
                stdin=subprocess.PIPE,
                # Kernels and libraries print; messages have a pipe of their own.
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=(writable, lifeline),
            )
        finally:
            # The ends of the worker: while this process holds them, no pipe reports that the worker has ended.
            os.close(writable)
            os.close(lifeline)

    def fileno(self) -> int:
        """File descriptor of the pipe with its messages, for `selectors`."""
        return self._lines

    def begin(self, task: Task, calls: list[str] | None) -> None:
        """Send it a task."""
        self.task, self.parts, self.done, self.step = task, set(), set(), Step(base_bytes=self.memory_bytes())
        line = {
            "operator": task.operator,
            "dtype": task.dtype,
            "parts": task.parts,
            "done": sorted(task.done),
            "calls": calls,
        }
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died, which `read` reports
            self._process.stdin.write((json.dumps(line) + "\n").encode())
            self._process.stdin.flush()

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """New messages, and whether it has closed the pipe."""
        piece = os.read(self._lines, _PIECE)
        *lines, self._buffer = (self._buffer + piece).split(b"\n")
        return [json.loads(line) for line in lines], not piece

    def memory_bytes(self) -> int:
        """Resident memory; 0 where the system does not report it (Linux does)."""
        return _memory_bytes(self._process.pid)

    def kill_children_above(self, n_bytes: int) -> None:
        """Kill child processes (of platforms) that are larger; the worker reports which platform died."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        with contextlib.suppress(OSError, ValueError):
            for pid in map(int, children.read_text(encoding="ascii").split()):
                if _memory_bytes(pid) > n_bytes:
                    os.kill(pid, signal.SIGKILL)

    def exit_reason(self) -> str:
        """How it ended: ``signal 11 (SIGSEGV)``."""
        try:
            # The system closes the pipe before the exit status is there.
            status = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        if status >= 0:
            return f"exit status {status}"
        name = signal.Signals(-status).name if -status in set(signal.Signals) else "?"
        return f"signal {-status} ({name})"

    def stderr_tail(self) -> str:
        """The last line that it wrote to standard error."""
        self._errors.seek(0)
        lines = self._errors.read()[-4000:].decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else ""

    def end(self) -> None:
        """Kill it if it runs, and free its resources."""
        if self._lines < 0:
            return
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        os.close(self._lines)
        os.close(self._life)
        self._lines = -1
        self._errors.close()


def _memory_bytes(pid: int) -> int:
    try:
        # The second field is the resident memory, in pages.
        pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a case.

    Attributes:
        seconds: Wall time.
        n_bytes: Growth of its process; the whole size of the process of a platform.
    """

    seconds: float
    n_bytes: int


class Pool:
    """Runs tasks in worker processes.

    Args:
        settings: Arguments of `worker.main`.
        n_workers: Number of workers.
        limits: Limits of a case.
        calls: Recorded calls by operator and dtype, if those are swept.
        on_result: Called with each case and its outcome.
        on_part: Called when all cases of a part were run: task, part, number of duplicates.
        on_task: Called when a task has ended.

    Attributes:
        n_given_up: Parts of operators that were abandoned after too many dead workers.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        n_workers: int,
        limits: Limits,
        calls: Mapping[tuple[str, str], list[str]] | None,
        on_result: Callable[[Case, CaseOutcome], None],
        on_part: Callable[[Task, Part, int], None],
        on_task: Callable[[Task], None],
    ) -> None:
        self._settings = settings
        self._n_workers = n_workers
        self._limits = limits
        self._calls = calls
        self._on_result, self._on_part, self._on_task = on_result, on_part, on_task
        self._workers: list[WorkerProcess] = []
        self._waiting: deque[Task] = deque()
        self._selector = selectors.DefaultSelector()
        self._deaths: dict[tuple[str, str, Part], int] = {}
        self.n_given_up = 0

    def run(self, tasks: Iterable[Task]) -> None:
        """Run all tasks, and return when they have ended.

        Raises:
            ShadowrunError: A worker cannot be started, for example because a platform is absent.
        """
        self._waiting.extend(tasks)
        try:
            while self._waiting or any(worker.task is not None for worker in self._workers):
                self._start_and_assign()
                for key, _ in self._selector.select(_LOOK_S):
                    self._receive(key.data)
                for worker in list(self._workers):
                    # `_replace` removes workers, hence the copy of the list.
                    self._enforce_limits(worker)
        finally:
            for worker in list(self._workers):
                self._remove(worker)
            self._selector.close()

    def _start_and_assign(self) -> None:
        while self._waiting and len(self._workers) < min(self._n_workers, len(self._workers) + len(self._waiting)):
            worker = WorkerProcess(self._settings)
            self._workers.append(worker)
            self._selector.register(worker, selectors.EVENT_READ, worker)
        for worker in self._workers:
            if worker.is_ready and worker.task is None and self._waiting:
                # Only when it has started: its imports take seconds, which no case is to pay for.
                task = self._waiting.popleft()
                worker.begin(task, None if self._calls is None else self._calls[task.operator, task.dtype])

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

    def _read(self, worker: WorkerProcess, line: dict[str, Any]) -> None:
        task = worker.task
        if "ready" in line:
            worker.is_ready = True
        elif "broken" in line:
            raise ShadowrunError(line["broken"], slug=line["slug"])
        elif task is None:
            return
        elif "case" in line:
            part, sample = line["case"]
            # The base is measured per case: memory that a worker keeps from earlier cases must not count.
            worker.step = Step((Part(part), sample), line["inputs"], base_bytes=worker.memory_bytes())
        elif "target" in line:
            worker.step.on_target = True
        elif "findings" in line:
            if line["findings"] is not None:
                self._result(worker, [CaseFinding(Kind(kind), *rest) for kind, *rest in line["findings"]])
            worker.step = Step(base_bytes=worker.step.base_bytes)
        elif "part" in line:
            worker.parts.add(Part(line["part"]))
            self._on_part(task, Part(line["part"]), line["duplicates"])
        elif "task" in line:
            worker.task = None
            self._on_task(task)

    def _result(self, worker: WorkerProcess, findings: list[CaseFinding]) -> None:
        task, case = worker.task, worker.step.case
        assert task is not None
        assert case is not None
        worker.done.add(case)
        self._on_result(Case(task.operator, task.dtype, *case), CaseOutcome.of(findings, worker.step.inputs))

    def _enforce_limits(self, worker: WorkerProcess) -> None:
        """Kill a worker whose case exceeds a limit."""
        step = worker.step
        took = time.monotonic() - step.since
        if not worker.is_ready:
            if took > _START_LIMIT_S:
                self._remove(worker)
                raise PlatformError(f"A worker was not ready within {_START_LIMIT_S:g} s.", slug="no-worker")
            return
        if worker.task is None:
            return
        worker.kill_children_above(self._limits.n_bytes)
        grown = worker.memory_bytes() - step.base_bytes
        # Between cases the worker generates inputs: that time does not count against the target.
        seconds = self._limits.seconds if step.case is not None else max(self._limits.seconds, _START_LIMIT_S)
        if grown > self._limits.n_bytes:  # before the time: a case that exhausts memory is slow too
            limit = f"more than {self._limits.n_bytes / 2**30:.3g} GiB"
            self._replace(worker, CaseFinding(Kind.OUT_OF_MEMORY, explanation=limit))
        elif took > seconds:
            memory = f"it had taken {grown / 2**30:.2g} GiB by then" if grown > _MUCH_MEMORY else ""
            self._replace(worker, CaseFinding(Kind.TIMEOUT, explanation=f"no end within {seconds:g} s", message=memory))

    def _died(self, worker: WorkerProcess) -> None:
        how = worker.exit_reason()
        if not worker.is_ready:
            text = f"A worker of the sweep did not start ({how}): {worker.stderr_tail() or 'it wrote nothing'}."
            self._remove(worker)
            raise PlatformError(text, slug="no-worker")
        self._replace(worker, CaseFinding(Kind.CRASH, explanation=how, message=worker.stderr_tail()))

    def _replace(self, worker: WorkerProcess, finding: CaseFinding) -> None:
        """Remove a worker: record the outcome of its current case, and queue the rest of its task."""
        task, step = worker.task, worker.step
        if task is not None and step.case is not None:
            # Until the reference has run the case, nothing is known against the target.
            if not step.on_target:
                words = f"on the reference: {finding.kind}, {finding.explanation}"
                finding = CaseFinding(Kind.HARNESS, explanation=words, message=finding.message)
            self._result(worker, [finding])
        self._remove(worker)
        if task is None:
            return
        rest = tuple(part for part in task.parts if part not in worker.parts)
        if rest:  # parts end in order, so the worker died in the first of these
            key = task.operator, task.dtype, rest[0]
            self._deaths[key] = self._deaths.get(key, 0) + 1
            if self._deaths[key] >= _MAX_DEATHS:
                self._give_up(task, rest[0], finding)
                rest = rest[1:]
        if rest:
            self._waiting.appendleft(dataclasses.replace(task, parts=rest, done=task.done | worker.done))
        else:
            self._on_task(task)

    def _give_up(self, task: Task, part: Part, finding: CaseFinding) -> None:
        """Abandon a part for this start: each of its hundreds of samples could take the whole time limit."""
        words = f"{_MAX_DEATHS} processes ended in it: the rest of this part was not tried; the same command resumes it"
        outcome = CaseOutcome((CaseFinding(Kind.UNVERIFIED, explanation=words, message=finding.explanation),))
        # No case has the sample -1: readers know the note by it.
        self._on_result(Case(task.operator, task.dtype, part, -1), outcome)
        self.n_given_up += 1
