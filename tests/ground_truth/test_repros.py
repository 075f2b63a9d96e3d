"""Every finding of every flaw that a script can show is shown by its script, and no longer once the flaw is off.

python -m tests.ground_truth.test_repros [NAME ...]        prints the table
"""

import contextlib
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
import torch

import shadowrun
from shadowrun import Cause, ShadowrunError
from shadowrun.repro import script
from shadowrun.sim import CATALOGUE
from tests import forked
from tests.ground_truth.timing import timed

FEW = (
    "missing-addcdiv",
    "nll-loss-falls-back-silently",
    "leaky-relu-ignores-strides",
    "matmul-in-bf16",
    "log-softmax-stale",
    "no-float64",
    "layer-norm-centres-its-input",
    "mul-writes-past-the-view",
    "clone-aliases",
)
"""One of each kind of script, for the default run."""

NOT_SHOWN = {
    "nan-to-zero-integer": "undefined behaviour is no finding",
    "sort-ties-reversed": "ties are no finding",
    "sum-in-other-order": "correct",
    "tanh-one-ulp-off": "correct",
    "index-put-random-order": "rounding, or an order that one run may not show",
    "dropout-ignores-p": "random: one call cannot show a wrong distribution",
}


def shown(name, folder, scripts, seconds=20.0):
    """(operator, kind, exit status with and without the flaw, inputs, why not) of each finding of a flaw's trigger."""
    from shadowrun import sim

    flaw, file = CATALOGUE[name], folder / "run.shadowrun"
    torch.manual_seed(0)
    with timed(flaw) as times, sim.flaws(name), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with shadowrun.compare("sim", file=file) as run:
            for _ in range(3 * times):
                with contextlib.suppress(Exception):
                    sim.trigger(name)("sim")
        for number, finding in enumerate(run.findings()):
            if finding.op not in flaw.operators or (finding.kind == "slow" and flaw.cause is not Cause.SLOW):
                continue  # a busy machine makes any operator slow once
            try:
                made = run.repro(finding, folder / str(number), time_limit_s=seconds)
            except ShadowrunError as error:
                yield finding.op, finding.kind, None, None, "", str(error)
                continue
            on, off = scripts.run(made.script), scripts.run(made.script, SIM_FLAWS="")
            said = "; ".join((*made.notes, *([off.stdout[-300:]] if off.returncode else [])))
            yield finding.op, finding.kind, on.returncode, off.returncode, made.inputs, said


@pytest.mark.parametrize(
    "name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in CATALOGUE if n not in NOT_SHOWN]
)
@pytest.mark.filterwarnings("ignore")
def test_the_script_shows_the_flaw_and_nothing_without_it(clean_sim, name, quick, tmp_path, capfd):
    rows = list(shown(name, tmp_path, quick))
    assert rows
    for op, kind, on, off, inputs, said in rows:
        assert (on, off) == (1, 0), (op, kind, inputs, said)


def main():
    from shadowrun import sim

    sim.enable("sim")
    print("| flaw | operator | kind | with | without | inputs | notes |\n|---|---|---|---|---|---|---|")
    n, right = 0, 0
    with forked.Server() as scripts, tempfile.TemporaryDirectory() as folder:
        script.run_script = lambda path, *_: scripts.run(path)
        for name in sys.argv[1:] or CATALOGUE:
            place = Path(folder) / name
            place.mkdir()
            for op, kind, on, off, inputs, said in shown(name, place, scripts):
                print(f"| {name} | `{op}` | {kind} | {on} | {off} | {inputs} | {said} |", flush=True)
                if on is not None or name not in NOT_SHOWN:
                    n, right = n + 1, right + ((on, off) == (1, 0))
    print(f"\n{right} of {n} scripts right")
    sys.exit(n != right)


if __name__ == "__main__":
    main()
