"""Platform specs: ``"cuda:1"``, ``"npu"``, ``"cpu[threads=1,mkldnn=off]"``.

Specs are parsed without torch, so that the command line can refuse a typing error at once.
`shadowrun.platforms.resolve` checks whether this machine has the device.
"""

from __future__ import annotations

import difflib
import importlib
import re
import sys
from dataclasses import dataclass
from typing import Any

from shadowrun.errors import PlatformError
from shadowrun.platforms import plugins
from shadowrun.platforms import settings as words
from shadowrun.platforms.backends import BACKENDS, RESERVED_NAMES
from shadowrun.platforms.plugin_file import FILE_GROUP
from shadowrun.platforms.settings import Setting

__all__ = [
    "ENTRY_POINT_GROUP",
    "PlatformSpec",
    "Setting",
    "known_devices",
    "parse",
]

ENTRY_POINT_GROUP = "shadowrun.platforms"
"""Packages may add a device type: entry point name = device type, value = a callable without
arguments that makes ``torch.device(name)`` usable."""

_PATTERN = re.compile(r"(?P<type>[A-Za-z_]\w*)(?::(?P<index>\d{1,9}))?(?:\[(?P<settings>.*)\])?", re.ASCII)
_EXAMPLE = 'such as "cuda:1", "npu" or "cpu[threads=1,mkldnn=off]"'


@dataclass(frozen=True, slots=True)
class PlatformSpec:
    """A platform as named by the user, in canonical form.

    Attributes:
        device_type: ``cpu``, ``cuda``, ``npu``.
        index: Which of the devices; None for the current one.
        settings: Sorted pairs of name and value.
    """

    device_type: str
    index: int | None = None
    settings: tuple[tuple[str, Setting], ...] = ()

    @property
    def device_string(self) -> str:
        """The part that torch understands: ``cuda:1``."""
        return self.device_type if self.index is None else f"{self.device_type}:{self.index}"

    @property
    def needs_process(self) -> bool:
        """Whether it has a setting that a process reads once, at its start, so that it needs a worker process."""
        return words.needs_process(self.settings)

    @property
    def public(self) -> str:
        """The text without paths, for data files and reports, which are passed on; `parse` may not read it."""
        shown = words.public(self.settings)
        if shown == self.settings:
            return str(self)
        return f"{self.device_string}[{words.write(shown)}]"

    def __str__(self) -> str:
        """The canonical text, which `parse` reads back."""
        if not self.settings:
            return self.device_string
        return f"{self.device_string}[{words.write(self.settings)}]"


def parse(spec: Any) -> PlatformSpec:
    """Read a platform spec.

    Args:
        spec: Text, a `torch.device`, or a `PlatformSpec`.

    Example:
        >>> str(parse("cpu[mkldnn=no, deterministic=on]"))
        'cpu[deterministic=on,mkldnn=off]'

    Raises:
        PlatformError: Malformed text, unknown device, unknown setting or bad value.
    """
    if isinstance(spec, PlatformSpec):
        return spec
    # By its name, since this module imports no torch.
    if type(spec).__module__ == "torch" and type(spec).__name__ == "device":
        spec = str(spec)
    if not isinstance(spec, str):
        raise PlatformError(
            f"{spec!r} is no platform: give a torch device or its name, {_EXAMPLE}.",
            slug="bad-spec",
        )
    match = _PATTERN.fullmatch(spec.strip())
    if match is None:
        raise PlatformError(
            f"Platform {spec!r} cannot be read: write device, device:index or device[key=value,...], {_EXAMPLE}.",
            slug="bad-spec",
        )
    device_type = match["type"]
    # Meta is a device of torch, so the general message would be wrong.
    if device_type == "meta":
        raise PlatformError("Platform 'meta' has shapes but no values: nothing could be compared.", slug="bad-spec")
    known = known_devices()
    # torch is imported only if it could know the name: a typing error is refused without it.
    packages, starts = plugins.autoloaded() if device_type not in known else ([], True)
    if packages and starts and "torch" not in sys.modules:
        importlib.import_module("torch")
        known = known_devices()
    if device_type not in known:
        off = (
            f" TORCH_DEVICE_BACKEND_AUTOLOAD keeps torch from starting {', '.join(packages)}."
            if packages and not starts
            else ""
        )
        raise PlatformError(
            f"Unknown device {device_type!r} in platform {spec!r}.{_nearest(device_type, known)} "
            f"Devices: {', '.join(known)}. `shadowrun platforms` lists which of them this machine has. One that a "
            f"package brings: --import PACKAGE, or an entry point of it in the group {ENTRY_POINT_GROUP!r}.{off}",
            slug="unknown-device",
        )
    index = None if match["index"] is None else int(match["index"])
    return PlatformSpec(device_type, index, words.read(spec, device_type, match["settings"]))


def known_devices() -> list[str]:
    """Sorted names of the device types that a spec may use, present on this machine or not."""
    names = {*BACKENDS, *RESERVED_NAMES}
    for group in (ENTRY_POINT_GROUP, FILE_GROUP):
        names.update(entry.name for entry in plugins.entry_points(group))
    # A plug-in or the simulated device may have named torch's private-use device; only a torch that
    # is loaded already can know.
    if "torch" in sys.modules:
        from shadowrun import sim
        from shadowrun.platforms import torchplatform

        name = torchplatform.private_device_name()
        if name != "privateuseone" or (torchplatform.private_device_present() and not sim.is_enabled()):
            names.add(name)
    return sorted(names)


def _nearest(word: str, known: Any) -> str:
    near = difflib.get_close_matches(word.lower(), list(known), 1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""
