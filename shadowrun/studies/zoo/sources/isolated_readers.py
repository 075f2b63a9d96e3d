"""Candidates of an untrusted source: each candidate for a program is read and run in a worker process with limits.

One that crashes, hangs or takes all memory costs itself only.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from shadowrun.limits import at_most_free
from shadowrun.studies.isolation.pool import Limits, Pool
from shadowrun.studies.zoo.graph import to_json
from shadowrun.studies.zoo.sources.source import RUNS, checked, reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from shadowrun.studies.isolation.pool import RemainingTask, WorkerFailure
    from shadowrun.studies.isolation.worker_side import Channel
    from shadowrun.studies.zoo.graph import Graph
    from shadowrun.studies.zoo.sources.source import Collected

__all__ = ["READ", "Candidate", "IsolatedCalls", "caller", "candidates_below", "read_each", "worker"]

READ: Final = "read"
_SECONDS: Final = 300.0
_MEMORY: Final = 4 << 30


class Candidate(NamedTuple):
    """What may become a program.

    Attributes:
        name: Of the program.
        given: What a reader makes the graph of: anything that JSON has.
        n_calls: How often it was called.
    """

    name: str
    given: Any
    n_calls: int = 1


def candidates_below(root: Path, paths: Sequence[Path], wanted: Callable[[str], bool]) -> list[Candidate]:
    """Files or folders at or below `root` whose name, their path below it, is wanted."""
    names = [path.relative_to(root).as_posix() if path != root else path.absolute().name for path in paths]
    return [Candidate(name, str(path.absolute())) for name, path in zip(names, paths, strict=True) if wanted(name)]


def read_each(
    found: Collected,
    reader: Callable[[Any], Graph],
    candidates: Sequence[Candidate],
    on_progress: Callable[..., None],
    *,
    isolated: bool,
) -> None:
    """Make programs of candidates.

    Args:
        found: Gets them, and the reasons for what is left out.
        reader: A function of a module, which makes the graph of what a candidate is given.
        candidates: In order.
        on_progress: Called with done, total and name.
        isolated: In a worker process, where the system has those; else in this process, without limits.
    """
    if not (isolated and os.name == "posix"):
        for number, candidate in enumerate(candidates):
            on_progress(number, len(candidates), candidate.name)
            graph = found.try_step(READ, candidate.name, partial(reader, candidate.given))
            if graph is not None:
                found.add(candidate.name, graph, candidate.n_calls)
        return
    step = READ

    def receive(task: Candidate, line: Any) -> None:
        nonlocal step
        if "graph" in line:
            found.add_data(task.name, line["graph"], task.n_calls)
            step = READ
            return
        found.count_step(line["step"], task.name, line["why"])
        step = READ if line["why"] else RUNS

    def lost(task: Candidate, why: str) -> None:
        nonlocal step
        found.count_step(step, task.name, why)
        step = READ

    with contextlib.closing(_pool("worker", {"reader": _entry_of(reader)})) as pool:
        pool.work = _Work(candidates, on_progress, lambda task: {"given": task.given}, receive, lost)
        pool.run()


class IsolatedCalls:
    """Calls functions on candidates, each call in a worker process with limits; use it in a ``with`` block.

    Args:
        isolated: Where the system has processes; else in this process, without limits.
    """

    def __init__(self, *, isolated: bool) -> None:
        self._pool = _pool("caller", {}) if isolated and os.name == "posix" else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.close()

    def each(
        self,
        function: Callable[[Any], Any],
        candidates: Sequence[Candidate],
        given: Callable[[Candidate], Any],
        take: Callable[[Candidate, Any], None],
        leave_out: Callable[[Candidate, str], None],
        on_progress: Callable[..., None],
    ) -> None:
        """Call a function on each.

        Args:
            function: A function of a module; gets and returns what JSON has.
            candidates: In order.
            given: What the function gets, made when its turn comes.
            take: Gets what it returned.
            leave_out: Gets the reason where it raised, or where its process ended.
            on_progress: Called with done, total and name.
        """
        if self._pool is None:
            for number, candidate in enumerate(candidates):
                on_progress(number, len(candidates), candidate.name)
                try:
                    made = function(given(candidate))
                except Exception as error:
                    leave_out(candidate, reason_of(error))
                else:
                    take(candidate, made)
            return

        def receive(task: Candidate, line: Any) -> None:
            if "why" in line:
                leave_out(task, line["why"])
            else:
                take(task, line["made"])

        def line_of(task: Candidate) -> dict[str, Any]:
            return {"function": _entry_of(function), "given": given(task)}

        self._pool.work = _Work(candidates, on_progress, line_of, receive, leave_out)
        self._pool.run()


def _entry_of(function: Callable[..., Any]) -> str:
    # By name and not by pickle: what a worker is asked to do is JSON, which a hostile file cannot turn into a call.
    return f"{function.__module__}:{function.__name__}"


def _function_at(entry: str) -> Callable[[Any], Any]:
    module, _, name = entry.partition(":")
    found: Callable[[Any], Any] = getattr(importlib.import_module(module), name)
    return found


def _pool(name: str, settings: dict[str, Any]) -> Pool[Candidate]:
    # One process: the order of programs in a zoo is that of the candidates, and a crash names exactly one.
    return Pool(f"{__name__}:{name}", settings, 1, Limits(_SECONDS, at_most_free(_MEMORY)))


class _Work:
    """The candidates, as a pool runs them."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        on_progress: Callable[..., None],
        line_of: Callable[[Candidate], dict[str, Any]],
        receive: Callable[[Candidate, Any], None],
        lost: Callable[[Candidate, str], None],
    ) -> None:
        self._candidates, self._on_progress = candidates, on_progress
        self._receive, self._lost = receive, lost
        self.line = line_of
        self._n_given = 0

    def next(self) -> Candidate | None:
        if self._n_given == len(self._candidates):
            return None
        candidate = self._candidates[self._n_given]
        self._on_progress(self._n_given, len(self._candidates), candidate.name)
        self._n_given += 1
        return candidate

    def receive(self, task: Candidate, line: Any) -> None:
        self._receive(task, line)

    def ended(self, task: Candidate) -> None:
        """It was counted as its messages came."""

    def lost(self, task: Candidate, failure: WorkerFailure) -> RemainingTask[Candidate] | None:
        self._lost(task, f"{failure.kind.value}: {failure.explanation}")
        return None

    def pause(self) -> bool:
        return False


def worker(settings: dict[str, Any], channel: Channel) -> Callable[[dict[str, Any]], None]:
    """The function of a worker process: makes the graph of one candidate."""
    warnings.simplefilter("ignore")
    reader = _function_at(settings["reader"])

    def run(line: dict[str, Any]) -> None:
        channel.step.begin("")
        step = READ
        try:
            graph = reader(line["given"])
            channel.send({"step": READ, "why": ""})
            step = RUNS
            channel.send({"graph": to_json(checked(graph))})
        except Exception as error:
            channel.send({"step": step, "why": reason_of(error)})
        channel.step.end()

    return run


def caller(_: dict[str, Any], channel: Channel) -> Callable[[dict[str, Any]], None]:
    """The function of a worker process: calls a function on one candidate."""
    warnings.simplefilter("ignore")

    def run(line: dict[str, Any]) -> None:
        channel.step.begin("")
        try:
            channel.send({"made": _function_at(line["function"])(line["given"])})
        except Exception as error:
            channel.send({"why": reason_of(error)})
        channel.step.end()

    return run
