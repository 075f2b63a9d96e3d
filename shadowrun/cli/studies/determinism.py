"""Find out which operators of a program repeat themselves: from run to run, over threads, batch slices and layouts.

The program is recorded in fresh processes, one after another. A call with equal inputs and different results is an
operator that broke; a call whose inputs differ already lies downstream. The program then runs once more, in this
process and with its output shown, and each distinct call is repeated on copies of its inputs: as it is, on slices of
its batch, in other layouts. Results are compared by all their bits.

Examples:
  shadowrun determinism train.py                               33 runs
  shadowrun determinism --threads 1,2,4 --runs 10 train.py     the same with each of three thread counts
  shadowrun determinism --batch-slices 1,2,8 --layouts generate.py --tokens 8
  shadowrun determinism --load 4 -m package.train              while 4 processes keep the machine busy
  shadowrun determinism --fail-on run,batch -o report.html train.py

Exit status:
  0  it ran, and nothing broke that --fail-on names
  1  an operator broke in a way that --fail-on names, or the program failed
  2  wrong usage, or an error inside shadowrun
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Final

from shadowrun.cli import options

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from shadowrun.recording.model import Key, Recording
    from shadowrun.studies.determinism.processes import ProcessRun
    from shadowrun.studies.determinism.report import Determinism
    from shadowrun.studies.determinism.stability import CallDigests, Stability
    from shadowrun.studies.determinism.variants import Variants

__all__ = ["add_arguments", "run"]

# What --fail-on names, and the columns of the report that it means.
_KINDS: Final = {
    "run": ("run to run", "one process"),
    "threads": ("threads",),
    "batch": ("batch slice",),
    "layout": ("layout",),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options, then the program and its arguments."""
    parser.usage = "shadowrun determinism [options] (script.py | -m module) [arguments of the program]"
    parser.add_argument(
        "--runs",
        type=options.positive_int,
        default=33,
        metavar="N",
        help="fresh processes, and repeats (default: %(default)s)",
    )
    parser.add_argument("--threads", type=_counts, default=[], metavar="1,2,4", help="runs with each thread count")
    parser.add_argument(
        "--batch-slices", type=_counts, default=[], metavar="1,2,8", help="also run calls on slices of their batch"
    )
    parser.add_argument("--layouts", action="store_true", help="also run calls on inputs in other layouts")
    parser.add_argument(
        "--load", type=options.positive_int, default=0, metavar="N", help="keep N processes busy during the runs"
    )
    parser.add_argument("--keep", metavar="DIR", help="keep the recordings in this folder")
    parser.add_argument(
        "--fail-on",
        type=options.kinds_reader(_KINDS),
        default=[],
        metavar="KINDS",
        help=f"exit with 1 if an operator breaks so: {', '.join(_KINDS)}",
    )
    options.add_output_arguments(parser, findings=True)
    options.add_program_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the program, print; returns the exit status.

    Raises:
        KeyboardInterrupt: Ctrl-C ended the program; nothing is reported.
    """
    options.require_program(args, "shadowrun determinism train.py")
    options.check_outputs(args.output)

    from shadowrun.cli.program import Program, import_torch

    program = Program(args.module or args.script, is_module=bool(args.module))
    import_torch()

    from shadowrun.studies.determinism.processes import DEFAULT_THREADS
    from shadowrun.studies.determinism.report import determinism_document, determinism_issues
    from shadowrun.studies.determinism.variants import Variants

    words = ["-m", *args.module] if args.module else args.script
    counts = args.threads or [DEFAULT_THREADS]
    with options.kept_folder(args.keep) as folder:
        # Before the program runs in this process, which it may end.
        imports = [f"--import={module}" for module in args.imports]
        seen = _Seen(_recorded([*imports, *words], folder, counts, args.runs, args.load))
    variants = Variants(args.runs, args.batch_slices, args.layouts)
    outcome = program.execute(variants)
    sys.stdout.flush()
    if outcome.interrupted:
        # `main` then ends the command by the signal, as Ctrl-C ends any program.
        raise KeyboardInterrupt
    found = seen.found(" ".join(words), variants, args.load)
    dimensions = [dimension for kind in args.fail_on for dimension in _KINDS[kind]]
    options.print_report(determinism_document(found, determinism_issues(found, dimensions)), args, always=True)
    broken = [kind for kind in args.fail_on if any(found.n_breaking(d) for d in _KINDS[kind])]
    if broken:
        print(f"shadowrun: FAILED: operators break by {', '.join(broken)}", file=sys.stderr)
    failed = outcome.status or any(r.status for r in found.runs)
    return 1 if broken or failed else 0


def _counts(text: str) -> list[int]:
    """Read ``1,2,4``."""
    found = [options.positive_int(word) for word in options.words(text)]
    if not found or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r}: use different whole numbers >= 1, such as 1,2,4")
    return found


def _recorded(
    words: Sequence[str], folder: Path, counts: Sequence[int], n_runs: int, n_load: int
) -> Iterator[ProcessRun]:
    """The runs, one after another, with progress on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from shadowrun.studies.determinism.processes import busy_machine, record_once

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    with busy_machine(n_load), bar:
        task = bar.add_task("recording", total=n_runs * len(counts))
        # One of each thread count in turn: what changes on the machine affects all of them.
        for number in range(n_runs):
            for threads in counts:
                yield record_once(words, folder, threads, number)
                bar.advance(task)


class _Seen:
    """What the recordings say; each is read when it was written, and only its hashes are kept."""

    def __init__(self, runs: Iterator[ProcessRun]) -> None:
        from shadowrun.errors import DataFileError
        from shadowrun.recording.file_format.recording_file import read
        from shadowrun.studies.determinism.stability import call_digests

        self._runs: list[ProcessRun] = []
        self._calls: dict[int, list[Mapping[Key, CallDigests]]] = {}
        self._provenance: dict[int, dict[str, set[str]]] = {}
        for one in runs:
            self._runs.append(one)
            if one.path is None:
                continue
            try:
                recording = read(one.path)
            except DataFileError:  # the process was killed before its first block
                continue
            self._calls.setdefault(one.threads, []).append(call_digests(recording))
            self._note_provenance(one.threads, recording)

    def _note_provenance(self, threads: int, recording: Recording) -> None:
        names = self._provenance.setdefault(threads, {})
        for process in recording.processes:
            for name, digest in process.provenance.items():
                names.setdefault(name, set()).add(digest)

    def found(self, program: str, variants: Variants, n_load: int) -> Determinism:
        from shadowrun.studies.determinism.report import RUNS, THREADS, Determinism
        from shadowrun.studies.determinism.stability import across_threads, merged, run_to_run

        each: list[dict[str, Stability]] = []
        n_missing = 0
        for calls in self._calls.values():
            outcomes, missing = run_to_run(calls)
            each.append(outcomes)
            n_missing += missing
        dimensions: dict[str, Mapping[str, Stability]] = {RUNS: merged(each), **variants.found}
        if len(self._calls) > 1:
            dimensions[THREADS] = across_threads(self._calls)
        differing = {n for names in self._provenance.values() for n, digests in names.items() if len(digests) > 1}
        return Determinism(
            program,
            self._runs,
            dimensions,
            variants.broken,
            variants.left_out,
            n_missing,
            sorted(differing),
            n_load,
            frozenset(variants.random),
        )
