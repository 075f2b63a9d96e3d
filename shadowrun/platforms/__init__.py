"""Platforms: a device, or a device with settings, on which operators run.

`parse` and the names of devices need no torch; the rest is loaded on first use. `backends` has the facts of each device
type, `fingerprint` describes a resolved platform.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shadowrun.platforms.spec import PlatformSpec, known_devices, parse

if TYPE_CHECKING:
    from shadowrun.platforms.device import DeviceAvailability, Platform, available, devices, resolve

__all__ = [
    "DeviceAvailability",
    "Platform",
    "PlatformSpec",
    "available",
    "devices",
    "known_devices",
    "parse",
    "resolve",
]

_NEED_TORCH = ("DeviceAvailability", "Platform", "available", "devices", "resolve")


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from shadowrun.platforms import device

    return getattr(device, name)
