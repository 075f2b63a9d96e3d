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
import functools
import importlib
import os
import sys
import traceback
from importlib import metadata
from typing import TYPE_CHECKING, NoReturn

from shadowrun.cli import child_process, options
from shadowrun.errors import ShadowrunError, UsageError, brief
from shadowrun.limits import ResourceLimits
from shadowrun.platforms.plugins import failed_autoload, import_plugins, inherited
from shadowrun.report.sanitize import MAX_WHOLE, clip, code_line, replacing_unencodable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["COMMANDS", "build_parser", "main"]

COMMANDS = (
    *("run", "report", "export", "explain", "repro", "compile", "combine", "record", "diff", "replay", "classes"),
    *("known", "coverage", "static", "sweep", "campaign", "zoo", "support", "slowdown", "determinism", "mitigate"),
    *("study", "platforms", "demo", "completion"),
)
"""In the order of `--help`, which must be fast: no module imports torch, rich or jinja2 before its `run` is called."""

OF_STUDIES = (
    *("diff", "replay", "classes", "static", "sweep", "campaign", "zoo", "support", "slowdown", "determinism"),
    *("mitigate", "study"),
)
"""Commands in `cli.studies`; the others are in `cli.commands`."""

READ = ("report", "export", "combine", "diff", "classes", "known", "coverage", "static", "support")
"""Commands that only read files, in a process of their own with bounds on memory and time."""

RUN_CALLS = ("explain", "repro", "slowdown", "replay")
"""Commands that run calls of a file, in a process of their own."""

WITH_ACTIONS = ("campaign",)
"""Commands whose actions have parsers of their own, with all options."""

FILES_TO_READ = (
    *("baseline", "before", "data", "file", "files", "first", "folder", "known", "ledger", "map", "paths", "published"),
    *("recordings", "second", "shards", "source", "write_known", "zoo"),
)
"""Arguments of commands that read, whose files allow memory and time. Another word may be the name of a folder, too."""

RUN_PROGRAM = ("run", "compile", "record", "determinism", "mitigate")
"""Commands that run the user's program, whose output must not be changed."""


class _Parser(argparse.ArgumentParser):
    """Words of the command line may be names of files, which a terminal obeys: messages have them as text."""

    def error(self, message: str) -> NoReturn:
        super().error(clip(message, MAX_WHOLE))


class _Version(argparse.Action):
    """Reads versions for ``--version`` only: metadata takes longer than all of ``--help``, and torch two seconds."""

    def __call__(self, *_: object) -> NoReturn:
        from shadowrun import native

        versions = [f"{name} {metadata.version(name)}" for name in ("shadowrun", "torch")]
        try:
            note = _what_torch_lacks()
        except ShadowrunError as error:
            # `--version` is what a bug report begins with: it prints what there is, whatever is missing.
            note = f"error: {error} [{error.command}]"
        print(*versions, f"native {native.state()}", sep=", ")
        if note:
            print(f"shadowrun: {note}")
        sys.exit(0)


def _what_torch_lacks() -> str:
    """Look up all torch APIs that a comparison uses; the note on this version of torch, or empty."""
    from shadowrun import torch_versions
    from shadowrun.intercept import torch_operators, torchapi  # noqa: F401 - the import looks them up

    return torch_versions.untested()


