"""Keeps worker processes busy, and makes a result of a crash, a hang and a case that takes all memory."""

from __future__ import annotations

import dataclasses
import selectors
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from shadowrun.errors import PlatformError, ShadowrunError
from shadowrun.sweep.cases import Case, Part, Task
from shadowrun.sweep.outcome import Finding, Kind, Outcome
from shadowrun.sweep.process import Step, WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["Limits", "Pool"]

_LOOK_S = 0.1
_START_LIMIT_S = 300.0
_MUCH_MEMORY = 1 << 28
_MOST_DEATHS = 3
"""Workers that a part of an operator may cost."""


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What a case may take.

    Attributes:
        seconds: Of wall time.
        n_bytes: By which it may enlarge its process; all that a platform's own process may hold.
    """

    seconds: float
    n_bytes: int


class Pool:
    """Runs tasks in worker processes.

    Args:
        settings: What each worker is told (`worker.main`).
        n_workers: How many.
        limits: What a case may take.
        calls: Recorded calls by operator and dtype, where those are swept.
        on_result: Called with each case and its outcome.
        on_part: Called when all cases of a part were run: task, part, number of duplicates.
        on_task: Called when a task has ended.

    Attributes:
        n_given_up: Parts of operators that cost so many processes that the rest of them was not tried.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        n_workers: int,
        limits: Limits,
        calls: Mapping[tuple[str, str], list[str]] | None,
        on_result: Callable[[Case, Outcome], None],
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
        """Run all tasks; returns when they have ended.

        Raises:
            ShadowrunError: A worker cannot be started: a platform that is absent, for instance.
        """
        self._waiting.extend(tasks)
        try:
            while self._waiting or any(worker.task is not None for worker in self._workers):
                self._employ()
                for key, _ in self._selector.select(_LOOK_S):
                    self._listen(key.data)
                for worker in list(self._workers):
                    self._watch(worker)
        finally:
            for worker in list(self._workers):
                self._dismiss(worker)
            self._selector.close()

    def _employ(self) -> None:
        while self._waiting and len(self._workers) < min(self._n_workers, len(self._workers) + len(self._waiting)):
            worker = WorkerProcess(self._settings)
            self._workers.append(worker)
            self._selector.register(worker, selectors.EVENT_READ, worker)
        for worker in self._workers:
            if worker.is_ready and worker.task is None and self._waiting:
                task = self._waiting.popleft()
                worker.begin(task, None if self._calls is None else self._calls[task.operator, task.dtype])

    def _dismiss(self, worker: WorkerProcess) -> None:
        self._workers.remove(worker)
        self._selector.unregister(worker)
        worker.end()

    def _listen(self, worker: WorkerProcess) -> None:
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
            worker.step = Step((Part(part), sample), line["inputs"], base_bytes=worker.memory_bytes())
        elif "target" in line:
            worker.step.on_target = True
        elif "findings" in line:
            if line["findings"] is not None:
                self._result(worker, [Finding(Kind(kind), *rest) for kind, *rest in line["findings"]])
            worker.step = Step(base_bytes=worker.step.base_bytes)
        elif "part" in line:
            worker.parts.add(Part(line["part"]))
            self._on_part(task, Part(line["part"]), line["duplicates"])
        elif "task" in line:
            worker.task = None
            self._on_task(task)

    def _result(self, worker: WorkerProcess, findings: list[Finding]) -> None:
        task, case = worker.task, worker.step.case
        assert task is not None
        assert case is not None
        worker.done.add(case)
        self._on_result(Case(task.operator, task.dtype, *case), Outcome.of(findings, worker.step.inputs))

    def _watch(self, worker: WorkerProcess) -> None:
        """End a worker whose case takes too long or too much."""
        step = worker.step
        took = time.monotonic() - step.since
        if not worker.is_ready:
            if took > _START_LIMIT_S:
                self._dismiss(worker)
                raise PlatformError(f"A worker was not ready within {_START_LIMIT_S:g} s.", slug="no-worker")
            return
        if worker.task is None:
            return
        worker.end_greater(self._limits.n_bytes)
        grown = worker.memory_bytes() - step.base_bytes
        # Between cases inputs are made, which is none of the target's business: a case has its time for itself.
        seconds = self._limits.seconds if step.case is not None else max(self._limits.seconds, _START_LIMIT_S)
        if grown > self._limits.n_bytes:  # first: who takes all memory takes long over it
            limit = f"more than {self._limits.n_bytes / 2**30:.3g} GiB"
            self._lost(worker, Finding(Kind.OUT_OF_MEMORY, explanation=limit))
        elif took > seconds:
            meanwhile = f"it had taken {grown / 2**30:.2g} GiB by then" if grown > _MUCH_MEMORY else ""
            self._lost(worker, Finding(Kind.TIMEOUT, explanation=f"no end within {seconds:g} s", message=meanwhile))

    def _died(self, worker: WorkerProcess) -> None:
        how = worker.obituary()
        if not worker.is_ready:
            text = f"A worker of the sweep did not start ({how}): {worker.last_words() or 'it wrote nothing'}."
            self._dismiss(worker)
            raise PlatformError(text, slug="no-worker")
        self._lost(worker, Finding(Kind.CRASH, explanation=how, message=worker.last_words()))

    def _lost(self, worker: WorkerProcess, finding: Finding) -> None:
        """A worker has to go: the case in hand gets its outcome, and the rest of its task another worker."""
        task, step = worker.task, worker.step
        if task is not None and step.case is not None:
            if not step.on_target:
                words = f"on the reference: {finding.kind}, {finding.explanation}"
                finding = Finding(Kind.HARNESS, explanation=words, message=finding.message)
            self._result(worker, [finding])
        self._dismiss(worker)
        if task is None:
            return
        rest = tuple(part for part in task.parts if part not in worker.parts)
        if rest:
            key = task.operator, task.dtype, rest[0]
            self._deaths[key] = self._deaths.get(key, 0) + 1
            if self._deaths[key] >= _MOST_DEATHS:
                self._give_up(task, rest[0], finding)
                rest = rest[1:]
        if rest:
            self._waiting.appendleft(dataclasses.replace(task, parts=rest, done=task.done | worker.done))
        else:
            self._on_task(task)

    def _give_up(self, task: Task, part: Part, finding: Finding) -> None:
        """Each of hundreds of samples could hang: what is left of the part is left to the next start of the sweep."""
        words = f"{_MOST_DEATHS} processes ended in it: the rest of this part was not tried; the same command goes on"
        outcome = Outcome((Finding(Kind.UNVERIFIED, explanation=words, message=finding.explanation),))
        self._on_result(Case(task.operator, task.dtype, part, -1), outcome)
        self.n_given_up += 1
