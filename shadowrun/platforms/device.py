"""Platforms of this machine: which devices it has, and how one is started, synchronized and given its settings."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from shadowrun import sim
from shadowrun.errors import PlatformError
from shadowrun.platforms import plugins, torchplatform
from shadowrun.platforms.backends import FUNCTIONALIZING, backend_of
from shadowrun.platforms.cpu import CpuSettings
from shadowrun.platforms.plugin_file import plugin_file
from shadowrun.platforms.settings import COMPUTE
from shadowrun.platforms.spec import ENTRY_POINT_GROUP, PlatformSpec, known_devices, parse
from shadowrun.platforms.worker.client import Worker
from shadowrun.sim import named_in_program

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from shadowrun.platforms.spec import Setting

__all__ = ["DeviceAvailability", "Platform", "available", "device_settings", "devices", "resolve"]

_SIM_TF32 = ("matmul-in-tf32", "convolution-in-tf32")


@contextlib.contextmanager
def device_settings(device_type: str, settings: tuple[tuple[str, Setting], ...]) -> Iterator[None]:
    """Apply the settings of a device other than the CPU for the length of a ``with`` block.

    They belong to the process, and are read when a kernel is launched: the block need not wait until it has run.

    Args:
        device_type: ``cuda``; `sim` imitates it.
        settings: Pairs as in `PlatformSpec.settings`.
    """
    values = dict(settings)
    with contextlib.ExitStack() as stack:
        # Each old value is put on the stack before the new one is set: whatever raises, all are restored.
        for setting in backend_of(device_type).own_settings:
            if setting.name in values:
                function = getattr(importlib.import_module(setting.module), setting.function)
                stack.enter_context(function(values.pop(setting.name)))
        deterministic = values.get("deterministic")
        if deterministic is not None:
            stack.callback(torchplatform.set_deterministic_state, torchplatform.deterministic_state())
            torchplatform.set_deterministic_state((bool(deterministic), False))
        tf32 = values.get("tf32")
        if tf32 is not None and device_type == "cuda":
            stack.callback(torchplatform.set_cuda_precisions, torchplatform.cuda_precisions())
            torchplatform.allow_tf32(bool(tf32))
        elif tf32 is not None:
            others = [name for name in sim.active() if name not in _SIM_TF32]
            # The simulated device has its tf32 as a flaw.
            stack.enter_context(sim.flaws(*others, *(_SIM_TF32 if tf32 else ())))
        yield


_NO_SETTINGS: AbstractContextManager[None] = contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class Platform:
    """A device of this machine with settings, on which operators can run. Made by `resolve`.

    Attributes:
        spec: What the user asked for.
        device: The device, with the index that its tensors carry.
        dispatch_key: Key of its kernels: ``CPU``, ``CUDA``, ``PrivateUse1``, ``Lazy``.
        remote: The worker process that runs its operators, where this process cannot have its settings.
    """

    spec: PlatformSpec
    device: torch.device
    dispatch_key: str
    remote: Worker | None = field(default=None, compare=False)

    @property
    def functionalizes(self) -> bool:
        """Whether views and in-place operators are rewritten below the dispatcher (lazy, xla).

        A replay inside a dispatch mode must let that happen.
        """
        return self.spec.device_type in FUNCTIONALIZING

    @property
    def has_program_settings(self) -> bool:
        """Whether operators run under the settings that the program has made, and no others."""
        return not self.spec.settings

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """In which operators of a comparison compute here (the setting ``compute``); None for that of their inputs."""
        wanted = dict(self.spec.settings).get(COMPUTE)
        return None if wanted is None else getattr(torch, str(wanted))

    def start(self) -> None:
        """Start the worker process, where there is one.

        Raises:
            PlatformError: It does not start.
        """
        if self.remote is not None:
            self.remote.start()

    def stop(self) -> None:
        """End the worker process, unless it is kept."""
        if self.remote is not None:
            self.remote.stop()

    def keep_worker(self) -> None:
        """Keep the worker process through all comparisons with this platform; one that died is restarted."""
        if self.remote is not None:
            self.remote.kept = True

    def set_timeout(self, seconds: float) -> None:
        """Set how long a call may take in a worker process; a call in this process cannot be ended."""
        if self.remote is not None:
            self.remote.limit_s = seconds

    def same_device(self, other: Platform | torch.device) -> bool:
        """Whether tensors of the other platform or device can be used here without a copy."""
        # A worker's tensors are the CPU's too, but operators on them run elsewhere.
        if self.remote is not None or (isinstance(other, Platform) and other.remote is not None):
            return False
        device = other.device if isinstance(other, Platform) else other
        # A tensor names its device with an index (`cuda:0`), a user mostly without.
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
        # Lazy has no module `torch.lazy` with a `synchronize`.
        if self.device.type == "lazy":
            torchplatform.wait_for_lazy()
            return
        wait = getattr(_module(self.device.type), "synchronize", None)
        if wait is not None:
            wait(self.device) if _takes_argument(wait) else wait()

    def compute_now(self, tensors: list[torch.Tensor]) -> None:
        """Have a lazy device compute these tensors, and as few others as it can; synchronize any other device."""
        if self.device.type == "lazy":
            torchplatform.compute_lazy(tensors)
        else:
            self.synchronize()

    def wait_for_running_graphs(self) -> None:
        """Wait for graphs that a lazy device is running, without running others; do nothing on any other device."""
        if self.device.type == "lazy":
            torchplatform.wait_for_running_lazy_graphs()

    def rng_state(self) -> torch.Tensor | None:
        """State of the device's default generator, or None where it cannot be read."""
        if self.device.type == "cpu":
            return torch.get_rng_state()
        read = getattr(_module(self.device.type), "get_rng_state", None)
        # Some devices have no generator, or hide its state.
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
class DeviceAvailability:
    """Whether this machine has a device type, and why not.

    Attributes:
        device_type: ``cuda``.
        available: Whether `resolve` accepts it.
        detail: What it is, or what is missing.
    """

    device_type: str
    available: bool
    detail: str


