"""Platforms that a file names: what changes this process alone is taken from it, all else from the person who runs us.

A data file may come from anybody. ``cpu[threads=1]`` in it is harmless; ``cpu[env:LD_PRELOAD=...]`` starts a process
with an environment of the file's writer, ``cpu[python=...]`` a program, and ``npu`` imports a package.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import shlex
from typing import TYPE_CHECKING, Any

from shadowrun.errors import DataFileError, PlatformError
from shadowrun.platforms import settings, sim
from shadowrun.platforms.sim import CATALOGUE, FATAL
from shadowrun.platforms.spec import ENTRY_POINT_GROUP, OF_TORCH, PlatformSpec, parse

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["accepted", "named", "simulated_flaws"]

_NAMES_OF_TORCH = frozenset({*OF_TORCH, "xla"} - {"sim"})
"""Names that a simulated device cannot have."""
_PASTEABLE = re.compile(r"[A-Za-z0-9_:\[\]()=,.+@%/ \"^~-]{1,300}")
"""Texts that a message offers to be pasted: nothing in them is more than it looks like."""


def accepted(text: Any, names: Iterable[str] = (), *, simulated: bool = False, option: str = "--target") -> str:
    """A platform of a file, if it may be used.

    Args:
        text: As the file has it.
        names: What the person at the keyboard named: platforms, and other things, which are passed over.
        simulated: The file says that it was the simulated device under this name: no plug-in is imported for it.
        option: That would name it.

    Returns:
        Its spec; that of the person, with the paths that data files do not keep.

    Raises:
        PlatformError: It is none, or takes more than this process, and nobody named it.
    """
    if not isinstance(text, str):
        raise DataFileError(f"{ascii(text)[:80]} is no platform: the data file is damaged.", slug="data-file-corrupt")
    own = named(text, names)
    if own is not None:
        return str(own)
    wanted = parse(text)
    why = _more_than_this_process(wanted, simulated=simulated)
    if why:
        raise PlatformError(
            f"Platform {ascii(text)[:300]} {why}, and only the data file names it, which may be somebody else's. "
            f"{_how_to_name(text, option)}",
            slug="platform-refused",
        )
    return str(wanted)


def named(text: str, names: Iterable[str]) -> PlatformSpec | None:
    """The first of the platforms that a person named that is this one; paths, which files do not keep, are its own."""
    for name in names:
        with contextlib.suppress(PlatformError):  # a module, or another platform that is not known here
            own = parse(name)
            if text in (name, str(own), own.public):
                return own
    return None


def simulated_flaws(facts: Any) -> tuple[str, ...] | None:
    """Flaws of a simulated device in a fingerprint that a file holds; None where it was none.

    Raises:
        DataFileError: There are no such flaws.
    """
    flaws = facts.get("simulated_flaws") if isinstance(facts, dict) else None
    if flaws is None:
        return None
    if not isinstance(flaws, (list, tuple)) or not all(isinstance(f, str) and f in (*CATALOGUE, *FATAL) for f in flaws):
        raise DataFileError(
            f"The simulated device of this file has flaws that there are not: {ascii(flaws)[:200]}.",
            slug="data-file-corrupt",
        )
    return tuple(flaws)


def _more_than_this_process(wanted: PlatformSpec, *, simulated: bool) -> str:
    """What the platform does beyond settings of a process of ours; empty where nothing."""
    keys = [key for key, _ in wanted.settings]
    if settings.PYTHON in keys:
        return "starts an interpreter of its own"
    variables = [key for key in keys if key.startswith(settings.ENV)]
    if variables:
        return "starts a process with environment variables of its own"
    if simulated and wanted.device_type in _NAMES_OF_TORCH:
        return "cannot be simulated"
    here = sim.device_name() if sim.is_enabled() else wanted.device_type
    if simulated and wanted.device_type in ("sim", here):
        return ""  # else a package would be looked for: the simulated device has another name here
    if _takes_a_package(wanted.device_type) and not _is_registered(wanted.device_type):
        return "is a device that a package brings, which would be imported"
    return ""


def _takes_a_package(device_type: str) -> bool:
    """Whether the device is another package's, under a name of torch's own as well."""
    entries = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    return device_type not in OF_TORCH or any(entry.name == device_type for entry in entries)


def _is_registered(device_type: str) -> bool:
    """Whether this process has the device already, so that nothing is imported for it."""
    from shadowrun.platforms import torchplatform

    return torchplatform.private_device_present() and torchplatform.private_device_name() == device_type


def _how_to_name(text: str, option: str) -> str:
    if not _PASTEABLE.fullmatch(text):
        return "Its text has characters that could hide what it is: it cannot be used."
    path = " with the path in the place of (a path)" if "(a path)" in text else ""
    return f"If you know what it is, name it{path}: {option} {shlex.quote(text)} (in Python: allow=[{text!r}])."
