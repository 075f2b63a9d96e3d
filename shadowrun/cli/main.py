"""Compare every PyTorch operator call of a program on two devices.

Examples:
  shadowrun demo                                   an example of a report, in a minute
  shadowrun run --target npu train.py --epochs 1   compare every operator of train.py with the CPU
  shadowrun report                                 the report of the last run again
  shadowrun platforms                              the platforms of this machine

Exit status:
  0  no findings, or none of a kind that --fail-on names
  1  findings that fail the run, or an exception of the program
  2  wrong usage, or an error inside shadowrun
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
import traceback
from importlib import metadata
from typing import TYPE_CHECKING, NoReturn

from shadowrun.errors import ShadowrunError
from shadowrun.report.sanitize import MAX_WHOLE, clip, forgiving

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

__all__ = ["COMMANDS", "build_parser", "in_child", "main"]

COMMANDS = (
    *("run", "report", "export", "explain", "repro", "compile", "combine", "record", "diff", "replay", "classes"),
    *(
        "coverage",
        "static",
        "sweep",
        "campaign",
        "support",
        "slowdown",
        "determinism",
        "mitigate",
        "study",
        "platforms",
        "demo",
    ),
)
"""Modules of this package. `--help` must be fast: none imports torch, rich or jinja2 before its `run` is called."""

RUN_CALLS = ("explain", "repro", "slowdown", "replay")
"""Commands that run calls of a file, in a process of their own."""

RUN_PROGRAM = ("run", "compile", "record", "determinism", "mitigate")
"""Commands that run the user's program, whose output must not be changed."""


class _Version(argparse.Action):
    """Reads versions for ``--version`` only: metadata takes longer than all of ``--help``, and torch two seconds."""

    def __call__(self, *_: object) -> NoReturn:
        from shadowrun import native

        versions = [f"{name} {metadata.version(name)}" for name in ("shadowrun", "torch")]
        try:
            note = _what_torch_lacks()
        except ShadowrunError as error:
            note = f"error: {error} [docs/messages.md#{error.slug}]"
        print(*versions, f"native {native.state()}", sep=", ")
        if note:
            print(f"shadowrun: {note}")
        sys.exit(0)


def _what_torch_lacks() -> str:
    """Look up all torch APIs that a comparison uses; the note on this version of torch, or empty."""
    from shadowrun import torch_versions
    from shadowrun.intercept import torch_operators, torchapi  # noqa: F401 - the import looks them up

    return torch_versions.untested()


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = _parser(argparse.ArgumentParser, "shadowrun", __doc__ or "")
    parser.add_argument("--version", action=_Version, nargs=0, help="print versions and exit")
    # Not by the files of the folder: a helper module is no command, and the order is that of `--help`.
    commands = parser.add_subparsers(metavar="COMMAND", title="commands", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"shadowrun.cli.{name}")
        text = module.__doc__ or ""
        command = _parser(commands.add_parser, name, text, help=text.partition("\n")[0].rstrip("."))
        module.add_arguments(command)
        command.set_defaults(run=module.run, runs_program=name in RUN_PROGRAM, runs_calls=name in RUN_CALLS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments without the program's name; `sys.argv` by default.

    Returns:
        The exit status.

    Raises:
        KeyboardInterrupt: After Ctrl-C, if `argv` is None.
    """
    try:
        with forgiving():
            args = build_parser().parse_args(argv)
        # Called by a test or a program, a command stays in its process.
        if argv is None and args.runs_calls and (ended := in_child()) is not None:
            return ended
        with contextlib.nullcontext() if args.runs_program else forgiving():
            # Before the command resolves a platform: the plug-in may register it.
            if getattr(args, "imports", None):
                from shadowrun.platforms.plugins import import_plugins

                import_plugins(args.imports, inherit=not args.runs_program)
            status: int = args.run(args)
        sys.stdout.flush()  # here a closed pipe is handled; at exit Python would print an error
    except ShadowrunError as error:
        with forgiving():
            print(f"shadowrun: error: {clip(str(error), MAX_WHOLE)} [docs/messages.md#{error.slug}]", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if argv is not None:  # called by a test or a program, which must not be ended
            return 130
        sys.excepthook = lambda *_: None  # the traceback was printed already
        raise  # Python ends the process by the signal, after its exit handlers
    except BrokenPipeError:
        # The reader (`| head`) closed the pipe: avoid a second error when Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception:
        with forgiving():
            traceback.print_exc()
            print("shadowrun: internal error: please report the lines above.", file=sys.stderr)
        return 2
    return status


def _parser(make: object, name: str, docstring: str, **options: str) -> argparse.ArgumentParser:
    summary, _, details = docstring.partition("\n\n")
    assert callable(make)
    parser: argparse.ArgumentParser = make(
        name,
        description=summary,
        epilog=details.rstrip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # an abbreviation would change its meaning when an option is added
        **options,
    )
    return parser


_FORWARDED = ("SIGTERM", "SIGHUP")
_ENDED_BY_CALLS = ("SIGSEGV", "SIGFPE", "SIGBUS", "SIGILL", "SIGABRT", "SIGTRAP", "SIGSYS", "SIGKILL")


def in_child() -> int | None:
    """Run the command in a child process, so that a kernel that ends its process ends it with a message.

    Inputs of a call of a file can make a kernel divide by zero or read where there is no memory, and then no exception
    is raised. The child is forked before torch is imported: a later fork would inherit locks of threads, and an
    accelerator that it cannot use.

    Returns:
        None in the child, and where processes cannot be forked; its exit status in the parent.

    Raises:
        ShadowrunError: A signal of a kernel ended the child.
        KeyboardInterrupt: Ctrl-C ended it.
    """
    if not hasattr(os, "fork"):
        return None
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        return None
    # Ctrl-C goes to both; the child decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def forward(number: int, _: FrameType | None) -> None:
        os.kill(pid, number)

    for name in _FORWARDED:
        signal.signal(getattr(signal, name), forward)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status >= 0:
        return status
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if -status == signal.SIGINT:
        raise KeyboardInterrupt
    names = {int(getattr(signal, name)): name for name in _ENDED_BY_CALLS if hasattr(signal, name)}
    if -status not in names:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    raise ShadowrunError(
        f"{names.get(-status, f'Signal {-status}')} ended the process while it worked on the file: a call of it has "
        "inputs that a kernel does not check, or took all memory. `shadowrun report` runs no call.",
        slug="calls-ended-process",
    )