def resolve(spec: Any, *, for_comparison: bool = False) -> Platform:
    """Find a platform on this machine and start it if it has to be started.

    Args:
        spec: What `parse` reads.
        for_comparison: Its operators run in a comparison, which can have them compute in another dtype.

    Raises:
        PlatformError: The spec is wrong, or this machine has no such device.
    """
    wanted = parse(spec)
    if not for_comparison and COMPUTE in dict(wanted.settings):
        raise PlatformError(
            f"Platform {str(wanted)!r}: compute= is for comparisons (`shadowrun run --ref`, `shadowrun.compare`), "
            "which run single operators in another dtype; a program runs in its own.",
            slug="bad-setting",
        )
    # Started before it is counted: a plug-in's module has no device_count before it is imported.
    missing = _start(wanted.device_type) or _import_counters(wanted.device_type)
    count = 0 if missing else _count(wanted.device_type)
    if not missing and count <= (wanted.index or 0):
        missing = f"there {'is 1' if count == 1 else f'are {count}'} of them, counted from 0"
    if missing:
        raise PlatformError(
            f"Platform {str(wanted)!r} is absent on this machine: {missing}. "
            f"Present: {', '.join(available())}. "
            "To try shadowrun without the hardware, use 'sim'.",
            slug="absent-device",
        )
    return Platform(
        spec=wanted,
        device=_device(wanted),
        dispatch_key=torchplatform.dispatch_key(_torch_type(wanted.device_type)),
        # Made, and not started: a comparison starts it.
        remote=Worker(wanted) if wanted.needs_process else None,
    )


def available() -> list[str]:
    """Device types that this machine has."""
    # `devices` starts nothing: a message about one device must not initialise another's driver.
    return [d.device_type for d in devices() if d.available]


def devices() -> list[DeviceAvailability]:
    """All known device types, and whether this machine has them. Starts none of them."""
    found = []
    for name in known_devices():
        # Listing must not import plug-ins: an import may take seconds, or initialise a driver.
        missing = _missing(name)
        described = plugin_file(name).summary
        detail = missing or _describe(name)
        found.append(DeviceAvailability(name, not missing, f"{detail}; {described}" if described else detail))
    return sorted(found, key=lambda d: (not d.available, d.device_type != "cpu", d.device_type))


def _missing(device_type: str) -> str:
    """Why a device cannot be used, as far as that is known without starting it; empty if it can."""
    taken = torchplatform.private_device_name()
    if device_type == "cpu":
        return ""
    # A plug-in may have given the private-use device any name.
    if device_type == taken:
        return "" if torchplatform.private_device_present() else "no plug-in has registered kernels for it"
    if device_type == "lazy":
        return "" if torchplatform.lazy_available() else "this torch was built without it"
    if device_type == "sim":
        free = taken == "privateuseone" and (sim.is_enabled() or not torchplatform.private_device_present())
        return "" if free else f"torch's one private-use device is already taken by {taken!r} in this process"
    if package := backend_of(device_type).package:
        # Only the parent is looked for: `find_spec` of a dotted name imports it.
        found = importlib.util.find_spec(package.partition(".")[0]) is not None
        return "" if found else f"the package {package} is not installed"
    if any(entry.name == device_type for entry in plugins.entry_points(ENTRY_POINT_GROUP)):
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
        # torch counts the device among the program's accelerators only where the program names it.
        (sim.enable if named_in_program.is_named_by_callers("sim") else sim.register)()
        return ""
    try:
        if package := backend_of(device_type).package:
            importlib.import_module(package)
        else:
            for entry in plugins.entry_points(ENTRY_POINT_GROUP):
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


def _import_counters(device_type: str) -> str:
    """Load the counters of a package that has started its device; returns why that failed."""
    module = plugin_file(device_type).facts.get("fallback_counters")
    try:
        counters = module and importlib.import_module(module)
        missing = [name for name in ("counter_names", "counter_value") if module and not hasattr(counters, name)]
    except Exception as error:  # of the vendor
        return f"its fallback counters failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return f"its fallback counters, {module}, have no {missing[0]}" if missing else ""


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
    """Name that torch has for a device type: `sim` has the private-use name where the program does not name it."""
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
    # C functions have no signature that Python could read.
    except (TypeError, ValueError):
        return False
    return len(parameters) > position
