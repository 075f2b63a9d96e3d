"""Entry point of a worker process: reads tasks from standard input, runs their cases, and writes messages to a pipe.

Messages are lines of JSON: ``ready``, ``case`` (a case begins), ``target`` (the target begins), ``findings`` (the case
ended), ``part`` (all cases of a part ended), ``task`` (the task ended). If the worker dies or hangs, the pool knows the
case and the platform from the last message.
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
from shadowrun.platforms.plugins import import_inherited
from shadowrun.studies.sweep import opinfo, programs, recorded
from shadowrun.studies.sweep.cases import PROBES, CaseFinding, Kind, Part
from shadowrun.studies.sweep.inputs import key, printed
from shadowrun.studies.sweep.rebuild_case import Sampler
from shadowrun.studies.sweep.run_case import CaseRunner

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shadowrun.studies.sweep.inputs import Sample

__all__ = ["main"]


def main(settings: dict[str, Any], lines: int, lifeline: int) -> None:
    """Run tasks until standard input ends.

    Args:
        settings: target, ref, flaws, database, seed, samples, threads, call_limit_s.
        lines: File descriptor to write to.
        lifeline: Pipe that closes when the parent process ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the sweep
    threading.Thread(target=_exit_with_parent, args=(lifeline,), daemon=True).start()
    send = _MessageWriter(lines)
    try:
        worker = _Worker(settings, send)
    except ShadowrunError as error:
        send(broken=str(error), slug=error.slug)
        return
    send(ready=os.getpid())
    for line in sys.stdin:
        worker.run(json.loads(line))


def _exit_with_parent(lifeline: int) -> None:
    os.read(lifeline, 1)
    # Not `sys.exit`, which ends this thread only: the main thread may hang in a kernel.
    os._exit(0)


class _MessageWriter:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __call__(self, **line: Any) -> None:
        text = (json.dumps(line) + "\n").encode()
        # A full pipe takes a part only.
        while text:
            text = text[os.write(self._descriptor, text) :]


class _Worker:
    """Runs tasks.

    Args:
        settings: As in `main`.
        send: Writes a message.
    """

    def __init__(self, settings: dict[str, Any], send: _MessageWriter) -> None:
        self._send = send
        self._seed: int = settings["seed"]
        self._limit: int | None = settings["samples"]
        torch.set_num_threads(settings["threads"])
        import_inherited()  # `--import` registered devices in the parent only
        if settings["flaws"] is not None:
            from shadowrun import sim
            from shadowrun.platforms import parse

            sim.enable(parse(settings["target"]).device_type, flaws=settings["flaws"])
        if settings["database"]:
            opinfo.database()  # takes seconds: before the first case is timed
        self._runner = CaseRunner(
            settings["target"], settings["ref"], settings["call_limit_s"], lambda: self._send(target=True)
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
            except Exception as error:  # of the sample functions of the database
                text = f"{type(error).__name__}: {error}"[:300]
                self._send(case=[part, -1], inputs="")
                self._send_findings([CaseFinding(Kind.HARNESS, explanation="its inputs cannot be made", message=text)])
                cases = []
            for number, sample in cases:
                # `out=` has the right shape for even samples and is empty for odd ones.
                identity = key(sample), part is Part.OUT and number % 2
                if identity in seen and part not in PROBES:  # probes may have equal descriptions and different values
                    n_duplicates += 1
                    continue
                seen.add(identity)
                if (part, number) not in done:
                    self._case(name, part, number, sample)
            self._send(part=part, duplicates=n_duplicates)
        self._send(task=True)

    def _case(self, name: str, part: Part, number: int, sample: Sample) -> None:
        # First of all: what ends the process from here on is the outcome of this case.
        self._send(case=[part, number], inputs=printed(sample))
        try:
            function = recorded.function(name) if "::" in name else opinfo.database()[name]
            findings = self._runner.run(part, programs.program(function, part, number, sample))
        except recorded.Unreadable as error:
            findings = [CaseFinding(Kind.HARNESS, explanation="not readable", message=str(error))]
        except Exception as error:  # a fault of shadowrun must not end the sweep
            text = f"{type(error).__name__}: {error}"[:300]
            findings = [CaseFinding(Kind.HARNESS, explanation="shadowrun failed", message=text)]
        if findings is None:
            self._send(findings=None)
        else:
            self._send_findings(findings)

    def _send_findings(self, findings: list[CaseFinding]) -> None:
        self._send(findings=[dataclasses.astuple(f) for f in findings])

    def _cases(self, name: str, part: Part, calls: list[str] | None, sampler: Sampler) -> Iterator[tuple[int, Sample]]:
        """Samples of a part, with their numbers."""
        if calls is not None:
            for number, text in enumerate(calls):
                try:
                    yield number, recorded.sample(name, text, self._seed)
                except recorded.Unreadable as error:
                    self._send(case=[part, number], inputs=text[:300])
                    self._send_findings([CaseFinding(Kind.HARNESS, explanation="not readable", message=str(error))])
            return
        yield from sampler.of(part)
