"""Run a program and compare every operator it calls.

The program runs unchanged, where its tensors live, with its own arguments and exit status. The records
are streamed to a data file; the report is printed when the program has ended, also after an exception
or Ctrl-C.

Examples:
  shadowrun run --target npu train.py --epochs 1
  shadowrun run --target cuda --ref cpu -o report.html -o report.json -m package.train
  shadowrun run --target 'cpu[threads=1]' --steps 0-2 --ops 'aten::*mm*' train.py
  shadowrun run --target npu --flaws maximum-drops-nan train.py     (no NPU needed: it is simulated)
  shadowrun run --target npu --fail-on unsupported train.py           (a gate for continuous integration)
  shadowrun run --target npu --known vendor.toml train.py    (divergences that are known fail nothing)

Exit status:
  0 or the program's own; 1 if --fail-on finds something, or the program raised; 2 wrong usage; 130 Ctrl-C
"""

from __future__ import annotations

import argparse
import os
import sys

from shadowrun.cli import options
from shadowrun.cli.gate import add_gate_argument, passes
from shadowrun.errors import UsageError
from shadowrun.platforms.spec import parse
from shadowrun.report.tame import forgiving

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options, then the program; what follows the program is its own."""
    parser.usage = "shadowrun run --target T [options] (script.py | -m module) [arguments of the program]"
    parser.add_argument("--target", metavar="T", help="platform to test: npu, cuda:1, sim, 'cpu[threads=1]', ...")
    parser.add_argument("--ref", default="cpu", metavar="R", help="platform to trust (default: %(default)s)")
    options.add_simulation_arguments(parser)
    options.add_compare_arguments(parser)
    options.add_output_argument(parser)
    add_gate_argument(parser)
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="script.py ...", help="program and its arguments")


def run(args: argparse.Namespace) -> int:
    """Run the program; returns the exit status.

    Raises:
        KeyboardInterrupt: It ended the program; the report is written.
    """
    if not args.module and not args.script:
        raise UsageError("Give the program to run: shadowrun run --target npu train.py", slug="missing-script")
    simulated = bool(args.flaws or args.preset)
    if args.target is None and not simulated:
        raise UsageError(
            "Give the platform to test, such as --target npu; `shadowrun platforms` lists what this machine has, "
            "and --target sim needs no hardware.",
            slug="missing-target",
        )
    target = args.target or "sim"
    options.check_outputs(args.output)

    from shadowrun.cli.program import Program

    program = Program(args.module or args.script, is_module=bool(args.module))
    named = program.names("sim")
    if simulated or (named and "sim" in (parse(target).device_type, parse(args.ref).device_type)):
        options.enable_simulation(target if simulated else "sim", args.flaws, args.preset, named=named)

    import shadowrun

    with program.environment():  # the data file names the program's own arguments
        comparison = shadowrun.compare(target, args.ref, **options.compare_options(args))
    process = os.getpid()
    outcome = program.execute(comparison)
    if os.getpid() != process:  # a child that the program forked: the report is its parent's
        return outcome.status
    sys.stdout.flush()

    comparison.fail_on = args.fail_on
    with forgiving():
        comparison.write("-")
        for output in args.output:
            comparison.write(output)
        passed = passes(comparison, args.fail_on)
    if outcome.interrupted:
        raise KeyboardInterrupt  # it ended the program, and ends the command as it ends Python
    return outcome.status if passed else 1
