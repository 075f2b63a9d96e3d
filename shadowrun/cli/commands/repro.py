"""Write a stand-alone script for each finding: plain torch, its inputs, and the versions.

For a run, the inputs of the first and of the worst failing call are stored next to its data file; for a sweep, the
inputs are generated again from its seed. They are made smaller and simpler while the fault remains. `python repro.py`
exits with 1 if the fault shows, and with 0 if it does not.

Examples:
  shadowrun repro                                  each finding of the last run, in ./repro
  shadowrun repro --finding 1 -o for-the-vendor   the first finding of the report
  shadowrun repro --finding 'aten::*mm*' --finding 7 nightly.shadowrun
  shadowrun repro --call 578                       a call that the report names, if its inputs were kept
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
from shadowrun.report.sanitize import MAX_WHOLE, clip, one_line
from shadowrun.store.atomic_write import refuse_links

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping

    from shadowrun.analysis import Finding
    from shadowrun.repro import Repro
    from shadowrun.run import Run
    from shadowrun.studies.sweep.sweep_findings import SweepFinding
    from shadowrun.types import Permissions

__all__ = ["add_arguments", "named_platforms", "print_script", "run"]

# Characters in the name of a folder; file systems allow 255 bytes.
_MAX_NAME = 100
# Characters of a title, and of its reason.
_MAX_SHOWN = 195


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A data file, findings or calls, and the output folder."""
    options.add_data_argument(parser)
    parser.add_argument(
        "--finding",
        metavar="N",
        action="append",
        help="number of a finding in the report, a glob pattern of operators, or all (default; a sweep's are listed); "
        "may be given several times",
    )
    parser.add_argument(
        "--call",
        metavar="N",
        action="append",
        type=int,
        help="number of a call in the report: the first or the worst of a finding; may be given several times",
    )
    parser.add_argument(
        "--from", dest="source", metavar="DATA", help="for a sweep of recorded calls: the data file that has them"
    )
    parser.add_argument("-o", "--output", default="repro", metavar="DIR", help="folder to write to (default: ./repro)")
    parser.add_argument("--no-minimise", action="store_true", help="keep the inputs as they were in the run")
    parser.add_argument(
        "--time-limit", type=float, default=30.0, metavar="S", help="seconds to minimise one (default: %(default)g)"
    )
    parser.add_argument("--target", metavar="T", help="the run's target, if the file may not start it by itself")
    parser.add_argument("--ref", metavar="R", help="the run's reference, if the file may not start it by itself")
    options.add_known_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Write the scripts; returns the exit status."""
    from shadowrun.cli.program import import_torch

    import_torch()

    from shadowrun.studies.sweep.coverage_file import is_coverage_file

    if is_coverage_file(Path(args.data)):
        return _run_of_sweep(args)
    if args.source is not None:
        raise UsageError(
            f"--from {args.source!r} is an option for sweeps, and {args.data!r} is a run.", slug="bad-option"
        )
    import shadowrun

    recorded = shadowrun.load(args.data, **options.known_options(args))
    allow = named_platforms(args, recorded.info.target, recorded.info.ref)
    wanted = _calls(recorded, args.call) if args.call else {}
    if args.finding or not args.call:
        # Known issues get scripts by name only: without --finding, the command writes what needs work.
        known = recorded.known().findings if args.finding else ()
        findings = {finding.number: finding for finding in (*recorded.findings(), *known)}
        operators = {number: findings[number].op for number in sorted(findings)}
        wanted |= {str(number): (findings[number], None) for number in _chosen(args.finding, operators)}

    def write(title: str, folder: Path) -> Repro:
        finding, call = wanted[title]
        minimise, seconds = not args.no_minimise, args.time_limit
        return recorded.repro(finding, folder, minimise=minimise, time_limit_s=seconds, call=call, allow=allow)

    titles = {title: (f"{finding.kind} {finding.op}", finding.op) for title, (finding, _) in wanted.items()}
    return _write(args, titles, {title: finding.kind for title, (finding, _) in wanted.items()}, write)


def _calls(recorded: Run, numbers: list[int]) -> dict[str, tuple[Finding, int | None]]:
    """Calls by title, with their findings.

    Raises:
        UsageError: The inputs of one of the calls were not captured.
    """
    kept = recorded.captured()
    for number in numbers:
        if number not in kept:
            near = ", ".join(f"{seq} ({kept[seq].op})" for seq in sorted(kept, key=lambda seq: abs(seq - number))[:8])
            is_unknown = next(recorded.records(seq=number), None) is None
            what = "was not recorded" if is_unknown else "has no captured inputs"
            raise UsageError(
                f"Call {number} {what}: the first and the worst call of each finding have. "
                f"The nearest are: {near or 'none'}.",
                slug="unknown-call",
            )
    return {f"call {number}": (kept[number], number) for number in numbers}


def _run_of_sweep(args: argparse.Namespace) -> int:
    """Write the scripts of a coverage file; returns the exit status."""
    if args.call:
        raise UsageError(f"--call is an option for runs, and {args.data!r} is a sweep.", slug="bad-option")
    from shadowrun.repro import ReproOptions
    from shadowrun.studies.sweep.coverage_file import CoverageFile
    from shadowrun.studies.sweep.rebuild_case import Origin
    from shadowrun.studies.sweep.scripts import write_script
    from shadowrun.studies.sweep.sweep_findings import findings_of_sweep

    file = CoverageFile.open(Path(args.data))
    try:
        found = findings_of_sweep(file.results())
        if args.finding is None:
            _list(found, args.data)
            return 0
        chosen = _chosen(args.finding, {n: f.first.operator for n, f in enumerate(found, start=1)})
        info, origin = file.info, Origin.from_file(file, None if args.source is None else Path(args.source))
    finally:
        file.close()
    # The fingerprint has the spec; the printed target may be followed by the names of flaws in parentheses.
    allow = named_platforms(args, info.target_fingerprint.get("platform", info.target.partition(" (")[0]), info.ref)

    def write(number: str, folder: Path) -> Repro:
        wanted = ReproOptions(not args.no_minimise, args.time_limit, allow)
        return write_script(found[int(number) - 1], info, origin, folder, wanted)

    shown = {str(n): found[n - 1] for n in chosen}
    titles = {n: (f.title, f"{f.first.operator}-{f.first.dtype}") for n, f in shown.items()}
    return _write(args, titles, {n: f.kind for n, f in shown.items()}, write)


def named_platforms(args: argparse.Namespace, target: str, ref: str) -> Permissions:
    """Platforms and modules that the user named on the command line, so that the file may start them."""
    from shadowrun.platforms.untrusted_specs import spec_of_user
    from shadowrun.types import Permissions

    named = (("--target", args.target, target), ("--ref", args.ref, ref))
    for option, name, platform in named:
        # Another platform is refused, not used: its name would allow something that the file does not ask for.
        if name is not None and spec_of_user(platform, [name]) is None:
            raise UsageError(
                f"{option} {name!r} is not the platform of {args.data!r}, which is {platform!r}.", slug="bad-option"
            )
    # A module may name a platform, and not the other way round: `--target npu` is no `--import npu`.
    names = (*(name for _, name, _ in named if name is not None), *args.imports)
    return Permissions(names, tuple(args.imports), is_command=True)


def _list(found: list[SweepFinding], data: str) -> None:
    """Print the findings of a sweep with their numbers."""
    from shadowrun.analysis.wording import shell_command

    if not found:
        print("There are no findings.")
        return
    # Findings on the reference come last, under a heading of their own.
    counts = True
    for number, f in enumerate(found, start=1):
        if counts and not f.counts:
            print("on the reference, not counted against the target:")
        counts = f.counts
        print(f"{number}. {clip(f.title, _MAX_SHOWN)}: {f.shown_by}")
        print(f"     {clip(f.reason, _MAX_SHOWN)}")
    show = shell_command("repro", Path(data), "--finding")
    print(f"\n`{one_line(show)} N` writes a script; N may be a glob pattern of operators, or all.")


def _write(
    args: argparse.Namespace,
    titles: Mapping[str, tuple[str, str]],
    kinds: Mapping[str, str],
    write: Callable[[str, Path], Repro],
) -> int:
    """Write the scripts of findings or calls, by number; each title comes with the name of its folder."""
    if not titles:
        print("There are no findings.")
        return 0
    written = 0
    for number, (title, name) in titles.items():
        short = re.sub(r"[^A-Za-z0-9_.]+", "-", f"{number:0>2}-{name}-{kinds[number]}")
        folder = Path(args.output) / short[:_MAX_NAME]
        print(f"{number}. {clip(title, _MAX_SHOWN)}: ", end="", flush=True)
        try:
            refuse_links(Path(args.output), folder)
            repro = write(number, folder)
        except ShadowrunError as error:  # other findings can still have scripts
            print(f"no script. {clip(str(error), MAX_WHOLE)}")
            continue
        written += 1
        print_script(repro)
    if not written:
        print("shadowrun: no script could be written.", file=sys.stderr)
    return 0 if written else 2


def _chosen(wanted: list[str] | None, operators: Mapping[int, str]) -> list[int]:
    """Numbers of findings in the report.

    Args:
        wanted: Numbers, patterns, or ``all``; None for all.
        operators: Number to operator.

    Raises:
        UsageError: One of them matches no finding.
    """
    chosen: dict[int, None] = {}  # a set in order: scripts are numbered as they are asked for
    for one in wanted or ["all"]:
        if one == "all":
            found = list(operators)
        elif one.isdecimal():
            found = [number for number in operators if number == int(one)]
        else:
            found = [number for number, op in operators.items() if fnmatch.fnmatchcase(op, one)]
        if not found and wanted:
            ops = ", ".join(f"{n} {op}" for n, op in list(operators.items())[:8])
            raise UsageError(f"There is no finding {one!r}. Findings: {ops or 'none'}.", slug="unknown-finding")
        chosen |= dict.fromkeys(found)
    return list(chosen)


def print_script(repro: Repro) -> None:
    """Print the path of a script, whether it shows the fault here, the first lines of its output, and notes."""
    shown = {True: "exits 1 here", False: "exits 0 here", None: "was not tried"}[repro.shows_fault]
    print(one_line(f"{repro.script} ({repro.inputs}), {shown}"))
    for line in (*repro.said.splitlines()[:4], *(f"note: {note}" for note in repro.notes)):
        print(f"     {one_line(line)}")
