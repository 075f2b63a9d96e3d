"""Print the report of a recorded run, or write it to files.

Examples:
  shadowrun report
  shadowrun report nightly.shadowrun -o nightly.html -o nightly.json
  shadowrun report --salvage damaged.shadowrun   what can still be read of it
  shadowrun report --no-known                    what the ledger excuses, too
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shadowrun.cli import options

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A data file, and reports to write."""
    options.add_data_argument(parser)
    parser.add_argument(
        "--salvage",
        action="store_true",
        help="of a damaged file, show what can be read, and what is missing",
    )
    options.add_known_arguments(parser)
    options.add_output_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Show or write the report; returns the exit status."""
    options.check_outputs(args.output)
    import shadowrun

    recorded = shadowrun.load(args.data, known=options.known_ledger(args), salvage=args.salvage)
    for output in args.output:
        recorded.write(output)
    if not args.output:
        recorded.write("-")
    return 0
