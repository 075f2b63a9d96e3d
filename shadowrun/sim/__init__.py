"""The simulated accelerator: a device with its own device type, whose flaws are switched on by name.

Without flaws it computes bit for bit what the CPU computes. It exists to prove that shadowrun finds the flaws of a
device: each `Flaw` of `CATALOGUE` says on which operator, and with which cause, a correct tool must report it.

Example:
    >>> from shadowrun import sim
    >>> sim.enable(flaws=["maximum-drops-nan"])
    >>> import torch
    >>> nan, one = torch.tensor([float("nan")]).to("sim"), torch.ones(1).to("sim")
    >>> torch.maximum(nan, one).item()
    1.0

Importing this package imports no torch and registers nothing; `CATALOGUE`, `FATAL` and `PRESETS` import torch when they
are first read.
"""

from __future__ import annotations

import difflib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from shadowrun.errors import PlatformError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from shadowrun.sim.catalogue import CATALOGUE, FATAL, PRESETS
    from shadowrun.sim.flaw import Flaw
    from shadowrun.sim.registered_device import RegisteredDevice

__all__ = [
    "CATALOGUE",
    "FATAL",
    "PRESETS",
    "Flaw",
    "active",
    "asynchronous",
    "device_name",
    "enable",
    "flaws",
    "is_enabled",
    "is_named",
    "register",
    "trigger",
]

_T = TypeVar("_T")

_device: RegisteredDevice | None = None


def __getattr__(name: str) -> Any:
    # Read lazily: the command line lists platforms without an import of torch, which takes seconds.
    if name not in ("CATALOGUE", "FATAL", "PRESETS", "Flaw"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from shadowrun.sim import catalogue, flaw

    return getattr(flaw if name == "Flaw" else catalogue, name)


def enable(name: str = "sim", flaws: Iterable[str] = (), preset: str = "clean", *, asynchronous: bool = False) -> None:
    """Registers the device under a name, or changes the flaws of the registered one.

    From here on the program has an accelerator: torch counts a named private-use device as one.

    Args:
        name: Device type, ``"sim"``; one per process.
        flaws: Names from `CATALOGUE` or `FATAL`, active in addition to those of the preset.
        preset: Name from `PRESETS`.
        asynchronous: Copies to the host with ``non_blocking=True`` are written only when the program synchronizes, as
            on an accelerator whose stream has not got there; until then they hold a poison pattern.

    Raises:
        PlatformError: An unknown flaw or preset; a second name; another backend holds PrivateUse1.
    """
    global _device  # noqa: PLW0603 - torch has one PrivateUse1 per process as well
    # Before anything is registered, which cannot be undone: a wrong name must change nothing.
    names = _checked(flaws, preset)
    if _device is None:
        _device = _register(name)
    # A comparison has registered it under no name: the program may still choose one.
    if not is_named():
        _device.rename(name)
    elif device_name() != name:
        raise PlatformError(
            f"the simulated device is registered as {device_name()!r} and cannot be {name!r} as well: torch renames "
            f"PrivateUse1 once per process. Use {device_name()!r}, or start another process.",
            slug="sim-one-name",
        )
    _device.switch_flaws(names)
    _switch_asynchronous(asynchronous)


def register(flaws: Iterable[str] = (), preset: str = "clean") -> None:
    """Registers the device for comparisons only: the program has no more accelerators than before.

    Programs cannot name the device until they `enable` it. Nothing happens where it is registered.

    Args:
        flaws: As for `enable`.
        preset: As for `enable`.

    Raises:
        PlatformError: An unknown flaw or preset; another backend holds PrivateUse1.
    """
    global _device  # noqa: PLW0603 - torch has one PrivateUse1 per process as well
    names = _checked(flaws, preset)
    if _device is None:
        _device = _register("sim")
        _device.switch_flaws(names)


@contextmanager
def asynchronous() -> Iterator[None]:
    """Makes the device asynchronous inside the block; see `enable`.

    Raises:
        PlatformError: `enable` was not called.
    """
    _enabled()
    before = _switch_asynchronous(True)
    try:
        yield
    finally:
        _switch_asynchronous(before)


@contextmanager
def flaws(*names: str) -> Iterator[None]:
    """Makes exactly these flaws active inside the block, and afterwards those that were active before.

    Args:
        *names: Names from `CATALOGUE`; none makes a clean device.

    Raises:
        PlatformError: An unknown flaw, or `enable` was not called.
    """
    device = _enabled()
    before = device.active
    device.switch_flaws(_checked(names))
    try:
        yield
    finally:
        device.switch_flaws(before)


def active() -> tuple[str, ...]:
    """Names of the active flaws."""
    return _device.active if _device is not None else ()


def is_enabled() -> bool:
    """Whether the device is registered."""
    return _device is not None


def device_name() -> str:
    """The name that torch has for the registered device.

    Raises:
        PlatformError: `enable` was not called.
    """
    from shadowrun.sim import device

    _enabled()
    return device.current_name()


def is_named() -> bool:
    """Whether programs can name the device, and torch counts it among the accelerators."""
    return _device is not None and device_name() != "privateuseone"


def trigger(name: str) -> Callable[[str], Any]:
    """A few lines of ordinary user code on which the flaw `name` matters.

    Args:
        name: Name from `CATALOGUE`.

    Returns:
        A function of the device's name.
    """
    from shadowrun.sim.catalogue import CATALOGUE

    found = _lookup(name, CATALOGUE, "flaw", "sim-unknown-flaw").trigger
    assert found is not None
    return found


def _enabled() -> RegisteredDevice:
    if _device is None:
        raise PlatformError("the simulated device is not registered: call sim.enable() first", slug="sim-not-enabled")
    return _device


def _register(name: str) -> RegisteredDevice:
    from shadowrun.sim import device

    if device.is_taken():
        raise PlatformError(
            f"the simulated device cannot be registered as {name!r}: this process has the backend "
            f"{device.current_name()!r} on PrivateUse1 already, and torch has one such key. Start another process.",
            slug="privateuse1-taken",
        )
    from shadowrun.sim.registered_device import RegisteredDevice

    return RegisteredDevice()


def _switch_asynchronous(wanted: bool) -> bool:
    """Returns the former state."""
    from shadowrun.sim.stream import STREAM

    before = STREAM.asynchronous
    # A pending copy must not outlast the mode that deferred it.
    STREAM.synchronize()
    STREAM.asynchronous = wanted
    return before


def _checked(names: Iterable[str], preset: str = "clean") -> tuple[str, ...]:
    """The flaws of the preset and the named ones, all of which exist."""
    from shadowrun.sim.catalogue import CATALOGUE, FATAL, PRESETS

    known = {**CATALOGUE, **FATAL}
    found = (*_lookup(preset, PRESETS, "preset", "sim-unknown-preset"), *names)
    for name in found:
        _lookup(name, known, "flaw", "sim-unknown-flaw")
    return found


def _lookup(name: str, known: Mapping[str, _T], what: str, slug: str) -> _T:
    if name in known:
        return known[name]
    # A low cutoff: names of flaws are long, and a user knows a part of one.
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise PlatformError(
        f"unknown {what} of the simulated device: {name!r}.{hint} There are: {', '.join(known)}.", slug=slug
    )
