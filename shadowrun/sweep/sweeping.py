"""A sweep from beginning to end: which cases there are, what of them is done, and the file that they go into."""

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
from shadowrun.sweep.cases import ANY_DTYPE, PARTS, Part, Task
from shadowrun.sweep.coveragefile import ALL, CoverageFile, SweepInfo
from shadowrun.sweep.pool import Limits, Pool
from shadowrun.sweep.process import refuse_without_processes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from shadowrun.sweep.cases import Case
    from shadowrun.sweep.outcome import Outcome

    Calls = Mapping[tuple[str, str], list[str]]

__all__ = ["DTYPES", "Plan", "Wish", "plan", "sweep"]

DTYPES = ("float32", "bfloat16", "float16", "float64", "complex64", "int64", "int32", "bool")
"""Dtypes that a sweep may be asked for."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What to sweep.

    Attributes:
        target, ref: Platform specs.
        ops: Glob patterns of operators; empty for all.
        dtypes: Of `DTYPES`.
        parts: Which.
        samples: Limit for each operator, dtype and part; None for all.
        seed: Of the sample inputs.
        source: Data file whose calls to sweep in the place of torch's database.
        flaws: Of the simulated target; None where it is not simulated.
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
    """What there is to do.

    Attributes:
        tasks: Operators and dtypes with their parts.
        calls: Recorded calls, where those are swept.
    """

    tasks: tuple[Task, ...]
    calls: Calls | None = None


def plan(wish: Wish) -> Plan:
    """List the tasks of a sweep.

    Raises:
        UsageError: No operator fits, or torch's database cannot be imported.
        DataFileError: The data file cannot be read.
    """
    if wish.source is not None:
        from shadowrun.sweep.recorded import read_calls

        calls = {key: found[: wish.samples] for key, found in read_calls(wish.source).items()}
        tasks = [Task(op, dtype, (Part.FORWARD,)) for op, dtype in calls if _fits(op, wish.ops)]
    else:
        calls = None
        tasks = list(_tasks_of_database(wish))
    if not tasks:
        raise UsageError(
            f"No operator fits --ops {','.join(wish.ops) or '*'} in {', '.join(wish.dtypes)}: "
            "`shadowrun sweep --list` names them.",
            slug="sweep-nothing",
        )
    return Plan(tuple(tasks), calls)


def sweep(
    wish: Wish,
    what: Plan,
    path: Path,
    *,
    jobs: int,
    limits: Limits,
    on_result: Callable[[Case, Outcome], None],
    on_task: Callable[[Task], None],
) -> bool:
    """Run what is not yet in the file.

    Args:
        wish: What to sweep.
        what: Its tasks.
        path: Coverage file.
        jobs: Worker processes.
        limits: What a case may take.
        on_result: Called with each case.
        on_task: Called with each task that ended, also with those that had ended before.

    Returns:
        Whether all was run; False after an interrupt.

    Raises:
        PlatformError: A platform is absent, or this system has no such processes.
        DataFileError: The file cannot be written, or holds another sweep.
    """
    refuse_without_processes()
    file = CoverageFile.begin(path, _info(wish))
    limit = ALL if wish.samples is None else wish.samples
    began, cpu = time.monotonic(), _cpu_s()
    complete = False

    def result(case: Case, outcome: Outcome) -> None:
        file.add(case, outcome)
        on_result(case, outcome)

    def finish(task: Task, part: Part, n_duplicates: int) -> None:
        file.finish(task.operator, task.dtype, part, limit, n_duplicates)

    try:
        tasks = []
        for task in _remaining(what.tasks, file, limit):
            if task.parts:
                tasks.append(task)
            else:
                on_task(task)
        settings = {
            "target": wish.target,
            "ref": wish.ref,
            "flaws": wish.flaws,
            "seed": wish.seed,
            "samples": wish.samples,
            "threads": max(1, _n_processors() // jobs),
            "call_limit_s": limits.seconds / 2,  # a platform's own process is ended before the worker that waits for it
        }
        if tasks:
            Pool(settings, jobs, limits, what.calls, result, finish, on_task).run(tasks)
        complete = True
    except KeyboardInterrupt:
        return False
    finally:
        with contextlib.suppress(DataFileError):  # what went wrong before is told
            file.add_time(time.monotonic() - began, _cpu_s() - cpu, complete=complete)
        file.close()
    return True


def _tasks_of_database(wish: Wish) -> Iterable[Task]:
    from shadowrun.sweep import opinfo
    from shadowrun.sweep.programs import applies

    for name, info in opinfo.database().items():
        if not _fits(name, wish.ops):
            continue
        has, has_gradients = opinfo.dtypes(info), opinfo.backward_dtypes(info)
        parts = [part for part in wish.parts if part is not Part.INVALID and applies(info, part)]
        for dtype in wish.dtypes:
            if dtype in has:
                own = tuple(p for p in parts if p is not Part.BACKWARD or dtype in has_gradients)
                if own:
                    yield Task(name, dtype, own)
        if Part.INVALID in wish.parts and applies(info, Part.INVALID):
            yield Task(name, ANY_DTYPE, (Part.INVALID,))


def _remaining(tasks: Iterable[Task], file: CoverageFile, limit: int) -> Iterable[Task]:
    finished, done = file.finished(), file.done()

    def is_open(task: Task, part: Part) -> bool:
        under = finished.get((task.operator, task.dtype, part))
        return under is None or (under != ALL and (limit == ALL or limit > under))

    for task in tasks:
        parts = tuple(part for part in task.parts if is_open(task, part))
        known = done.get((task.operator, task.dtype), set())
        yield Task(task.operator, task.dtype, parts, frozenset(known))


def _fits(name: str, patterns: tuple[str, ...]) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def _info(wish: Wish) -> SweepInfo:
    from shadowrun.platforms import resolve
    from shadowrun.platforms.fingerprint import fingerprint, versions

    facts: list[dict[str, Any]] = []
    for spec in (wish.target, wish.ref):
        platform = resolve(spec)
        facts.append(fingerprint(platform))
        platform.stop()
    return SweepInfo(
        target=f"{resolve(wish.target)}{_flaws(wish)}",
        ref=str(resolve(wish.ref)),
        seed=wish.seed,
        source="opinfo" if wish.source is None else wish.source.name,
        target_fingerprint=facts[0],
        ref_fingerprint=facts[1],
        versions=versions(),
        argv=(Path(sys.argv[0]).name, *sys.argv[1:]) if sys.argv else (),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _flaws(wish: Wish) -> str:
    if not wish.flaws:
        return ""
    from shadowrun.platforms.sim import PRESETS

    preset = next((name for name, flaws in PRESETS.items() if flaws == wish.flaws), "")
    return f" (preset {preset})" if preset else f" ({', '.join(wish.flaws)})"


def _n_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_s() -> float:
    """Processor time of this process and of those that it has waited for."""
    import resource  # where there is none (Windows), there are no workers either

    own, others = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime
