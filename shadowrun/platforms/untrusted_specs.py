"""Platform specs that come from a data file, which the user may not have written: which of them may be used.

``cpu[threads=1]`` in a file changes this process only, and is used. ``cpu[env:LD_PRELOAD=...]`` starts a process with
an environment that the file's writer chose, ``cpu[python=...]`` starts a program, and ``npu`` imports a package: these
are used only if the user has named them.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from typing import TYPE_CHECKING, Any

from shadowrun import sim
from shadowrun.errors import DataFileError, PlatformError
from shadowrun.platforms import plugins, settings
from shadowrun.platforms.backends import TORCH_NAMES
from shadowrun.platforms.plugin_file import FILE_GROUP
from shadowrun.platforms.spec import ENTRY_POINT_GROUP, PlatformSpec, parse

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["simulated_flaws", "spec_of_user", "trusted_spec"]

# Names that torch does not let the simulated device have.
_NOT_FOR_SIM = frozenset({*TORCH_NAMES, "xla"} - {"sim"})
# Texts that a message offers for pasting into a shell: they have no character that could hide what they do.
_PASTEABLE = re.compile(r"[A-Za-z0-9_:\[\]()=,.+@%/ \"^~-]{1,300}")


def trusted_spec(text: Any, names: Iterable[str] = (), *, simulated: bool = False, option: str = "--target") -> str:
    """The platform spec of a data file, if it may be used.

    Args:
        text: As the file has it.
        names: What the user named: platforms, and other things, which are ignored.
        simulated: The file says that it was the simulated device under this name: no plug-in is imported for it.
        option: Command-line option by which the user could name it.

    Returns:
        The spec; where the user named it, theirs, with the paths that data files do not keep.

    Raises:
        PlatformError: It is no platform, or needs more than this process and the user did not name it.
    """
    # The file may be from anyone: nothing in it is of a known type.
    if not isinstance(text, str):
        raise DataFileError(f"{ascii(text)[:80]} is no platform: the data file is damaged.", slug="data-file-corrupt")
    # What the user has named may be used, whatever the file says.
    own = spec_of_user(text, names)
    if own is not None:
        return str(own)
    wanted = parse(text)
    # An environment variable such as LD_PRELOAD, or an interpreter's path, runs code of the file's writer.
    why = _more_than_this_process(wanted, simulated=simulated)
    if why:
        raise PlatformError(
            f"Platform {ascii(text)[:300]} {why}, and only the data file names it, which another may have written. "
            f"{_how_to_name(text, option)}",
            slug="platform-refused",
        )
    return str(wanted)


def spec_of_user(text: str, names: Iterable[str]) -> PlatformSpec | None:
    """The first spec among what the user named that is this one; it has the paths, which files do not keep."""
    for name in names:
        with contextlib.suppress(PlatformError):  # a module, or a platform that is not known here
            own = parse(name)
            if text in (name, str(own), own.public):
                return own
    return None


def simulated_flaws(facts: Any) -> tuple[str, ...] | None:
    """Flaws of the simulated device in a fingerprint of a file; None where the device was not simulated.

    Raises:
        DataFileError: A flaw does not exist.
    """
    flaws = facts.get("simulated_flaws") if isinstance(facts, dict) else None
    if flaws is None:
        return None
    known = {*sim.CATALOGUE, *sim.FATAL}
    if not isinstance(flaws, (list, tuple)) or not all(isinstance(f, str) and f in known for f in flaws):
        raise DataFileError(
            f"The simulated device of this file has flaws that do not exist: {ascii(flaws)[:200]}.",
            slug="data-file-corrupt",
        )
    return tuple(flaws)


def _more_than_this_process(wanted: PlatformSpec, *, simulated: bool) -> str:
    """What the platform does beyond changing settings of this process; empty where nothing."""
    keys = [key for key, _ in wanted.settings]
    if settings.PYTHON in keys:
        return "starts another interpreter"
    variables = [key for key in keys if key.startswith(settings.ENV)]
    if variables:
        return "starts a process with environment variables that the file sets"
    if simulated and wanted.device_type in _NOT_FOR_SIM:
        return "cannot be simulated"
    here = sim.device_name() if sim.is_enabled() else wanted.device_type
    if simulated and wanted.device_type in ("sim", here):
        return ""  # no package is looked for: the simulated device has another name here
    if _takes_a_package(wanted.device_type) and not _is_registered(wanted.device_type):
        return "is a device that a package brings, which would be imported"
    return ""


def _takes_a_package(device_type: str) -> bool:
    """Whether a package brings the device, also under one of torch's own names."""
    groups = (ENTRY_POINT_GROUP, FILE_GROUP)
    entries = [entry for group in groups for entry in plugins.entry_points(group)]
    return device_type not in TORCH_NAMES or any(entry.name == device_type for entry in entries)


def _is_registered(device_type: str) -> bool:
    """Whether this process has the device already, so that nothing is imported for it."""
    from shadowrun.platforms import torchplatform

    return torchplatform.private_device_present() and torchplatform.private_device_name() == device_type


def _how_to_name(text: str, option: str) -> str:
    # A command that the user pastes must show all that it does.
    if not _PASTEABLE.fullmatch(text):
        return "Its text has characters that could hide what it is: it cannot be used."
    path = " with the path in the place of (a path)" if "(a path)" in text else ""
    return f"If you know what it is, name it{path}: {option} {shlex.quote(text)} (in Python: allow=[{text!r}])."
