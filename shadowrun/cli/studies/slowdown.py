"""Time the operators of a recorded run, or of torch's database, on two platforms, and estimate the time of a step.

Each recorded call is repeated on both platforms alternately (A B A B), after a warm-up, and timed from its launch to
its result. Shapes and dtypes are the recorded ones; values are newly sampled. Times are medians; the spread is the
interquartile range of the rounds. If the spread crosses a bound, the machine was too noisy to decide.

With --database, the calls are the forward calls of torch's own database of operators: a million elements for
element-wise operators and reductions, the largest sample for all others. This is the default if no data file exists.

Examples:
  shadowrun slowdown                                  the last run, on its own platforms
  shadowrun slowdown run.shadowrun --target cuda      the calls of a run on the CPU, timed on a GPU
  shadowrun slowdown --ops 'aten::*norm*' --rounds 25
  shadowrun slowdown -o slowdown.json
  shadowrun slowdown --critical-ratio 20              report operators separately that are over 20 times slower
  shadowrun slowdown --fail-over 1.5                  exit with 1 if a step takes over 1.5 times as long
  shadowrun slowdown --database --target npu          every operator of torch's database
  shadowrun slowdown --database --target npu --fail-on critical,error -o junit.xml
"""

from __future__ import annotations

import contextlib
import fnmatch
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shadowrun.cli import options
from shadowrun.cli.progress import progress_bar
from shadowrun.errors import UsageError
from shadowrun.report.sanitize import print_line

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

    from shadowrun.platforms.device import Platform
    from shadowrun.studies.slowdown.calls import Call, Entry
    from shadowrun.studies.slowdown.timing import TimedCall

__all__ = ["add_arguments", "run"]

# Values of `shadowrun.studies.slowdown.table.FAIL_ON`; a test compares them.
_FAIL_ON = ("critical", "error")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A data file, platforms, rounds, and the output."""
    parser.add_argument("data", nargs="?", metavar="DATA", help=f"data file (default: {options.DATA_FILE})")
    parser.add_argument(
        "--database", action="store_true", help="time the operators of torch's own database, not of a run"
    )
    parser.add_argument("--target", metavar="T", help="platform to time (default: the run's target)")
    parser.add_argument("--ref", metavar="R", help="platform to time it against (default: the run's reference, or cpu)")
    options.add_simulation_arguments(parser)
    parser.add_argument(
        "--ops", type=options.words, default=[], metavar="GLOBS", help="time only these operators, such as 'aten::*mm*'"
    )
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="samples on each platform (default: 9)")
    parser.add_argument(
        "--critical-ratio",
        type=float,
        default=10.0,
        metavar="X",
        help="report operators slower than this separately (default: %(default)g)",
    )
    parser.add_argument("--dtype", default="float32", help="dtype of the database's inputs (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the values (default: %(default)s)")
    options.add_output_arguments(parser, findings=True)
    parser.add_argument(
        "--fail-on",
        type=options.kinds_reader(_FAIL_ON),
        default=[],
        metavar="KINDS",
        help="exit with 1 on critical (an operator slower than --critical-ratio beyond the noise) or error (one that "
        "the target cannot run)",
    )
    parser.add_argument("--fail-over", type=float, metavar="X", help="exit with 1 if a step takes over X times as long")


def run(args: argparse.Namespace) -> int:
    """Time and print; returns the exit status."""
    from shadowrun.limits import bounded_memory
    from shadowrun.platforms import resolve
    from shadowrun.studies.slowdown.table import Slowdown, slowdown_document, slowdown_issues

    if args.rounds < 3:
        raise UsageError(f"--rounds {args.rounds}: a spread needs 3 or more.", slug="bad-option")
    if not args.critical_ratio > 1:
        raise UsageError(f"--critical-ratio {args.critical_ratio}: use a ratio above 1.", slug="bad-option")
    options.check_outputs(args.output)
    chosen = _of_database(args) if _wants_database(args) else _of_run(args)
    if args.flaws or args.preset:
        options.enable_simulation(chosen.target, args.flaws, args.preset)
    target, ref = resolve(chosen.target), resolve(chosen.ref)
    # A worker process runs operators by their schemas; torch's database calls functions.
    if not chosen.of_program:
        _check_no_process(target, ref)
    # Shapes of a recorded run come from a file, and may be of any size.
    with bounded_memory() if chosen.of_program else contextlib.nullcontext():
        measured = _measured(chosen, target, ref, args.rounds, args.seed)
    found = Slowdown.from_timings(measured, chosen.n_steps, args.critical_ratio, of_program=chosen.of_program)
    title = f"{target} against {ref}"
    issues = slowdown_issues(found, title, args.fail_on, Path(args.data or options.DATA_FILE).name)
    options.print_report(slowdown_document(found, title, issues), args)
    status = 0
    failing = [issue.name for issue in issues.rows if issue.level == "error"]
    if failing:
        more = f" and {len(failing) - 5} more" if len(failing) > 5 else ""
        print_line(f"shadowrun: FAILED: {', '.join(failing[:5])}{more} (--fail-on)", error=True)
        status = 1
    if args.fail_over is not None and found.step.ratio > args.fail_over:
        print_line(
            f"shadowrun: FAILED: a step takes {found.step.ratio:.2f} times as long, over {args.fail_over:g}",
            error=True,
        )
        status = 1
    return status


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The calls to time, and the platforms to time them on."""

    calls: Iterable[Call | Entry]
    n_calls: int
    target: str
    ref: str
    n_steps: int
    of_program: bool


