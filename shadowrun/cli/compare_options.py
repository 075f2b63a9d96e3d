"""Options of the commands that run a program: the keyword arguments of `shadowrun.compare`, and the choice of calls."""

from __future__ import annotations

import argparse
from typing import Any

from shadowrun.cli.options import add_baseline_argument, add_known_arguments, known_options, words
from shadowrun.config import ON_UNSUPPORTED, STOP_ON
from shadowrun.errors import UsageError
from shadowrun.settings import DATA_FILE

__all__ = ["add_compare_arguments", "add_selection_arguments", "compare_keywords", "operators", "step_numbers"]


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """The keyword arguments of `shadowrun.compare` that make sense on a command line."""
    group = parser.add_argument_group("comparison")
    add_selection_arguments(group, "compare")
    group.add_argument("--rtol", type=float, help="relative tolerance, instead of the rounding analysis; needs --atol")
    group.add_argument("--atol", type=float, help="absolute tolerance; needs --rtol")
    settings = group.add_mutually_exclusive_group()
    settings.add_argument(
        "--settings",
        metavar="FILE",
        help="tolerances and ledger (default: shadowrun.toml and [tool.shadowrun] of pyproject.toml, here or above)",
    )
    settings.add_argument("--no-settings", action="store_true", help="read no settings file")
    add_known_arguments(group)
    add_baseline_argument(group)
    _add_extent(group)
    _add_calls(group)
    group.add_argument(
        "--ranks",
        type=rank_numbers,
        metavar="0,2-3",
        help="ranks of a distributed program to compare; the others run plain (default: all)",
    )
    group.add_argument("--data", default=DATA_FILE, metavar="FILE", help="data file to write (default: %(default)s)")
    group.add_argument("--append", action="store_true", help="append to the data file instead of replacing it")


def _add_extent(group: argparse._ArgumentGroup) -> None:
    """What is compared and recorded."""
    group.add_argument("--drift", action="store_true", help="also record the accumulated error")
    group.add_argument(
        "--budget",
        type=float,
        metavar="X",
        help="overhead budget: time of a step relative to a plain one, such as 1.2 (default: compare all calls)",
    )
    group.add_argument(
        "--api",
        action="store_true",
        help="also record which function or module of torch made each call, for `shadowrun coverage --api`",
    )
    group.add_argument(
        "--timeline",
        action="store_true",
        help="also record when the parts of each call ran, for `shadowrun export --trace`; takes longer",
    )
    group.add_argument(
        "--no-replay",
        dest="replay",
        action="store_false",
        help="compare nothing: only record the operators that are called, their inputs and source lines",
    )
    group.add_argument(
        "--compiled",
        action="store_true",
        help="also compare each region of torch.compile with eager, as a whole",
    )


def _add_calls(group: argparse._ArgumentGroup) -> None:
    """How each call is run, and what is done with one that fails."""
    group.add_argument(
        "--on-unsupported",
        choices=ON_UNSUPPORTED,
        default=ON_UNSUPPORTED[0],
        help="if the target lacks an operator: use the reference's result, or let it raise (default: %(default)s)",
    )
    group.add_argument(
        "--call-limit",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds that a call may take on a CPU in a separate process (default: %(default)g)",
    )
    group.add_argument(
        "--capture",
        type=float,
        metavar="MIB",
        help="MiB of inputs of failing calls to store next to the data file, for `shadowrun repro` (default: 64)",
    )
    # None, the default, leaves the choice to `compare`: asynchronous where that is possible.
    group.add_argument(
        "--no-asynchronous",
        dest="asynchronous",
        action="store_const",
        const=False,
        help="synchronise an asynchronous device after each call, and compare immediately",
    )
    group.add_argument(
        "--stop-on",
        type=words,
        default=[],
        metavar="KINDS",
        help=f"raise into the program at the first call that is one of {', '.join(STOP_ON)}; waits for a device "
        "after each call",
    )


def add_selection_arguments(parser: argparse._ActionsContainer, verb: str) -> None:
    """Which calls.

    Args:
        parser: Gets the options.
        verb: What is done with the calls: compare, record.
    """
    parser.add_argument(
        "--steps", type=step_numbers, metavar="0,2,5-7", help=f"training steps to {verb} (default: all)"
    )
    parser.add_argument(
        "--ops", type=words, metavar="GLOBS", help=f"operators to {verb}, such as 'aten::*mm*', or functions: matmul"
    )
    parser.add_argument("--modules", type=words, metavar="GLOBS", help=f"modules to {verb}, such as '*.attn.*'")


def compare_keywords(args: argparse.Namespace) -> dict[str, Any]:
    """The parsed arguments as keyword arguments of `shadowrun.compare`."""
    names = (
        *("steps", "modules", "rtol", "atol", "drift", "budget", "on_unsupported", "append", "asynchronous"),
        *("compiled", "replay", "api", "timeline", "stop_on", "ranks"),
    )
    settings = False if args.no_settings else args.settings
    files = {"settings": settings, **known_options(args)}
    return {
        "file": args.data,
        "ops": None if args.ops is None else operators(args.ops),
        **files,
        "call_limit_s": args.call_limit,
        # MiB on the command line, bytes in `Config`.
        "capture": None if args.capture is None else int(args.capture * 2**20),
        **{name: getattr(args, name) for name in names},
    }


def operators(wanted: list[str]) -> list[str]:
    """Patterns of operators; a function that is no operator (``matmul``) is replaced by the operators that it calls.

    Raises:
        UsageError: There is no such operator and no such function, or torch's database of them cannot be used.
    """
    from shadowrun.schedule.selection import is_composite, why_unknown

    found: list[str] = []
    for name in wanted:
        unknown = why_unknown(name)
        if unknown or is_composite(name):
            from shadowrun.studies.sweep.opinfo import operators_called

            # A composite operator never reaches the dispatch mode: the operators that it calls do.
            called = operators_called(name.removeprefix("aten::"))
            if unknown and not called:
                raise UsageError(f"--ops {name}: {unknown}.", slug="unknown-operator")
            found += called
        if not unknown:
            found.append(name)
    return list(dict.fromkeys(found))


def step_numbers(text: str) -> list[int]:
    """Read ``0,2,5-7``.

    Raises:
        ArgumentTypeError: It names no step.
    """
    return _numbers(text, "step")


def rank_numbers(text: str) -> list[int]:
    """As `step_numbers`, for ranks."""
    return _numbers(text, "rank")


def _numbers(text: str, what: str) -> list[int]:
    numbers: list[int] = []
    for word in words(text):
        first, dash, last = word.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise argparse.ArgumentTypeError(f"{word!r} is no {what}: use numbers and ranges, such as 0,2,5-7")
        # An empty range would compare nothing, and pass.
        if dash and int(last) < int(first):
            raise argparse.ArgumentTypeError(f"{word!r} is an empty range: use {last}-{first}")
        numbers += range(int(first), int(last if dash else first) + 1)
    if not numbers:
        raise argparse.ArgumentTypeError(f"{text!r} names no {what}: use numbers and ranges, such as 0,2,5-7")
    return numbers