def build_parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser of the whole command line; of one command alone, if `words` begin with it.

    The modules of all commands take longer to import than most commands take to read their arguments.
    """
    parser = _parser(_Parser, "shadowrun", __doc__ or "")
    parser.add_argument("--version", action=_Version, nargs=0, help="print versions and exit")
    # Not by the files of the folder: a helper module is no command, and the order is that of `--help`.
    commands = parser.add_subparsers(metavar="COMMAND", title="commands", required=True)
    for name in words[:1] if words and words[0] in COMMANDS else COMMANDS:
        module = importlib.import_module(f"shadowrun.cli.{'studies' if name in OF_STUDIES else 'commands'}.{name}")
        text = module.__doc__ or ""
        command = _parser(commands.add_parser, name, text, help=text.partition("\n")[0].rstrip("."))
        module.add_arguments(command)
        if name not in WITH_ACTIONS:
            options.add_import_argument(command)
        command.set_defaults(
            run=module.run, runs_program=name in RUN_PROGRAM, runs_calls=name in RUN_CALLS, reads=name in READ
        )
        command.set_defaults(defaults=functools.partial(module.set_defaults, command) if name == "run" else None)
        if hasattr(module, "reads_and_runs"):  # what it does depends on its action
            command.set_defaults(reads_and_runs=module.reads_and_runs)
        if hasattr(module, "read_first"):  # it has worker processes, so that its own process has no bounds
            command.set_defaults(read_first=module.read_first)
        if name in READ or hasattr(module, "read_first"):
            options.add_no_limits_argument(command)
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
        with replacing_unencodable():
            words = sys.argv[1:] if argv is None else argv
            _check_options(words)
            parser = build_parser(words)
            args = parser.parse_args(argv)
            if args.defaults is not None:  # of this command, by the environment and settings of the project
                args.defaults(args)
                args = parser.parse_args(argv)
        if hasattr(args, "reads_and_runs"):
            args.reads, args.runs_calls = args.reads_and_runs(args)
        if argv is None and not args.runs_program and not getattr(args, "free", None):
            # Of all processes to come: torch's compiler starts some with `-c`, which import from the current folder.
            os.environ["PYTHONSAFEPATH"] = "1"
        allowance = _limits_for(args)
        if argv is None and hasattr(args, "read_first") and not args.no_limits:
            child_process.check_costs(
                functools.partial(args.read_first, args), ResourceLimits.for_files(_read_by(args))
            )
        # Called by a test or a program, a command stays in its process.
        is_child = argv is None and (args.runs_calls or allowance is not None)
        if is_child and (ended := child_process.in_child(allowance)) is not None:
            return ended
        with contextlib.nullcontext() if args.runs_program else replacing_unencodable():
            # Before the command resolves a platform: the plug-in may register it.
            args.imports = args.imports or inherited()
            import_plugins(args.imports, inherit=not args.runs_program)
            # What the user names, a package that runs calls or a program, takes what it needs.
            is_free = allowance is None and (args.imports or getattr(args, "free", None))
            is_bounded = is_child and not is_free
            with child_process.with_limits(allowance) if is_bounded else contextlib.nullcontext():
                status: int = args.run(args)
        sys.stdout.flush()  # here a closed pipe is handled; at exit Python would print an error
    except ShadowrunError as error:
        with replacing_unencodable():
            print(f"shadowrun: error: {clip(str(error), MAX_WHOLE)} [{error.command}]", file=sys.stderr)
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
    except Exception as error:
        with replacing_unencodable():
            if refused := failed_autoload(error) or _unusable_path(error):
                print(f"shadowrun: error: {clip(str(refused), MAX_WHOLE)} [{refused.command}]", file=sys.stderr)
                return 2
            for line in traceback.format_exc().splitlines():  # it ends with a text that may be a file's
                print(f"  {code_line(line, MAX_WHOLE)}", file=sys.stderr)
            print("shadowrun: internal error: please report the lines above.", file=sys.stderr)
        return 2
    return status


def _check_options(words: Sequence[str]) -> None:
    """Refuse an option that is the name of a file here: a pattern (`*.shadowrec`) puts it on the command line.

    A folder from elsewhere may have a file ``--import=module.shadowrec`` next to the module.

    Raises:
        UsageError: One is.
    """
    if words and words[0] in RUN_PROGRAM:  # nearly all words are the program's
        return
    # Behind `--` all are names of files, and behind `--free` the words of a program: both words are options too.
    ends = next((n for n, word in enumerate(words) if word in ("--", "--free")), len(words))
    for word in words[: ends + 1]:
        if len(word) > 1 and word.startswith("-") and os.path.lexists(word):
            raise UsageError(
                f"{word!r} is an option, and the name of a file in this folder, which a pattern such as * may have put "
                "on the command line. Write ./* for the pattern, or rename the file.",
                slug="bad-option",
            )


def _unusable_path(error: Exception) -> ShadowrunError | None:
    """What an exception of the system means, if it is about a path that no reader looked at first; None if not."""
    if not isinstance(error, OSError) or error.filename is None:
        return None
    return UsageError(
        f"{brief(error.filename)} cannot be used ({error.strerror}): give another name, or look at its folder.",
        slug="unusable-path",
    )


def _limits_for(args: argparse.Namespace) -> ResourceLimits | None:
    """Bounds on memory and time for a command that reads files, by their size."""
    if not args.reads or args.no_limits:
        return None
    return ResourceLimits.for_files(_read_by(args), getattr(args, "packed", 1))


def _read_by(args: argparse.Namespace) -> Iterator[str]:
    """Words of the command line that name files or folders to read."""
    for name in FILES_TO_READ:
        value = getattr(args, name, None)
        for word in value if isinstance(value, list) else [value]:
            if isinstance(word, (str, os.PathLike)):
                yield os.fspath(word)


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
