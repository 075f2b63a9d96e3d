"""Run a program and record digests of all results, to compare with a recording of another machine.

The program runs once, unchanged, on its own devices, with its own arguments and exit status. Nothing is compared and no
tensor is kept, only hashes, counts and 64 sampled elements of each result.

Examples:
  shadowrun record -o a.shadowrec train.py --epochs 1
  shadowrun record --steps 0-2 -m package.train
  shadowrun record --flaws matmul-in-tf32 -o flawed.shadowrec train.py sim     (a simulated device)

Exit status:
  the exit status of the program; 2 wrong usage; 130 after Ctrl-C
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from shadowrun.cli import options
from shadowrun.errors import UsageError

if TYPE_CHECKING:
    from shadowrun.comparison.record import RecordRun

__all__ = ["add_arguments", "run"]

_DEFAULT = "run.shadowrec"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options, then the program and its arguments."""
    parser.usage = "shadowrun record [-o FILE] [options] (script.py | -m module) [arguments of the program]"
    parser.add_argument(
        "-o", "--output", default=_DEFAULT, metavar="FILE", help="recording to write (default: %(default)s)"
    )
    options.add_import_argument(parser)
    options.add_simulation_arguments(parser)
    options.add_selection_arguments(parser, "record")
    parser.add_argument(
        "--rows", type=int, default=0, metavar="N", help="also digest the first N rows of each result one by one"
    )
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="script.py ...", help="program and its arguments")


def run(args: argparse.Namespace) -> int:
    """Run the program; returns the exit status.

    Raises:
        KeyboardInterrupt: Ctrl-C ended the program; the recording has been written.
    """
    if not args.module and not args.script:
        raise UsageError("Give the program to run: shadowrun record -o a.shadowrec train.py", slug="missing-script")

    from shadowrun.cli.program import Program

    program = Program(args.module or args.script, is_module=bool(args.module))
    named = program.names("sim")
    # A program that names `sim` itself expects the device to exist before its first line runs.
    if args.flaws or args.preset or named:
        options.enable_simulation("sim", args.flaws, args.preset, named=named)

    from shadowrun.comparison.record import record

    recording = record(
        args.output,
        steps=args.steps,
        modules=args.modules,
        ops=None if args.ops is None else options.operators(args.ops),
        rows=args.rows,
    )
    process = os.getpid()
    outcome = program.execute(recording)
    if os.getpid() != process:  # a child that the program forked
        return outcome.status
    sys.stdout.flush()
    print(_closing_line(recording), file=sys.stderr)
    if outcome.interrupted:
        raise KeyboardInterrupt  # end the command by the signal, as Python does
    return outcome.status


def _closing_line(recording: RecordRun) -> str:
    """Calls, bytes, file and what to do next."""
    path = recording.path
    size = path.stat().st_size if path.exists() else 0
    n_skipped = sum(recording.skipped.values())
    skipped = f" ({n_skipped:,} not recorded)" if n_skipped else ""
    return (
        f"shadowrun: {recording.n_calls:,} calls{skipped}, {size:,} bytes in {path}; "
        f"next: shadowrun diff {path.name} OTHER.shadowrec, or shadowrun classes *.shadowrec"
    )
