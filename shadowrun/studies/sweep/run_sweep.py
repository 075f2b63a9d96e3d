"""A whole sweep: list its tasks, run the remaining cases in worker processes, and write the coverage file."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import sys
import time
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shadowrun.errors import DataFileError, UsageError
from shadowrun.studies.isolation.pool import Pool, RemainingTask
from shadowrun.studies.isolation.process import refuse_without_processes
from shadowrun.studies.shards import Shard
from shadowrun.studies.sweep.cases import ANY_DTYPE, PARTS, Case, CaseFinding, CaseOutcome, Kind, Part, Task
from shadowrun.studies.sweep.coverage_file import ALL, CoverageFile, SweepInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from shadowrun.studies.isolation.pool import Limits, WorkerFailure

    Calls = Mapping[tuple[str, str], list[str]]

__all__ = ["DTYPES", "ENTRY", "Plan", "SweepRequest", "SweepWork", "plan", "sweep"]

DTYPES = ("float32", "bfloat16", "float16", "float64", "complex64", "int64", "int32", "bool")
"""Dtypes that a sweep supports."""


@dataclass(frozen=True, slots=True)
class SweepRequest:
    """The options of a sweep.

    Attributes:
        target, ref: Platform specs.
        ops: Glob patterns of operators; empty for all.
        dtypes: Of `DTYPES`.
        parts: Parts to run.
        samples: Limit for each operator, dtype and part; None for all.
        seed: Seed of the sample inputs.
        source: Data file whose calls to sweep instead of torch's database.
        flaws: Flaws of the simulated target; None if it is not simulated.
        reset_command: Brings the device back; run after each case that ended its process.
        shard: Its part: each has every so-manieth task.
        seconds: After these no further task is started; None for no limit.
    """

    target: str
    ref: str = "cpu"
    ops: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("float32",)
    parts: tuple[Part, ...] = PARTS
    samples: int | None = None
    seed: int = 0
    source: Path | None = None
    flaws: tuple[str, ...] | None = None
    reset_command: tuple[str, ...] = ()
    shard: Shard = Shard()  # noqa: RUF009 - frozen
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The tasks of a sweep.

    Attributes:
        tasks: Operators and dtypes with their parts.
        calls: Recorded calls, if those are swept.
    """

    tasks: tuple[Task, ...]
    calls: Calls | None = None


def plan(request: SweepRequest) -> Plan:
    """List the tasks of a sweep.

    Raises:
        UsageError: No operator matches, or torch's database cannot be imported.
        DataFileError: The data file cannot be read.
    """
    if request.source is not None:
        # Imported here: torch takes seconds, and what else this module needs works without it.
        from shadowrun.studies.sweep.recorded_calls import read_calls

        calls = {key: texts[: request.samples] for key, texts in read_calls(request.source).items()}
        tasks = [Task(op, dtype, (Part.FORWARD,)) for op, dtype in calls if _fits(op, request.ops)]
    else:
        calls = None
        tasks = list(_tasks_of_database(request))
    index, of = request.shard.index, request.shard.of
    if tasks and not tasks[index::of]:
        raise UsageError(
            f"--shard {index + 1}/{of}: there are {len(tasks)} tasks only, so this shard has none.",
            slug="sweep-nothing",
        )
    tasks = tasks[index::of]
    if not tasks:
        raise UsageError(
            f"No operator fits --ops {','.join(request.ops) or '*'} in {', '.join(request.dtypes)}: "
            "`shadowrun sweep --list` names them.",
            slug="sweep-nothing",
        )
    return Plan(tuple(tasks), calls)


def _open_tasks(planned: Plan, file: CoverageFile, limit: int, on_task: Callable[[Task], None]) -> Iterator[Task]:
    """Tasks that have parts left to run; `on_task` gets the others."""
    # The last start may have abandoned parts on a busy machine.
    file.forget_given_up()
    for task in _remaining(planned.tasks, file, limit):
        if task.parts:
            yield task
        else:
            on_task(task)


def _run(pool: Pool[Task], work: SweepWork) -> int:
    """Run all tasks of a pool, and close it; returns how many are open."""
    with contextlib.closing(pool):
        pool.run()
    return work.n_given_up + work.n_left


