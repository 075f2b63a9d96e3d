"""A B A B: the plain program and the program under a tool alternate in one process.

A machine whose speed drifts slows neighbours equally, so the figure is the median of their ratios. Processor time is
that of the whole process, so it includes other threads of a tool. Peak memory is measured in separate turns, because
returning memory to the system before each turn costs time.
"""

from __future__ import annotations

import ctypes
import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tools import Tool
    from workloads import Program, Workload

__all__ = ["Timing", "measure", "peak_mb", "summary", "timed", "turns"]

_CLEAR, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
_MEMORY_ROUNDS = 3
_MAX_S, _MIN_ROUNDS = 10.0, 3
"""For a tool that takes a hundred times as long as the plain program, fewer turns are enough."""
_ROUNDS_OF_MEAN, _MAX_S_OF_MEAN = 10, 90.0
"""Where one step in fifty takes ten times as long, and only the mean counts, more of them are needed."""
_MB = 1e6


@dataclass(frozen=True)
class Timing:
    """Seconds for one run: of the process on the processors, of this thread, and on the wall."""

    cpu: float
    thread: float
    wall: float


def timed(
    step: Callable[[], object],
    n: int,
    before: Callable[[], object] | None = None,
    after: Callable[[], object] | None = None,
) -> Timing:
    """Run `n` times; `before` and `after` once, which is what a tool has to begin or puts off."""
    cpu, thread, wall = time.process_time(), time.thread_time(), time.perf_counter()
    if before is not None:
        before()
    for _ in range(n):
        step()
    if after is not None:
        after()
    return Timing((time.process_time() - cpu) / n, (time.thread_time() - thread) / n, (time.perf_counter() - wall) / n)


def measure(workload: Workload, program: Program, tool: Tool, rounds: int) -> dict[str, Any]:
    """Ratios to the plain program, what a run costs more, and peak memory above the plain program's."""
    n = workload.inner * tool.longer
    step = program.step
    try:
        with tool.enter() as hooks:
            run = hooks.step_of(step, trains=workload.trains)
            for _ in range(tool.warm_up):
                run()
        pairs, firsts = [], []
        n_turns, max_s = (rounds * _ROUNDS_OF_MEAN, _MAX_S_OF_MEAN) if tool.by_mean else (rounds, _MAX_S)
        for _ in turns(n_turns, max_s):
            plain = timed(step, n)
            with tool.enter() as hooks:
                run = hooks.step_of(step, trains=workload.trains)
                if tool.starts_anew:
                    firsts.append(timed(run, 1, after=hooks.after).cpu / plain.cpu)
                pairs.append((plain, timed(run, n, after=hooks.after)))
        found = summary(pairs, mean=tool.by_mean)
        if firsts:
            found["first_step_cpu"] = statistics.median(firsts)
        found["peak_mb_above_plain"] = _memory(workload, step, tool, min(rounds, _MEMORY_ROUNDS))
        if tool.share is not None:
            found["verified_share"] = tool.share()
        if tool.problems is not None and (problems := tool.problems()):
            found["problems"] = problems
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return found


def turns(rounds: int, max_s: float = _MAX_S) -> Iterator[int]:
    """Numbers of the turns, fewer than `rounds` where they take too long."""
    latest = time.perf_counter() + max_s
    for k in range(rounds):
        if k >= _MIN_ROUNDS and time.perf_counter() > latest:
            return
        yield k


def summary(pairs: Sequence[tuple[Timing, Timing]], *, mean: bool = False) -> dict[str, Any]:
    """Figures from neighbours; by their sums where only the mean over many steps means something."""
    found: dict[str, Any] = {"rounds": len(pairs)}
    for clock in ("cpu", "thread", "wall"):
        plains = [getattr(a, clock) for a, _ in pairs]
        theirs = [getattr(b, clock) for _, b in pairs]
        ratios = [b / a if a else math.nan for a, b in zip(plains, theirs, strict=True)]
        added = [b - a for a, b in zip(plains, theirs, strict=True)]
        found[clock] = sum(theirs) / sum(plains) if mean else statistics.median(ratios)
        found[f"added_{clock}_us"] = 1e6 * (statistics.mean(added) if mean else statistics.median(added))
        found[f"plain_{clock}_ms"] = 1e3 * statistics.median(plains)
    return found


def _memory(workload: Workload, step: Callable[[], object], tool: Tool, rounds: int) -> float | None:
    above = []
    for _ in range(rounds):
        plain = peak_mb(step)
        with tool.enter() as hooks:
            theirs = peak_mb(hooks.step_of(step, trains=workload.trains))
        if plain is None or theirs is None:
            return None
        above.append(theirs - plain)
    return round(statistics.median(above), 2)


def peak_mb(step: Callable[[], object]) -> float | None:
    """Peak of resident memory during a run, above what was resident before; None if not reported."""
    try:
        ctypes.CDLL(None).malloc_trim(0)  # else memory that an earlier run gave back would be there already
        _CLEAR.write_text("5", encoding="ascii")  # the peak begins anew
        before = _status_mb("VmRSS")
        step()
        return _status_mb("VmHWM") - before
    except (OSError, AttributeError, TypeError, StopIteration):  # another system
        return None


def _status_mb(key: str) -> float:
    lines = _STATUS.read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024 / _MB
