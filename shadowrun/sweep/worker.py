"""The process that runs cases: reads tasks on standard input, and tells of each step on a pipe.

Lines of JSON, by what they hold: ``case`` (begins), ``target`` (its turn), ``findings`` (the case's end), ``part`` (all
its cases were run), ``task`` (its end), ``ready``. Who dies or hangs has told by then which case it was in, and on
which side.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.errors import ShadowrunError
from shadowrun.platforms.importing import import_inherited
from shadowrun.sweep import opinfo, programs, recorded
from shadowrun.sweep.cases import PROBES, Part
from shadowrun.sweep.inputs import key, printed
from shadowrun.sweep.outcome import Finding, Kind
from shadowrun.sweep.sampling import Sampler
from shadowrun.sweep.trial import Trial

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shadowrun.sweep.inputs import Sample

__all__ = ["main"]


def main(settings: dict[str, Any], lines: int, lifeline: int) -> None:
    """Run tasks until standard input ends.

    Args:
        settings: target, ref, flaws, database, seed, samples, threads, call_limit_s.
        lines: File descriptor to write to.
        lifeline: Pipe that ends with the process that started this one.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that started this
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    tell = _Teller(lines)
    try:
        worker = _Worker(settings, tell)
    except ShadowrunError as error:
        tell(broken=str(error), slug=error.slug)
        return
    tell(ready=os.getpid())
    for line in sys.stdin:
        worker.run(json.loads(line))


def _end_with(lifeline: int) -> None:
    os.read(lifeline, 1)
    os._exit(0)


class _Teller:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __call__(self, **line: Any) -> None:
        text = (json.dumps(line) + "\n").encode()
        while text:
            text = text[os.write(self._descriptor, text) :]


class _Worker:
    """Runs tasks.

    Args:
        settings: As in `main`.
        tell: Writes a line.
    """

    def __init__(self, settings: dict[str, Any], tell: _Teller) -> None:
        self._tell = tell
        self._seed: int = settings["seed"]
        self._limit: int | None = settings["samples"]
        torch.set_num_threads(settings["threads"])
        import_inherited()
        if settings["flaws"] is not None:
            from shadowrun.platforms import parse, sim

            sim.enable(parse(settings["target"]).device_type, flaws=settings["flaws"])
        if settings["database"]:
            opinfo.database()  # some seconds, which are no case's
        self._trial = Trial(
            settings["target"], settings["ref"], settings["call_limit_s"], lambda: self._tell(target=True)
        )

    def run(self, task: dict[str, Any]) -> None:
        """Run the parts of an operator in a dtype."""
        name, dtype, done = task["operator"], task["dtype"], {tuple(d) for d in task["done"]}
        sampler = Sampler(name, dtype, self._seed, self._limit)
        for part in map(Part, task["parts"]):
            seen: set[Any] = set()
            n_duplicates = 0
            try:
                cases = list(self._cases(name, part, task["calls"], sampler))
            except Exception as error:
                text = f"{type(error).__name__}: {error}"[:300]
                self._tell(case=[part, -1], inputs="")
                self._end([Finding(Kind.HARNESS, explanation="its inputs cannot be made", message=text)])
                cases = []
            for number, sample in cases:
                identity = key(sample), part is Part.OUT and number % 2
                if identity in seen and part not in PROBES:  # two values of a class are two probes
                    n_duplicates += 1
                    continue
                seen.add(identity)
                if (part, number) not in done:
                    self._case(name, part, number, sample)
            self._tell(part=part, duplicates=n_duplicates)
        self._tell(task=True)

    def _case(self, name: str, part: Part, number: int, sample: Sample) -> None:
        self._tell(case=[part, number], inputs=printed(sample))
        try:
            function = recorded.function(name) if "::" in name else opinfo.database()[name]
            findings = self._trial.run(part, programs.program(function, part, number, sample))
        except recorded.Unreadable as error:
            findings = [Finding(Kind.HARNESS, explanation="not readable", message=str(error))]
        except Exception as error:  # ours
            text = f"{type(error).__name__}: {error}"[:300]
            findings = [Finding(Kind.HARNESS, explanation="shadowrun failed", message=text)]
        if findings is None:
            self._tell(findings=None)
        else:
            self._end(findings)

    def _end(self, findings: list[Finding]) -> None:
        self._tell(findings=[dataclasses.astuple(f) for f in findings])

    def _cases(self, name: str, part: Part, calls: list[str] | None, sampler: Sampler) -> Iterator[tuple[int, Sample]]:
        """Samples of a part, with their numbers."""
        if calls is not None:
            for number, text in enumerate(calls):
                try:
                    yield number, recorded.sample(name, text, self._seed)
                except recorded.Unreadable as error:
                    self._tell(case=[part, number], inputs=text[:300])
                    self._end([Finding(Kind.HARNESS, explanation="not readable", message=str(error))])
            return
        yield from sampler.of(part)
