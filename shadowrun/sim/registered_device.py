"""The registered device: its kernels, casts of autocast and active flaws, and the module ``torch.<name>``."""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.sim import device, kernels
from shadowrun.sim.catalogue import CATALOGUE, FATAL
from shadowrun.sim.device import NoTorchFunction, current_name
from shadowrun.sim.flaw import KernelChanges
from shadowrun.sim.stream import STREAM, Event, Stream, current_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.library import Library

    from shadowrun.sim.device import Kernel
    from shadowrun.sim.kernels import CpuKernel, DeviceKernel

__all__ = ["FLAWS", "RegisteredDevice"]

FLAWS = {**CATALOGUE, **FATAL}
"""All flaws that can be switched on."""

# What at::autocast does with operators on the CPU (torch 2.13.0), so that the device computes what the CPU computes:
# these run in the lower precision, these in the widest of their tensors, all others that have a cast in float32.
_LOWER = (
    "_addmm_activation", "_convolution.deprecated", "_native_multi_head_attention", "addbmm", "addmm", "baddbmm", "bmm",
    "conv1d", "conv1d.padding", "conv2d", "conv2d.padding", "conv3d", "conv3d.padding", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "linalg_vecdot", "linear", "matmul", "mm", "prelu",
    "scaled_dot_product_attention",
)  # fmt: skip
_WIDEST = ("cat", "stack", "index_copy")
# Its cast calls another operator of the CPU, which the device does not have.
_NO_CAST = ("mkldnn_rnn_layer",)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        # As `at::autocast::cached_cast` decides: float64 and tensors of other devices stay as they are.
        eligible = value.is_floating_point() and value.dtype not in (torch.float64, dtype) and not value.is_cpu
        return value.to(dtype) if eligible else value
    if isinstance(value, (list, tuple)):
        return type(value)([_cast(v, dtype) for v in value])
    return value


def _kernel(op: Any, dtype_of: Any) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with NoTorchFunction():
            dtype = dtype_of(args)

            def cast_and_call() -> Any:
                return op(*(_cast(a, dtype) for a in args), **{k: _cast(v, dtype) for k, v in kwargs.items()})

            # The operator must run with autocast off, or it would come back to this kernel.
            return device.below_autocast(cast_and_call)

    return kernel


def _register_autocast() -> Library:
    """Registers the casts of autocast for the device."""

    def lower(_: Any) -> torch.dtype:
        return torch.get_autocast_dtype(device.current_name())

    def widest(args: Any) -> torch.dtype:
        # `cat` and `stack` have a list first, `index_copy` has tensors.
        values = args[0] if isinstance(args[0], (list, tuple)) else [a for a in args if isinstance(a, torch.Tensor)]
        return torch.float32 if any(v.dtype == torch.float32 for v in values) else lower(args)

    rules = {**dict.fromkeys(_LOWER, lower), **dict.fromkeys(_WIDEST, widest)}
    # Asked of torch: the list of another version is not that of 2.13.
    names = [n.removeprefix("aten::") for n in device.all_operators() if device.has_kernel(n, "AutocastCPU")]
    pairs = [
        (f"aten::{n}", _kernel(device.overload(f"aten::{n}"), rules.get(n, lambda _: torch.float32)))
        for n in sorted(names)
        if n not in _NO_CAST
    ]
    return device.register(pairs, "AutocastPrivateUse1")


