"""Compare sweeps: the support of operators on each platform, or the changes between two sweeps.

The command reads the coverage files that `shadowrun sweep` writes, and runs no operator.

Examples:
  shadowrun support                                          the last sweep again
  shadowrun support npu.shadowcov cuda.shadowcov             two platforms in one table
  shadowrun support *.shadowcov -o coverage.html             a page with a filter
  shadowrun support --diff old.shadowcov new.shadowcov --fail-on regressed
  shadowrun support npu.shadowcov --fail-under 95

Exit status:
  0 passed; 1 a platform is under --fail-under, or --fail-on found something; 2 wrong usage
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shadowrun.cli import options
from shadowrun.cli.sweep import FILE
from shadowrun.errors import UsageError
from shadowrun.report.sanitize import say

if TYPE_CHECKING:
    import argparse

    from shadowrun.studies.sweep.support import Changes, Sweep

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Coverage files, the output, and gates."""
    parser.add_argument("files", nargs="*", default=[FILE], metavar="FILE", help=f"coverage files (default: {FILE})")
    parser.add_argument(
        "--diff", action="store_true", help="report what changed from the first of two files to the second"
    )
    options.add_output_arguments(parser)
    parser.add_argument(
        "--fail-under",
        type=float,
        metavar="N",
        help="exit with 1 below N percent of a platform's operators (of the second file with --diff)",
    )
    parser.add_argument("--fail-on", choices=("regressed",), help="with --diff: exit with 1 if something regressed")


def run(args: argparse.Namespace) -> int:
    """Print the table; returns the exit status."""
    from shadowrun.studies.sweep.report import changes_document, support_document
    from shadowrun.studies.sweep.support import Changes, Platforms, read_sweeps

    _check(args)
    sweeps = read_sweeps([Path(file) for file in args.files])
    changes = Changes.between(*sweeps) if args.diff else None
    document = support_document(Platforms.of(sweeps)) if changes is None else changes_document(changes)
    options.print_report(document, args)
    return _gate(args, sweeps[1:] if args.diff else sweeps, changes)


def _check(args: argparse.Namespace) -> None:
    if args.diff and len(args.files) != 2:
        raise UsageError(
            f"--diff compares two coverage files, not {len(args.files)}: name the old and the new one.",
            slug="bad-option",
        )
    options.check_outputs(args.output)
    # Ignored, it would be a gate that never fails.
    if args.fail_on and not args.diff:
        raise UsageError(f"--fail-on {args.fail_on} needs --diff and two coverage files.", slug="bad-option")


def _gate(args: argparse.Namespace, sweeps: list[Sweep], changes: Changes | None) -> int:
    failures = []
    if args.fail_under is not None:
        failures += [
            f"{s.label}: {s.percent_full:.1f} % of the operators are full, under {args.fail_under:g} %"
            for s in sweeps
            if s.percent_full < args.fail_under
        ]
    if changes is not None and args.fail_on:
        n = sum(change.direction == args.fail_on for change in changes.changes)
        failures += [f"{n} regressed"] if n else []
    for failure in failures:
        say(f"shadowrun: FAILED: {failure}", error=True)
    return int(bool(failures))
