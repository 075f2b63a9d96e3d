"""Find which of many recorded machines give the same results, how near the others are, and what explains it.

Recordings are files that `shadowrun record` wrote, one for each machine or setting; a folder stands for all in it. No
device is needed, and nothing runs. Two machines are in one class if the bytes of an output are equal.

Examples:
  shadowrun classes *.shadowrec                              the last call of each step, on each machine
  shadowrun classes runs/ --output-of 'layer4/*' -o classes.html
  shadowrun classes runs/ --where device=cpu --where cores=2
  shadowrun classes a.shadowrec b.shadowrec --values         NaNs of any payload are equal, and both zeros
  shadowrun classes runs/ --repeats                          equal fingerprints: repeats on one machine
  shadowrun classes new.shadowrec --known known_classes.toml     exit with 1 if its class is new
  shadowrun classes runs/ --write-known known_classes.toml --reason release-1
  shadowrun classes --published results/ --where device=gpu  results of Schlögl et al. (NeurIPS 2023)

Exit status:
  0 passed; 1 --known found a class that is not known; 2 wrong usage
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from shadowrun.cli import options
from shadowrun.errors import UsageError
from shadowrun.report.sanitize import print_line

if TYPE_CHECKING:
    from shadowrun.studies.classes.platforms import Platform

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Recordings, what to compare, known classes, and the output."""
    parser.add_argument("recordings", nargs="*", metavar="RECORDING", help="recordings, or folders of them")
    options.add_outputs_argument(parser)
    parser.add_argument("--values", action="store_true", help="compare by value: all NaNs are equal, and both zeros")
    parser.add_argument(
        "--repeats", action="store_true", help="recordings with equal fingerprints are repeats on one machine"
    )
    parser.add_argument(
        "--where",
        type=_condition,
        action="append",
        default=[],
        metavar="FACT=PATTERN",
        help="only platforms with this fact, such as device=cpu, vendor=AMD, name='gcloud/*' (may be repeated)",
    )
    known = parser.add_argument_group("known classes")
    known.add_argument("--known", metavar="FILE", help="exit with 1 if a recording's class is not in this file")
    known.add_argument("--write-known", metavar="FILE", help="add the classes of these recordings to this file")
    known.add_argument("--reason", default="", metavar="TEXT", help="with --write-known: why these results are right")
    published = parser.add_argument_group("published results")
    published.add_argument(
        "--published", metavar="SOURCE", help="read the results of Schlögl et al. from their folder or .jsonl.xz file"
    )
    published.add_argument(
        "--experiment", default="equivalence_classes", metavar="NAME", help="which of them (default: %(default)s)"
    )
    published.add_argument("--save", metavar="DIR", help="also write them as recordings into this folder")
    parser.add_argument("--plots", metavar="DIR", help="also write the pictures as SVG files into this folder")
    options.add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Compare and print; returns the exit status."""
    from shadowrun.report import save
    from shadowrun.studies.classes.report import classes_document, plots_of
    from shadowrun.studies.classes.study import Study

    _check(args)
    platforms = _platforms(args)
    if args.write_known or args.known:
        return _known(platforms, args)
    study = Study.from_platforms(platforms, args.outputs, by_value=args.values)
    options.print_report(classes_document(study), args)
    if args.plots:
        for name, content in plots_of(study).items():
            save(content, Path(args.plots) / f"{name}.svg")
    return 0


def _check(args: argparse.Namespace) -> None:
    options.check_outputs(args.output)
    if bool(args.recordings) == bool(args.published):
        raise UsageError(
            "Name recordings (shadowrun classes *.shadowrec), or published results (--published SOURCE).",
            slug="no-recordings",
        )
    if args.save and not args.published:
        raise UsageError("--save writes published results as recordings: it needs --published.", slug="bad-option")
    if args.reason and not args.write_known:
        raise UsageError("--reason is written by --write-known: use both.", slug="bad-option")
    if args.known and (args.outputs or args.values or args.plots):
        raise UsageError(
            "--known compares the bytes of the outputs that its file has: leave out --output-of, --values and --plots.",
            slug="bad-option",
        )
    if args.known and args.write_known:
        raise UsageError("--known checks and --write-known writes: use one of them.", slug="bad-option")
    from shadowrun.store.atomic_write import refuse_links

    # Before anything is read: comparing many recordings takes minutes.
    for folder in filter(None, (args.plots, args.save)):
        refuse_links(Path(folder))
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"The folder {folder!r} cannot be made: {error}.", slug="unwritable-report") from error


def _platforms(args: argparse.Namespace) -> list[Platform]:
    from shadowrun.studies.classes.platforms import filter_platforms, find_recordings, load, platforms_of

    if args.published:
        from shadowrun.studies.classes.import_published import read_published, save_published

        if args.save:
            save_published(args.published, args.save, args.experiment)
        platforms = platforms_of(read_published(args.published, args.experiment), repeats=args.repeats)
    else:
        platforms = load(find_recordings(args.recordings), repeats=args.repeats)
    return filter_platforms(platforms, args.where)


def _known(platforms: list[Platform], args: argparse.Namespace) -> int:
    """Check recordings against known classes, or write theirs; returns the exit status."""
    from shadowrun.studies.classes import known_classes
    from shadowrun.studies.classes.report import known_document

    if not platforms:
        raise UsageError("No recording meets --where: there is nothing to check.", slug="no-recordings")
    if args.write_known:
        classes = known_classes.classes_to_know(platforms, args.outputs, args.reason)
        n_new = known_classes.write_known(Path(args.write_known), classes)
        print_line(f"{len(platforms)} recordings, {len(classes)} classes: wrote {n_new} new ones to {args.write_known}")
        return 0
    classes = known_classes.read_known(Path(args.known))
    checked = [known_classes.check_platform(platform, classes) for platform in platforms]
    options.print_report(known_document(checked, args.known), args)
    return int(not all(found.known for found in checked))


def _condition(text: str) -> tuple[str, str]:
    fact, equals, pattern = text.partition("=")
    if not equals or not fact:
        raise argparse.ArgumentTypeError(f"{text!r} is no condition: use FACT=PATTERN, such as device=cpu")
    return fact, pattern
