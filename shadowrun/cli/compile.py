"""Run a program and check everything that it compiles with torch.compile.

Each graph that the program compiles runs compiled and eagerly on the same inputs: as the program has it compiled,
results and gradients, and its forward and backward pass each by itself. The program goes on with the eager results, so
that one wrong graph is not reported by all that follow. Where a graph deviates, the operators at fault are looked for
and named with the program's own lines; `--repro` writes a script for each.

Examples:
  shadowrun compile train.py --epochs 1
  shadowrun compile --repro for-the-vendor train.py
  shadowrun compile --calls 3 --time-limit 60 -m package.train

Exit status:
  0 or the program's own; 1 if a graph deviates or fails, or the program raised; 2 wrong usage; 3 if a graph could not
  be verified, unless --allow-unverified is given; 130 Ctrl-C
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shadowrun.errors import UsageError
from shadowrun.report.tame import forgiving

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.compiled.outcome import CompileReport

__all__ = ["add_arguments", "run"]

_UNVERIFIED = 3
"""Exit status."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options, then the program; what follows the program is its own."""
    parser.usage = "shadowrun compile [options] (script.py | -m module) [arguments of the program]"
    parser.add_argument(
        "--calls", type=_count, default=10, metavar="N", help="calls to check of each graph (default: %(default)s)"
    )
    parser.add_argument(
        "--time-limit",
        type=_seconds,
        default=600.0,
        metavar="S",
        help="seconds for the search for wrong operators (default: 600)",
    )
    parser.add_argument(
        "--repro", metavar="DIR", help="write a script for each operator at fault: a folder of its own in DIR"
    )
    parser.add_argument(
        "--allow-unverified", action="store_true", help="exit with 0 also where a graph could not be verified"
    )
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="script.py ...", help="program and its arguments")


def run(args: argparse.Namespace) -> int:
    """Run the program; returns the exit status."""
    if not args.module and not args.script:
        raise UsageError("Give the program to run: shadowrun compile train.py", slug="missing-script")

    from shadowrun.cli.program import Program

    program = Program(args.module or args.script, is_module=bool(args.module))

    import contextlib
    import time

    from shadowrun.compiled import torchcompile
    from shadowrun.compiled.script import reports_on, watched

    before = torchcompile.graph_breaks()
    with watched(args.calls) as found:
        outcome = program.execute(contextlib.nullcontext())
    sys.stdout.flush()
    breaks = {r: n - before.get(r, 0) for r, n in torchcompile.graph_breaks().items() if n > before.get(r, 0)}
    until = time.perf_counter() + args.time_limit
    reports = reports_on(found, breaks, until, _progress(), allow_unverified=args.allow_unverified)
    with forgiving():
        for report in reports:
            print(report.summary())
        if args.repro:
            _write_repros(reports, Path(args.repro))
        if not reports:
            print("The program called nothing that torch.compile compiled.")
    if outcome.interrupted:
        return outcome.status
    if any(report.failed for report in reports):
        return 1
    unverified = any(not report.ok for report in reports)
    return _UNVERIFIED if unverified and outcome.status == 0 else outcome.status


def _write_repros(reports: list[CompileReport], folder: Path) -> None:
    for k, report in enumerate(reports):
        try:
            made = report.repro(folder / f"{k + 1:02}-{report.name}" if len(reports) > 1 else folder)
        except UsageError as error:
            print(f"{report.name}: no script. {error}")
            continue
        for one in made:
            shown = {True: "exits 1 here", False: "exits 0 here", None: "was not tried"}[one.shows_fault]
            print(f"{one.script} ({one.inputs}), {shown}")
            for line in (*one.said.splitlines()[:4], *(f"note: {note}" for note in one.notes)):
                print(f"     {line}")


def _progress() -> Callable[[str, int, int], None]:
    """Tell what is being done, on one line of standard error, where somebody is watching."""
    if not sys.stderr.isatty():
        return lambda _what, _done, _of: None

    def tell(what: str, done: int, of: int) -> None:
        bar = "#" * (20 * done // max(of, 1))
        print(f"\r\033[K[{bar:<20}] {what}", end="\r", file=sys.stderr, flush=True)

    return tell


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError
    return number
