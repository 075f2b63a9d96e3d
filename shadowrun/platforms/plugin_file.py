"""What a vendor's package says of its device: a TOML file in the package, which an entry point names.

::

    [project.entry-points."shadowrun.backends"]
    vpu = "vpu_plugin:shadowrun.toml"       # the device type; the package, and the file in it

The file is data: reading it imports neither the package nor torch, so a report of a data file may read it too.
`docs/howto/vendors.md` describes the keys.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from shadowrun.errors import UsageError, brief
from shadowrun.limits import read_toml
from shadowrun.platforms import plugins
from shadowrun.settings import fits_platform, known_lines
from shadowrun.types import Cause

if TYPE_CHECKING:
    from collections.abc import Mapping
    from importlib.metadata import EntryPoint

    from shadowrun.settings import KnownLine

__all__ = ["FILE_GROUP", "PluginFile", "VendorSetting", "known_issues", "plugin_file"]

FILE_GROUP: Final = "shadowrun.backends"
"""Entry points: name = device type, value = package and file: ``vpu_plugin:shadowrun.toml``."""

_TEXTS: Final = ("package", "distribution", "fallback-counters", "reset")
_TABLES: Final = ("settings", "missing", "known")
_KEYS: Final = (*_TEXTS, "streams", "environment", *_TABLES)
_MODULE: Final = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", re.ASCII)
_FUNCTION: Final = re.compile(rf"{_MODULE.pattern}:{_MODULE.pattern}", re.ASCII)
_NAME: Final = re.compile(r"[a-z]\w{0,60}", re.ASCII)
_WORD: Final = re.compile(r"[\w.+-]{1,60}", re.ASCII)
_MEANS: Final = {"operator": Cause.MISSING_OPERATOR, "dtype": Cause.MISSING_DTYPE}
_MAX_PATTERN: Final = 300


@dataclass(frozen=True, slots=True)
class VendorSetting:
    """A setting of a device that its package applies.

    Attributes:
        name: ``rounding``, as in ``vpu[rounding=nearest]``.
        module, function: What makes a context manager of the value: it is entered around each replay.
        values: Words that it accepts; none for on and off.
    """

    name: str
    module: str
    function: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PluginFile:
    """A file that was read.

    Attributes:
        facts: Fields of `backends.Backend`, by name.
        known: Known issues of the device.
        package: Name of the package; empty if there is no file.
    """

    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    known: tuple[KnownLine, ...] = ()
    package: str = ""

    @property
    def summary(self) -> str:
        """``described by vpu-plugin: settings fast_math, rounding; 1 known issue``; empty if there is no file."""
        n, settings = len(self.known), ", ".join(self.facts.get("settings", ()))
        parts = [f"settings {settings}" if settings else "", f"{n} known issue{'s' * (n != 1)}" if n else ""]
        said = "; ".join(filter(None, parts))
        return f"described by {self.package}{': ' if said else ''}{said}" if self.package else ""


_NONE: Final = PluginFile()


@functools.lru_cache(maxsize=64)  # data files have any names
def plugin_file(device_type: str) -> PluginFile:
    """What the installed packages say of a device type; empty if none does.

    Raises:
        UsageError: The file is missing or has a wrong entry.
    """
    for entry in plugins.entry_points(FILE_GROUP):
        # `entry.load` would import the package: a report of another person's file must not.
        if entry.name == device_type:
            return _read(entry, device_type)
    return _NONE


def known_issues(platform: str) -> tuple[KnownLine, ...]:
    """Known issues that the package of a platform's device ships.

    Args:
        platform: A spec; of a data file, any text.
    """
    lines = plugin_file(re.split(r"[:\[]", platform)[0]).known
    return tuple(line for line in lines if fits_platform(line.platform, platform))


def _read(entry: EntryPoint, device_type: str) -> PluginFile:
    where = f"{entry.value} of the package {entry.dist.name if entry.dist else '?'}"
    path = _path(entry)
    if path is None:
        raise UsageError(
            f"{where}: the entry point {device_type!r} of the group {FILE_GROUP!r} names a file that does not exist: "
            "write package:file.toml, and install the file with the package.",
            slug="bad-plugin",
        )
    try:
        text, table = read_toml(path)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{where} cannot be read: {error}.", slug="bad-plugin") from error
    for key in table:
        # A misspelled key would be a setting without effect, without a word.
        if key not in _KEYS:
            raise UsageError(f"{where}: unknown key {brief(key)}. Keys: {', '.join(_KEYS)}.", slug="bad-plugin")
    facts: dict[str, Any] = {key.replace("-", "_"): _module(table, key, where) for key in _TEXTS if key in table}
    if "streams" in table:
        facts["streams"] = _checked(table["streams"], bool, "streams", where, "use true or false")
    if "environment" in table:
        facts["environment"] = tuple(_texts(table["environment"], "environment", where))
    if "missing" in table:
        facts["missing_kernel"] = _patterns(table["missing"], where)
    if "settings" in table:
        facts |= _settings(table["settings"], where)
    # Their origin: a report says which package excuses a finding.
    lines = known_lines(table.get("known", []), text, path)
    package = entry.dist.name if entry.dist else entry.value.partition(":")[0]
    known = tuple(dataclasses.replace(line, origin=f"{line.origin} of {package}") for line in lines)
    return PluginFile(MappingProxyType(facts), known, package)


def _path(entry: EntryPoint) -> Path | None:
    """Where the file is: among the files of the distribution, or in the package's folder."""
    package, _, name = entry.value.partition(":")
    parts = package.split(".")
    found = []
    if entry.dist is not None:
        found.append(Path(str(entry.dist.locate_file("/".join([*parts, name])))))
    # An editable install has its files elsewhere. A top-level package is found without being imported.
    spec = importlib.util.find_spec(parts[0])
    found += [Path(folder, *parts[1:], name) for folder in (spec and spec.submodule_search_locations) or ()]
    return next((path for path in found if path.is_file()), None)


