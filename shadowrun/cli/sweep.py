"""Try every operator of torch's own database on two platforms, one small case at a time.

Each case runs in a worker process: a crash, a hang and a case that takes all memory are results, and the sweep goes on.
Stopped, it goes on with the next start. What the reference itself cannot run is never counted against the target.

Examples:
  shadowrun sweep --target npu                                    float32, all operators and parts
  shadowrun sweep --target npu --dtypes float32,bfloat16,float16 --json coverage.json
  shadowrun sweep --target npu --ops '*norm*' --parts forward,backward --samples 5
  shadowrun sweep --target npu --probe                            NaN, infinities, zeros, subnormals, edges; layouts
  shadowrun sweep --target npu --from run.shadowrun               only what your program called
  shadowrun sweep --target sim --flaws matmul-in-bf16 --ops 'matmul,*mm*'    (no hardware needed)

Exit status:
  0 nothing counts against the target, or nothing that --fail-on names; 1 findings; 2 wrong usage; 130 Ctrl-C
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shadowrun.cli import options
from shadowrun.errors import UsageError
from shadowrun.report.tame import MAX_NAME, clip, one_line
from shadowrun.sweep.cases import PARTS, PROBES, Part

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.sweep.cases import Case, Task
    from shadowrun.sweep.outcome import Outcome
    from shadowrun.sweep.support import SupportTable
    from shadowrun.sweep.sweeping import Wish

__all__ = ["add_arguments", "run"]

FILE = ".shadowcov"
KINDS = ("unsupported", "error", "mismatch", "fallback", "crash")
_DEFAULT_FAIL_ON = "unsupported,error,mismatch,crash"
_GROUPS = {
    "unsupported": ("unsupported operator", "unsupported dtype"),
    "error": ("error", "missing error", "wrong error"),
    "mismatch": ("mismatch", "wrong form"),
    "fallback": ("silent fallback", "warned fallback"),
    "crash": ("crash", "time-out", "out of memory"),
}
"""Values of `shadowrun.sweep.outcome.Kind` by the words of ``--fail-on``; a test compares them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to try, with which limits, and where to write."""
    options.add_import_argument(parser)
    parser.add_argument("--target", metavar="T", help="platform to test: npu, cuda:1, sim, 'cpu[threads=1]', ...")
    parser.add_argument("--ref", default="cpu", metavar="R", help="platform to trust (default: %(default)s)")
    options.add_simulation_arguments(parser)
    what = parser.add_argument_group("what is tried")
    what.add_argument(
        "--ops", type=options.words, action="extend", default=[], metavar="GLOBS", help="operators, such as '*norm*'"
    )
    what.add_argument(
        "--dtypes", type=options.words, default=["float32"], metavar="A,B", help="dtypes (default: float32)"
    )
    what.add_argument(
        "--parts", type=_parts, default=list(PARTS), metavar="A,B", help=f"of {', '.join(PARTS)} (default: all)"
    )
    what.add_argument(
        "--probe",
        dest="parts",
        action="store_const",
        const=list(PROBES),
        help=f"exceptional values instead: the parts {', '.join(PROBES)}",
    )
    what.add_argument("--samples", type=_count, metavar="N", help="samples of each operator and dtype (default: all)")
    what.add_argument("--seed", type=int, default=0, metavar="N", help="of the sample inputs (default: %(default)s)")
    what.add_argument("--from", dest="source", metavar="DATA", help="calls of a recorded run, with its shapes, instead")
    what.add_argument("--list", action="store_true", help="list the operators, and run nothing")
    how = parser.add_argument_group("how")
    how.add_argument("--jobs", type=_count, metavar="N", help="worker processes (default: one for each processor)")
    how.add_argument(
        "--timeout", type=_positive, default=60.0, metavar="S", help="seconds for a case (default: %(default)g)"
    )
    how.add_argument(
        "--memory", type=_positive, default=4.0, metavar="GIB", help="GiB that a case may take (default: %(default)g)"
    )
    how.add_argument(
        "--file",
        default=FILE,
        metavar="FILE",
        help="coverage file; a sweep in it is gone on with (default: %(default)s)",
    )
    how.add_argument("--restart", action="store_true", help="begin anew, replacing the file")
    out = parser.add_argument_group("what is written")
    out.add_argument(
        "--all", action="store_true", dest="everything", help="print all that fails, not the first 40 lines"
    )
    for name in ("json", "markdown", "csv"):
        out.add_argument(f"--{name}", metavar="FILE", help=f"write the tables as {name}")
    out.add_argument(
        "--fail-on",
        type=_kinds,
        default=_DEFAULT_FAIL_ON,
        metavar="KINDS",
        help=f"what makes the exit status 1: {', '.join(KINDS)}, or none (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Sweep, and print the tables; returns the exit status."""
    simulated = bool(args.flaws or args.preset)
    if args.target is None and not simulated and not args.list:
        raise UsageError(
            "Give the platform to test, such as --target npu; `shadowrun platforms` lists what this machine has, "
            "and --target sim needs no hardware.",
            slug="missing-target",
        )
    outputs = {name: Path(path) for name in ("json", "markdown", "csv") if (path := getattr(args, name))}
    _check(args, outputs)

    from shadowrun.sweep.pool import Limits
    from shadowrun.sweep.sweeping import plan, sweep

    wish = _wish(args, simulated=simulated)
    what = plan(wish)
    if args.list:
        for task in what.tasks:
            print(f"{clip(task.operator, MAX_NAME):<50} {clip(task.dtype, MAX_NAME):<10} {', '.join(task.parts)}")
        return 0
    path = Path(args.file)
    if args.restart:
        _remove(path)
    limits = Limits(args.timeout, int(args.memory * 2**30))
    jobs = min(args.jobs or _n_processors(), len(what.tasks))
    with _Progress(len(what.tasks)) as (on_result, on_task):
        complete = sweep(wish, what, path, jobs=jobs, limits=limits, on_result=on_result, on_task=on_task)
    table = _write(path, outputs, everything=args.everything)
    if complete and not _is_complete(path):
        print("shadowrun: parts of some operators ended too many processes; the same command tries them again.",
              file=sys.stderr)  # fmt: skip
    if not complete:
        print(f"shadowrun: stopped. The same command goes on where it stopped ({path}).", file=sys.stderr)
        return 130
    return _passes(table, args.fail_on)


