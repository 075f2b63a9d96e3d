"""A worker process of a sweep: runs the cases of its tasks.

Its messages: ``findings`` (a case ended), ``part`` (all cases of a part ended). Which case is in hand stands in the
page that it shares with the pool.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.studies.sweep import case_programs, opinfo, recorded_calls
from shadowrun.studies.sweep.cases import PROBES, CaseFinding, Kind, Part
from shadowrun.studies.sweep.inputs import key, printed
from shadowrun.studies.sweep.rebuild_case import Sampler
from shadowrun.studies.sweep.run_case import CaseRunner

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.studies.isolation.worker_side import Channel
    from shadowrun.studies.sweep.inputs import Sample

__all__ = ["start"]


def start(settings: dict[str, Any], channel: Channel) -> Callable[[dict[str, Any]], None]:
    """Prepare a worker; gives the function that runs a task.

    Args:
        settings: target, ref, flaws, database, seed, samples, threads, call_limit_s.
        channel: To the pool.

    Raises:
        ShadowrunError: A platform is absent.
    """
    return _Worker(settings, channel).run


class _Worker:
    """Runs tasks.

    Args:
        settings: As in `start`.
        channel: To the pool.
    """

    def __init__(self, settings: dict[str, Any], channel: Channel) -> None:
        self._channel = channel
        self._seed: int = settings["seed"]
        self._limit: int | None = settings["samples"]
        torch.set_num_threads(settings["threads"])
        if settings["flaws"] is not None:
            from shadowrun import sim
            from shadowrun.platforms import parse

            sim.enable(parse(settings["target"]).device_type, flaws=settings["flaws"])
        if settings["database"]:
            opinfo.database()  # takes seconds: before the first case is timed
        self._runner = CaseRunner(settings["target"], settings["ref"], settings["call_limit_s"], channel.step.on_target)

    def run(self, task: dict[str, Any]) -> None:
        """Run the parts of an operator in a dtype."""
        name, dtype, done = task["operator"], task["dtype"], {tuple(d) for d in task["done"]}
        sampler = Sampler(name, dtype, self._seed, self._limit)
        for part in map(Part, task["parts"]):
            if task["calls"] is None:
                n_duplicates = self._samples(name, part, sampler, done)
            else:  # each is there once
                n_duplicates = 0
                for number, text in enumerate(task["calls"]):
                    if (part, number) not in done:
                        self._call(name, part, number, text)
            self._channel.send({"part": part, "duplicates": n_duplicates})

    def _samples(self, name: str, part: Part, sampler: Sampler, done: set[Any]) -> int:
        """Run the samples of the database that are not done; returns how many repeat another."""
        try:
            cases = list(sampler.samples(part))
        except Exception as error:  # of its sample functions
            self._channel.step.begin([part, -1, ""])
            self._not_made([part, -1, ""], error)
            return 0
        seen: set[Any] = set()
        n_duplicates = 0
        for number, sample in cases:
            # `out=` has the right shape for even samples and is empty for odd ones.
            identity = key(sample), part is Part.OUT and number % 2
            if identity in seen and part not in PROBES:  # probes may have equal descriptions and different values
                n_duplicates += 1
                continue
            seen.add(identity)
            if (part, number) not in done:
                self._case(name, part, number, sample)
        return n_duplicates

    def _call(self, name: str, part: Part, number: int, text: str) -> None:
        """Run a recorded call, whose inputs are made here: those of a few calls may have more than all of memory."""
        case = [part, number, text[:300]]
        # In hand before they are made: a process that ends in that is the outcome of this call alone.
        self._channel.step.begin(case)
        try:
            sample = recorded_calls.sample(name, text, self._seed)
        except recorded_calls.UnreadableCall as error:
            self._end(case, CaseFinding(Kind.HARNESS, explanation="not readable", message=str(error)))
        except Exception as error:  # a fault of shadowrun must not end the sweep
            self._not_made(case, error)
        else:
            self._case(name, part, number, sample)

    def _case(self, name: str, part: Part, number: int, sample: Sample) -> None:
        case = [part, number, printed(sample)]
        # First of all: what ends the process from here on is the outcome of this case.
        self._channel.step.begin(case)
        try:
            function = recorded_calls.function(name) if "::" in name else opinfo.database()[name]
            findings = self._runner.run(part, case_programs.program(function, part, number, sample))
        except recorded_calls.UnreadableCall as error:
            findings = [CaseFinding(Kind.HARNESS, explanation="not readable", message=str(error))]
        except Exception as error:  # a fault of shadowrun must not end the sweep
            text = f"{type(error).__name__}: {error}"[:300]
            findings = [CaseFinding(Kind.HARNESS, explanation="shadowrun failed", message=text)]
        if findings is None:
            self._channel.step.end()
        else:
            self._end(case, *findings)

    def _end(self, case: list[Any], *findings: CaseFinding) -> None:
        self._channel.send({"case": case, "findings": [dataclasses.astuple(f) for f in findings]})
        self._channel.step.end()

    def _not_made(self, case: list[Any], error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"[:300]
        self._end(case, CaseFinding(Kind.HARNESS, "", "", "", "its inputs cannot be made", text))