def _settings(table: Any, where: str) -> dict[str, Any]:
    names, own = [], []
    for name, value in _checked(table, dict, "settings", where, "use a table").items():
        if not _NAME.fullmatch(name):
            raise _wrong(where, "settings", name, "use a name of small letters, digits and _")
        names.append(name)
        if value is True and name == "deterministic":  # torch's own switch, which shadowrun sets
            continue
        use = 'use {apply = "module:function"}, and values = ["a", "b"] unless it is on or off'
        if not isinstance(value, dict) or value.keys() - {"apply", "values"}:
            raise _wrong(where, f"settings.{name}", value, use)
        apply, words = value.get("apply"), value.get("values", [])
        if not isinstance(apply, str) or not _FUNCTION.fullmatch(apply):
            raise _wrong(where, f"settings.{name}.apply", apply, use)
        words = _texts(words, f"settings.{name}.values", where)
        if not all(map(_WORD.fullmatch, words)):
            raise _wrong(where, f"settings.{name}.values", words, "use words of letters, digits, . + and -")
        module, _, function = apply.partition(":")
        own.append(VendorSetting(name, module, function, tuple(words)))
    return {"settings": tuple(names), "own_settings": tuple(own)}


def _patterns(tables: Any, where: str) -> tuple[tuple[tuple[str, ...], str, Cause], ...]:
    found = []
    for table in _checked(tables, list, "missing", where, "begin each with [[missing]]"):
        use = 'use exception = ["RuntimeError"], text = "a regular expression", means = "operator" or "dtype"'
        if not isinstance(table, dict) or table.keys() != {"exception", "text", "means"}:
            raise _wrong(where, "missing", table, use)
        text, means = table["text"], table["means"]
        # Each exception of the device is searched for it: a pattern of any length could take any time.
        if not isinstance(text, str) or len(text) > _MAX_PATTERN or means not in _MEANS:
            raise _wrong(where, "missing", table, use)
        try:
            re.compile(text)
        except re.error as error:
            raise _wrong(where, "missing.text", text, str(error)) from error
        found.append((tuple(_texts(table["exception"], "missing.exception", where)), text, _MEANS[means]))
    return tuple(found)


def _module(table: Mapping[str, Any], key: str, where: str) -> str:
    value = table[key]
    # A distribution has a name with hyphens.
    fits = isinstance(value, str) and (_MODULE.fullmatch(value) if key != "distribution" else _WORD.fullmatch(value))
    if not fits:
        raise _wrong(where, key, value, "use the name of a module" if key != "distribution" else "use its name")
    return str(value)


def _texts(value: Any, key: str, where: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
        raise _wrong(where, key, value, "use a list of texts")
    return value


def _checked(value: Any, kind: type, key: str, where: str, use: str) -> Any:
    if not isinstance(value, kind):
        raise _wrong(where, key, value, use)
    return value


def _wrong(where: str, key: str, value: Any, use: str) -> UsageError:
    return UsageError(f"{where}: {key} = {brief(value)}: {use}.", slug="bad-plugin")
