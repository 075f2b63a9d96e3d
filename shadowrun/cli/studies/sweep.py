"""Test every operator of torch's own database on two platforms, one small case at a time.

Each case runs in a worker process: a crash, a hang or exhausted memory is the result of the case, and the sweep
continues. The same command resumes an interrupted sweep. A case that the reference cannot run never counts against the
target.

Examples:
  shadowrun sweep --target npu                                    float32, all operators and parts
  shadowrun sweep --target npu --dtypes float32,bfloat16,float16 -o coverage.json
  shadowrun sweep --target npu --ops '*norm*' --parts forward,backward --samples 5
  shadowrun sweep --target npu --probe                            NaN, infinities, zeros, subnormals, edges; layouts
  shadowrun sweep --target npu --from run.shadowrun               only the calls of your program
  shadowrun sweep --target sim --flaws matmul-in-bf16 --ops 'matmul,*mm*'    (no hardware needed)

Exit status:
  0 no failure of a kind in --fail-on; 1 failures; 2 wrong usage; 130 after Ctrl-C
"""

from __future__ import annotations

import argparse
import os
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

from shadowrun.cli import options
from shadowrun.cli.progress import progress_bar
from shadowrun.errors import UsageError
from shadowrun.report.sanitize import MAX_NAME, clip, print_line
from shadowrun.studies.sweep.cases import PARTS, PROBES, Part

if TYPE_CHECKING:
    from shadowrun.analysis import KnownIssues
    from shadowrun.cli.progress import ProgressUpdate
    from shadowrun.studies.sweep.cases import Case, CaseOutcome, Kind, Task
    from shadowrun.studies.sweep.reports.support import SupportTable
    from shadowrun.studies.sweep.run_sweep import SweepRequest

__all__ = ["FILE", "KINDS", "add_arguments", "count_failures", "failing_kinds", "read_first", "run"]

