"""See what every PyTorch operator of your program does on another device.

Examples:
  shadowrun demo                                   what a report looks like, in a minute
  shadowrun run --target npu train.py --epochs 1   compare every operator of train.py with the CPU
  shadowrun report                                 the report of the last run again
  shadowrun platforms                              what this machine can compare

Exit status:
  0  nothing found, or nothing that --fail-on names
  1  findings past the gate, or the program's own exception
  2  wrong usage, or an error inside shadowrun
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import traceback
from importlib import metadata
from typing import TYPE_CHECKING, NoReturn

from shadowrun.errors import ShadowrunError
from shadowrun.report.tame import forgiving, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["COMMANDS", "build_parser", "main"]

COMMANDS = (
    *("run", "report", "export", "repro", "compile", "combine"),
    *("coverage", "static", "sweep", "support", "slowdown", "platforms", "demo"),
)
"""Modules of this package. None imports torch, rich or jinja2 before its `run` is called."""

RUN_PROGRAM = ("run", "compile")
"""Those that run a program of the user's, whose own output stays as it is."""


class _Version(argparse.Action):
    """Reads the versions only when asked: metadata costs more than the rest of ``--help``, and torch two seconds."""

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
    """Have everything looked up in torch that a comparison uses; says what there is to say of this version."""
    from shadowrun.intercept import torchapi  # noqa: F401 - it looks
    from shadowrun.platforms import torchnames

    return torchnames.untested()


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = _parser(argparse.ArgumentParser, "shadowrun", __doc__ or "")
    parser.add_argument("--version", action=_Version, nargs=0, help="print versions and exit")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"shadowrun.cli.{name}")
        text = module.__doc__ or ""
        command = _parser(commands.add_parser, name, text, help=text.partition("\n")[0].rstrip("."))
        module.add_arguments(command)
        command.set_defaults(run=module.run, runs_program=name in RUN_PROGRAM)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments without the program's name; `sys.argv` by default.

    Returns:
        The exit status.

    Raises:
        KeyboardInterrupt: After Ctrl-C, where this is the process's program.
    """
    try:
        with forgiving():
            args = build_parser().parse_args(argv)
        with contextlib.nullcontext() if args.runs_program else forgiving():
            status: int = args.run(args)
        sys.stdout.flush()
    except ShadowrunError as error:
        with forgiving():
            print(f"shadowrun: error: {one_line(str(error))} [docs/messages.md#{error.slug}]", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if argv is not None:
            return 130
        sys.excepthook = lambda *_: None  # what there is to say was said
        raise  # Python ends such a process by the signal, after all that it does at exit
    except BrokenPipeError:
        # The reader (`| head`) has left: keep Python from complaining when it flushes at exit.
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
        allow_abbrev=False,
        **options,
    )
    return parser