def _worker_settings(request: SweepRequest, planned: Plan, jobs: int, limits: Limits) -> dict[str, Any]:
    return {
        "target": request.target,
        "ref": request.ref,
        "flaws": request.flaws,
        "database": planned.calls is None,
        "seed": request.seed,
        "samples": request.samples,
        # More threads than processors slow each other down, and cases then time out.
        "threads": max(1, _n_processors() // jobs),
        # Half: the process of a platform must time out before the worker that waits for it is killed.
        "call_limit_s": limits.seconds / 2,
    }


def sweep(
    request: SweepRequest,
    planned: Plan,
    path: Path,
    *,
    jobs: int,
    limits: Limits,
    on_result: Callable[[Case, CaseOutcome], None],
    on_task: Callable[[Task], None],
) -> bool:
    """Run the cases that are not in the file.

    Args:
        request: The options.
        planned: The tasks.
        path: Coverage file.
        jobs: Worker processes.
        limits: Limits of a case.
        on_result: Called with each case.
        on_task: Called with each finished task, also with those that an earlier start finished.

    Returns:
        True if all tasks ended; False after Ctrl-C.

    Raises:
        PlatformError: A platform is absent, or this system does not support the worker processes.
        DataFileError: The file cannot be written, or holds another sweep.
    """
    refuse_without_processes("sweep")
    file = CoverageFile.begin(path, _info(request))
    limit = ALL if request.samples is None else request.samples
    began, cpu = time.monotonic(), _cpu_s()
    # Until the pool has returned: an exception leaves a file that says that it is not complete.
    complete, n_open = False, 0

    def result(case: Case, outcome: CaseOutcome) -> None:
        file.add(case, outcome)
        on_result(case, outcome)

    def finish(task: Task, part: Part, n_duplicates: int) -> None:
        file.finish(task.operator, task.dtype, part, limit, n_duplicates)

    try:
        tasks = list(_open_tasks(planned, file, limit, on_task))
        if tasks:
            settings = _worker_settings(request, planned, jobs, limits)
            until = math.inf if request.seconds is None else began + request.seconds
            work = SweepWork(tasks, planned.calls, result, finish, on_task, until)
            pool: Pool[Task] = Pool(ENTRY, settings, jobs, limits, work, request.reset_command, resets_always=True)
            n_open = _run(pool, work)
        complete = not n_open
    # What was run is in the file: the same command resumes the sweep.
    except KeyboardInterrupt:
        return False
    finally:
        with contextlib.suppress(DataFileError):  # keep the first exception
            file.add_time(time.monotonic() - began, _cpu_s() - cpu, complete=complete)
        file.close()
    return True


def _tasks_of_database(request: SweepRequest) -> Iterable[Task]:
    from shadowrun.studies.sweep import opinfo
    from shadowrun.studies.sweep.case_programs import applies

    for name, info in opinfo.database().items():
        if not _fits(name, request.ops):
            continue
        has, has_gradients = opinfo.dtypes(info), opinfo.backward_dtypes(info)
        parts = [part for part in request.parts if part is not Part.INVALID and applies(info, part)]
        for dtype in request.dtypes:
            if dtype in has:
                own = tuple(p for p in parts if p is not Part.BACKWARD or dtype in has_gradients)
                if own:
                    yield Task(name, dtype, own)
        if Part.INVALID in request.parts and applies(info, Part.INVALID):
            yield Task(name, ANY_DTYPE, (Part.INVALID,))


def _remaining(tasks: Iterable[Task], file: CoverageFile, limit: int) -> Iterable[Task]:
    finished, done = file.finished(), file.done()

    def is_open(task: Task, part: Part) -> bool:
        under = finished.get((task.operator, task.dtype, part))
        # A part that ended under a lower limit of samples has more cases under a higher limit.
        return under is None or (under != ALL and (limit == ALL or limit > under))

    for task in tasks:
        parts = tuple(part for part in task.parts if is_open(task, part))
        known = done.get((task.operator, task.dtype), set())
        yield Task(task.operator, task.dtype, parts, frozenset(known))


def _fits(name: str, patterns: tuple[str, ...]) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def _info(request: SweepRequest) -> SweepInfo:
    from shadowrun.platforms import resolve
    from shadowrun.platforms.fingerprint import fingerprint, versions

    facts: list[dict[str, Any]] = []
    for spec in (request.target, request.ref):
        platform = resolve(spec)
        facts.append(fingerprint(platform))
        platform.stop()  # each worker starts its own
    return SweepInfo(
        target=f"{resolve(request.target)}{_flaws(request)}",
        ref=str(resolve(request.ref)),
        seed=request.seed,
        source="opinfo" if request.source is None else request.source.name,
        target_fingerprint=facts[0],
        ref_fingerprint=facts[1],
        versions=versions(),
        argv=(Path(sys.argv[0]).name, *sys.argv[1:]) if sys.argv else (),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _flaws(request: SweepRequest) -> str:
    if not request.flaws:
        return ""
    from shadowrun.sim import PRESETS

    preset = next((name for name, flaws in PRESETS.items() if flaws == request.flaws), "")
    return f" (preset {preset})" if preset else f" ({', '.join(request.flaws)})"


def _n_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_s() -> float:
    """Processor time of this process and its finished children."""
    import resource  # absent on Windows, where `refuse_without_processes` has raised

    own, others = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime


ENTRY: Final = "shadowrun.studies.sweep.worker:start"
# Workers that may die in one part of an operator.
_MAX_DEATHS: Final = 3


class SweepWork:
    """Tasks, and what is known of those in hand. A death of a worker process is the outcome of a case.

    Args:
        tasks: What to run.
        calls: Recorded calls by operator and dtype, if those are swept.
        on_result: Called with each case and its outcome.
        on_part: Called when all cases of a part were run: task, part, number of duplicates.
        on_task: Called when a task has ended.
        until: By `time.monotonic`: no task is started after it.

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
        until: float = math.inf,
    ) -> None:
        self._until = until
        self._tasks = deque(tasks)
        self._calls = calls
        self._on_result, self._on_part, self._on_task = on_result, on_part, on_task
        self._parts: dict[Task, set[Part]] = {}
        self._done: dict[Task, set[tuple[Part, int]]] = {}
        self._deaths: dict[tuple[str, str, Part], int] = {}
        self.n_given_up = 0

    def next(self) -> Task | None:
        """The next task."""
        return self._tasks.popleft() if self._tasks and time.monotonic() < self._until else None

    @property
    def n_left(self) -> int:
        """Tasks that were not started."""
        return len(self._tasks)

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
        self._on_result(Case(task.operator, task.dtype, part, sample), CaseOutcome.from_findings(findings, inputs))

    def _give_up(self, task: Task, part: Part, finding: CaseFinding) -> None:
        """Abandon a part for this start: each of its hundreds of samples could take the whole time limit."""
        words = f"{_MAX_DEATHS} processes ended in it: the rest of this part was not tried; the same command resumes it"
        outcome = CaseOutcome((CaseFinding(Kind.UNVERIFIED, explanation=words, message=finding.explanation),))
        # No case has the sample -1: readers know the note by it.
        self._on_result(Case(task.operator, task.dtype, part, -1), outcome)
        self.n_given_up += 1
