"""Run a program and compare every operator it calls.

The program runs unchanged on its own devices, with its own arguments and exit status. Records are streamed to a data
file. The report is printed when the program ends, also after an exception or Ctrl-C.

Examples:
  shadowrun run --target npu train.py --epochs 1
  shadowrun run --target cuda --ref cpu -o report.html -o report.json -m package.train
  shadowrun run --target 'cpu[threads=1]' --steps 0-2 --ops 'aten::*mm*' train.py
  shadowrun run --target npu --flaws maximum-drops-nan train.py     (no NPU needed: it is simulated)
  shadowrun run --target npu --fail-on unsupported train.py           (a gate for continuous integration)
  shadowrun run --target npu --known vendor.toml train.py    (known issues fail nothing)
  shadowrun run --target npu --baseline main.shadowrun --fail-on new train.py    (only what a change broke)

Each option has a variable (SHADOWRUN_FAIL_ON for --fail-on) and a key in [tool.shadowrun.run] of pyproject.toml
(fail-on). The command line decides before the variable, and that before the file; options that may be repeated add up.

Exit status:
  the exit status of the program; 1 if there are findings of a kind in --fail-on, or the program raised; 2 wrong usage;
  130 after Ctrl-C
"""

from __future__ import annotations

import contextlib
import difflib
import os
import shlex
import sys
from typing import TYPE_CHECKING, Any, Final

from shadowrun.cli import compare_options, options, progress
from shadowrun.errors import PlatformError, UsageError, brief
from shadowrun.platforms.spec import parse
from shadowrun.report.sanitize import MAX_NAME, clip, replacing_unencodable, sanitize
from shadowrun.settings import FAIL_ON, KINDS, NEW, WORSE, read_settings

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

    from shadowrun.comparison import Comparison
    from shadowrun.run import Run

__all__ = [
    "LateDeviceComparison",
    "add_arguments",
    "add_gate_argument",
    "option_defaults",
    "passes_gate",
    "run",
    "set_defaults",
]

# Defaults of the options of `run`: environment variables, and ``[tool.shadowrun.run]`` of the settings files.
#
# The command line decides before a variable (``SHADOWRUN_FAIL_ON`` for ``--fail-on``), and that before the settings.
# Options that may be repeated add up.

_PREFIX: Final = "SHADOWRUN_"
# Not defaults: they decide where defaults come from.
_LEFT_OUT: Final = ("help", "settings", "no-settings")
_WORDS: Final = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


def option_defaults(
    actions: Sequence[argparse.Action], table: Mapping[str, Any], environment: Mapping[str, str]
) -> dict[str, Any]:
    """Defaults by destination, as `ArgumentParser.set_defaults` takes them: it reads a text as if it were given.

    Args:
        actions: Of the parser.
        table: Of the settings, by names of options.
        environment: Variables of the process.

    Raises:
        UsageError: The settings name no option, or a value does not fit.
    """
    known = dict(_named(actions))
    given: dict[str, tuple[Any, str]] = {}
    for key, value in table.items():
        name = key.replace("_", "-")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise UsageError(
                f"[tool.shadowrun.run]: {brief(key)} is no option of `shadowrun run`.{hint}", slug="bad-settings"
            )
        given[name] = value, f"[tool.shadowrun.run] {key}"
    for name in known:
        variable = f"{_PREFIX}{name.upper().replace('-', '_')}"
        if value := environment.get(variable):
            given[name] = value, variable
    found = {}
    for name, (value, origin) in given.items():
        converted = _value(known[name], value, origin)
        if converted is not None:
            found[known[name].dest] = converted
    return found


def _named(actions: Sequence[argparse.Action]) -> Iterator[tuple[str, argparse.Action]]:
    for action in actions:
        for option in action.option_strings:
            name = option.removeprefix("--")
            if name != option and name not in _LEFT_OUT:
                yield name, action


def _value(action: argparse.Action, value: Any, origin: str) -> Any:
    if action.nargs == 0:  # a flag, such as --drift or --no-replay
        wanted = _WORDS.get(value.lower()) if isinstance(value, str) else value
        if not isinstance(wanted, bool):
            raise _wrong(origin, value, "use true or false")
        return action.const if wanted else None
    if isinstance(action.default, list):
        texts = shlex.split(value) if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise _wrong(origin, value, "use a list of texts")
        return texts
    if isinstance(value, list):  # ["mismatch", "error"] for mismatch,error
        value = ",".join(map(str, value))
    if isinstance(value, bool | dict):
        raise _wrong(origin, value, f"use what {action.option_strings[-1]} takes")
    if action.choices is not None and value not in action.choices:
        raise _wrong(origin, value, f"use one of {', '.join(map(str, action.choices))}")
    return str(value)


