"""Convert a recorded run to another format.

Examples:
  shadowrun export -f json | jq '.findings[0]'
  shadowrun export nightly.shadowrun -f md >> "$GITHUB_STEP_SUMMARY"
  shadowrun export -o report.html -o operators.csv
  shadowrun export --records calls.parquet
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shadowrun.cli import options
from shadowrun.errors import UsageError
from shadowrun.report.sanitize import say

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A data file and the output."""
    options.add_data_argument(parser)
    options.add_known_arguments(parser)
    options.add_baseline_argument(parser)
    options.add_output_arguments(parser, findings=True)
    parser.add_argument(
        "--records",
        metavar="FILE",
        help="also write a row for each recorded call to FILE: .csv, or .parquet (needs pyarrow)",
    )


def run(args: argparse.Namespace) -> int:
    """Write the run; returns the exit status."""
    if not args.format and not args.output and not args.records:
        raise UsageError(
            "Give a format, such as -f json, or a file, such as -o report.html or --records calls.csv.",
            slug="bad-option",
        )
    options.check_outputs(args.output)
    import shadowrun
    from shadowrun.report.run_report import run_document

    recorded = shadowrun.load(args.data, **options.known_options(args))
    recorded.baseline = options.baseline(args)
    if args.records:
        n = recorded.write_records(args.records)
        say(f"{n:,} calls: {args.records}", error=True)
    if args.format or args.output:
        options.print_report(run_document(recorded), args)
    return 0
