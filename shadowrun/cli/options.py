"""Options that several commands share, and readers of their values."""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shadowrun.cli.output_options import add_output_arguments, check_outputs, print_report, wants_pictures
from shadowrun.errors import UsageError
from shadowrun.platforms import parse
from shadowrun.report import FORMATS
from shadowrun.settings import DATA_FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from shadowrun.analysis import Baseline, KnownIssues

__all__ = [
    "DATA_FILE",
    "FORMATS",
    "add_baseline_argument",
    "add_data_argument",
    "add_import_argument",
    "add_known_arguments",
    "add_no_limits_argument",
    "add_output_arguments",
    "add_outputs_argument",
    "add_program_arguments",
    "add_simulation_arguments",
    "baseline",
    "byte_count",
    "check_outputs",
    "enable_simulation",
    "is_simulated",
    "iso_date",
    "kept_folder",
    "kinds_reader",
    "known_issues_on",
    "known_ledger",
    "known_options",
    "positive_float",
    "positive_int",
    "print_report",
    "require_program",
    "reset_command",
    "wants_pictures",
    "words",
]

# As `python -m`, but with the current folder behind all others: it may have a file of the name of a module.
_RUN_MODULE: Final = (
    "import os, runpy, sys; sys.path.append(os.getcwd()); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def add_data_argument(parser: argparse.ArgumentParser) -> None:
    """The data file to read."""
    parser.add_argument("data", nargs="?", default=DATA_FILE, metavar="DATA", help="data file (default: %(default)s)")


def add_program_arguments(parser: argparse.ArgumentParser) -> None:
    """The program to run and its arguments: last, since they take all words that are left."""
    # Two arguments that take the rest: after `-m`, argparse gives no word to the script, and without it, none to the
    # module.
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="script.py ...", help="program and its arguments")


def require_program(args: argparse.Namespace, example: str) -> None:
    """Refuse a command without a program.

    Raises:
        UsageError: Neither a script nor a module is given.
    """
    if not args.module and not args.script:
        raise UsageError(f"Give the program to run: {example}", slug="missing-script")


def add_outputs_argument(parser: argparse.ArgumentParser) -> None:
    """Which results of a recording are compared."""
    parser.add_argument(
        "--output-of",
        dest="outputs",
        action="append",
        default=[],
        metavar="MODULE/OP",
        help="calls whose results to compare, as a pattern (default: the last call of each step; may be repeated)",
    )


@contextlib.contextmanager
def kept_folder(kept: str | None) -> Iterator[Path]:
    """The folder of ``--keep``, or a temporary one.

    Raises:
        UsageError: The folder cannot be made, or is a link.
    """
    if kept is None:
        with tempfile.TemporaryDirectory(prefix="shadowrun-") as name:
            yield Path(name)
        return
    from shadowrun.store.atomic_write import refuse_links

    path = Path(kept)
    refuse_links(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--keep {kept!r}: {error.strerror}. Name a folder.", slug="bad-option") from error
    yield path


def add_import_argument(parser: argparse._ActionsContainer) -> None:
    """Packages that register devices; `main` imports them before it runs the command."""
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="import this package first: it registers a device, operators or a backend (may be repeated)",
    )


def add_no_limits_argument(parser: argparse._ActionsContainer) -> None:
    """What lifts the bounds of a command that only reads; `main` sets them."""
    parser.add_argument(
        "--no-limits", action="store_true", help="read without bounds on memory and time: only files you trust"
    )


def add_known_arguments(parser: argparse._ActionsContainer) -> None:
    """The ledger of known issues."""
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--known",
        metavar="FILE",
        help="ledger of known issues, which fail nothing (default: that in shadowrun.toml or pyproject.toml here "
        "or above)",
    )
    either.add_argument("--no-known", action="store_true", help="read no ledger: known issues fail the run too")
    parser.add_argument(
        "--no-vendor-known",
        action="store_true",
        help="leave out the known issues that the package of the target's device ships",
    )


def add_baseline_argument(parser: argparse._ActionsContainer) -> None:
    """A run to compare with."""
    parser.add_argument(
        "--baseline",
        metavar="DATA",
        help="data file of an earlier run: the report says which findings are new since then (--fail-on new)",
    )


def baseline(args: argparse.Namespace) -> Baseline | None:
    """The findings of ``--baseline``; read at once, since the run may replace the file."""
    import shadowrun

    # Under this run's ledger: a finding that is excused now must not count as one that is gone.
    return None if args.baseline is None else shadowrun.load(args.baseline, **known_options(args)).as_baseline()