def _wrong(origin: str, value: Any, use: str) -> UsageError:
    return UsageError(f"{origin} = {brief(value)}: {use}.", slug="bad-settings")


# A comparison with a device that the program itself registers: it starts when the device is registered.


class LateDeviceComparison:
    """A ``with`` block in which the program runs; the comparison starts when the program registers its device.

    Args:
        device: Type of the device that the program registers.
        make: Creates the comparison when torch knows the device.

    Attributes:
        comparison: None until the device is registered.
    """

    def __init__(self, device: str, make: Callable[[], Comparison]) -> None:
        self._device = device
        self._make = make
        self._watching = contextlib.ExitStack()
        self._failure: PlatformError | None = None
        self.comparison: Comparison | None = None

    def __enter__(self) -> None:
        from shadowrun.platforms import torchplatform

        self._watching.enter_context(torchplatform.watching_registrations(self._start_if_registered))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Also where the device never came: a hook that stays would start a comparison later.
        self._watching.close()
        if self.comparison is not None:
            self.comparison.__exit__(kind, error, trace)

    def required(self) -> Comparison:
        """The comparison that was started.

        Raises:
            PlatformError: The program has ended without registering the device.
        """
        if self.comparison is not None:
            return self.comparison
        why = f" ({self._failure})" if self._failure is not None else ""
        raise PlatformError(
            f"The program names the device {self._device!r}, and never registered it{why}: it must call "
            "torch.utils.rename_privateuse1_backend and torch._register_device_module, or a module that --import "
            "names must. Nothing was compared.",
            slug="unknown-device",
        )

    def _start_if_registered(self) -> None:
        """Called when torch gets a new device, or a device its module."""
        from shadowrun.platforms import torchplatform

        if self.comparison is not None or torchplatform.private_device_name() != self._device:
            return
        try:
            comparison = self._make()
        except PlatformError as error:  # the device's module is not registered yet
            self._failure = error
            return
        self._watching.close()  # a comparison registers kernels itself
        self.comparison = comparison.start()


_SHOWN = 5


def add_gate_argument(parser: argparse.ArgumentParser) -> None:
    """The gate: which kinds of findings fail the run."""
    parser.add_argument(
        "--fail-on",
        type=options.kinds_reader((*KINDS, NEW, WORSE)),
        default=",".join(FAIL_ON),
        metavar="KINDS",
        help=f"findings that make the exit status 1: {', '.join(KINDS)}, or none (default: %(default)s); {NEW} and "
        f"{WORSE}: since --baseline",
    )
    parser.add_argument(
        "--fail-fast", action="store_true", help="end the program at the first finding that --fail-on names"
    )


def passes_gate(run: Run, fail_on: list[str]) -> bool:
    """Whether a run passes the gate; if not, print the reason, with one line for each kind of finding."""
    if not fail_on:
        return True
    gate = sanitize(run.gate(fail_on), whole=True)
    if gate.passed:
        return True
    if gate.only_exception:  # its traceback has been printed already
        return False
    # On standard error: standard output may be a report that another program reads.
    print(f"shadowrun: {gate.line}", file=sys.stderr)
    found = [(finding.kind, finding.op) for finding in run.findings()]
    if (since := run.since_baseline()) is not None:
        found += [(str(c.change), f"{c.signature.op} ({c.signature.kind})") for c in since.failing(fail_on)]
    for kind in fail_on:
        ops = list(dict.fromkeys(clip(op, MAX_NAME) for of, op in found if of == kind))
        if ops:
            more = f" and {len(ops) - _SHOWN} more" if len(ops) > _SHOWN else ""
            print(f"shadowrun:   {kind}: {', '.join(ops[:_SHOWN])}{more}", file=sys.stderr)
    return False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options, then the program and its arguments."""
    parser.usage = "shadowrun run --target T [options] (script.py | -m module) [arguments of the program]"
    parser.add_argument("--target", metavar="T", help="platform to test: npu, cuda:1, sim, 'cpu[threads=1]', ...")
    parser.add_argument("--ref", default="cpu", metavar="R", help="platform to trust (default: %(default)s)")
    options.add_simulation_arguments(parser)
    compare_options.add_compare_arguments(parser)
    options.add_output_arguments(parser, findings=True, digest=True)
    add_gate_argument(parser)
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--progress",
        action="store_const",
        const=True,
        help="show calls, findings and overhead on the last line of the terminal, in CI services too",
    )
    either.add_argument("--no-progress", dest="progress", action="store_const", const=False, help="do not show them")
    options.add_program_arguments(parser)


def set_defaults(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Take defaults of options from the environment and from ``[tool.shadowrun.run]``; see `option_defaults`.

    Args:
        parser: Gets them.
        args: Parsed without them: they say which settings are read.
    """
    table = read_settings(False if args.no_settings else args.settings).run
    # The parser has no public list of its actions.
    parser.set_defaults(**option_defaults(vars(parser)["_actions"], table, os.environ))


