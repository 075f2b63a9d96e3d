"""Run a program and compare every operator it calls.

The program runs unchanged on its own devices, with its own arguments and exit status. Records are streamed to a data
file. The report is printed when the program ends, also after an exception or Ctrl-C.

Examples:
  shadowrun run --target npu train.py --epochs 1
  shadowrun run --target cuda --ref cpu -o report.html -o report.json -m package.train
  shadowrun run --target 'cpu[threads=1]' --steps 0-2 --ops 'aten::*mm*' train.py
  shadowrun run --target npu --flaws maximum-drops-nan train.py     (no NPU needed: it is simulated)
  shadowrun run --target npu --fail-on unsupported train.py           (a gate for continuous integration)
  shadowrun run --target npu --known vendor.toml train.py    (known issues fail nothing)
  shadowrun run --target npu --baseline main.shadowrun --fail-on new train.py    (only what a change broke)

Each option has a variable (SHADOWRUN_FAIL_ON for --fail-on) and a key in [tool.shadowrun.run] of pyproject.toml
(fail-on). The command line decides before the variable, and that before the file; options that may be repeated add up.

Exit status:
  the exit status of the program; 1 if there are findings of a kind in --fail-on, or the program raised; 2 wrong usage;
  130 after Ctrl-C
"""

from __future__ import annotations

import os
import shlex
import sys
from typing import TYPE_CHECKING

from shadowrun.cli import compare_options, live_line, options
from shadowrun.cli.option_defaults import option_defaults
from shadowrun.errors import PlatformError, UsageError
from shadowrun.platforms.spec import parse
from shadowrun.report.sanitize import MAX_NAME, clip, forgiving, sanitize
from shadowrun.settings import FAIL_ON, KINDS, NEW, WORSE, read_settings

if TYPE_CHECKING:
    import argparse

    from shadowrun.comparison import Comparison
    from shadowrun.run import Run

__all__ = ["add_arguments", "add_gate_argument", "passes", "run", "set_defaults"]


_SHOWN = 5


def add_gate_argument(parser: argparse.ArgumentParser) -> None:
    """The gate: which kinds of findings fail the run."""
    parser.add_argument(
        "--fail-on",
        type=options.kinds_among((*KINDS, NEW, WORSE)),
        default=",".join(FAIL_ON),
        metavar="KINDS",
        help=f"findings that make the exit status 1: {', '.join(KINDS)}, or none (default: %(default)s); {NEW} and "
        f"{WORSE}: since --baseline",
    )
    parser.add_argument(
        "--fail-fast", action="store_true", help="end the program at the first finding that --fail-on names"
    )


def passes(run: Run, fail_on: list[str]) -> bool:
    """Whether a run passes the gate; if not, print the reason, with one line for each kind of finding."""
    if not fail_on:
        return True
    gate = sanitize(run.gate(fail_on), whole=True)
    if gate.passed:
        return True
    if gate.only_exception:  # its traceback has been printed already
        return False
    # On standard error: standard output may be a report that another program reads.
    print(f"shadowrun: {gate.line}", file=sys.stderr)
    found = [(finding.kind, finding.op) for finding in run.findings()]
    if (since := run.since_baseline()) is not None:
        found += [(str(c.change), f"{c.signature.op} ({c.signature.kind})") for c in since.failing(fail_on)]
    for kind in fail_on:
        ops = list(dict.fromkeys(clip(op, MAX_NAME) for of, op in found if of == kind))
        if ops:
            more = f" and {len(ops) - _SHOWN} more" if len(ops) > _SHOWN else ""
            print(f"shadowrun:   {kind}: {', '.join(ops[:_SHOWN])}{more}", file=sys.stderr)
    return False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options, then the program and its arguments."""
    parser.usage = "shadowrun run --target T [options] (script.py | -m module) [arguments of the program]"
    parser.add_argument("--target", metavar="T", help="platform to test: npu, cuda:1, sim, 'cpu[threads=1]', ...")
    parser.add_argument("--ref", default="cpu", metavar="R", help="platform to trust (default: %(default)s)")
    options.add_simulation_arguments(parser)
    compare_options.add_compare_arguments(parser)
    options.add_output_arguments(parser, findings=True, digest=True)
    add_gate_argument(parser)
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--progress",
        action="store_const",
        const=True,
        help="show calls, findings and overhead on the last line of the terminal, in CI services too",
    )
    either.add_argument("--no-progress", dest="progress", action="store_const", const=False, help="do not show them")
    options.add_program_arguments(parser)


def set_defaults(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Take defaults of options from the environment and from ``[tool.shadowrun.run]``; see `option_defaults`.

    Args:
        parser: Gets them.
        args: Parsed without them: they say which settings are read.
    """
    table = read_settings(False if args.no_settings else args.settings).run
    # The parser has no public list of its actions.
    parser.set_defaults(**option_defaults(vars(parser)["_actions"], table, os.environ))


