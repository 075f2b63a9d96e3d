"""Compare two recordings, or the findings of two runs.

Two recordings (`shadowrun record`) are compared call by call: calls are matched, and each difference is credited to
inputs that differ already, to another kernel, or to another algorithm on equal inputs. What the programs started from
comes first: if that differs, nothing is credited to the platforms.

Two data files (`shadowrun run`) are compared by their findings: new, gone, worse, same.

No device is needed, and nothing runs.

Examples:
  shadowrun diff cluster.shadowrec laptop.shadowrec
  shadowrun diff a.shadowrec b.shadowrec -o diff.html -o diff.json
  shadowrun diff a.shadowrec b.shadowrec --fail-on not-rounding,missing
  shadowrun diff trainer.shadowrec rollout.shadowrec --map names.toml
  shadowrun diff monday.shadowrun today.shadowrun --fail-on new

Exit status:
  0  passed; 1  --fail-on found something; 2  wrong usage
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shadowrun.analysis.wording import shell_command
from shadowrun.cli import options
from shadowrun.errors import ShadowrunError, UsageError
from shadowrun.platforms.settings import ENV, PYTHON
from shadowrun.platforms.spec import parse
from shadowrun.report.sanitize import print_line

if TYPE_CHECKING:
    import argparse

    from shadowrun.recording.model import Recording
    from shadowrun.report.document import Document
    from shadowrun.studies.diff.recordings import RecordingDiff

__all__ = ["add_arguments", "replay_commands", "run"]

_OF_RECORDINGS: Final = ("any", "kernel", "algorithm", "not-rounding", "provenance", "missing")
_OF_RUNS: Final = ("any", "new", "worse")
DEFAULT_ROWS: Final = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Two files, what corresponds, the output, and the gate."""
    parser.add_argument("first", metavar="A", help="recording or data file")
    parser.add_argument("second", metavar="B", help="another of the same kind, compared with A")
    parser.add_argument(
        "--map", metavar="FILE", help="modules and rows that correspond, where names differ (docs/howto/diff.md)"
    )
    parser.add_argument(
        *("-n", "--limit"),
        type=int,
        default=DEFAULT_ROWS,
        metavar="N",
        help="rows of each list at most, in all formats (default: %(default)s)",
    )
    options.add_known_arguments(parser)
    options.add_output_arguments(parser, findings=True)
    parser.add_argument(
        "--fail-on",
        type=options.words,
        default=[],
        metavar="KINDS",
        help=f"exit with 1 if there is: {', '.join(_OF_RECORDINGS)} (recordings); {', '.join(_OF_RUNS)} (data files)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the difference; returns the exit status."""
    options.check_outputs(args.output)
    if args.limit < 1:
        raise UsageError(f"--limit {args.limit}: use a number of rows from 1.", slug="bad-option")
    paths = Path(args.first), Path(args.second)
    document, failures = _diff(args, paths)
    options.print_report(document, args)
    for failure in failures:
        print_line(f"shadowrun: FAILED: {failure}", error=True)
    return int(bool(failures))


def _diff(args: argparse.Namespace, paths: tuple[Path, Path]) -> tuple[Document, list[str]]:
    from shadowrun.recording.file_format.recording_writer import SUFFIX, is_recording

    kinds = [is_recording(path) for path in paths]
    # By its name, a file that cannot be read gets the message of what it should be.
    of_recordings = any(kinds) or any(path.suffix == SUFFIX for path in paths)
    others = [path for path, kind in zip(paths, kinds, strict=True) if not kind and path.suffix != SUFFIX]
    if any(kinds) and others and others[0].exists():
        recording = str(paths[kinds.index(True)])
        raise UsageError(
            f"{recording!r} is a recording and {str(others[0])!r} is not: give two recordings, or two data files.",
            slug="bad-option",
        )
    return (_diff_recordings if of_recordings else _diff_runs)(args, paths)


def _diff_runs(args: argparse.Namespace, paths: tuple[Path, Path]) -> tuple[Document, list[str]]:
    import shadowrun
    from shadowrun.studies.diff.findings_report import change_issues, changes_document, failures

    kinds = _kinds(args.fail_on, _OF_RUNS, "data files")
    if args.map:
        raise UsageError("--map is for recordings, not for data files.", slug="bad-option")
    before, after = (shadowrun.load(path, **options.known_options(args)) for path in paths)
    changes = after.changes_since(before)
    issues = change_issues(changes, after.info.target, kinds, paths[1].name)
    document = changes_document(changes, (before.info, after.info), _labels(paths), args.limit, issues)
    return document, failures(changes, kinds)


def _diff_recordings(args: argparse.Namespace, paths: tuple[Path, Path]) -> tuple[Document, list[str]]:
    from shadowrun.cli.studies.diff import replay_commands
    from shadowrun.recording.file_format.recording_file import read
    from shadowrun.studies.diff.name_map import read_names
    from shadowrun.studies.diff.recordings import diff_recordings
    from shadowrun.studies.diff.report import recording_issues, recordings_document

    kinds = _kinds(args.fail_on, _OF_RECORDINGS, "recordings")
    names = read_names(Path(args.map)) if args.map else None
    first, second = map(read, paths)
    found = diff_recordings(first, second, names, _labels(paths))
    # A mistake that would pass every gate.
    if paths[0].samefile(paths[1]):
        found = dataclasses.replace(found, warnings=("both names are of one file", *found.warnings))
    issues = recording_issues(found, kinds, args.limit, paths[1].name)
    return recordings_document(found, args.limit, replay_commands(found, paths), issues), found.failures(kinds)


def _kinds(given: list[str], known: tuple[str, ...], what: str) -> frozenset[str]:
    for kind in given:
        if kind not in known:
            raise UsageError(f"--fail-on {kind}: for {what}, use {', '.join(known)}.", slug="bad-option")
    return frozenset(given)


def _labels(paths: tuple[Path, Path]) -> tuple[str, str]:
    """Names of the files; with their folders where they have the same name."""
    first, second = paths
    return (first.name, second.name) if first.name != second.name else (str(first), str(second))


# The `shadowrun replay` commands that judge a call of which two recordings hold the inputs. Needs no torch.

_DEVICE: Final = re.compile(r"[a-z][a-z0-9_]{0,30}", re.ASCII)


def replay_commands(found: RecordingDiff, paths: tuple[Path, Path]) -> tuple[str, ...]:
    """Commands that replay the first divergent call of each recording on the platform of the other.

    Args:
        found: The two recordings.
        paths: Their files.

    Returns:
        None unless both files hold the inputs of the call.
    """
    from shadowrun.recording.file_format.captured_reader import CapturedFile

    if not found.flow.origins:
        return ()
    calls = [int(call) for call in found.difference.alignment.pairs[found.flow.origins[0].pair]]
    recordings = [v.recording for v in (found.difference.first, found.difference.second)]
    for path, call in zip(paths, calls, strict=True):
        with CapturedFile(path) as captured:
            # Both or neither: one command alone cannot show which machine is off.
            if call not in captured.calls():
                return ()
    targets = [_platform(recording, call) for recording, call in zip(recordings, calls, strict=True)]
    # Crossed: the inputs of one machine are run as the other would, so that each command settles which is off.
    sides = zip(paths, calls, reversed(targets), strict=True)
    return tuple(
        shell_command("replay", path, "--call", str(call), "--target", target) for path, call, target in sides if target
    )


def _platform(recording: Recording, call: int) -> str:
    """The platform that made a call, as far as a command may name it for the user; empty if there is none."""
    device = recording.context_of(call).device
    text = recording.process_of(call).options.get("platform")
    try:
        spec = parse(text) if isinstance(text, str) else None
    except ShadowrunError:
        spec = None
    # A file from another person must not have a user paste what starts a program or sets its environment.
    if spec is not None and not any(key == PYTHON or key.startswith(ENV) for key, _ in spec.settings):
        return spec.public
    return device if _DEVICE.fullmatch(device) else ""
