"""Write a script for each finding that shows it alone: plain torch, its inputs, and the versions.

The inputs are those of the first call that failed, which the run kept beside its data file; they are made smaller and
simpler while the fault stays. `python repro.py` exits 1 while the fault is there, and 0 when it is gone.

Examples:
  shadowrun repro                                  each finding of the last run, in ./repro
  shadowrun repro --finding 1 -o for-the-vendor   the first finding of the report
  shadowrun repro --finding 'aten::*mm*' nightly.shadowrun

Exit status:
  0 written, 2 wrong usage, or no script can be written
"""

from __future__ import annotations

import fnmatch
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shadowrun.cli import options
from shadowrun.errors import ShadowrunError, UsageError

if TYPE_CHECKING:
    import argparse

    from shadowrun.analysis import Finding
    from shadowrun.repro import Repro

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A data file, which findings, and where to."""
    options.add_data_argument(parser)
    parser.add_argument(
        "--finding",
        default="all",
        metavar="N",
        help="number of a finding in the report, a glob pattern of operators, or all (default)",
    )
    parser.add_argument("-o", "--output", default="repro", metavar="DIR", help="folder to write to (default: ./repro)")
    parser.add_argument("--no-minimise", action="store_true", help="leave the inputs as they were in the run")
    parser.add_argument(
        "--time-limit", type=float, default=30.0, metavar="S", help="seconds to minimise one (default: %(default)g)"
    )
    options.add_known_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Write the scripts; returns the exit status."""
    import shadowrun

    recorded = shadowrun.load(args.data, known=options.known_ledger(args))
    chosen = _chosen(args.finding, recorded.findings())
    if not chosen:
        print("Nothing was found: there is nothing to show.")
        return 0
    written = 0
    for number, finding in chosen:
        folder = Path(args.output) / f"{number:02}-{re.sub(r'[^A-Za-z0-9_.]+', '-', finding.op)}-{finding.kind}"
        print(f"{number}. {finding.kind} {finding.op}: ", end="", flush=True)
        try:
            made = recorded.repro(finding, folder, minimise=not args.no_minimise, time_limit_s=args.time_limit)
        except ShadowrunError as error:
            print(f"no script. {error}")
            continue
        written += 1
        _tell(made)
    if not written:
        print("shadowrun: no script could be written.", file=sys.stderr)
    return 0 if written else 2


def _chosen(wanted: str, findings: list[Finding]) -> list[tuple[int, Finding]]:
    """Findings with their numbers in the report, from 1."""
    numbered = list(enumerate(findings, start=1))
    if wanted == "all":
        return numbered
    if wanted.isdecimal():
        chosen = [pair for pair in numbered if pair[0] == int(wanted)]
    else:
        chosen = [pair for pair in numbered if fnmatch.fnmatchcase(pair[1].op, wanted)]
    if not chosen:
        ops = ", ".join(f"{n} {finding.op}" for n, finding in numbered[:8])
        raise UsageError(f"No finding is {wanted!r}. There are: {ops or 'none'}.", slug="unknown-finding")
    return chosen


def _tell(made: Repro) -> None:
    shown = {True: "exits 1 here", False: "exits 0 here", None: "was not tried"}[made.shows_fault]
    print(f"{made.script} ({made.inputs}), {shown}")
    for line in (*made.said.splitlines()[:4], *(f"note: {note}" for note in made.notes)):
        print(f"     {line}")
