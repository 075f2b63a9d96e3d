"""How many steps an overhead budget needs to find each persistent flaw of the catalogue.

python -m tests.ground_truth.budgets [--flaw PATTERN] [--program PATTERN] [--limit N] [--output FILE]

A step is one run of a program of the benchmark on the reference, replayed on the simulated device with one flaw. A flaw
is persistent in a program if a comparison of every call finds it in every step.
"""

import argparse
import fnmatch
import itertools
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import shadowrun
from shadowrun import Cause, sim
from shadowrun.sim import CATALOGUE
from tests.ground_truth.benchmark import Bench, quietly
from tests.ground_truth.programs import PROGRAMS
from tests.ground_truth.scoring import WRONG

BUDGETS = (1.05, 1.2, 1.5)
WITHIN = (10, 50, 200)
CONTROL_STEPS = 3
N_PROGRAMS = 3


@dataclass(frozen=True)
class Search:
    """What one budget found in one program.

    Attributes:
        budget: None: every call is compared.
        steps: Number of the step, from 1, that first showed the flaw on an operator of its own; None: none did.
        compared: Steps up to that one in which any call was compared.
        right: What was recorded as wrong is on operators of the flaw, with a cause that the catalogue allows.
        achieved: The mean step in plain steps, as the report says.
    """

    flaw: str
    program: str
    budget: float | None
    steps: int | None
    compared: int
    right: bool
    achieved: float


def is_hit(flaw, record):
    """Whether a record shows the flaw."""
    verdict = record.verdict
    if record.call.op not in flaw.operators or verdict.status not in flaw.statuses:
        return False
    return flaw.cause is None or verdict.cause in {flaw.cause, *flaw.accepted}


def compare(flaw, program, budget, n_steps, run=None):
    """Run steps, under a comparison that may have run before."""
    options = {} if budget is None else {"budget": budget}
    with sim.flaws(flaw.name), quietly():
        run = shadowrun.compare("sim", **options) if run is None else run
        with run:
            for _ in range(n_steps):
                program("cpu")
                run.step()
    return run


def is_persistent(flaw, program):
    """Whether each step shows the flaw where every call is compared."""
    if flaw.cause is Cause.SLOW:
        return False
    records = compare(flaw, program, None, CONTROL_STEPS).records()
    return len({r.call.step for r in records if is_hit(flaw, r)}) == CONTROL_STEPS


def persistent_programs(bench, flaw, wanted, limit):
    """The first programs, of families in turn, in which the flaw matters in every step."""
    chosen = (p for p in PROGRAMS.values() if fnmatch.fnmatch(p.name, wanted))
    found = (p for p in chosen if bench.matters(flaw, p) and is_persistent(flaw, p))
    return list(itertools.islice(found, limit))


def search(flaw, program, budget, within=WITHIN):
    """Run until the flaw is found, or to the last limit. It is looked for at the limits, while nothing is timed."""
    run, done, hits = None, 0, []
    for limit in within:
        run = compare(flaw, program, budget, limit - done, run)
        done = limit
        records = list(run.records())
        hits = [r for r in records if is_hit(flaw, r)]
        if hits:
            break
    first = min((r.call.step for r in hits), default=None)
    wrong = [r for r in records if r.verdict.status in WRONG and (first is None or r.call.step <= first)]
    return Search(
        flaw.name,
        program.name,
        budget,
        None if first is None else first + 1,
        len({r.call.step for r in records if first is None or r.call.step <= first}),
        all(is_hit(flaw, r) for r in wrong),
        run.info.budget["achieved"] if budget else float("nan"),
    )


def median(values, most):
    """Of numbers of steps, where None is more than all."""
    m = statistics.median_high(most + 1 if v is None else v for v in values)
    return f"> {most}" if m > most else str(m)


def share(found, n):
    """Cells of a row: searches that ended within so many steps."""
    return f"{sum(s.steps is not None and s.steps <= n for s in found)}/{len(found)}"


def markdown(searches):
    """A row for each budget, then one for each flaw."""
    budgets = [b for b in (*BUDGETS, None) if any(s.budget == b for s in searches)]
    head = ["budget", "searches", "median step", *(f"within {n}" for n in (1, *WITHIN)), "only right verdicts"]
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for b in budgets:
        found = [s for s in searches if s.budget == b]
        cells = [str(b or "none"), str(len(found)), median([s.steps for s in found], WITHIN[-1])]
        cells += [share(found, n) for n in (1, *WITHIN)]
        yield f"| {' | '.join(cells)} | {sum(s.right for s in found)}/{len(found)} |"
    yield ""
    head = ["flaw", "programs", *(f"step at {b or 'no budget'} (compared steps)" for b in budgets)]
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for name in dict.fromkeys(s.flaw for s in searches):
        rows = [[s for s in searches if s.flaw == name and s.budget == b] for b in budgets]
        cells = [f"{median([s.steps for s in r], WITHIN[-1])} ({median([s.compared for s in r], 999)})" for r in rows]
        yield f"| {name} | {len(rows[0])} | {' | '.join(cells)} |"


def main():
    from rich.console import Console
    from rich.progress import Progress

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--flaw", default="*", help="pattern of flaws")
    parser.add_argument("--program", default="*", help="pattern of programs")
    parser.add_argument("--limit", type=int, default=N_PROGRAMS, help="programs for each flaw")
    parser.add_argument("--output", type=Path, default=Path("budgets.json"))
    options = parser.parse_args()
    sim.enable("sim")
    bench, searches, passing = Bench(), [], []
    flaws = [f for f in CATALOGUE.values() if fnmatch.fnmatch(f.name, options.flaw)]
    with Progress(console=Console(file=sys.stdout), transient=True, disable=not sys.stdout.isatty()) as progress:
        task = progress.add_task("flaws", total=len(flaws))
        for flaw in flaws:
            progress.update(task, description=flaw.name)
            programs = persistent_programs(bench, flaw, options.program, options.limit)
            if not programs:
                passing.append(flaw.name)
            searches += [search(flaw, p, b) for p in programs for b in (*BUDGETS, None)]
            # After each flaw: a run that is stopped leaves what it found.
            result = {"searches": [asdict(s) for s in searches], "passing": passing}
            options.output.write_text(json.dumps(result, indent=1))
            progress.advance(task)
    print("\n".join(markdown(searches)))
    print(f"\nNot in every step of any program: {', '.join(passing) or 'none'}")
    never = [s for s in searches if s.steps is None]
    print("\n".join(f"Not found: {s.flaw}, {s.program}, {s.budget}" for s in never))
    unclear = {(s.flaw, s.program) for s in searches if s.budget is None and not s.right}  # no matter of the budget
    wrong = [s for s in searches if not s.right and (s.flaw, s.program) not in unclear]
    print("\n".join(f"Also other verdicts: {s.flaw}, {s.program}, {s.budget}" for s in wrong))
    sys.exit(any(s.budget is None for s in never) or bool(wrong))  # how soon is a matter of the machine


if __name__ == "__main__":
    main()
