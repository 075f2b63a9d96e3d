"""Options that several commands share, and the reading of their values."""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path
from typing import Any

from shadowrun.config import ON_UNSUPPORTED
from shadowrun.errors import UsageError
from shadowrun.platforms import parse
from shadowrun.settings import DATA_FILE

__all__ = [
    "DATA_FILE",
    "FORMATS",
    "add_compare_arguments",
    "add_data_argument",
    "add_import_argument",
    "add_known_arguments",
    "add_output_argument",
    "add_simulation_arguments",
    "check_outputs",
    "compare_options",
    "enable_simulation",
    "import_modules",
    "known_ledger",
    "operators",
    "step_numbers",
    "words",
]

FORMATS = ("json", "md", "txt", "html")


def add_data_argument(parser: argparse.ArgumentParser) -> None:
    """Which run to read."""
    parser.add_argument("data", nargs="?", default=DATA_FILE, metavar="DATA", help="data file (default: %(default)s)")


def add_known_arguments(parser: argparse._ActionsContainer) -> None:
    """The ledger of known divergences."""
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--known",
        metavar="FILE",
        help="ledger of known divergences, which fail nothing (default: that in shadowrun.toml or pyproject.toml here "
        "or above)",
    )
    either.add_argument("--no-known", action="store_true", help="excuse nothing")


def known_ledger(args: argparse.Namespace) -> str | bool | None:
    """What `add_known_arguments` read, as `shadowrun.load` takes it."""
    return False if args.no_known else args.known


def add_import_argument(parser: argparse._ActionsContainer) -> None:
    """Modules to import first."""
    parser.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="import the package that brings a device, operators or a backend first (may be repeated)",
    )


def import_modules(args: argparse.Namespace) -> None:
    """Import what `add_import_argument` read.

    Raises:
        UsageError: There is no such module.
    """
    for module in args.modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UsageError(f"--import {module}: {error}.", slug="bad-option") from None


def add_output_argument(parser: argparse.ArgumentParser) -> None:
    """Reports to write."""
    parser.add_argument(
        "-o",
        "--output",
        action="append",
        default=[],
        metavar="FILE",
        help=f"write a report; its extension picks the format: {', '.join(FORMATS)} (may be repeated)",
    )


def add_simulation_arguments(parser: argparse.ArgumentParser, preset: str | None = None) -> None:
    """What the simulated accelerator does wrong."""
    parser.add_argument(
        "--flaws",
        type=words,
        default=[],
        metavar="A,B",
        help="simulate the target with these flaws (`shadowrun platforms --flaws` lists them)",
    )
    parser.add_argument(
        "--preset",
        default=preset,
        metavar="P",
        help=f"simulate the target with a named set of flaws (default: {preset or 'clean, if --flaws is given'})",
    )


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """The keyword arguments of `shadowrun.compare` that make sense on a command line."""
    group = parser.add_argument_group("what is compared, and how")
    group.add_argument("--steps", type=step_numbers, metavar="0,2,5-7", help="training steps to compare (default: all)")
    group.add_argument(
        "--ops", type=words, metavar="GLOBS", help="operators to compare, such as 'aten::*mm*', or functions: matmul"
    )
    group.add_argument("--modules", type=words, metavar="GLOBS", help="modules to compare, such as '*.attn.*'")
    group.add_argument("--rtol", type=float, help="relative tolerance, instead of the rounding analysis; needs --atol")
    group.add_argument("--atol", type=float, help="absolute tolerance; needs --rtol")
    settings = group.add_mutually_exclusive_group()
    settings.add_argument(
        "--settings",
        metavar="FILE",
        help="tolerances and ledger (default: shadowrun.toml and [tool.shadowrun] of pyproject.toml, here or above)",
    )
    settings.add_argument("--no-settings", action="store_true", help="read no such file")
    add_known_arguments(group)
    group.add_argument("--drift", action="store_true", help="also record the error that accumulates")
    group.add_argument(
        "--budget",
        type=float,
        metavar="X",
        help="time that a step may take, in plain steps: 1.2 is a fifth more (default: compare everything)",
    )
    group.add_argument(
        "--no-replay",
        dest="replay",
        action="store_false",
        help="compare nothing: only record which operators are called, with which inputs and from where",
    )
    group.add_argument(
        "--on-unsupported",
        choices=ON_UNSUPPORTED,
        default=ON_UNSUPPORTED[0],
        help="answer an operator that the target lacks with the reference's result, or let it raise",
    )
    group.add_argument(
        "--call-limit",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds that a call may take on a CPU with a process of its own (default: %(default)g)",
    )
    group.add_argument(
        "--capture",
        type=float,
        metavar="MIB",
        help="MiB of inputs of failing calls to keep beside the data file, for `shadowrun repro` (default: 64)",
    )
    group.add_argument(
        "--no-asynchronous",
        dest="asynchronous",
        action="store_const",
        const=False,
        help="wait for each call of a device that runs behind its host, and compare it at once",
    )
    group.add_argument(
        "--compiled", action="store_true", help="also compare what torch.compile makes, as a whole, with eager"
    )
    group.add_argument("--data", default=DATA_FILE, metavar="FILE", help="data file to write (default: %(default)s)")
    group.add_argument("--append", action="store_true", help="add to the data file instead of replacing it")


