"""Time the operators of a recorded run on two platforms, and tell what a step would take; or those of a database.

Each call that the run made is made again on both, in turn (A B A B), after a warm-up, from its launch until its result
is there. Its shapes and dtypes are those of the run, its values are drawn anew. Times are medians; the spread is that
of the middle half of the rounds: where it reaches over a bound, the machine was too noisy to tell.

With --database the calls are those of torch's own database of operators, forward: a million elements for element-wise
operators and reductions, the largest sample of all others. The same where no data file is named and none is here.

Examples:
  shadowrun slowdown                                  the last run, on its own platforms
  shadowrun slowdown run.shadowrun --target cuda      the calls of a run on the CPU, timed on a GPU
  shadowrun slowdown --ops 'aten::*norm*' --rounds 25
  shadowrun slowdown -f json -o slowdown.json
  shadowrun slowdown --fail-over 1.5                  exit with 1 where a step takes half as long again
  shadowrun slowdown --database --target npu          every operator of torch's database
"""

from __future__ import annotations

import contextlib
import fnmatch
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shadowrun.cli import options
from shadowrun.errors import UsageError
from shadowrun.report.tame import MAX_NAME, clip

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

    from shadowrun.platforms.device import Platform
    from shadowrun.slowdown.calls import Call
    from shadowrun.slowdown.database import Entry
    from shadowrun.slowdown.measuring import Measured

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A data file, platforms, how exactly, and what to write."""
    parser.add_argument("data", nargs="?", metavar="DATA", help=f"data file (default: {options.DATA_FILE})")
    parser.add_argument("--database", action="store_true", help="operators of torch's own database, not of a run")
    options.add_import_argument(parser)
    parser.add_argument("--target", metavar="T", help="platform to time (default: the run's target)")
    parser.add_argument("--ref", metavar="R", help="platform to time it against (default: the run's reference, or cpu)")
    options.add_simulation_arguments(parser)
    parser.add_argument(
        "--ops", type=options.words, default=[], metavar="GLOBS", help="operators, such as 'aten::*mm*'"
    )
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="samples on each platform (default: 9)")
    parser.add_argument(
        "--intolerable", type=float, default=10.0, metavar="X", help="ratio that you could not live with (default: 10)"
    )
    parser.add_argument("--dtype", default="float32", help="of the database's inputs (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the values (default: 0)")
    parser.add_argument("-f", "--format", choices=("txt", "md", "json", "csv"), default="txt", help="(default: txt)")
    parser.add_argument("-o", "--output", default="-", metavar="FILE", help="file, or - for standard output (default)")
    parser.add_argument(
        "--fail-over", type=float, metavar="X", help="exit with 1 where a step takes over X times as long"
    )


def run(args: argparse.Namespace) -> int:
    """Time and print; returns the exit status."""
    from shadowrun import report
    from shadowrun.platforms import resolve
    from shadowrun.repro.memory import bounded
    from shadowrun.slowdown.formats import FORMATS
    from shadowrun.slowdown.table import Slowdown

    if args.rounds < 3:
        raise UsageError(f"--rounds {args.rounds}: a spread needs 3 or more.", slug="bad-option")
    if not args.intolerable > 1:
        raise UsageError(f"--intolerable {args.intolerable}: use a ratio above 1.", slug="bad-option")
    chosen = _of_database(args) if _wants_database(args) else _of_run(args)
    if args.flaws or args.preset:
        options.enable_simulation(chosen.target, args.flaws, args.preset)
    target, ref = resolve(chosen.target), resolve(chosen.ref)
    if not chosen.of_program:
        _check_no_process(target, ref)
    with bounded() if chosen.of_program else contextlib.nullcontext():
        measured = _measured(chosen, target, ref, args.rounds, args.seed)
    found = Slowdown.of(measured, chosen.n_steps, args.intolerable, of_program=chosen.of_program)
    text = FORMATS[args.format](found, f"{target} against {ref}")
    if args.output == "-":
        report.show(text)
    else:
        report.save(text, Path(args.output))
    if args.fail_over is not None and found.step.ratio > args.fail_over:
        print(
            f"shadowrun: FAILED: a step takes {found.step.ratio:.2f} times as long, over {args.fail_over:g}",
            file=sys.stderr,
        )
        return 1
    return 0


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What is timed, and where."""

    calls: Iterable[Call | Entry]
    n_calls: int
    target: str
    ref: str
    n_steps: int
    of_program: bool


def _wants_database(args: argparse.Namespace) -> bool:
    if args.database and args.data is not None:
        raise UsageError(f"--database and {args.data!r}: leave one of them out.", slug="bad-option")
    return args.database or (args.data is None and args.target is not None and not Path(options.DATA_FILE).exists())


def _of_run(args: argparse.Namespace) -> _Chosen:
    from shadowrun.platforms.untrusted import accepted
    from shadowrun.slowdown.calls import read_mix

    data = args.data or options.DATA_FILE
    mix = read_mix(Path(data))
    calls = [c for c in mix.calls if not args.ops or any(fnmatch.fnmatchcase(c.op, glob) for glob in args.ops)]
    if not calls:
        raise UsageError(f"{data!r} has no calls of {', '.join(args.ops) or 'operators'}.", slug="bad-option")
    # The run's platforms are the file's, which may be somebody else's; those of the options are the person's.
    names = [name for name in (args.target, args.ref) if name]
    target = args.target or accepted(mix.target, names, simulated=bool(args.flaws or args.preset))
    ref = args.ref or accepted(mix.ref, names, option="--ref")
    return _Chosen(calls, len(calls), target, ref, mix.n_steps, of_program=True)


def _of_database(args: argparse.Namespace) -> _Chosen:
    from shadowrun.slowdown.database import entries, names_of
    from shadowrun.sweep.sweeping import DTYPES

    target = args.target or ("sim" if args.flaws or args.preset else None)
    if target is None:
        raise UsageError("--database needs a platform to time, such as --target npu.", slug="missing-target")
    if args.fail_over is not None:
        raise UsageError("--fail-over is about a step: it needs a run, not --database.", slug="bad-option")
    if args.dtype not in DTYPES:
        raise UsageError(f"--dtype {args.dtype!r}: use {', '.join(DTYPES)}.", slug="bad-option")
    names = names_of(args.ops, args.dtype)
    return _Chosen(entries(names, args.dtype, args.seed), len(names), target, args.ref or "cpu", 1, of_program=False)


def _check_no_process(*platforms: Platform) -> None:
    for platform in platforms:
        if platform.remote is not None:
            raise UsageError(
                f"{platform} runs in a process of its own, which takes single operators, no functions of torch's "
                "database. Record a run and time its calls: shadowrun slowdown DATA.",
                slug="bad-option",
            )


def _measured(chosen: _Chosen, target: Platform, ref: Platform, rounds: int, seed: int) -> list[Measured]:
    import warnings

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from shadowrun.slowdown.measuring import measure

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # of operators: they are called to be timed
        for platform in (target, ref):
            stack.callback(platform.stop)
            platform.start()
        bar = stack.enter_context(
            Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
        )
        task = bar.add_task("timing", total=chosen.n_calls)
        measured = []
        for call in chosen.calls:
            bar.update(task, description=clip(call.op, MAX_NAME))
            measured.append(measure(call, target, ref, rounds=rounds, seed=seed))
            bar.advance(task)
        return measured