def _check(args: argparse.Namespace, outputs: dict[str, Path]) -> None:
    from shadowrun.sweep.sweeping import DTYPES

    for dtype in args.dtypes:
        if dtype not in DTYPES:
            raise UsageError(f"--dtypes {dtype!r}: use {', '.join(DTYPES)}.", slug="bad-option")
    if not args.dtypes:
        raise UsageError(f"--dtypes names no dtype: use {', '.join(DTYPES)}.", slug="bad-option")
    if args.source is not None and set(args.parts) & set(PROBES):
        raise UsageError(
            f"--from {args.source!r} sweeps recorded calls as they were; --probe makes inputs of its own from torch's "
            "database. Leave one of them out.",
            slug="bad-option",
        )
    for name, path in outputs.items():
        if path.is_dir() or not os.access(path.parent, os.W_OK):
            raise UsageError(
                f"--{name} {str(path)!r} cannot be written: its folder must exist and be writable.",
                slug="unwritable-report",
            )


def _wish(args: argparse.Namespace, *, simulated: bool) -> Wish:
    from shadowrun.sweep.sweeping import Wish

    target = args.target or "sim"
    flaws = None
    if simulated:
        options.enable_simulation(target, args.flaws, args.preset)
        from shadowrun.platforms import sim

        flaws = sim.active()
    source = None if args.source is None else Path(args.source)
    return Wish(
        target=target,
        ref=args.ref,
        ops=tuple(args.ops),
        dtypes=tuple(dict.fromkeys(args.dtypes)),
        parts=tuple(args.parts),
        samples=args.samples,
        seed=args.seed,
        source=source,
        flaws=flaws,
    )


def _write(path: Path, outputs: dict[str, Path], *, everything: bool) -> SupportTable:
    from shadowrun.analysis.words import command
    from shadowrun.sweep import report
    from shadowrun.sweep.coveragefile import CoverageFile
    from shadowrun.sweep.support import SupportTable

    file = CoverageFile.open(path)
    info, table = file.info, SupportTable.of(file.results())
    file.close()
    print(report.as_text(table, info, everything=everything), end="")
    if any(operator.failing for operator in table.operators):
        print(f"scripts that show this alone: {command('repro', path)}")
    if table.not_invariant:
        names = one_line(", ".join(table.not_invariant))
        print(f"not batch-invariant, which is no failure: {len(table.not_invariant)} operators ({names})")
    texts: dict[str, Callable[[], str]] = {
        "json": lambda: report.as_json(table, info),
        "markdown": lambda: report.as_markdown(table, info),
        "csv": lambda: report.as_csv(table),
    }
    for name, output in outputs.items():
        try:
            output.write_text(texts[name](), encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"--{name} {str(output)!r} cannot be written: {error}.", slug="unwritable-report"
            ) from None
    return table


def _passes(table: SupportTable, fail_on: list[str]) -> int:
    found = {kind: sum(table.totals[k] for k in table.totals if k in _GROUPS[kind]) for kind in fail_on}
    if not any(found.values()):
        return 0
    words = ", ".join(f"{n} {kind}" for kind, n in found.items() if n)
    print(f"shadowrun: FAILED: cases that count against the target: {words} (--fail-on)", file=sys.stderr)
    return 1


class _Progress:
    """A bar on standard error where somebody is watching."""

    def __init__(self, n_tasks: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (
            *(TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()),
            *(TextColumn("left"), TimeRemainingColumn()),
        )
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
        self._task = self._bar.add_task("starting", total=n_tasks)
        self._n_failed = 0

    def __enter__(self) -> tuple[Callable[[Case, Outcome], None], Callable[[Task], None]]:
        self._bar.start()
        return self._on_result, self._on_task

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _on_result(self, _: Case, outcome: Outcome) -> None:
        from shadowrun.sweep.outcome import FAILURES

        self._n_failed += outcome.kind in FAILURES

    def _on_task(self, task: Task) -> None:
        name = clip(f"{task.operator} {task.dtype}", MAX_NAME)
        self._bar.update(self._task, advance=1, description=f"{name}, {self._n_failed} failed")


def _is_complete(path: Path) -> bool:
    from shadowrun.sweep.coveragefile import CoverageFile

    file = CoverageFile.open(path)
    try:
        return file.info.complete
    finally:
        file.close()


def _remove(path: Path) -> None:
    """Begin anew, if it is a coverage file."""
    from shadowrun.sweep.coveragefile import CoverageFile

    if path.exists():
        CoverageFile.open(path).close()
        path.unlink()


def _n_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _parts(text: str) -> list[Part]:
    try:
        return [Part(word) for word in options.words(text)] or _raise(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: use {', '.join(Part)}") from None


def _raise(text: str) -> list[Part]:
    raise ValueError(text)


def _kinds(text: str) -> list[str]:
    kinds = [] if text == "none" else options.words(text)
    for kind in kinds:
        if kind not in KINDS:
            raise argparse.ArgumentTypeError(f"{kind!r} is no kind of finding; use {', '.join(KINDS)}, or none")
    return kinds


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError(text)
    return number
