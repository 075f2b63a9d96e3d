"""Where an operator can run: a device, or a CPU with settings.

`parse` and the names of devices need no torch; the rest is loaded when first asked for.
What a platform is made of is told by `shadowrun.platforms.fingerprint`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shadowrun.platforms.spec import PlatformSpec, known_devices, parse

if TYPE_CHECKING:
    from shadowrun.platforms.device import Platform, Presence, devices, present, resolve

__all__ = [
    "Platform",
    "PlatformSpec",
    "Presence",
    "devices",
    "known_devices",
    "parse",
    "present",
    "resolve",
]

_LAZY = ("Platform", "Presence", "devices", "present", "resolve")


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from shadowrun.platforms import device

    return getattr(device, name)