def compare_options(args: argparse.Namespace) -> dict[str, Any]:
    """The parsed arguments as keyword arguments of `shadowrun.compare`."""
    names = (
        *("steps", "modules", "rtol", "atol", "drift", "budget", "on_unsupported", "append", "asynchronous"),
        *("compiled", "replay"),
    )
    settings = False if args.no_settings else args.settings
    files = {"settings": settings, "known": known_ledger(args)}
    return {
        "file": args.data,
        "ops": None if args.ops is None else operators(args.ops),
        **files,
        "call_limit_s": args.call_limit,
        "capture": None if args.capture is None else int(args.capture * 2**20),
        **{name: getattr(args, name) for name in names},
    }


def operators(wanted: list[str]) -> list[str]:
    """Patterns of operators; a function that is no operator (``matmul``) is replaced by those that it calls.

    Raises:
        UsageError: There is no such operator and no such function, or torch's database of them cannot be used.
    """
    from shadowrun.replay.schedule import is_composite, why_unknown

    found: list[str] = []
    for name in wanted:
        unknown = why_unknown(name)
        if unknown or is_composite(name):
            from shadowrun.sweep.opinfo import operators_called

            called = operators_called(name.removeprefix("aten::"))
            if unknown and not called:
                raise UsageError(f"--ops {name}: {unknown}.", slug="unknown-operator")
            found += called
        if not unknown:
            found.append(name)
    return list(dict.fromkeys(found))


def enable_simulation(target: str, flaws: list[str], preset: str | None, *, named: bool = True) -> None:
    """Start the simulated accelerator under the target's name.

    Args:
        target: The platform that it imitates.
        flaws: Names of flaws.
        preset: Name of a preset of flaws.
        named: Whether the program names it. One that does not has no more accelerators than plainly, unless a real
            one is imitated, as ``npu``.

    Raises:
        UsageError: The target cannot be simulated, or there is no such flaw or preset.
    """
    name = parse(target).device_type
    if name == "cpu":
        raise UsageError(
            f"--flaws and --preset simulate an accelerator, and the target is {target!r}: use --target sim, "
            "or the name of the accelerator to imitate, such as npu.",
            slug="bad-simulation",
        )
    from shadowrun.platforms import sim

    if named or name != "sim":
        sim.enable(name, flaws=flaws, preset=preset or "clean")
    else:
        sim.register(flaws=flaws, preset=preset or "clean")


def check_outputs(outputs: list[str]) -> None:
    """Refuse reports that could not be written, before hours are spent on the run.

    Raises:
        UsageError: Unknown extension, a folder that is not there, or one file given twice.
    """
    for output in outputs:
        path = Path(output)
        if path.suffix.lstrip(".").lower() not in FORMATS:
            raise UsageError(
                f"The extension of the report {output!r} picks its format; use one of "
                f"{', '.join('.' + f for f in FORMATS)}.",
                slug="unknown-format",
            )
        if path.is_dir() or not os.access(path.parent, os.W_OK):
            raise UsageError(
                f"The report {output!r} cannot be written: its folder must exist and be writable.",
                slug="unwritable-report",
            )
    if len(set(outputs)) < len(outputs):
        raise UsageError("The same report is asked for twice: give each -o its own file.", slug="unwritable-report")


def words(text: str) -> list[str]:
    """Split ``a,b``; an empty text is no word."""
    return [word.strip() for word in text.split(",") if word.strip()]


def step_numbers(text: str) -> list[int]:
    """Read ``0,2,5-7``.

    Raises:
        ArgumentTypeError: It names no step.
    """
    steps: list[int] = []
    for word in words(text):
        first, dash, last = word.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise argparse.ArgumentTypeError(f"{word!r} is no step: use numbers and ranges, such as 0,2,5-7")
        if dash and int(last) < int(first):
            raise argparse.ArgumentTypeError(f"{word!r} ends before it begins: use {last}-{first}")
        steps += range(int(first), int(last if dash else first) + 1)
    if not steps:
        raise argparse.ArgumentTypeError(f"{text!r} names no step: use numbers and ranges, such as 0,2,5-7")
    return steps
