"""Runs a program on each platform without and with each mitigation, and finds the cheapest combination that helps.

A *trial* is one set of mitigations on all platforms. Each platform of a trial is a fresh process that records the
program, and one or more that run it unrecorded, for their time.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from shadowrun.errors import PlatformError, UsageError
from shadowrun.intercept.untrusted.op_allowlist import Refused, operator_named
from shadowrun.platforms.settings import environment
from shadowrun.recording.file_format.recording_file import read
from shadowrun.recording.model import Kind
from shadowrun.studies.classes.equivalence import classes_of, outputs_of
from shadowrun.studies.classes.platforms import platforms_of
from shadowrun.studies.grid import RECORDED, Cell, record_grid
from shadowrun.studies.isolation.process import own_command
from shadowrun.studies.mitigate.mitigations import conflicts, platform_under, why_not_applicable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from shadowrun.platforms.spec import PlatformSpec
    from shadowrun.recording.model import Key, Recording
    from shadowrun.studies.mitigate.mitigations import Mitigation

__all__ = ["Seconds", "Sweep", "Trial", "run_sweep"]


@dataclass(frozen=True, slots=True)
class Seconds:
    """Time that a program took, without the start of Python and torch.

    Attributes:
        processor: Of all its threads and child processes.
        wall: By the clock.
    """

    processor: float
    wall: float


@dataclass(frozen=True, slots=True)
class Trial:
    """A set of mitigations on all platforms.

    Attributes:
        mitigations: The set; empty for the program as it is.
        cells: What became of each platform.
        n_settings: Platforms that are still different: mitigations replace settings of platforms.
        labels: Class of each platform in all outputs together, in first-seen order; -1 where it was not recorded.
        digests: What the outputs of each platform are, to compare with another trial; empty where it was not recorded.
        bits: Least remaining precision of any two platforms over all outputs, and mantissa bits of that output.
        ignored: Low bits of the outputs to ignore, so that all platforms agree; None if none is enough.
        differing: Names of inputs and parameters that differ between platforms, and random operators whose draws do.
        seconds: Shortest time of each platform, None where it failed; empty if no time was measured.
    """

    mitigations: tuple[Mitigation, ...]
    cells: tuple[Cell, ...]
    n_settings: int
    labels: tuple[int, ...]
    digests: tuple[tuple[object, ...], ...]
    bits: tuple[int, int]
    ignored: int | None
    differing: tuple[str, ...]
    seconds: tuple[Seconds | None, ...] = ()

    @property
    def name(self) -> str:
        """``threads=1 + mkldnn=off``."""
        return " + ".join(m.name for m in self.mitigations) or "none"

    @property
    def is_complete(self) -> bool:
        """Whether every platform was recorded."""
        return all(cell.outcome == RECORDED for cell in self.cells)

    @property
    def n_classes(self) -> int:
        """Classes of the platforms that were recorded."""
        return len(set(self.labels) - {-1})

    def ratio(self, base: Trial, which: str) -> float:
        """Time relative to that without mitigations, summed over the platforms that ran both; NaN if there are none.

        Args:
            base: The program as it is.
            which: Field of `Seconds`.
        """
        both = [(a, b) for a, b in zip(self.seconds, base.seconds, strict=False) if a is not None and b is not None]
        own, others = (sum(getattr(pair[side], which) for pair in both) for side in (0, 1))
        return own / others if others else math.nan


@dataclass(frozen=True, slots=True)
class Sweep:
    """What was found.

    Attributes:
        program: As it was given.
        platforms: Their names.
        outputs: Names of the outputs whose classes are counted.
        base: The program as it is.
        singles: One mitigation each.
        combinations: Two or more.
        inapplicable: Reason by name of the mitigation.
        n_untried: Combinations that were not tried.
        n_runs: Timed runs of each platform; 0 if time was not measured.
    """

    program: str
    platforms: tuple[str, ...]
    outputs: tuple[str, ...]
    base: Trial
    singles: tuple[Trial, ...]
    combinations: tuple[Trial, ...]
    inapplicable: Mapping[str, str]
    n_untried: int
    n_runs: int

    @property
    def best(self) -> Trial:
        """The trial with the fewest classes, the cheapest of them by processor time, then by number of mitigations."""
        trials = (self.base, *self.singles, *self.combinations)
        return min((t for t in trials if t.is_complete), key=self._rank, default=self.base)

    def _rank(self, trial: Trial) -> tuple[float, float, int]:
        return trial.n_classes, _or_one(trial.ratio(self.base, "processor")), len(trial.mitigations)

    def has_effect(self, trial: Trial) -> bool:
        """Whether any platform's outputs are other than without mitigations."""
        return any(a and b and a != b for a, b in zip(trial.digests, self.base.digests, strict=True))