def run(args: argparse.Namespace) -> int:
    """Run the program; returns the exit status.

    Raises:
        KeyboardInterrupt: Ctrl-C ended the program; the report has been written.
    """
    options.require_program(args, "shadowrun run --target npu train.py")
    simulated = options.is_simulated(args)
    target = args.target or "sim"
    options.check_outputs(args.output)  # before the program runs, which may take hours
    if args.baseline is None and {NEW, WORSE} & set(args.fail_on):
        raise UsageError(
            f"--fail-on {','.join(args.fail_on)} compares with an earlier run: name its data file by --baseline.",
            slug="bad-option",
        )

    from shadowrun.cli.late_device import LateDeviceComparison
    from shadowrun.cli.program import Program

    program = Program(args.module or args.script, is_module=bool(args.module))
    named = program.names("sim")
    # A program that names `sim` itself expects the device to exist before its first line runs.
    if simulated or (named and "sim" in (parse(target).device_type, parse(args.ref).device_type)):
        options.enable_simulation(target if simulated else "sim", args.flaws, args.preset, named=named)

    import shadowrun

    before = options.baseline(args)

    line = live_line.LiveLine() if live_line.is_wanted(args.progress) else None

    # A function: the comparison may have to wait until the program registers its device.
    def make() -> Comparison:
        fail_fast = [kind for kind in args.fail_on if kind != WORSE] if args.fail_fast else ()
        made = shadowrun.compare(target, args.ref, fail_fast=fail_fast, **compare_options.compare_keywords(args))
        # The report has the verdict of the same gate.
        made.fail_on, made.baseline = args.fail_on, before
        if line is not None:
            line.follow(made)
        return made

    deferred = None
    with program.environment():  # the data file records the program's arguments
        try:
            comparison = make()
        except PlatformError as error:
            device = target.partition(":")[0]
            # The program itself may register the device: then the comparison starts when it does.
            if error.slug != "unknown-device" or not device.isidentifier() or not program.names(device):
                raise
            deferred = LateDeviceComparison(device, make)
    process = os.getpid()
    block = comparison if deferred is None else deferred
    outcome = program.execute(block if line is None else line.around(block))
    if os.getpid() != process:  # a child that the program forked; the parent prints the report
        return outcome.status
    if deferred is not None:
        comparison = deferred.required()
    if comparison.left_out:  # it has nothing to report, and one report of all ranks is enough
        return outcome.status
    sys.stdout.flush()  # the program's output comes before the report

    from shadowrun.report.run_report import run_document

    with forgiving():
        data = "" if args.data == options.DATA_FILE else f" {shlex.quote(args.data)}"
        document = run_document(comparison, pictures=options.wants_pictures(args))
        options.print_report(document, args, always=True, more=f"shadowrun report{data} -v")
        # The last line on the screen is the gate already.
        at_terminal = args.format is None and sys.stdout.isatty() and sys.stderr.isatty()
        passed = comparison.gate(args.fail_on).passed if at_terminal else passes(comparison, args.fail_on)
    if outcome.interrupted:
        raise KeyboardInterrupt  # end the command by the signal, as Python does
    return outcome.status if passed else 1
