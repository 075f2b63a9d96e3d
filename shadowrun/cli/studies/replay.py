"""Run the calls of a recording again on this machine, from the inputs that it holds, and compare the results.

Each call whose inputs were kept (`shadowrun record --capture 100MB`) runs on --target. Its results are held against
the recorded digests: equal, rounding-sized, or beyond rounding; and against the results of --ref on this machine. Calls
without inputs are counted, never passed. --free also runs the program itself, whose error propagates from call to call.

Examples:
  shadowrun replay a.shadowrec --target npu
  shadowrun replay a.shadowrec --target 'cpu[threads=1]' --fail-on not-rounding,mismatch
  shadowrun replay a.shadowrec --target cuda --call 214
  shadowrun replay a.shadowrec --target cuda -o replay.html --free train.py --epochs 1
  shadowrun replay a.shadowrec --flaws matmul-in-tf32          (a simulated device)

Exit status:
  0  passed; 1  --fail-on found something; 2  wrong usage; 130 after Ctrl-C, with a report of what was done
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from shadowrun.cli import compare_options, options
from shadowrun.cli.progress import progress_bar
from shadowrun.errors import UsageError
from shadowrun.report.sanitize import print_line

if TYPE_CHECKING:
    from shadowrun.recording.model import Recording
    from shadowrun.studies.replay.outcomes import Replay

__all__ = ["add_arguments", "run"]

_FAIL_ON = ("any", "not-rounding", "mismatch", "error", "missing", "provenance")
_ROWS = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The recording, platforms, the selection, the output, the gate, and the program."""
    parser.add_argument("recording", metavar="A", help="recording of another machine, a.shadowrec")
    parser.add_argument("--target", metavar="SPEC", help="platform that the calls run on")
    parser.add_argument(
        "--ref", default="cpu", metavar="SPEC", help="platform whose results judge them too (default: %(default)s)"
    )
    options.add_simulation_arguments(parser)
    parser.add_argument(
        "--ops", type=options.words, default=[], metavar="GLOBS", help="only these operators, such as 'aten::*mm*'"
    )
    parser.add_argument(
        "--call",
        type=compare_options.step_numbers,
        default=[],
        metavar="0,2,5-7",
        help="only the calls with these numbers",
    )
    parser.add_argument(
        *("-n", "--limit"),
        type=options.positive_int,
        default=_ROWS,
        metavar="N",
        help="rows of each list at most (default: %(default)s)",
    )
    options.add_output_arguments(parser)
    parser.add_argument(
        "--fail-on",
        type=options.words,
        default=[],
        metavar="KINDS",
        help=f"exit with 1 if there is: {', '.join(_FAIL_ON)}",
    )
    parser.add_argument(
        "--free",
        nargs=argparse.REMAINDER,
        metavar="script.py ...",
        help="run the program itself here too, with its arguments, and compare (last option)",
    )


def run(args: argparse.Namespace) -> int:
    """Replay and print; returns the exit status.

    Raises:
        KeyboardInterrupt: Ctrl-C ended the replay; what was found has been printed.
    """
    for kind in args.fail_on:
        if kind not in _FAIL_ON:
            raise UsageError(f"--fail-on {kind}: use {', '.join(_FAIL_ON)}.", slug="bad-option")
    if args.free is not None and not args.free:
        raise UsageError("--free takes the program: --free train.py --epochs 1.", slug="missing-script")
    options.check_outputs(args.output)
    simulated = options.is_simulated(args)
    target = args.target or "sim"

    from shadowrun.cli.program import import_torch

    import_torch()

    from shadowrun.recording.file_format.recording_file import read

    path = Path(args.recording)
    recording = read(path)
    _check_calls(args.call, recording)
    if simulated:
        options.enable_simulation(target, args.flaws, args.preset)
    found = _replayed(args, path, recording, target)
    # After Ctrl-C nothing more is begun.
    if args.free and not found.n_left:
        found = _with_free_run(args, recording, found, target)

    from shadowrun.studies.replay.report import replay_document

    options.print_report(replay_document(found, path, args.limit, _platforms(args)), args)
    # After the report: the command then ends by the signal, as Python does.
    if found.n_left:
        raise KeyboardInterrupt
    failures = found.failures(args.fail_on)
    for failure in failures:
        print_line(f"shadowrun: FAILED: {failure}", error=True)
    return int(bool(failures))


def _platforms(args: argparse.Namespace) -> list[str]:
    """The options that chose the platforms."""
    found = [f"--import={name}" for name in args.imports]
    found += [] if args.target is None else ["--target", args.target]
    found += [] if args.ref == "cpu" else ["--ref", args.ref]
    found += ["--flaws", ",".join(args.flaws)] if args.flaws else []
    return found + (["--preset", args.preset] if args.preset else [])


def _check_calls(calls: list[int], recording: Recording) -> None:
    n = len(recording.calls)
    beyond = [call for call in calls if call >= n]
    if beyond:
        raise UsageError(f"--call {beyond[0]}: {recording.name!r} has {n:,} calls, from 0.", slug="unknown-call")


def _replayed(args: argparse.Namespace, path: Path, recording: Recording, target: str) -> Replay:
    import warnings

    from shadowrun.recording.file_format.captured_reader import CapturedFile
    from shadowrun.studies.replay.replay_recording import CallFilter, replay

    ops = compare_options.operators(args.ops) if args.ops else []
    with CapturedFile(path) as captured, progress_bar("replaying") as progress, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # operators warn at each of many calls

        def show(done: int, total: int, op: str) -> None:
            progress(done, total, op)

        return replay(recording, captured, target, args.ref, CallFilter(frozenset(args.call), ops), progress=show)


def _with_free_run(args: argparse.Namespace, recording: Recording, found: Replay, target: str) -> Replay:
    """Also the program itself, on the device that it chooses."""
    from shadowrun.studies.replay.propagated import by_operator, free_run

    given = [f"--import={name}" for name in args.imports]
    given += [f"--flaws={','.join(args.flaws)}"] if args.flaws else []
    given += [f"--preset={args.preset}"] if args.preset else []
    diff, status = free_run(recording, target, given, args.free)
    warnings = (*found.warnings, *([f"the program run here ended with exit status {status}"] if status else []))
    warnings += tuple(f"the program run here: {text}" for text in diff.warnings)
    if not diff.provenance.is_same:
        warnings += (f"PROVENANCE DIFFERS: {diff.provenance.line}: the propagated error is not the platform's alone",)
    return dataclasses.replace(
        found, propagated=by_operator(diff), warnings=warnings, same_provenance=diff.provenance.is_same
    )
