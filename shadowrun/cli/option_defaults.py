"""Defaults of the options of `run`: environment variables, and ``[tool.shadowrun.run]`` of the settings files.

The command line decides before a variable (``SHADOWRUN_FAIL_ON`` for ``--fail-on``), and that before the settings.
Options that may be repeated add up.
"""

from __future__ import annotations

import difflib
import shlex
from typing import TYPE_CHECKING, Any, Final

from shadowrun.errors import UsageError, brief

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["option_defaults"]

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
