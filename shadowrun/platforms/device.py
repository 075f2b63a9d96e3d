"""Platforms of this machine: is the device there, how is it started, asked and waited for."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.errors import PlatformError
from shadowrun.platforms import sim, torchplatform
from shadowrun.platforms.cpu import CpuSettings
from shadowrun.platforms.device_settings import device_settings
from shadowrun.platforms.remote import Worker
from shadowrun.platforms.sim import naming
from shadowrun.platforms.spec import ENTRY_POINT_GROUP, PLUGINS, PlatformSpec, known_devices, parse

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

__all__ = ["Platform", "Presence", "devices", "present", "resolve"]

_NO_SETTINGS: AbstractContextManager[None] = contextlib.nullcontext()
_FUNCTIONALIZING = ("lazy", "xla")


@dataclass(frozen=True, slots=True)
class Platform:
    """A place of this machine where an operator can run. Made by `resolve`.

    Attributes:
        spec: What the user asked for.
        device: The device, with the index that its tensors carry.
        dispatch_key: Key of its kernels: ``CPU``, ``CUDA``, ``PrivateUse1``, ``Lazy``.
        functionalizes: True where views and in-place operators are rewritten below the dispatcher
            (lazy, xla): a replay inside a dispatch mode must let that happen.
        remote: The process that runs its operators, where this one cannot have its settings.
    """

    spec: PlatformSpec
    device: torch.device
    dispatch_key: str
    functionalizes: bool = False
    remote: Worker | None = field(default=None, compare=False)

    @property
    def is_ambient(self) -> bool:
        """True where operators run under the process's own settings."""
        return not self.spec.settings

    def start(self) -> None:
        """Start the process that runs its operators, where there is one.

        Raises:
            PlatformError: It does not start.
        """
        if self.remote is not None:
            self.remote.start()

    def stop(self) -> None:
        """End that process, unless it is kept."""
        if self.remote is not None:
            self.remote.stop()

    def keep(self) -> None:
        """Have that process live through all comparisons with this platform; one that died is started anew."""
        if self.remote is not None:
            self.remote.kept = True

    def limit(self, seconds: float) -> None:
        """Set how long a call may take, where operators have a process of their own; elsewhere nothing can end one."""
        if self.remote is not None:
            self.remote.limit_s = seconds

    def same_device(self, other: Platform | torch.device) -> bool:
        """Whether tensors of the other one can be used here without a copy."""
        if self.remote is not None or (isinstance(other, Platform) and other.remote is not None):
            return False
        device = other.device if isinstance(other, Platform) else other
        return self.device.type == device.type and (self.device.index or 0) == (device.index or 0)

    def context(self) -> AbstractContextManager[None]:
        """Settings of this platform for the length of a ``with`` block; nothing to do for most."""
        if not self.spec.settings:
            return _NO_SETTINGS
        if self.device.type == "cpu":
            return CpuSettings(self.spec.settings)
        return device_settings(self.device.type, self.spec.settings)

    def synchronize(self) -> None:
        """Wait until everything launched on the device is done."""
        if self.device.type == "cpu":
            return
        if self.device.type == "lazy":
            torchplatform.wait_for_lazy()
            return
        wait = getattr(_module(self.device.type), "synchronize", None)
        if wait is not None:
            wait(self.device) if _takes_argument(wait) else wait()

    def materialise(self, tensors: list[torch.Tensor]) -> None:
        """Have these tensors computed now, on a device that puts its work off; other tensors as little as it can."""
        if self.device.type == "lazy":
            torchplatform.compute_lazy(tensors)
        else:
            self.synchronize()

    def settle(self) -> None:
        """Wait for graphs that run by now, on a device that puts its work off, and run no other."""
        if self.device.type == "lazy":
            torchplatform.settle_lazy()

    def rng_state(self) -> torch.Tensor | None:
        """State of the device's default generator, or None where it cannot be read."""
        if self.device.type == "cpu":
            return torch.get_rng_state()
        read = getattr(_module(self.device.type), "get_rng_state", None)
        if read is None:
            return None
        state: torch.Tensor = read(self.device) if _takes_argument(read) else read()
        return state

    def set_rng_state(self, state: torch.Tensor | None) -> None:
        """Put back what `rng_state` gave; nothing for None."""
        if state is None:
            return
        if self.device.type == "cpu":
            torch.set_rng_state(state)
            return
        write = _module(self.device.type).set_rng_state
        write(state, self.device) if _takes_argument(write, 1) else write(state)

    def __str__(self) -> str:
        """The spec as data files and reports show it."""
        return self.spec.public


@dataclass(frozen=True, slots=True)
class Presence:
    """Whether this machine has a device type, and why not.

    Attributes:
        device_type: ``cuda``.
        present: Whether `resolve` accepts it.
        detail: What it is, or what is missing.
    """

    device_type: str
    present: bool
    detail: str


