"""Convert a recorded run to another format.

Examples:
  shadowrun export -f json | jq '.findings[0]'
  shadowrun export nightly.shadowrun -f md >> "$GITHUB_STEP_SUMMARY"
  shadowrun export -o report.html -o operators.csv
  shadowrun export --records calls.parquet
  shadowrun export --trace trace.json.gz         lanes and counters, for ui.perfetto.dev
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shadowrun.cli import options
from shadowrun.errors import UsageError
from shadowrun.report.sanitize import print_line

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
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="also write a trace for ui.perfetto.dev and chrome://tracing to FILE: .json or .json.gz",
    )


def run(args: argparse.Namespace) -> int:
    """Write the run; returns the exit status."""
    if not (args.format or args.output or args.records or args.trace):
        raise UsageError(
            "Give a format, such as -f json, or a file, such as -o report.html, --records calls.csv or --trace x.json.",
            slug="bad-option",
        )
    options.check_outputs(args.output)
    import shadowrun
    from shadowrun.report.run_report import run_document

    recorded = shadowrun.load(args.data, **options.known_options(args))
    recorded.baseline = options.baseline(args)
    if args.records:
        n = recorded.write_records(args.records)
        print_line(f"{n:,} calls: {args.records}", error=True)
    if args.trace:
        n, n_all = recorded.write_trace(args.trace)
        left = f" of {n_all:,}, the first ones" if n < n_all else ""
        print_line(f"{n:,} calls{left}: {args.trace}", error=True)
    if args.format or args.output:
        options.print_report(run_document(recorded, pictures=options.wants_pictures(args)), args)
    return 0
