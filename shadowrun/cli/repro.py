"""Write a script for each finding that shows it alone: plain torch, its inputs, and the versions.

Of a run, the inputs are those of the first call that failed, which it kept beside its data file; those of a sweep are
made again from its seed. They are made smaller and simpler while the fault stays. `python repro.py` exits 1 while the
fault is there, and 0 when it is gone.

Examples:
  shadowrun repro                                  each finding of the last run, in ./repro
  shadowrun repro --finding 1 -o for-the-vendor   the first finding of the report
  shadowrun repro --finding 'aten::*mm*' nightly.shadowrun
  shadowrun repro --finding 'compiled::*' --time-limit 300   graphs of torch.compile (shadowrun run --compiled)
  shadowrun repro npu.shadowcov                    the findings of a sweep, with their numbers
  shadowrun repro npu.shadowcov --finding 3        a script for one of them

Exit status:
  0 written, 2 wrong usage, or no script can be written
"""

from __future__ import annotations

import fnmatch
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shadowrun.cli import options
from shadowrun.errors import ShadowrunError, UsageError
from shadowrun.report.tame import clip, one_line

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping

    from shadowrun.repro import Repro
    from shadowrun.sweep.found import Found

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A data file, which findings, and where to."""
    options.add_data_argument(parser)
    parser.add_argument(
        "--finding",
        metavar="N",
        help="number of a finding in the report, a glob pattern of operators, or all (default; a sweep's are listed)",
    )
    parser.add_argument(
        "--from", dest="source", metavar="DATA", help="of a sweep of recorded calls: the data file that has them"
    )
    parser.add_argument("-o", "--output", default="repro", metavar="DIR", help="folder to write to (default: ./repro)")
    parser.add_argument("--no-minimise", action="store_true", help="leave the inputs as they were in the run")
    parser.add_argument(
        "--time-limit", type=float, default=30.0, metavar="S", help="seconds to minimise one (default: %(default)g)"
    )
    options.add_known_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Write the scripts; returns the exit status."""
    from shadowrun.sweep.coveragefile import is_coverage_file

    if is_coverage_file(Path(args.data)):
        return _run_of_sweep(args)
    if args.source is not None:
        raise UsageError(f"--from {args.source!r} belongs to a sweep, and {args.data!r} is a run.", slug="bad-option")
    import shadowrun

    recorded = shadowrun.load(args.data, known=options.known_ledger(args))
    findings = recorded.findings()
    chosen = _chosen(args.finding, [finding.op for finding in findings])

    def write(number: int, folder: Path) -> Repro:
        minimise, seconds = not args.no_minimise, args.time_limit
        return recorded.repro(findings[number - 1], folder, minimise=minimise, time_limit_s=seconds)

    titles = {n: (f"{findings[n - 1].kind} {findings[n - 1].op}", findings[n - 1].op) for n in chosen}
    return _write(args, titles, {n: findings[n - 1].kind for n in chosen}, write)


def _run_of_sweep(args: argparse.Namespace) -> int:
    """The same for a coverage file."""
    from shadowrun.sweep.again import Origin
    from shadowrun.sweep.coveragefile import CoverageFile
    from shadowrun.sweep.found import found_in
    from shadowrun.sweep.scripts import write_script

    file = CoverageFile.open(Path(args.data))
    try:
        found = found_in(file.results())
        if args.finding is None:
            _list(found, args.data)
            return 0
        chosen = _chosen(args.finding, [f.first.operator for f in found])
        info, origin = file.info, Origin.of(file, None if args.source is None else Path(args.source))
    finally:
        file.close()

    def write(number: int, folder: Path) -> Repro:
        minimise, seconds = not args.no_minimise, args.time_limit
        return write_script(found[number - 1], info, origin, folder, minimise=minimise, time_limit_s=seconds)

    titles = {n: (found[n - 1].title, f"{found[n - 1].first.operator}-{found[n - 1].first.dtype}") for n in chosen}
    return _write(args, titles, {n: found[n - 1].kind for n in chosen}, write)


def _list(found: list[Found], data: str) -> None:
    """What a sweep found, by number."""
    if not found:
        print("Nothing was found: there is nothing to show.")
        return
    counts = True
    for number, f in enumerate(found, start=1):
        if counts and not f.counts:
            print("on the reference, not counted against the target:")
        counts = f.counts
        print(f"{number}. {one_line(f.title)}: {f.shown_by}")
        print(f"     {clip(f.reason, 195)}")
    print(f"\n`shadowrun repro {data} --finding N` writes a script; N may be a pattern of operators, or all.")


def _write(
    args: argparse.Namespace,
    titles: Mapping[int, tuple[str, str]],
    kinds: Mapping[int, str],
    write: Callable[[int, Path], Repro],
) -> int:
    """Write the scripts of the findings with these numbers; titles come with what their folder is called by."""
    if not titles:
        print("Nothing was found: there is nothing to show.")
        return 0
    written = 0
    for number, (title, name) in titles.items():
        folder = Path(args.output) / f"{number:02}-{re.sub(r'[^A-Za-z0-9_.]+', '-', f'{name}-{kinds[number]}')}"
        print(f"{number}. {one_line(title)}: ", end="", flush=True)
        try:
            made = write(number, folder)
        except ShadowrunError as error:
            print(f"no script. {one_line(str(error))}")
            continue
        written += 1
        _tell(made)
    if not written:
        print("shadowrun: no script could be written.", file=sys.stderr)
    return 0 if written else 2


def _chosen(wanted: str | None, operators: list[str]) -> list[int]:
    """Numbers of findings in the report, from 1."""
    numbered = list(enumerate(operators, start=1))
    if wanted is None or wanted == "all":
        return [number for number, _ in numbered]
    if wanted.isdecimal():
        chosen = [number for number, _ in numbered if number == int(wanted)]
    else:
        chosen = [number for number, op in numbered if fnmatch.fnmatchcase(op, wanted)]
    if not chosen:
        ops = ", ".join(f"{n} {op}" for n, op in numbered[:8])
        raise UsageError(f"No finding is {wanted!r}. There are: {ops or 'none'}.", slug="unknown-finding")
    return chosen


def _tell(made: Repro) -> None:
    shown = {True: "exits 1 here", False: "exits 0 here", None: "was not tried"}[made.shows_fault]
    print(f"{made.script} ({one_line(made.inputs)}), {shown}")
    for line in (*made.said.splitlines()[:4], *(f"note: {note}" for note in made.notes)):
        print(f"     {one_line(line)}")
