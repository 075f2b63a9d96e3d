"""Every flaw of the simulated device, recorded and compared with the clean device: is the first divergence the flaw's?

python -m tests.ground_truth.recordings [--flaw NAME] [--limit N]

A flaw's own trigger and the programs of the benchmark are recorded on the clean and on the flawed device, and the two
recordings are compared. Flaws of support and speed change no result and are left out, and so are programs that end in
an exception of the flawed device.
"""

import argparse
import fnmatch
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

import shadowrun
from shadowrun import sim
from shadowrun.recording.file_format.recording_file import read
from shadowrun.sim import CATALOGUE
from shadowrun.studies.diff.compare import Outcome
from shadowrun.studies.diff.recordings import diff_recordings
from tests.ground_truth.benchmark import Bench, quietly
from tests.ground_truth.kit import same

NO_RESULT = {"support", "speed", "fatal"}
"""Kinds of flaws that change no result."""
LIMIT = 3


@dataclass
class Score:
    """What the difference of two recordings said of one flaw in one program.

    Attributes:
        flaw, program: Their names.
        changes: Whether the flaw changes a result, found without any recording: ``values``, ``strides`` (only),
            ``nothing``, or ``raises``.
        first: Operator of the first call in which a difference arises; empty if there is none.
        outcome: Its outcome.
        right: Whether it is an operator of the flaw.
    """

    flaw: str
    program: str
    changes: str
    first: str
    outcome: str
    right: bool


def recorded(function, path, *flaws):
    """Record a program on the device with these flaws; gives what it returned, and whether it raised."""
    out, raised = None, False
    with sim.flaws(), sim.flaws(*flaws), quietly(), shadowrun.record(path):
        try:
            out = function("sim")
        except Exception:
            raised = True
    return out, raised


def score(flaw, name, function, folder):
    """Record a program twice and compare."""
    clean, flawed = (folder / f"{side}.shadowrec" for side in ("clean", "flawed"))
    expected, _ = recorded(function, clean)
    actual, raised = recorded(function, flawed, flaw.name)
    found = diff_recordings(read(clean), read(flawed))
    origin = next(iter(found.flow.origins), None)
    first, outcome = "", ""
    if origin is not None:
        call = int(found.difference.alignment.pairs[origin.pair, 0])
        first, outcome = found.difference.first.recording.context_of(call).op, found.difference.outcome(origin.pair)
    changes = "raises" if raised else what_changes(actual, expected)
    return Score(flaw.name, name, changes, first, str(outcome), first in flaw.operators)


def what_changes(actual, expected):
    """How two lists of results differ."""
    a, e = (tensors(r) for r in (actual, expected))
    if same(a, e):
        return "nothing"
    plain = [[t.detach().cpu().contiguous() if isinstance(t, torch.Tensor) else t for t in side] for side in (a, e)]
    return "strides" if same(*plain) else "values"


def tensors(value):
    """Results of a program as a flat list."""
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in tensors(v)]
    return [value]


def triggered(flaw):
    """A flaw's own trigger, with a seed."""

    def run(device):
        torch.manual_seed(0)
        return sim.trigger(flaw.name)(device)

    return run


def scores(flaw, bench, folder, limit):
    """Of the trigger, and of programs in which the flaw matters."""
    yield score(flaw, "trigger", triggered(flaw), folder)
    for program in bench.programs_for(flaw, limit=limit) if limit else ():
        yield score(flaw, program.name, program, folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--flaw", default="*", help="pattern of flaws")
    parser.add_argument("--limit", type=int, default=LIMIT, help="programs for each flaw, in addition to its trigger")
    options = parser.parse_args()
    sim.enable("sim")
    bench, found = Bench(times=False), []
    flaws = [f for f in CATALOGUE.values() if fnmatch.fnmatch(f.name, options.flaw) and f.kind not in NO_RESULT]
    with tempfile.TemporaryDirectory() as folder:
        for flaw in flaws:
            for s in scores(flaw, bench, Path(folder), options.limit):
                found.append(s)
                if not s.right:
                    said = f"first divergence {s.first or '-'} ({s.outcome})"
                    print(f"{s.flaw}, {s.program}: changes {s.changes}; {said}")
    for changes, n in sorted(Counter(s.changes for s in found).items()):
        right = [s for s in found if s.changes == changes and s.right]
        named = sum(s.outcome in (Outcome.KERNEL, Outcome.ALGORITHM) for s in right)
        print(f"{changes}: {len(right)} of {n} right, {named} of these by kernel or algorithm")
    counted = [s for s in found if s.changes == "values"]
    share = sum(s.right for s in counted) / max(1, len(counted))
    print(f"{len({s.flaw for s in counted})} flaws that change values: {100 * share:.1f} % right")
    sys.exit(share < 0.95)


if __name__ == "__main__":
    main()