def resolve(spec: Any) -> Platform:
    """Find a platform on this machine and start it if it has to be started.

    Args:
        spec: What `parse` reads.

    Raises:
        PlatformError: The spec is wrong, or this machine has no such device.
    """
    wanted = parse(spec)
    missing = _start(wanted.device_type)
    count = 0 if missing else _count(wanted.device_type)
    if not missing and count <= (wanted.index or 0):
        missing = f"there {'is 1' if count == 1 else f'are {count}'} of them, counted from 0"
    if missing:
        raise PlatformError(
            f"Platform {str(wanted)!r} is absent on this machine: {missing}. "
            f"Present: {', '.join(present())}. "
            "To try shadowrun without the hardware, use 'sim'.",
            slug="absent-device",
        )
    return Platform(
        spec=wanted,
        device=_device(wanted),
        dispatch_key=torchplatform.dispatch_key(_torch_type(wanted.device_type)),
        functionalizes=wanted.device_type in _FUNCTIONALIZING,
        remote=Worker(wanted) if wanted.needs_process else None,
    )


def present() -> list[str]:
    """Device types that this machine has."""
    return [d.device_type for d in devices() if d.present]


def devices() -> list[Presence]:
    """All device types that are known, with whether they are there. Starts none of them."""
    found = []
    for name in known_devices():
        missing = _missing(name)
        found.append(Presence(name, not missing, missing or _describe(name)))
    return sorted(found, key=lambda d: (not d.present, d.device_type != "cpu", d.device_type))


def _missing(device_type: str) -> str:
    """Why a device cannot be used, as far as that is known without starting it; empty if it can."""
    taken = torchplatform.private_device_name()
    if device_type == "cpu":
        return ""
    if device_type == taken:
        return "" if torchplatform.private_device_present() else "no plug-in has registered kernels for it"
    if device_type == "lazy":
        return "" if torchplatform.lazy_available() else "this torch was built without it"
    if device_type == "sim":
        free = taken == "privateuseone" and (sim.is_enabled() or not torchplatform.private_device_present())
        return "" if free else f"torch's one private-use device is already taken by {taken!r} in this process"
    if device_type in PLUGINS:
        package = PLUGINS[device_type]
        # Only the parent is looked for: `find_spec` of a dotted name imports it.
        found = importlib.util.find_spec(package.partition(".")[0]) is not None
        return "" if found else f"the package {package} is not installed"
    if any(entry.name == device_type for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)):
        return ""
    module = getattr(torch, device_type, None)
    if module is None or not hasattr(module, "is_available"):
        return "this torch has no module for it"
    if not module.is_available():
        return "torch finds no such hardware, or was built without it"
    return ""


def _start(device_type: str) -> str:
    """Make a device usable; returns why it cannot be."""
    missing = _missing(device_type)
    if missing or device_type == torchplatform.private_device_name():
        return missing
    if device_type == "lazy":
        torchplatform.init_lazy()
        return ""
    if device_type == "sim":
        # The program has no more accelerators for being compared with one, unless it asks for it.
        (sim.enable if naming.is_named_on_the_way_here("sim") else sim.register)()
        return ""
    try:
        if device_type in PLUGINS:
            importlib.import_module(PLUGINS[device_type])
        else:
            for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
                if entry.name == device_type:
                    entry.load()()
    except Exception as error:  # a vendor's start-up code may raise anything
        return f"its package failed to start: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    module = getattr(torch, device_type, None)
    if module is not None and hasattr(module, "is_available") and not module.is_available():
        return "its package is installed, but finds no such hardware"
    try:
        torch.device(device_type)
    except RuntimeError:
        return "its package started, but torch still has no device of this name"
    return ""


def _count(device_type: str) -> int:
    if device_type in ("cpu", "lazy"):
        return 1
    count = getattr(_module(_torch_type(device_type)), "device_count", None)
    return int(count()) if count is not None else 1


def _device(spec: PlatformSpec) -> torch.device:
    """Tensors carry an index on every device but the CPU: give it, so that devices compare equal."""
    device_type = _torch_type(spec.device_type)
    if device_type == "cpu":
        return torch.device("cpu")
    if spec.index is not None:
        return torch.device(device_type, spec.index)
    current = getattr(_module(device_type), "current_device", None)
    return torch.device(device_type, int(current()) if current is not None else 0)


def _torch_type(device_type: str) -> str:
    """The name that torch has for a device type: `sim` has none of its own where programs do not ask for it."""
    return sim.device_name() if device_type == "sim" and sim.is_enabled() else device_type


def _describe(device_type: str) -> str:
    if device_type == "cpu":
        return f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    if device_type == "lazy":
        return "torch's lazy tensors: real, XLA-like, computes on the CPU"
    if device_type == "sim":
        return "simulated accelerator with switchable flaws, computes on the CPU"
    module = getattr(torch, device_type, None)
    name = getattr(module, "get_device_name", None)
    count = _count(device_type)
    return f"{count} x {name(0)}" if name is not None and count else f"{count} of them"


def _module(device_type: str) -> Any:
    return getattr(torch, device_type, None)


def _takes_argument(function: Any, position: int = 0) -> bool:
    """Whether a function of a device module takes a device there: torch.mps has one device, and none does."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return False
    return len(parameters) > position