class RegisteredDevice:
    """The registered device.

    Attributes:
        active: Names of the active flaws.
    """

    def __init__(self) -> None:
        self.active: tuple[str, ...] = ()
        self._kernels: dict[str, CpuKernel | DeviceKernel] = {**kernels.kernels_on_cpu()}
        self._kernels.update(kernels.kernels_on_device())
        self._extra: dict[str, Library] = {}
        self._changed: set[str] = set()
        # All flaws are built once to learn which kernels any of them may remove.
        all_changes = KernelChanges()
        for flaw in FLAWS.values():
            flaw.fault(all_changes)
        self._module = _make_module()
        device.set_up(self._module)
        device.patch_storages()
        self._libraries = [*device.register_fallthroughs(), _register_autocast()]
        # Kernels that a flaw may take away have a library each: a kernel leaves with its library only.
        self._removable: dict[str, Library | None] = {
            n: device.register([(n, self._kernels[n])]) for n in sorted(all_changes.removed)
        }
        fixed = ((n, k) for n, k in self._kernels.items() if n not in self._removable)
        self._libraries.append(device.register(fixed))

    def rename(self, name: str) -> None:
        """Lets programs name the device, and torch count it among its accelerators; once per process."""
        device.rename(name, self._module)

    def switch_flaws(self, names: Iterable[str]) -> None:
        """Makes exactly these flaws active."""
        names = tuple(dict.fromkeys(names))
        changes = KernelChanges()
        for name in names:
            FLAWS[name].fault(changes)
        # Flaws compose: each wraps the kernel that the one before it has left, so all start from a clean one.
        for operator in self._changed:
            self._kernels[operator].reset()
        self._changed = {*changes.replaced, *changes.before, *changes.after}
        self._register_extra(self._changed)
        for operator, functions in changes.replaced.items():
            for function in functions:
                kernel = self._kernels[operator]
                kernel.compute = functools.partial(function, kernel.compute)
        for operator, hooks in changes.before.items():
            self._kernels[operator].before = _call_all(hooks)
        for operator, filters in changes.after.items():
            self._kernels[operator].after = _chain(filters)
        self._remove(changes.removed)
        self.active = names

    def _register_extra(self, operators: set[str]) -> None:
        """Registers operators that only flaws have kernels for: without a flaw, torch's composite kernels run."""
        for operator in [*self._extra]:
            if operator not in operators:
                device.unregister(self._extra.pop(operator))
                del self._kernels[operator]
        for operator in operators - self._kernels.keys():
            self._kernels[operator] = kernels.make_kernel(operator)
            self._extra[operator] = device.register([(operator, self._kernels[operator])])

    def _remove(self, operators: set[str]) -> None:
        for operator, library in self._removable.items():
            if operator in operators and library is not None:
                device.unregister(library)
                self._removable[operator] = None
            elif operator not in operators and library is None:
                self._removable[operator] = device.register([(operator, self._kernels[operator])])


def _call_all(hooks: list[Callable[..., None]]) -> Callable[..., None]:
    def before(*args: Any, **kwargs: Any) -> None:
        for hook in hooks:
            hook(*args, **kwargs)

    return before


def _chain(filters: list[Callable[[Any], Any]]) -> Kernel:
    def after(result: Any) -> Any:
        for function in filters:
            result = function(result)
        return result

    return after


class _DeviceContext:
    """``with torch.sim.device(0)``: there is one device, so nothing changes."""

    def __init__(self, device: Any) -> None:
        self.device = device

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _index(device: Any = None) -> int:
    if device is None:
        return 0
    index = device if isinstance(device, int) else torch.device(device).index or 0
    # -1 stands for no change of the current device, as in `torch.cuda.device`.
    if index not in (-1, 0):
        raise RuntimeError(f"invalid device ordinal {index}: {current_name()} has 1 device")
    return 0


def _make_module() -> types.ModuleType:
    """The device module.

    Returns:
        A module to be registered as ``torch.<name>``.
    """
    # Memory statistics are absent on purpose: the device uses the host's memory, and a stub that returns 0 would look
    # like a measurement.
    module = types.ModuleType("torch.sim", "Simulated accelerator of shadowrun.")

    def set_device(device: Any) -> None:
        _index(device)

    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_built": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_initialized": True,  # without it, checkpointing does not restore the random stream
        "_is_in_bad_fork": lambda: False,  # without it, `torch.manual_seed` does not seed the device
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": set_device,
        "device": _DeviceContext,
        "get_device_name": lambda device=None: f"shadowrun simulated accelerator {_index(device)}",
        "synchronize": _synchronize,
        "is_asynchronous": lambda: STREAM.asynchronous,
        "current_stream": current_stream,
        "Stream": Stream,
        "Event": Event,
        "empty_cache": lambda: None,
        **_random_stream(),
        # `torch.autocast` asks a private-use device for these.
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "is_bf16_supported": lambda: True,
    }
    for attribute, function in functions.items():
        setattr(module, attribute, function)
    return module


def _random_stream() -> dict[str, Any]:
    """Functions of the device module for its generator."""

    def manual_seed(seed: int) -> None:
        kernels.GENERATOR.manual_seed(int(seed))

    def get_rng_state(device: Any = None) -> torch.Tensor:
        _index(device)
        return kernels.GENERATOR.get_state()

    def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
        _index(device)
        kernels.GENERATOR.set_state(new_state)

    def set_rng_state_all(states: list[torch.Tensor]) -> None:
        (state,) = states
        kernels.GENERATOR.set_state(state)

    return {
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed,
        "seed": kernels.GENERATOR.seed,
        "seed_all": kernels.GENERATOR.seed,
        "initial_seed": kernels.GENERATOR.initial_seed,
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "get_rng_state_all": lambda: [kernels.GENERATOR.get_state()],
        "set_rng_state_all": set_rng_state_all,
    }


def _synchronize(device: Any = None) -> None:
    _index(device)
    STREAM.synchronize()
