"""A whole sweep: list its tasks, run the remaining cases in worker processes, and write the coverage file."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shadowrun.errors import DataFileError, UsageError
from shadowrun.studies.isolation.pool import Pool
from shadowrun.studies.isolation.process import refuse_without_processes
from shadowrun.studies.sweep.cases import ANY_DTYPE, PARTS, Part, Task
from shadowrun.studies.sweep.coverage_file import ALL, CoverageFile, SweepInfo
from shadowrun.studies.sweep.pool import ENTRY, SweepWork

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from shadowrun.studies.isolation.pool import Limits
    from shadowrun.studies.sweep.cases import Case, CaseOutcome

    Calls = Mapping[tuple[str, str], list[str]]

__all__ = ["DTYPES", "Plan", "SweepRequest", "plan", "sweep"]

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
        from shadowrun.studies.sweep.recorded import read_calls

        calls = {key: texts[: request.samples] for key, texts in read_calls(request.source).items()}
        tasks = [Task(op, dtype, (Part.FORWARD,)) for op, dtype in calls if _fits(op, request.ops)]
    else:
        calls = None
        tasks = list(_tasks_of_database(request))
    if not tasks:
        raise UsageError(
            f"No operator fits --ops {','.join(request.ops) or '*'} in {', '.join(request.dtypes)}: "
            "`shadowrun sweep --list` names them.",
            slug="sweep-nothing",
        )
    return Plan(tuple(tasks), calls)


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
        tasks = []
        # The last start may have abandoned parts on a busy machine.
        file.forget_given_up()
        for task in _remaining(planned.tasks, file, limit):
            if task.parts:
                tasks.append(task)
            else:
                on_task(task)
        settings = {
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
        if tasks:
            work = SweepWork(tasks, planned.calls, result, finish, on_task)
            with contextlib.closing(Pool(ENTRY, settings, jobs, limits, work)) as pool:
                pool.run()
            n_open = work.n_given_up
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
    from shadowrun.studies.sweep.programs import applies

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
