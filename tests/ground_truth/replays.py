"""Every flaw of the simulated device: recorded on the clean device with inputs, replayed on the flawed one.

python -m tests.ground_truth.replays [--flaw NAME] [--limit N]

A replay has to flag the flaw's operators, and no others. Flaws of speed change no result and are left out, as are those
that end a process. Where no result differs, or only by rounding, the flaw is counted apart.
"""

import argparse
import fnmatch
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import shadowrun
from shadowrun import sim
from shadowrun.recording.file_format.captured_reader import CapturedFile
from shadowrun.recording.file_format.recording_file import read
from shadowrun.sim import CATALOGUE
from shadowrun.studies.replay.outcomes import Outcome
from shadowrun.studies.replay.replay_recording import replay
from tests.ground_truth.benchmark import Bench, quietly
from tests.ground_truth.recordings import triggered

NO_RESULT = {"speed", "fatal"}
EVERYWHERE = {"no-float64"}
"""Flaws that every operator meets: no float64 tensor can be on the device, so that each call with one raises."""
CAPTURE = 1 << 28


@dataclass
class Score:
    """What a replay said of one flaw in one program.

    Attributes:
        flaw, program: Their names.
        raised: The program did not end on the clean device.
        right: Operators of the flaw that were flagged.
        wrong: Others that were flagged.
        n_run: Calls that were replayed.
        n_differ: Of these, calls whose results differ from the recorded ones.
    """

    flaw: str
    program: str
    raised: bool
    right: list[str]
    wrong: list[str]
    n_run: int
    n_differ: int


def record_clean(function, path):
    """Record a program on the clean device, with inputs; gives whether it raised."""
    with sim.flaws(), quietly(), shadowrun.record(path, capture=CAPTURE):
        try:
            function("sim")
        except Exception:
            return True
    return False


def replayed(path, *flaws, ref="cpu"):
    """Replay a recording on the device with these flaws."""
    with sim.flaws(), sim.flaws(*flaws), quietly(), CapturedFile(path) as captured:
        return replay(read(path), captured, "sim", ref)


def score(flaw, name, function, path):
    """Record on the clean device, replay on the flawed one."""
    raised = record_clean(function, path)
    found = replayed(path, flaw.name)
    flagged = sorted({call.context.op for call in found.flagged})
    of_flaw = [op for op in flagged if op in flaw.operators or flaw.name in EVERYWHERE]
    differ = len(found.calls) - found.count(Outcome.EQUAL, Outcome.NOT_RUN, Outcome.NO_DIGEST)
    n_run = len(found.calls) - found.count(Outcome.NOT_RUN)
    return Score(flaw.name, name, raised, of_flaw, [op for op in flagged if op not in of_flaw], n_run, differ)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--flaw", default="*", help="pattern of flaws")
    parser.add_argument("--limit", type=int, default=0, help="programs for each flaw, besides its trigger")
    options = parser.parse_args()
    sim.enable("sim")
    bench, counts, wrong = Bench(times=False), Counter(), 0
    flaws = [f for f in CATALOGUE.values() if fnmatch.fnmatch(f.name, options.flaw) and f.kind not in NO_RESULT]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.shadowrec"
        for flaw in flaws:
            programs = [("trigger", triggered(flaw))]
            programs += [(p.name, p) for p in bench.programs_for(flaw, limit=options.limit)] if options.limit else []
            for name, function in programs:
                found = score(flaw, name, function, path)
                kind = "named" if found.right else "differs, not named" if found.n_differ else "no result differs"
                counts[kind] += 1
                wrong += bool(found.wrong)
                if not found.right or found.wrong:
                    print(f"{flaw.name} ({flaw.kind}), {name}: {kind}; {found}")
    print(*(f"{kind}: {n}" for kind, n in counts.items()), f"others flagged: {wrong}", sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