FILE = ".shadowcov"
KINDS = ("unsupported", "error", "mismatch", "fallback", "crash")
_DEFAULT_FAIL_ON = "unsupported,error,mismatch,crash"
# Values of `shadowrun.studies.sweep.cases.Kind` by the words of ``--fail-on``; a test compares them.
_GROUPS = {
    "unsupported": ("unsupported operator", "unsupported dtype"),
    "error": ("error", "missing error", "wrong error"),
    "mismatch": ("mismatch", "wrong form"),
    "fallback": ("silent fallback", "warned fallback"),
    "crash": ("crash", "time-out", "out of memory"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Operators, limits, and the output."""
    parser.add_argument("--target", metavar="T", help="platform to test: npu, cuda:1, sim, 'cpu[threads=1]', ...")
    parser.add_argument("--ref", default="cpu", metavar="R", help="platform to trust (default: %(default)s)")
    options.add_simulation_arguments(parser)
    _add_cases(parser.add_argument_group("cases"))
    _add_limits(parser.add_argument_group("limits"))
    _add_output(parser.add_argument_group("report"))


def _add_cases(what: argparse._ArgumentGroup) -> None:
    what.add_argument(
        "--ops",
        type=options.words,
        action="extend",
        default=[],
        metavar="GLOBS",
        help="test only these operators, such as '*norm*'",
    )
    what.add_argument(
        "--dtypes", type=options.words, default=["float32"], metavar="A,B", help="dtypes (default: float32)"
    )
    what.add_argument(
        "--parts",
        type=_parts,
        default=list(PARTS),
        metavar="A,B",
        help=f"test only these of {', '.join(PARTS)} (default: all)",
    )
    what.add_argument(
        "--probe",
        dest="parts",
        action="store_const",
        const=list(PROBES),
        help=f"test exceptional values instead: the parts {', '.join(PROBES)}",
    )
    what.add_argument(
        "--samples", type=options.positive_int, metavar="N", help="samples of each operator and dtype (default: all)"
    )
    what.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the sample inputs (default: %(default)s)"
    )
    what.add_argument(
        "--from", dest="source", metavar="DATA", help="test the calls of a recorded run instead, with its shapes"
    )
    what.add_argument("--list", action="store_true", help="list the cases, and run nothing")


def _add_limits(how: argparse._ArgumentGroup) -> None:
    how.add_argument(
        "--jobs",
        type=options.positive_int,
        metavar="N",
        help="worker processes (default: one for each processor; 1 on a device with a reset command)",
    )
    how.add_argument(
        "--timeout",
        type=options.positive_float,
        default=60.0,
        metavar="S",
        help="seconds for a case (default: %(default)g)",
    )
    how.add_argument(
        "--memory",
        type=options.positive_float,
        default=4.0,
        metavar="GIB",
        help="GiB that a case may take (default: %(default)g)",
    )
    how.add_argument(
        "--file",
        default=FILE,
        metavar="FILE",
        help="coverage file; an unfinished sweep in it is resumed (default: %(default)s)",
    )
    how.add_argument(
        "--shard",
        metavar="I/N",
        help="run the I-th of N parts, which `shadowrun support --join` reads as one; /N takes the number from the "
        "variables of Slurm arrays, Kubernetes indexed jobs, GitLab and CircleCI",
    )
    how.add_argument(
        "--minutes",
        type=options.positive_float,
        metavar="M",
        help="start no further operator after M minutes; the same command resumes the sweep",
    )
    how.add_argument(
        "--reset-command",
        type=shlex.split,
        default=[],
        metavar="C",
        help="command that brings the device back, after a case that ended its process",
    )
    how.add_argument("--restart", action="store_true", help="start again, replacing the coverage file")


def _add_output(out: argparse._ArgumentGroup) -> None:
    out.add_argument("--all", action="store_true", dest="everything", help="print all failures, not only the first 20")
    options.add_known_arguments(out)
    options.add_output_arguments(out, findings=True, has_all=True)
    out.add_argument(
        "--fail-on",
        type=options.kinds_reader(KINDS),
        default=_DEFAULT_FAIL_ON,
        metavar="KINDS",
        help=f"failures that make the exit status 1: {', '.join(KINDS)}, or none (default: %(default)s)",
    )


def read_first(args: argparse.Namespace) -> None:
    """Read its files, which may be anyone's, and nothing else."""
    from shadowrun.store.datafile import DataFile
    from shadowrun.store.records import distinct_calls
    from shadowrun.studies.sweep.coverage_file import CoverageFile

    if args.source is not None:
        distinct_calls(DataFile.open(Path(args.source)))
    if Path(args.file).exists():
        file = CoverageFile.open(Path(args.file))
        for _ in file.results():
            pass
        file.close()


def run(args: argparse.Namespace) -> int:
    """Sweep, and print the tables; returns the exit status."""
    from shadowrun.cli.program import import_torch

    simulated = options.is_simulated(args, needs_target=not args.list)
    import_torch()
    _check(args)

    from shadowrun.studies.isolation.pool import Limits
    from shadowrun.studies.sweep.run_sweep import plan, sweep

    request = _request_of(args, simulated=simulated)
    planned = plan(request)
    if args.list:
        for task in planned.tasks:  # names of a recorded run come from a file
            print(f"{clip(task.operator, MAX_NAME):<50} {clip(task.dtype, MAX_NAME):<10} {', '.join(task.parts)}")
        return 0
    path = Path(args.file)
    if args.restart:
        _remove(path)
    limits = Limits(args.timeout, int(args.memory * 2**30))
    # A worker imports torch, which takes seconds: no more of them than tasks.
    # A reset would end the cases of other processes.
    jobs = min(args.jobs or (1 if request.reset_command else _n_processors()), len(planned.tasks))
    began = time.monotonic()
    with progress_bar("starting", len(planned.tasks)) as update:
        shown = _SweepProgress(update)
        complete = sweep(
            request, planned, path, jobs=jobs, limits=limits, on_result=shown.on_result, on_task=shown.on_task
        )
    # Also after Ctrl-C: what was swept so far is in the file.
    ledger = options.known_issues_on(request.target, args)
    table = _report(path, args, ledger)
    if complete and not _is_complete(path):
        is_late = args.minutes is not None and time.monotonic() - began >= 60 * args.minutes
        why = f"stopped after {args.minutes:g} minutes" if is_late else "some operators ended too many worker processes"
        print_line(f"shadowrun: {why}; the same command resumes the sweep ({path}).", error=True)
    if not complete:
        print_line(f"shadowrun: stopped. The same command resumes the sweep ({path}).", error=True)
        return 130
    return _passes(table, args.fail_on, ledger)


def _check(args: argparse.Namespace) -> None:
    from shadowrun.studies.sweep.run_sweep import DTYPES

    for dtype in args.dtypes:
        if dtype not in DTYPES:
            raise UsageError(f"--dtypes {dtype!r}: use {', '.join(DTYPES)}.", slug="bad-option")
    if not args.dtypes:
        raise UsageError(f"--dtypes names no dtype: use {', '.join(DTYPES)}.", slug="bad-option")
    if args.source is not None and set(args.parts) & set(PROBES):
        raise UsageError(
            f"--from {args.source!r} sweeps recorded calls, and --probe uses inputs of torch's database: "
            "use only one of them.",
            slug="bad-option",
        )
    options.check_outputs(args.output)


def _request_of(args: argparse.Namespace, *, simulated: bool) -> SweepRequest:
    from shadowrun.platforms import parse
    from shadowrun.studies.shards import Shard, shard_of
    from shadowrun.studies.sweep.run_sweep import SweepRequest

    target = args.target or "sim"
    flaws = None
    # The cases are programs on the device itself: a backward pass needs one that torch counts as an accelerator.
    if simulated or parse(target).device_type == "sim":
        options.enable_simulation(target, args.flaws, args.preset)
        from shadowrun import sim

        flaws = sim.active()
    source = None if args.source is None else Path(args.source)
    return SweepRequest(
        target=target,
        ref=args.ref,
        ops=tuple(args.ops),
        dtypes=tuple(dict.fromkeys(args.dtypes)),  # each once, in this order
        parts=tuple(args.parts),
        samples=args.samples,
        seed=args.seed,
        source=source,
        flaws=flaws,
        # Only where it is asked for: a part has its own file, for `support --join`.
        shard=Shard() if args.shard is None else shard_of(args.shard, os.environ)[0],
        seconds=None if args.minutes is None else 60 * args.minutes,
        reset_command=tuple(args.reset_command) or options.reset_command([target]),
    )


def _report(path: Path, args: argparse.Namespace, ledger: KnownIssues) -> SupportTable:
    from shadowrun.analysis.wording import shell_command
    from shadowrun.studies.sweep.coverage_file import CoverageFile
    from shadowrun.studies.sweep.reports.issues import sweep_issues
    from shadowrun.studies.sweep.reports.report import sweep_document
    from shadowrun.studies.sweep.reports.support import SupportTable

    file = CoverageFile.open(path)
    info, table = file.info, SupportTable.from_results(file.results())
    file.close()
    script = shell_command("repro", path) if any(operator.failing for operator in table.operators) else ""
    issues = sweep_issues(table, info, failing_kinds(args.fail_on), path.name, ledger)
    document = sweep_document(table, info, everything=args.everything, script=script, issues=issues, ledger=ledger)
    options.print_report(document, args, always=True)
    return table


def failing_kinds(fail_on: list[str]) -> set[Kind]:
    """Kinds of cases that ``--fail-on`` names."""
    from shadowrun.studies.sweep.cases import Kind

    return {Kind(kind) for word in fail_on for kind in _GROUPS[word]}


def count_failures(table: SupportTable, fail_on: list[str], ledger: KnownIssues | None = None) -> str:
    """Cases that fail the gate, known issues left out: ``6 unsupported, 1 mismatch``; empty if there is none."""
    from shadowrun.studies.sweep.reports.issues import known_line

    counts = table.totals
    failing = [(operator.name, f) for operator in table.operators for f in operator.failing]
    new = [f for name, f in failing if known_line(f.finding, name, ledger) is None]
    if len(new) < len(failing):
        # By reason: a case that fails for a known one as well still counts for the other.
        counts = {kind: sum(f.n for f in new if f.finding.kind == kind) for kind in counts}
    found = {kind: sum(counts[k] for k in counts if k in _GROUPS[kind]) for kind in fail_on}
    return ", ".join(f"{n} {kind}" for kind, n in found.items() if n)


def _passes(table: SupportTable, fail_on: list[str], ledger: KnownIssues | None = None) -> int:
    words = count_failures(table, fail_on, ledger)
    if not words:
        return 0
    print_line(f"shadowrun: FAILED: cases that count against the target: {words} (--fail-on)", error=True)
    return 1


class _SweepProgress:
    """Shows the failures so far, and the operator that was swept last."""

    def __init__(self, update: ProgressUpdate) -> None:
        self._update = update
        self._n_done = self._n_failed = 0

    def on_result(self, _: Case, outcome: CaseOutcome) -> None:
        from shadowrun.studies.sweep.cases import FAILURES

        self._n_failed += outcome.kind in FAILURES

    def on_task(self, task: Task) -> None:
        self._n_done += 1
        # The number first: a long name is cut.
        self._update(self._n_done, text=f"{self._n_failed} failed, {task.operator} {task.dtype}")


def _is_complete(path: Path) -> bool:
    from shadowrun.studies.sweep.coverage_file import CoverageFile

    file = CoverageFile.open(path)
    try:
        return file.info.complete
    finally:
        file.close()


def _remove(path: Path) -> None:
    """Delete the file, if it is a coverage file."""
    from shadowrun.studies.sweep.coverage_file import CoverageFile

    if path.exists():
        CoverageFile.open(path).close()  # raises for any other file: --restart must not delete it
        path.unlink()


def _n_processors() -> int:
    # In a container, a process may be bound to some of the machine's processors.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _parts(text: str) -> list[Part]:
    try:
        return [Part(word) for word in options.words(text)] or _raise(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: use {', '.join(Part)}") from None


def _raise(text: str) -> list[Part]:
    raise ValueError(text)
