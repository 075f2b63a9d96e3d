"""Write a recorded run in another format, by default to standard output.

Examples:
  shadowrun export -f json | jq '.findings[0]'
  shadowrun export nightly.shadowrun -f md >> "$GITHUB_STEP_SUMMARY"
  shadowrun export -f html -o report.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shadowrun.cli import options

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A data file, a format and where to."""
    options.add_data_argument(parser)
    options.add_known_arguments(parser)
    parser.add_argument("-f", "--format", required=True, choices=options.FORMATS, help="format to write")
    parser.add_argument("-o", "--output", default="-", metavar="FILE", help="file, or - for standard output (default)")


def run(args: argparse.Namespace) -> int:
    """Write the run; returns the exit status."""
    import shadowrun

    shadowrun.load(args.data, known=options.known_ledger(args)).write(args.output, format=args.format)
    return 0
