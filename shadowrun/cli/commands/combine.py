"""Combine the data files of several runs, such as the ranks of a distributed run.

The data file of a rank has its number: for run.shadowrun, rank 3 writes run.3.shadowrun. Files are given by name, by
glob pattern or by their folder; the default is the current folder. The files are kept unless --delete is given.

Examples:
  shadowrun combine
  shadowrun combine run.*.shadowrun -o run.shadowrun
  shadowrun combine results/ -o all.shadowrun --force --ignore-errors
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shadowrun.cli.progress import progress_bar
from shadowrun.report.sanitize import print_line

if TYPE_CHECKING:
    import argparse

    from shadowrun.store.combine.combine_files import CombineResult

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Files to read and the file to write."""
    parser.add_argument(
        "paths", nargs="*", default=["."], metavar="DATA", help="data files, folders or patterns (default: this folder)"
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="data file to write (default: the ranks' name without the rank)"
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--append", action="store_true", help="add to the output instead of refusing if it exists")
    group.add_argument("--force", action="store_true", help="replace the output if it exists")
    parser.add_argument("--ignore-errors", action="store_true", help="skip files that cannot be read, and name them")
    parser.add_argument("--delete", action="store_true", help="delete the files that were combined")


def run(args: argparse.Namespace) -> int:
    """Combine; returns the exit status."""
    from shadowrun.store.combine.combine_files import choose, combine_files, name_together

    # The name of the output may follow from the files; a folder is then read again, without the output.
    out = Path(args.output) if args.output else name_together(choose(args.paths, None))
    paths = choose(args.paths, out)
    with progress_bar("combining runs") as progress:
        combined = combine_files(
            paths,
            out,
            append=args.append,
            force=args.force,
            ignore_errors=args.ignore_errors,
            progress=progress,
        )
    for problem in combined.skipped:
        print_line(f"shadowrun: left out: {problem}", error=True)
    # Only now: the combined file is complete, and files that were skipped are not in it.
    if args.delete:
        _delete(combined, out)
    print_line(f"{out}: {_described(combined)}")
    return 0


def _described(combined: CombineResult) -> str:
    from shadowrun.store.combine.combined_runs import are_ranks, name_runs

    sources = combined.sources
    text = "1 run" if len(sources) == 1 else f"{len(sources):,} runs"
    if are_ranks(sources):
        ranks = name_runs(sources, range(len(sources))).removesuffix(" only")
        text += f" ({ranks} of {sources[0].info.world_size})"
    return f"{text}, {combined.n_calls:,} calls"


def _delete(combined: CombineResult, out: Path) -> None:
    for path in combined.files:
        if path.resolve() != out.resolve():  # never delete the output
            path.unlink(missing_ok=True)