def known_ledger(args: argparse.Namespace) -> str | bool | None:
    """The ledger of `add_known_arguments`, as `shadowrun.load` takes it."""
    return False if args.no_known else args.known


def known_issues_on(target: str, args: argparse.Namespace) -> KnownIssues:
    """The ledger of `add_known_arguments`, and what the package of the target's device ships."""
    from shadowrun.analysis import KnownIssues
    from shadowrun.platforms.plugin_file import known_issues
    from shadowrun.settings import read_settings

    shipped = () if args.no_known or args.no_vendor_known else known_issues(target)
    return KnownIssues((*read_settings(known_ledger(args)).known, *shipped), target)


def known_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `add_known_arguments`, as keyword arguments of `shadowrun.load`."""
    return {"known": known_ledger(args), "vendor_known": not args.no_vendor_known}


def add_simulation_arguments(parser: argparse.ArgumentParser, preset: str | None = None) -> None:
    """Flaws of the simulated accelerator."""
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


def reset_command(targets: Iterable[str]) -> tuple[str, ...]:
    """The command by which the package of a device brings it back; empty if none has one."""
    from shadowrun.platforms.backends import backend_of

    modules = filter(None, (backend_of(parse(target).device_type).reset for target in targets))
    # A module and no command line: what a package names is run by this Python, without a shell.
    return next(((sys.executable, "-P", "-c", _RUN_MODULE, module) for module in modules), ())


def enable_simulation(target: str, flaws: list[str], preset: str | None, *, named: bool = True) -> None:
    """Start the simulated accelerator under the target's name.

    Args:
        target: The platform to imitate.
        flaws: Names of flaws.
        preset: Name of a preset of flaws.
        named: Whether the program names the device. If not, ``sim`` is only registered: a program that uses whatever
            accelerator torch reports must not find it.

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
    from shadowrun import sim

    if named or name != "sim":
        sim.enable(name, flaws=flaws, preset=preset or "clean")
    else:
        sim.register(flaws=flaws, preset=preset or "clean")


def is_simulated(args: argparse.Namespace, *, needs_target: bool = True) -> bool:
    """Whether the options of `add_simulation_arguments` ask for a simulated target.

    Raises:
        UsageError: There is no target, neither named nor simulated, and one is needed.
    """
    # Either option asks for it: `--flaws X train.py` needs no --target.
    simulated = bool(args.flaws or args.preset)
    if needs_target and args.target is None and not simulated:
        raise UsageError(
            "Give the platform to test, such as --target npu; `shadowrun platforms` lists what this machine has, "
            "and --target sim needs no hardware.",
            slug="missing-target",
        )
    return simulated


def words(text: str) -> list[str]:
    """Split ``a,b``; empty words are dropped."""
    return [word.strip() for word in text.split(",") if word.strip()]


def kinds_reader(known: Collection[str]) -> Callable[[str], list[str]]:
    """Reader of ``--fail-on``: ``a,b`` of these kinds, or ``none``."""

    def read(text: str) -> list[str]:
        # Empty words are kept and refused: an empty variable in a CI script must not switch the gate off.
        kinds = [] if text == "none" else [word.strip() for word in text.split(",")]
        for kind in kinds:
            if kind not in known:
                raise argparse.ArgumentTypeError(f"{kind!r} is no kind of finding; use {', '.join(known)}, or none")
        return kinds

    return read


def positive_int(text: str) -> int:
    """Read a whole number from 1 on.

    Raises:
        ArgumentTypeError: It is none.
    """
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: use a whole number >= 1")
    return number


def iso_date(text: str) -> dt.date:
    """Read a date, such as 2027-01-31.

    Raises:
        ArgumentTypeError: It is none.
    """
    try:
        return dt.date.fromisoformat(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no date such as 2027-01-31") from error


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def byte_count(text: str) -> int:
    """Read ``100MB``, ``1.5 GiB`` or a number of bytes.

    Raises:
        ArgumentTypeError: It is no size.
    """
    number = text.strip().rstrip("BKMGIbkmgi")
    unit = text.strip()[len(number) :].lower()
    try:
        found = float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        found = -1.0
    if not 0 <= found < 2**62:  # false for NaN too
        raise argparse.ArgumentTypeError(f"{text!r} is no size: use bytes, or a number with KB, MB or GB")
    return int(found)


def positive_float(text: str) -> float:
    """Read a finite number above 0.

    Raises:
        ArgumentTypeError: It is none.
    """
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):  # false for NaN too
        raise argparse.ArgumentTypeError(f"{text!r}: use a finite number > 0")
    return number