def _require_baseline(args: argparse.Namespace) -> None:
    if args.baseline is None and {NEW, WORSE} & set(args.fail_on):
        raise UsageError(
            f"--fail-on {','.join(args.fail_on)} compares with an earlier run: name its data file by --baseline.",
            slug="bad-option",
        )


def _print_report(comparison: Comparison, args: argparse.Namespace) -> bool:
    """Print or write the report; returns whether the run passes its gate."""
    from shadowrun.report.run_report import run_document

    with replacing_unencodable():
        data = "" if args.data == options.DATA_FILE else f" {shlex.quote(args.data)}"
        document = run_document(comparison, pictures=options.wants_pictures(args))
        options.print_report(document, args, always=True, more=f"shadowrun report{data} -v")
        # The last line on the screen is the gate already.
        at_terminal = args.format is None and sys.stdout.isatty() and sys.stderr.isatty()
        return comparison.gate(args.fail_on).passed if at_terminal else passes_gate(comparison, args.fail_on)


def run(args: argparse.Namespace) -> int:
    """Run the program; returns the exit status.

    Raises:
        KeyboardInterrupt: Ctrl-C ended the program; the report has been written.
    """
    options.require_program(args, "shadowrun run --target npu train.py")
    simulated = options.is_simulated(args)
    target = args.target or "sim"
    options.check_outputs(args.output)  # before the program runs, which may take hours
    _require_baseline(args)

    from shadowrun.cli.program import Program, import_torch

    program = Program(args.module or args.script, is_module=bool(args.module))
    import_torch()
    named = program.names("sim")
    # A program that names `sim` itself expects the device to exist before its first line runs.
    if simulated or (named and "sim" in (parse(target).device_type, parse(args.ref).device_type)):
        options.enable_simulation(target if simulated else "sim", args.flaws, args.preset, named=named)

    import shadowrun

    before = options.baseline(args)
    line = progress.LiveLine() if progress.wants_live_line(args.progress) else None

    # A function: the comparison may have to wait until the program registers its device.
    def make() -> Comparison:
        fail_fast = [kind for kind in args.fail_on if kind != WORSE] if args.fail_fast else ()
        made = shadowrun.compare(target, args.ref, fail_fast=fail_fast, **compare_options.compare_keywords(args))
        # The report has the verdict of the same gate.
        made.fail_on, made.baseline = args.fail_on, before
        if line is not None:
            line.follow(made)
        return made

    deferred = None
    with program.environment():  # the data file records the program's arguments
        try:
            comparison = make()
        except PlatformError as error:
            device = target.partition(":")[0]
            # The program itself may register the device: then the comparison starts when it does.
            if error.slug != "unknown-device" or not device.isidentifier() or not program.names(device):
                raise
            deferred = LateDeviceComparison(device, make)
    process = os.getpid()
    block = comparison if deferred is None else deferred
    outcome = program.execute(block if line is None else line.shown_during(block))
    if os.getpid() != process:  # a child that the program forked; the parent prints the report
        return outcome.status
    if deferred is not None:
        comparison = deferred.required()
    if comparison.left_out:  # it has nothing to report, and one report of all ranks is enough
        return outcome.status
    sys.stdout.flush()  # the program's output comes before the report

    passed = _print_report(comparison, args)
    if outcome.interrupted:
        raise KeyboardInterrupt  # end the command by the signal, as Python does
    return outcome.status if passed else 1
