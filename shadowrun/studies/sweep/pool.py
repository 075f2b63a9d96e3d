"""The tasks of a sweep, as a pool of worker processes runs them: a death of a process is the outcome of a case."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from shadowrun.studies.isolation.pool import RemainingTask
from shadowrun.studies.sweep.cases import Case, CaseFinding, CaseOutcome, Kind, Part, Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from shadowrun.studies.isolation.pool import WorkerFailure

__all__ = ["ENTRY", "SweepWork"]

ENTRY: Final = "shadowrun.studies.sweep.worker:start"
_MAX_DEATHS: Final = 3
"""Workers that may die in one part of an operator."""


class SweepWork:
    """Tasks, and what is known of those in hand.

    Args:
        tasks: What to run.
        calls: Recorded calls by operator and dtype, if those are swept.
        on_result: Called with each case and its outcome.
        on_part: Called when all cases of a part were run: task, part, number of duplicates.
        on_task: Called when a task has ended.

    Attributes:
        n_given_up: Parts of operators that were abandoned after too many dead workers.
    """

    def __init__(
        self,
        tasks: Iterable[Task],
        calls: Mapping[tuple[str, str], list[str]] | None,
        on_result: Callable[[Case, CaseOutcome], None],
        on_part: Callable[[Task, Part, int], None],
        on_task: Callable[[Task], None],
    ) -> None:
        self._tasks = deque(tasks)
        self._calls = calls
        self._on_result, self._on_part, self._on_task = on_result, on_part, on_task
        self._parts: dict[Task, set[Part]] = {}
        self._done: dict[Task, set[tuple[Part, int]]] = {}
        self._deaths: dict[tuple[str, str, Part], int] = {}
        self.n_given_up = 0

    def next(self) -> Task | None:
        """The next task."""
        return self._tasks.popleft() if self._tasks else None

    def line(self, task: Task) -> dict[str, Any]:
        """A task as its worker gets it."""
        self._parts[task], self._done[task] = set(), set()
        return {
            "operator": task.operator,
            "dtype": task.dtype,
            "parts": task.parts,
            "done": sorted(task.done),
            "calls": None if self._calls is None else self._calls[task.operator, task.dtype],
        }

    def receive(self, task: Task, line: dict[str, Any]) -> None:
        """The outcome of a case, or the end of a part."""
        if "part" in line:
            part = Part(line["part"])
            self._parts[task].add(part)
            self._on_part(task, part, line["duplicates"])
        else:
            self._result(task, line["case"], [CaseFinding(Kind(kind), *rest) for kind, *rest in line["findings"]])

    def ended(self, task: Task) -> None:
        """All of a task was run."""
        del self._parts[task], self._done[task]
        self._on_task(task)

    def lost(self, task: Task, failure: WorkerFailure) -> RemainingTask[Task] | None:
        """Record the outcome of the case in hand, and give what is left."""
        finding = CaseFinding(Kind(failure.kind), explanation=failure.explanation, message=failure.message)
        case = failure.step.case
        # The process may have ended after it had sent the outcome.
        if case is not None and (Part(case[0]), case[1]) not in self._done[task]:
            # Until the reference has run the case, nothing is known against the target.
            if not failure.step.on_target:
                words = f"on the reference: {finding.kind}, {finding.explanation}"
                finding = CaseFinding(Kind.HARNESS, explanation=words, message=finding.message)
            self._result(task, case, [finding])
        parts, done = self._parts.pop(task), self._done.pop(task)
        rest = tuple(part for part in task.parts if part not in parts)
        if rest:  # parts end in order, so the worker died in the first of these
            key = task.operator, task.dtype, rest[0]
            self._deaths[key] = self._deaths.get(key, 0) + 1
            if self._deaths[key] >= _MAX_DEATHS:
                self._give_up(task, rest[0], finding)
                rest = rest[1:]
        if rest:
            return RemainingTask(dataclasses.replace(task, parts=rest, done=task.done | done))
        self._on_task(task)
        return None

    def pause(self) -> bool:
        """A sweep runs to its end."""
        return False

    def _result(self, task: Task, case: tuple[str, int, str], findings: list[CaseFinding]) -> None:
        part, sample, inputs = Part(case[0]), case[1], case[2]
        self._done[task].add((part, sample))
        self._on_result(Case(task.operator, task.dtype, part, sample), CaseOutcome.of(findings, inputs))

    def _give_up(self, task: Task, part: Part, finding: CaseFinding) -> None:
        """Abandon a part for this start: each of its hundreds of samples could take the whole time limit."""
        words = f"{_MAX_DEATHS} processes ended in it: the rest of this part was not tried; the same command resumes it"
        outcome = CaseOutcome((CaseFinding(Kind.UNVERIFIED, explanation=words, message=finding.explanation),))
        # No case has the sample -1: readers know the note by it.
        self._on_result(Case(task.operator, task.dtype, part, -1), outcome)
        self.n_given_up += 1
