"""The embedded simulated accelerator: a device of its own type whose flaws are switched on by name.

Without flaws it computes bit for bit what the CPU computes. It exists to prove that shadowrun finds what is
wrong with a device: each `Flaw` of `CATALOGUE` says where a correct tool must place it and why.

Example:
    >>> from shadowrun.platforms import sim
    >>> sim.enable(flaws=["maximum-drops-nan"])
    >>> import torch
    >>> nan, one = torch.tensor([float("nan")]).to("sim"), torch.ones(1).to("sim")
    >>> torch.maximum(nan, one).item()
    1.0

Importing this package imports no torch and registers nothing.
"""

from __future__ import annotations

import difflib
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from shadowrun.errors import PlatformError
from shadowrun.platforms.sim.catalogue import CATALOGUE, FATAL, PRESETS, Flaw

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from shadowrun.platforms.sim.switch import Switchboard

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

_board: Switchboard | None = None


def enable(name: str = "sim", flaws: Iterable[str] = (), preset: str = "clean", *, asynchronous: bool = False) -> None:
    """Registers the device under a name, or changes the flaws of the registered one.

    From here on the program has an accelerator: torch counts a device with a name of its own as one.

    Args:
        name: Device type, ``"sim"``; one per process.
        flaws: Names from `CATALOGUE` or `FATAL`, active besides those of the preset.
        preset: Name from `PRESETS`.
        asynchronous: Copies to the host with ``non_blocking=True`` are written only when somebody waits, as on an
            accelerator whose stream lags behind; read before, they hold a poison.

    Raises:
        PlatformError: An unknown flaw or preset; a second name; another backend holds PrivateUse1.
    """
    global _board  # noqa: PLW0603 - torch has one PrivateUse1 per process as well
    names = _checked([*_choose(preset, PRESETS, "preset", "sim-unknown-preset"), *flaws])
    if _board is None:
        _board = _register(name)
    if not is_named():
        _board.give_name(name)
    elif device_name() != name:
        raise PlatformError(
            f"the simulated device is registered as {device_name()!r} and cannot be {name!r} as well: torch renames "
            f"PrivateUse1 once per process. Use {device_name()!r}, or start another process.",
            slug="sim-one-name",
        )
    _board.switch(names)
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
    global _board  # noqa: PLW0603 - torch has one PrivateUse1 per process as well
    names = _checked([*_choose(preset, PRESETS, "preset", "sim-unknown-preset"), *flaws])
    if _board is None:
        _board = _register("sim")
        _board.switch(names)


@contextmanager
def asynchronous() -> Iterator[None]:
    """Lets the device lag behind inside the block; see `enable`.

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
    """Makes exactly these flaws active inside the block, then those that were active before.

    Args:
        *names: Names from `CATALOGUE`; none makes a clean device.

    Raises:
        PlatformError: An unknown flaw, or `enable` was not called.
    """
    board = _enabled()
    before = board.active
    board.switch(_checked(names))
    try:
        yield
    finally:
        board.switch(before)


def active() -> tuple[str, ...]:
    """Names of the active flaws."""
    return _board.active if _board is not None else ()


def is_enabled() -> bool:
    """Whether the device is registered."""
    return _board is not None


def device_name() -> str:
    """The name that torch has for the registered device.

    Raises:
        PlatformError: `enable` was not called.
    """
    from shadowrun.platforms.sim import device

    _enabled()
    return device.current_name()


def is_named() -> bool:
    """Whether programs can name the device, and torch counts it among the accelerators."""
    return _board is not None and device_name() != "privateuseone"


def trigger(name: str) -> Callable[[str], None]:
    """A few lines of ordinary user code on which the flaw `name` matters.

    Args:
        name: Name from `CATALOGUE`.

    Returns:
        A function of the device's name.
    """
    flaw = _choose(name, CATALOGUE, "flaw", "sim-unknown-flaw")
    from shadowrun.platforms.sim.triggers import TRIGGERS

    return TRIGGERS[flaw.trigger]


def _enabled() -> Switchboard:
    if _board is None:
        raise PlatformError("the simulated device is not registered: call sim.enable() first", slug="sim-not-enabled")
    return _board


def _register(name: str) -> Switchboard:
    from shadowrun.platforms.sim import device

    if device.is_taken():
        raise PlatformError(
            f"the simulated device cannot be registered as {name!r}: this process has the backend "
            f"{device.current_name()!r} on PrivateUse1 already, and torch has one such key. Start another process.",
            slug="privateuse1-taken",
        )
    from shadowrun.platforms.sim import faults  # noqa: F401 - fills FAULTS
    from shadowrun.platforms.sim.switch import Switchboard

    return Switchboard()


def _switch_asynchronous(wanted: bool) -> bool:
    """Returns what was before."""
    from shadowrun.platforms.sim.stream import STREAM

    before = STREAM.asynchronous
    STREAM.synchronize()
    STREAM.asynchronous = wanted
    return before


def _checked(names: Iterable[str]) -> tuple[str, ...]:
    names = tuple(names)
    for name in names:
        _choose(name, {**CATALOGUE, **FATAL}, "flaw", "sim-unknown-flaw")
    return names


def _choose(name: str, known: Mapping[str, _T], what: str, slug: str) -> _T:
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise PlatformError(
        f"unknown {what} of the simulated device: {name!r}.{hint} There are: {', '.join(known)}.", slug=slug
    )
