"""Candidates of an untrusted source: each is read and run in a worker process with limits.

One that crashes, hangs or takes all memory costs itself only.
"""

from __future__ import annotations

import importlib
import os
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shadowrun.limits import at_most_free
from shadowrun.studies.isolation.pool import Limits, Pool
from shadowrun.studies.zoo.graph import to_json
from shadowrun.studies.zoo.sources.source import RUNS, checked, reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from shadowrun.studies.isolation.pool import RemainingTask, WorkerFailure
    from shadowrun.studies.isolation.serving import Channel
    from shadowrun.studies.zoo.graph import Graph
    from shadowrun.studies.zoo.sources.source import Collected

__all__ = ["READ", "Candidate", "candidates_below", "read_each", "worker"]

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
    return [Candidate(name, str(path)) for name, path in zip(names, paths, strict=True) if wanted(name)]


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
    if not isolated or os.name != "posix":
        for number, candidate in enumerate(candidates):
            on_progress(number, len(candidates), candidate.name)
            graph = found.tried(READ, candidate.name, partial(reader, candidate.given))
            if graph is not None:
                found.add(candidate.name, graph, candidate.n_calls)
        return
    entry = f"{reader.__module__}:{reader.__name__}"
    limits = Limits(_SECONDS, at_most_free(_MEMORY))
    pool = Pool(f"{__name__}:worker", {"reader": entry}, 1, limits, _Work(found, candidates, on_progress))
    try:
        pool.run()
    finally:
        pool.close()


class _Work:
    """The candidates, as a pool runs them."""

    def __init__(self, found: Collected, candidates: Sequence[Candidate], on_progress: Callable[..., None]) -> None:
        self._found, self._candidates, self._on_progress = found, candidates, on_progress
        self._n_given = 0
        self._step = READ

    def next(self) -> Candidate | None:
        if self._n_given == len(self._candidates):
            return None
        candidate = self._candidates[self._n_given]
        self._on_progress(self._n_given, len(self._candidates), candidate.name)
        self._n_given += 1
        return candidate

    def line(self, task: Candidate) -> dict[str, Any]:
        self._step = READ
        return {"given": task.given}

    def receive(self, task: Candidate, line: Any) -> None:
        if "graph" in line:
            self._found.add_data(task.name, line["graph"], task.n_calls)
            return
        self._found.note(line["step"], task.name, line["why"])
        self._step = RUNS

    def ended(self, task: Candidate) -> None:
        """It was counted as its messages came."""

    def lost(self, task: Candidate, failure: WorkerFailure) -> RemainingTask[Candidate] | None:
        self._found.note(self._step, task.name, f"{failure.kind.value}: {failure.explanation}")
        return None

    def pause(self) -> bool:
        return False


def worker(settings: dict[str, Any], channel: Channel) -> Callable[[dict[str, Any]], None]:
    """The function of a worker process: makes the graph of one candidate."""
    warnings.simplefilter("ignore")
    module, _, name = settings["reader"].partition(":")
    reader: Callable[[Any], Graph] = getattr(importlib.import_module(module), name)

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