@dataclass(slots=True)
class _Runner:
    """Makes trials.

    Attributes:
        platforms: The platforms.
        program: ``script.py`` and its arguments, or ``-m``, a module and its arguments.
        options: Options of ``shadowrun record``.
        wanted: Patterns of outputs.
        folder: Gets a folder for each trial.
        jobs: Recordings at a time.
        n_runs: Timed runs of each platform.
        progress: Called with the number of processes that ended, of all that are known, and the name of the trial.
    """

    platforms: Sequence[PlatformSpec]
    program: Sequence[str]
    options: Sequence[str]
    wanted: Sequence[str]
    folder: Path
    jobs: int
    n_runs: int
    progress: Callable[[int, int, str], None]
    n_done: int = 0
    n_planned: int = 0
    outputs: tuple[str, ...] = ()
    _times: dict[tuple[str, ...], list[list[Seconds | None]]] = field(default_factory=dict)

    def plan(self, n_trials: int) -> None:
        """Note that so many trials are to come."""
        self.n_planned += n_trials * len(self.platforms) * (1 + self.n_runs)

    def record(self, mitigations: Sequence[Mitigation]) -> tuple[list[Cell], list[Recording]]:
        """Record the program on each platform; the cells, and the recordings of those that have one."""
        specs = self._under(mitigations)
        name = _name(mitigations)
        folder = self.folder / name.replace(" + ", "+").replace("/", "-")
        before = self.n_done

        def progress(n: int, _n_all: int) -> None:
            self.n_done = before + n
            self.progress(self.n_done, self.n_planned, name)

        arguments = [*self.options, f"--apply={','.join(_in_process(mitigations))}", *self.program]
        # A process for each: settings such as MKL_CBWR are read once, when a library is loaded.
        cells = record_grid(specs, arguments, folder, jobs=self.jobs, progress=progress)
        return cells, [read(folder / cell.file) for cell in cells if cell.outcome == RECORDED]

    def trial(self, mitigations: Sequence[Mitigation], found: tuple[list[Cell], list[Recording]]) -> Trial:
        """What the recordings of a trial say."""
        cells, recordings = found
        names = [str(spec) for spec, cell in zip(self.platforms, cells, strict=True) if cell.outcome == RECORDED]
        results = _Results.from_recordings(recordings, names, self.wanted)
        if not mitigations:
            self.outputs = results.outputs
        labels = iter(results.labels)
        digests = iter(results.digests)
        recorded = [cell.outcome == RECORDED for cell in cells]
        return Trial(
            tuple(mitigations),
            tuple(cells),
            len({str(spec) for spec in self._under(mitigations)}),
            tuple(next(labels) if there else -1 for there in recorded),
            tuple(next(digests) if there else () for there in recorded),
            results.bits,
            results.ignored,
            _differing(recordings),
        )

    def time(self, trials: Sequence[Trial]) -> list[Trial]:
        """Run trials unrecorded, in turn in each round, so that what changes on the machine meets all of them."""
        for _ in range(self.n_runs):
            for trial in trials:
                names = tuple(m.name for m in trial.mitigations)
                found = self._times.setdefault(names, [[] for _ in self.platforms])
                specs = self._under(trial.mitigations)
                for cell, spec, times in zip(trial.cells, specs, found, strict=True):
                    self.n_done += 1
                    self.progress(self.n_done, self.n_planned, f"timing {trial.name}")
                    if cell.outcome == RECORDED:
                        times.append(self._time_once(spec, trial.mitigations))
        return [self._timed(trial) for trial in trials]

    def _timed(self, trial: Trial) -> Trial:
        shortest: list[Seconds | None] = []
        for times in self._times.get(tuple(m.name for m in trial.mitigations), ()):
            measured = [t for t in times if t is not None]
            # The shortest: load of the machine only ever adds time.
            least = [min(getattr(t, name) for t in measured) for name in ("processor", "wall") if measured]
            shortest.append(Seconds(*least) if least else None)
        return replace(trial, seconds=tuple(shortest))

    def _time_once(self, spec: PlatformSpec, mitigations: Sequence[Mitigation]) -> Seconds | None:
        path = self.folder / "seconds.json"
        # A run that fails leaves no file: the one of the run before it must not be read in its place.
        path.unlink(missing_ok=True)
        command = [*own_command(), "mitigate", "--seconds", str(path), "--platforms", str(spec)]
        # Other options are of `record`, and nothing is recorded here.
        imports = [word for word in self.options if word.startswith("--import=")]
        subprocess.run(  # noqa: S603 - this interpreter, and the user's program
            [*command, *imports, f"--apply={','.join(_in_process(mitigations))}", *self.program],
            env=os.environ | environment(spec.settings),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
        try:
            return Seconds(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return None

    def _under(self, mitigations: Sequence[Mitigation]) -> list[PlatformSpec]:
        return [platform_under(spec, mitigations) for spec in self.platforms]


def run_sweep(
    platforms: Sequence[PlatformSpec],
    mitigations: Sequence[Mitigation],
    program: Sequence[str],
    folder: Path,
    *,
    options: Sequence[str] = (),
    wanted: Sequence[str] = (),
    jobs: int = 1,
    n_runs: int = 1,
    n_combinations: int = 12,
    progress: Callable[[int, int, str], None] = lambda _done, _total, _text: None,
) -> Sweep:
    """Run everything.

    Args:
        platforms: Two or more platforms of the CPU.
        mitigations: To try; those that cannot do anything for this program are left out, with the reason.
        program: ``script.py`` and its arguments, or ``-m``, a module and its arguments.
        folder: Gets the recordings.
        options: Of ``shadowrun record``.
        wanted: Patterns of outputs; see `outputs_of`.
        jobs: Recordings at a time; timed runs are never side by side.
        n_runs: Timed runs of each platform; 0 measures no time.
        n_combinations: Combinations to try at most.
        progress: Called with the number of processes that ended, of all, and what runs.

    Raises:
        UsageError: Fewer than two platforms ran the program without mitigations, or nothing was recorded to compare.
    """
    runner = _Runner(platforms, program, options, wanted, folder, jobs, n_runs, progress)
    runner.plan(1 + len(mitigations))
    found = runner.record(())
    cells, recordings = found
    if len(recordings) < 2:
        why = "; ".join(f"{c.platform}: {c.outcome} {c.note}".strip() for c in cells)
        raise UsageError(f"Fewer than two platforms ran the program: {why}.", slug="no-recordings")
    base = runner.trial((), found)
    # After the first recording, which shows the operators that the program calls.
    reasons = {m.name: _why_not(m, platforms, recordings[0]) for m in mitigations}
    applicable = [m for m in mitigations if not reasons[m.name]]
    # Less those that are left out: the bar must reach its end.
    runner.plan(len(applicable) - len(mitigations))
    singles = [runner.trial((m,), runner.record((m,))) for m in applicable]
    # After all recordings: a timed run must not share the machine with them.
    base, *singles = runner.time([base, *singles])
    sweep = Sweep(
        " ".join(program),
        tuple(spec.public for spec in platforms),
        runner.outputs,
        base,
        tuple(singles),
        (),
        {name: reason for name, reason in reasons.items() if reason},
        0,
        n_runs,
    )
    return _with_combinations(sweep, runner, n_combinations)


def _with_combinations(sweep: Sweep, runner: _Runner, n_most: int) -> Sweep:
    """Try combinations, those first that should leave the fewest classes, then those that should cost least."""
    n_tried = 0
    # Anew after each trial: what it found changes which combination is worth a try.
    while True:
        candidates = list(_candidates(sweep))
        if not candidates or n_tried >= n_most:
            return replace(sweep, n_untried=len(candidates))
        n_tried += 1
        runner.plan(1)
        mitigations = candidates[0]
        trial = runner.trial(mitigations, runner.record(mitigations))
        # The program as it is runs again next to it: the machine may have become slower since.
        runner.n_planned += len(runner.platforms) * runner.n_runs
        base, trial = runner.time([sweep.base, trial])
        sweep = replace(sweep, base=base, combinations=(*sweep.combinations, trial))


def _candidates(sweep: Sweep) -> Iterator[tuple[Mitigation, ...]]:
    """Combinations that could be better than the best trial, in the order in which to try them.

    Mitigations of which one makes platforms 1 and 2 agree and the other 2 and 3 are expected to make all three agree,
    and ratios of time to multiply. What already leaves one class needs no other mitigation with it.
    """
    useful = [t for t in sweep.singles if t.is_complete and sweep.has_effect(t)]
    tried = {frozenset(m.name for m in t.mitigations) for t in (*sweep.singles, *sweep.combinations)}
    enough = [
        frozenset(m.name for m in t.mitigations)
        for t in (*sweep.singles, *sweep.combinations)
        if t.is_complete and t.n_classes == 1
    ]
    best = sweep.best
    # Then only a cheaper combination is of use, and most need not be tried.
    is_solved = best.n_classes == 1
    most = _or_one(best.ratio(sweep.base, "processor"))
    ranked = []
    for size in range(2, len(useful) + 1):
        for trials in itertools.combinations(useful, size):
            mitigations = tuple(t.mitigations[0] for t in trials)
            # As if each cost were independent of the others: it decides only what is tried first.
            cost = math.prod(_or_one(t.ratio(sweep.base, "processor")) for t in trials)
            names = frozenset(m.name for m in mitigations)
            costs_more = is_solved and (cost, size) >= (most, len(best.mitigations))
            # Nor where a part of it leaves one class already.
            if names in tried or costs_more or conflicts(mitigations) or any(names >= other for other in enough):
                continue
            ranked.append((_expected_classes([t.labels for t in trials]), cost, size, mitigations))
    yield from (mitigations for *_, mitigations in sorted(ranked, key=lambda r: r[:3]))


def _expected_classes(labelings: Sequence[Sequence[int]]) -> int:
    """Classes if platforms that agree in any of these agree in all of them together."""
    group = list(range(len(labelings[0])))
    for labels in labelings:
        first: dict[int, int] = {}
        for number, label in enumerate(labels):
            a, b = group[first.setdefault(label, number)], group[number]
            group = [a if g == b else g for g in group]
    return len(set(group))


@dataclass(frozen=True, slots=True)
class _Results:
    """Classes of some platforms in all outputs together; the fields are those of `Trial`."""

    outputs: tuple[str, ...] = ()
    labels: tuple[int, ...] = ()
    digests: tuple[tuple[object, ...], ...] = ()
    bits: tuple[int, int] = (0, 0)
    ignored: int | None = 0

    @classmethod
    def from_recordings(cls, recordings: Sequence[Recording], names: Sequence[str], wanted: Sequence[str]) -> _Results:
        """Compare recordings.

        Raises:
            UsageError: A pattern matches no call, or nothing was digested.
        """
        if not recordings:
            return cls()
        platforms = platforms_of(recordings, names)
        outputs = outputs_of(platforms, wanted)
        every = [c for output in outputs if (c := classes_of(platforms, output)) is not None]
        if not every:
            raise UsageError("The program has no results to compare: no call left a digest.", slug="no-recordings")
        identities: list[list[object]] = [[] for _ in names]
        for classes in every:
            of_platform = {m.platform: classes.values[m.label] for m in classes.members}
            for name, found in zip(names, identities, strict=True):
                value = of_platform.get(name)
                # Not the key of the call: a wrapper may add calls, so that the last one has another name.
                found.append(None if value is None else (value.form.dtype, value.form.shape, int(value.ladder[0])))
        digests = [tuple(found) for found in identities]
        first = list(dict.fromkeys(digests))
        lost = [classes.lost_bits for classes in every]
        # By the bits that are lost, not by those left, of which an output in bfloat16 never has more than 7.
        worst = min(every, key=lambda c: (c.min_precision - c.mantissa, c.min_precision))
        return cls(
            tuple(classes.output.name for classes in every),
            tuple(first.index(digest) for digest in digests),
            tuple(digests),
            (worst.min_precision, worst.mantissa),
            None if None in lost else max((k for k in lost if k is not None), default=0),
        )


def _why_not(mitigation: Mitigation, platforms: Sequence[PlatformSpec], recording: Recording) -> str:
    """Why a mitigation cannot do anything here; empty if it can."""
    try:
        for spec in platforms:
            platform_under(spec, (mitigation,))
    except PlatformError as error:
        return str(error)
    return why_not_applicable(mitigation, recording)


def _differing(recordings: Sequence[Recording]) -> tuple[str, ...]:
    """Names of the provenance that differ between recordings."""
    found: dict[str, set[str]] = {}
    for recording in recordings:
        for process in recording.processes:
            for name, digest in process.provenance.items():
                found.setdefault(name, set()).add(digest)
    # The state of a generator matters only where numbers are drawn, and those are compared themselves.
    names = (n for n, digests in found.items() if len(digests) > 1 and not n.startswith("generator:"))
    return (*names, *_random_draws(recordings))


def _random_draws(recordings: Sequence[Recording]) -> Iterator[str]:
    """Random operators whose results differ: the same seed need not give the same numbers on another platform."""
    drawn: dict[tuple[Key, int], int] = {}
    found: dict[str, None] = {}
    for recording in recordings:
        random = {c.op for c in recording.contexts if _is_random(c.op)}
        for call, key in enumerate(recording.call_keys()):
            if key.op not in random:
                continue
            for place, row in enumerate(recording.results_of(call)):
                if recording.results["kind"][row] != Kind.LEAF and len(ladder := recording.ladder(row)):
                    digest = int(ladder[0])
                    # With one seed, `randn` gives other numbers for ATEN_CPU_CAPABILITY=default than for avx2 (2.13);
                    # `rand` does not.
                    if drawn.setdefault((key, place), digest) != digest:
                        found[f"random numbers of {key.op}"] = None
    yield from found


def _is_random(op: str) -> bool:
    try:
        return torch.Tag.nondeterministic_seeded in operator_named(op, checked=False).tags
    except (AttributeError, Refused):  # of a library that this process has not imported
        return False


def _in_process(mitigations: Sequence[Mitigation]) -> list[str]:
    return [m.name for m in mitigations if m.in_process]


def _name(mitigations: Sequence[Mitigation]) -> str:
    return " + ".join(m.name for m in mitigations) or "none"


def _or_one(ratio: float) -> float:
    """A ratio of time; 1 where it was not measured."""
    return 1.0 if math.isnan(ratio) else ratio
