"""Time the operators of a recorded run on two platforms, and tell what a step would take.

Each call that the run made is made again on both, in turn (A B A B), after a warm-up, from its launch until its result
is there. Its shapes and dtypes are those of the run, its values are drawn anew. Times are medians; the spread is that
of the middle half of the rounds: where it reaches over a bound, the machine was too noisy to tell.

Examples:
  shadowrun slowdown                                  the last run, on its own platforms
  shadowrun slowdown run.shadowrun --target cuda      the calls of a run on the CPU, timed on a GPU
  shadowrun slowdown --ops 'aten::*norm*' --rounds 25
  shadowrun slowdown -f json -o slowdown.json
  shadowrun slowdown --fail-over 1.5                  exit with 1 where a step takes half as long again
"""

from __future__ import annotations

import fnmatch
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shadowrun.cli import options
from shadowrun.errors import UsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from shadowrun.platforms.device import Platform
    from shadowrun.slowdown.calls import Call
    from shadowrun.slowdown.measuring import Measured

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A data file, platforms, how exactly, and what to write."""
    options.add_data_argument(parser)
    parser.add_argument("--target", metavar="T", help="platform to time (default: the run's target)")
    parser.add_argument("--ref", metavar="R", help="platform to time it against (default: the run's reference)")
    options.add_simulation_arguments(parser)
    parser.add_argument(
        "--ops", type=options.words, default=[], metavar="GLOBS", help="operators, such as 'aten::*mm*'"
    )
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="samples on each platform (default: 9)")
    parser.add_argument(
        "--intolerable", type=float, default=10.0, metavar="X", help="ratio that you could not live with (default: 10)"
    )
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
    from shadowrun.slowdown.calls import read_mix
    from shadowrun.slowdown.formats import FORMATS
    from shadowrun.slowdown.table import Slowdown

    if args.rounds < 3:
        raise UsageError(f"--rounds {args.rounds}: a spread needs 3 or more.", slug="bad-option")
    if not args.intolerable > 1:
        raise UsageError(f"--intolerable {args.intolerable}: use a ratio above 1.", slug="bad-option")
    mix = read_mix(Path(args.data))
    target_spec, ref_spec = args.target or mix.target, args.ref or mix.ref
    if args.flaws or args.preset:
        options.enable_simulation(target_spec, args.flaws, args.preset)
    calls = [c for c in mix.calls if not args.ops or any(fnmatch.fnmatchcase(c.op, glob) for glob in args.ops)]
    if not calls:
        raise UsageError(f"{args.data!r} has no calls of {', '.join(args.ops) or 'operators'}.", slug="bad-option")
    target, ref = resolve(target_spec), resolve(ref_spec)
    measured = _measured(calls, target, ref, args.rounds, args.seed)
    found = Slowdown.of(measured, mix.n_steps, args.intolerable)
    text = FORMATS[args.format](found, f"{target} against {ref}")
    if args.output == "-":
        sys.stdout.write(text)
    else:
        report.save(text, Path(args.output))
    if args.fail_over is not None and found.step.ratio > args.fail_over:
        print(
            f"shadowrun: FAILED: a step takes {found.step.ratio:.2f} times as long, over {args.fail_over:g}",
            file=sys.stderr,
        )
        return 1
    return 0


def _measured(calls: Sequence[Call], target: Platform, ref: Platform, rounds: int, seed: int) -> list[Measured]:
    import contextlib

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from shadowrun.slowdown.measuring import measure

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with contextlib.ExitStack() as stack:
        for platform in (target, ref):
            stack.callback(platform.stop)
            platform.start()
        bar = stack.enter_context(
            Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
        )
        task = bar.add_task("timing", total=len(calls))
        measured = []
        for call in calls:
            bar.update(task, description=call.op)
            measured.append(measure(call, target, ref, rounds=rounds, seed=seed))
            bar.advance(task)
        return measured
