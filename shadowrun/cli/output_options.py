"""Where a report goes: files and formats, and at a terminal a digest, or all of it by a pager."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shadowrun import report
from shadowrun.errors import UsageError
from shadowrun.limits import current_call
from shadowrun.report import FORMATS, ISSUE_FORMATS, STDOUT, output_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from shadowrun.report.document import Document

__all__ = ["add_output_arguments", "check_outputs", "pager_command", "print_report", "wants_pictures"]


def add_output_arguments(
    parser: argparse._ActionsContainer, *, findings: bool = False, digest: bool = False, has_all: bool = False
) -> None:
    """Files and format of the report; the same options for every command that prints one.

    Args:
        parser: Gets the options.
        findings: Whether the report has findings, which CI services take in formats of their own.
        digest: Whether a terminal shows a digest of it.
        has_all: Whether the command has an option ``--all`` of its own.
    """
    formats = (*FORMATS, *ISSUE_FORMATS) if findings else FORMATS
    services = f"; for CI services: {', '.join(ISSUE_FORMATS)}" if findings else ""
    parser.add_argument(
        "-o",
        "--output",
        action="append",
        type=_output_among(formats),
        default=[],
        metavar="FILE",
        help="write the report to FILE, in the format of its extension, or to FORMAT:FILE (FORMAT:- is standard "
        f"output): {', '.join(FORMATS)}{services} (may be repeated)",
    )
    parser.add_argument(
        "-f",
        "--format",
        choices=formats,
        metavar="FORMAT",
        help="format on standard output, one of these (default: text, coloured in a terminal); a page that a file of "
        "-o gets is not printed too",
    )
    if digest:
        parser.add_argument(
            "-v", "--verbose", action="store_true", help="at a terminal, show the details of the findings too"
        )
    if not has_all:
        parser.add_argument("--all", action="store_true", dest="everything", help="print all rows of each table")
    parser.add_argument(
        "--no-pager", action="store_true", help="do not show a long report by $PAGER (default at a terminal: less)"
    )


def _output_among(formats: Collection[str]) -> Callable[[str], str]:
    """Reader of ``-o``: refuses the formats of findings where a report has none."""

    def read(text: str) -> str:
        with contextlib.suppress(UsageError):  # `check_outputs` raises it, with its entry in the documentation
            if (name := output_of(text).format) not in formats:
                raise argparse.ArgumentTypeError(
                    f"{text!r}: {name} is a format of findings, and this report has none; use {', '.join(formats)}"
                )
        return text

    return read


def wants_pictures(args: argparse.Namespace) -> bool:
    """Whether HTML is among the reports that are asked for."""
    return args.format == "html" or any(output_of(output).format == "html" for output in args.output)


def print_report(document: Document, args: argparse.Namespace, *, always: bool = False, more: str = "") -> None:
    """Write a document as the options of `add_output_arguments` say.

    Args:
        document: The report.
        args: The parsed options.
        always: Print to standard output even if files are named, for commands that run something.
        more: Where a terminal that shows the digest has the details; a command, or what to add to this one.

    Raises:
        UsageError: A file has an unknown extension or cannot be written.
    """
    from shadowrun.report.document import render

    # Again: since the start, a run of hours may have passed, and a folder may be gone.
    check_outputs(args.output)
    outputs = [output_of(output) for output in args.output]
    # `-f html -o page.html` asks for a page, not for its text at the terminal as well.
    has_page = any(o.format == "html" and o.path != report.STDOUT for o in outputs)
    form = None if args.format == "html" and has_page else args.format
    printed = [form or "terminal"] if form or always or not outputs else []
    # Files first: the reader of standard output may close it, as `head` does.
    for output in outputs:
        if output.path == report.STDOUT:
            printed.append(output.format)
        elif output.appends:
            report.append_to_summary(render(document, output.format), Path(output.path))
        else:
            report.save(render(document, output.format), Path(output.path))
    for name in printed:
        if name == "terminal":
            _show(document, args, more)
        else:
            report.write_to_stdout(render(document, name))


def _show(document: Document, args: argparse.Namespace, more: str) -> None:
    """The digest, or with ``-v`` all, by a pager if it is longer than the screen."""
    from shadowrun.report.document import View, render_view

    at_terminal = sys.stdout.isatty()
    everything = bool(getattr(args, "everything", False))
    # A log or a pipe is searched later: it gets all.
    details = everything or not document.digest or not at_terminal or bool(getattr(args, "verbose", False))
    pages = at_terminal and details and not getattr(args, "no_pager", False) and pager_command() is not None
    text = render_view(document, View(details, everything, at_terminal and not pages, more))
    if not (pages and is_long(text) and show_by_pager(text)):
        report.write_to_stdout(text)


def check_outputs(outputs: list[str]) -> None:
    """Refuse reports that cannot be written, before the run starts.

    Raises:
        UsageError: Unknown extension, a missing folder, or the same file twice.
    """
    paths = [output_of(output).path for output in outputs]  # raises for an unknown extension
    for path in (Path(path) for path in paths if path != STDOUT):
        if path.is_dir() or not os.access(path.parent, os.W_OK):
            raise UsageError(
                f"The report {str(path)!r} cannot be written: its folder must exist and be writable.",
                slug="unwritable-report",
            )
    files = [path for path in paths if path != STDOUT]
    if len(set(files)) < len(files):
        raise UsageError(
            "Two -o options name the same file: give each report a file of its own.", slug="unwritable-report"
        )


# Long reports at a terminal, by the user's pager, as git shows its own: never in a pipe, a file or a CI service.

_DEFAULT = "less"
# As git: quit if one screen is enough, show colours, leave the text on the screen.
_LESS, _LV = "FRX", "-c"


def pager_command() -> list[str] | None:
    """The pager of SHADOWRUN_PAGER or PAGER, else less; None for none."""
    if os.environ.get("CI") or os.environ.get("TERM", "dumb") == "dumb":
        return None
    # Set and empty is a choice, as `cat` is.
    wanted = next((os.environ[name] for name in ("SHADOWRUN_PAGER", "PAGER") if name in os.environ), _DEFAULT)
    try:
        words = shlex.split(wanted)
    except ValueError:  # an open quotation mark
        return None
    if not words or words == ["cat"] or shutil.which(words[0]) is None:
        return None
    return words


def is_long(text: str) -> bool:
    """Whether a text has more lines than the screen."""
    return text.count("\n") >= shutil.get_terminal_size().lines


def show_by_pager(text: str) -> bool:
    """Show a text by the pager, and wait for its end; False where it does not start."""
    words = pager_command()
    if words is None:
        return False
    environment = {"LESS": _LESS, "LV": _LV, **os.environ}
    sys.stdout.flush()
    try:
        process = subprocess.Popen(  # noqa: S603 - the user's own choice, without a shell
            words, stdin=subprocess.PIPE, env=environment, encoding="utf-8", errors="replace"
        )
    except OSError:
        return False
    # The user may leave before the end, and Ctrl-C is the pager's: it ends a search.
    current_call.begin(current_call.PAGER, "")
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        process.communicate(text)
    while process.poll() is None:
        with contextlib.suppress(KeyboardInterrupt):
            process.wait()
    current_call.begin(-1, "")
    return True
