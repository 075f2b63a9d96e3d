"""Print the report of a recorded run, or write it to files.

Examples:
  shadowrun report
  shadowrun report -v                            at a terminal, with the details of each finding
  shadowrun report nightly.shadowrun -o nightly.html -o nightly.json
  shadowrun report --salvage damaged.shadowrun   the readable part of a damaged file
  shadowrun report --no-known                    known issues count as findings
  shadowrun report --baseline main.shadowrun     what is new since that run
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shadowrun.cli import options

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A data file and the output."""
    options.add_data_argument(parser)
    parser.add_argument(
        "--salvage",
        action="store_true",
        help="read what is left of a damaged file, and report what is missing",
    )
    options.add_known_arguments(parser)
    options.add_baseline_argument(parser)
    options.add_output_arguments(parser, findings=True, digest=True)


def run(args: argparse.Namespace) -> int:
    """Show or write the report; returns the exit status."""
    options.check_outputs(args.output)
    import shadowrun
    from shadowrun.report.run_report import run_document

    # `run_document`, not `Run.write`: -o may be given several times, and the file is read once.
    recorded = shadowrun.load(args.data, **options.known_options(args), salvage=args.salvage)
    recorded.baseline = options.baseline(args)
    document = run_document(recorded, pictures=options.wants_pictures(args))
    options.print_report(document, args, more="-v: details of each finding; --all: all rows")
    return 0