def _wants_database(args: argparse.Namespace) -> bool:
    if args.database and args.data is not None:
        raise UsageError(f"--database and {args.data!r} exclude each other: use only one of them.", slug="bad-option")
    # A first look without a recorded run; an existing file is always preferred.
    return args.database or (args.data is None and args.target is not None and not Path(options.DATA_FILE).exists())


def _of_run(args: argparse.Namespace) -> _Chosen:
    from shadowrun.platforms.untrusted_specs import trusted_spec
    from shadowrun.studies.slowdown.calls import read_mix

    data = args.data or options.DATA_FILE
    mix = read_mix(Path(data))
    calls = [c for c in mix.calls if not args.ops or any(fnmatch.fnmatchcase(c.op, glob) for glob in args.ops)]
    if not calls:
        raise UsageError(f"{data!r} has no calls of {', '.join(args.ops) or 'operators'}.", slug="bad-option")
    # The platforms come from the file, which need not be trusted; those of the options come from the user.
    names = [name for name in (args.target, args.ref) if name]
    target = args.target or trusted_spec(mix.target, names, simulated=bool(args.flaws or args.preset))
    ref = args.ref or trusted_spec(mix.ref, names, option="--ref")
    return _Chosen(calls, len(calls), target, ref, mix.n_steps, of_program=True)


def _of_database(args: argparse.Namespace) -> _Chosen:
    from shadowrun.studies.slowdown.calls import entries, names_of
    from shadowrun.studies.sweep.run_sweep import DTYPES

    target = args.target or ("sim" if args.flaws or args.preset else None)
    if target is None:
        raise UsageError("--database needs a platform to time, such as --target npu.", slug="missing-target")
    if args.fail_over is not None:
        raise UsageError(
            "--fail-over needs the steps of a run, which --database does not have: give a data file.", slug="bad-option"
        )
    if args.dtype not in DTYPES:
        raise UsageError(f"--dtype {args.dtype!r}: use {', '.join(DTYPES)}.", slug="bad-option")
    names = names_of(args.ops, args.dtype)
    return _Chosen(entries(names, args.dtype, args.seed), len(names), target, args.ref or "cpu", 1, of_program=False)


def _check_no_process(*platforms: Platform) -> None:
    for platform in platforms:
        if platform.remote is not None:
            raise UsageError(
                f"{platform} runs in a worker process, which can run operators, but no functions of torch's "
                "database. Record a run and time its calls: shadowrun slowdown DATA.",
                slug="bad-option",
            )


def _measured(chosen: _Chosen, target: Platform, ref: Platform, rounds: int, seed: int) -> list[TimedCall]:
    import warnings

    from shadowrun.current_folder import in_empty_folder
    from shadowrun.limits import current_call
    from shadowrun.studies.slowdown.timing import TimedCall, measure

    with contextlib.ExitStack() as stack:
        stack.enter_context(in_empty_folder())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # operators warn at each of many calls
        for platform in (target, ref):
            stack.callback(platform.stop)
            platform.start()
        progress = stack.enter_context(progress_bar("timing", chosen.n_calls))
        measured = []
        for n_done, call in enumerate(chosen.calls):
            progress(n_done, text=call.op)
            if why := current_call.ended.get(n_done):
                measured.append(TimedCall(call.summary, failed=why))
                continue
            current_call.begin(n_done, call.op)
            measured.append(measure(call, target, ref, rounds=rounds, seed=seed))
            current_call.begin(-1, "")
        return measured
