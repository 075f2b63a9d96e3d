"""The device's kernels: most run the CPU's operator on CPU tensors over the same memory.

Random operators draw from the device's own generator and never change the state of the CPU's.
"""

from __future__ import annotations

import functools
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.sim import device, device_kernels
from shadowrun.sim.device import Kernel, NoTorchFunction
from shadowrun.sim.stream import STREAM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["GENERATOR", "CpuKernel", "DeviceKernel", "kernels_on_cpu", "kernels_on_device", "make_kernel"]


GENERATOR = torch.Generator(device="cpu")
"""Draws for operators that take a generator; its state is the device's RNG state."""

# The default generator of the CPU is one for the process, whichever thread draws.
_LOCK = threading.RLock()


@contextmanager
def _drawing_from_device() -> Iterator[None]:
    """Gives the CPU's default generator the device's state, for operators that take no generator argument."""
    default = torch.default_generator
    with _LOCK:
        # The state of the CPU's generator is the program's: random operators of the device must not move it.
        saved = default.get_state()
        default.set_state(GENERATOR.get_state())
        try:
            yield
        finally:
            GENERATOR.set_state(default.get_state())
            default.set_state(saved)


_CPU = torch.device("cpu")
_OTHER, _TENSOR, _LIST = 0, 1, 2
_KINDS: dict[type, int] = {torch.Tensor: _TENSOR, torch.nn.Parameter: _TENSOR, list: _LIST, tuple: _LIST}

# Not registered, as on real accelerators: the composite implementation is what a device without a fused
# kernel runs. Registering `_fused_sdp_choice` would send attention to CUDA's kernels.
_CPU_ONLY = frozenset(
    {
        "aten::_fused_sdp_choice",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
        "aten::_empty_affine_quantized",
        "aten::_empty_per_channel_affine_quantized",
        "aten::_nested_view_from_buffer",
    }
)

# Their results are no strided tensors, and the device has nothing else.
_OTHER_LAYOUTS = ("aten::_to_sparse", "aten::to_mkldnn", "aten::quantize_per", "aten::_make_per")

# Operators that take CPU tensors together with tensors of the device.
_MIXED = ("aten::_copy_from", "aten::index", "aten::_index_put_impl_", "aten::_pad_packed", "aten::_pack_padded")


def _kind(cls: type) -> int:
    # Once per class: `issubclass` for each argument of each call is slower than the lookup.
    kind = _KINDS[cls] = _TENSOR if issubclass(cls, torch.Tensor) else _OTHER
    return kind


class CpuKernel:
    """The kernel of one overload.

    Attributes:
        name: ``aten::add.Tensor``.
        compute: Called with CPU tensors; the CPU's operator unless a flaw stands in its place.
        before: Called with the caller's arguments first; may raise, warn or wait.
        after: Called with the device's results last.
    """

    __slots__ = (
        "_allows_mixed",
        "_numbers_to_tensors",
        "_returns",
        "_takes_generator",
        "_uses_global_rng",
        "_waits",
        "_written",
        "after",
        "before",
        "compute",
        "name",
        "op",
    )

    def __init__(self, name: str) -> None:
        overload = device.overload(name)
        schema = device.schema(overload)
        self.name = name
        self.op: Kernel = device.raw(overload)
        # The CPU's own kernel: without flaws, the device computes bit for bit what the CPU does.
        self.compute: Kernel = self.op
        self.before: Callable[..., None] | None = None
        self.after: Callable[[Any], Any] | None = None
        self._takes_generator = any(a.name == "generator" for a in schema.arguments)
        self._uses_global_rng = not self._takes_generator and torch.Tag.nondeterministic_seeded in overload.tags
        # The host needs their values (data-dependent shapes, numbers), so every device waits there.
        self._waits = not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.isdisjoint(overload.tags)
        # An operator may give what it writes another size, which the device's tensor has to follow.
        self._written = tuple(
            (i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write
        )
        self._numbers_to_tensors = tuple(i for i, a in enumerate(schema.arguments) if str(a.type) == "Tensor")
        self._returns = _returned_arguments(schema)
        # Real accelerators refuse CPU tensors of one or more dimensions, and so does this one.
        self._allows_mixed = name.startswith(_MIXED)

    def reset(self) -> None:
        """Forgets all flaws."""
        self.compute, self.before, self.after = self.op, None, None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        with NoTorchFunction():
            # Flaws run first: a missing operator raises before anything is computed, as in a real dispatcher.
            if self.before is not None:
                self.before(*args, **kwargs)
            if self._waits:
                STREAM.synchronize()
            pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
            inputs = [self._input(a, pairs) if _KINDS.get(type(a)) != _OTHER else a for a in args]
            if kwargs:
                self._keywords(kwargs, pairs)
            result = self._run(inputs, kwargs)
            for i, key in self._written:
                _resized(inputs[i] if i < len(inputs) else kwargs.get(key), pairs)
            # In-place operators have to return the caller's tensor itself.
            if self._returns is not None:
                result = self._given(args, kwargs, pairs)
            elif type(result) is torch.Tensor:
                result = _output(result, pairs)
            elif isinstance(result, (tuple, list)):
                result = type(result)([_output(r, pairs) if isinstance(r, torch.Tensor) else r for r in result])
            return result if self.after is None else self.after(result)

    def _input(self, value: Any, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        kind = _KINDS.get(type(value))
        if kind is None:
            kind = _kind(type(value))
        if kind == _TENSOR:
            if value.is_cpu:
                # Of no dimensions, a tensor of the CPU counts as a number on every device.
                if value.dim() and not self._allows_mixed:
                    raise RuntimeError(_two_devices(value))
                return value
            # One alias for each tensor, so that an alias that the operator returns leads back to its tensor.
            for alias, tensor in pairs:
                if tensor is value:
                    return alias
            alias = device.to_cpu(value)
            pairs.append((alias, value))
            return alias
        # Sizes, strides and dimensions have no tensors in them.
        if kind == _LIST and value and type(value[0]) not in (int, float, bool):
            return [self._input(v, pairs) for v in value]
        return value

    def _keywords(self, kwargs: dict[str, Any], pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for key, value in kwargs.items():
            if key == "device":
                kwargs[key] = _CPU
            # The device's tensors lie in host memory, so there is nothing to pin.
            elif key == "pin_memory":
                kwargs[key] = None
            else:
                kwargs[key] = self._input(value, pairs)

    def _run(self, inputs: list[Any], kwargs: dict[str, Any]) -> Any:
        if self._takes_generator:
            if kwargs.get("generator") is None:
                kwargs["generator"] = GENERATOR
        elif self._uses_global_rng:
            with _drawing_from_device():
                return self.compute(*inputs, **kwargs)
        try:
            return self.compute(*inputs, **kwargs)
        except (RuntimeError, TypeError):
            # The dispatcher hands "wrapped numbers" to Python kernels as Python numbers, which some
            # overloads do not take back.
            numbers = [
                i for i in self._numbers_to_tensors if i < len(inputs) and isinstance(inputs[i], (int, float, complex))
            ]
            if not numbers:
                raise
            for i in numbers:
                inputs[i] = torch.scalar_tensor(inputs[i], dtype=_dtype_beside(inputs, inputs[i]), device=_CPU)
            return self.compute(*inputs, **kwargs)

    def _given(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], pairs: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> Any:
        """The caller's own tensors, for operators that return what they wrote."""
        tensors = {id(alias): tensor for alias, tensor in pairs}
        results = []
        for i, name in self._returns or ():
            value = args[i] if i < len(args) else kwargs[name]
            results.append(tensors.get(id(value), value))
        return results[0] if len(results) == 1 else tuple(results) or None


def _two_devices(value: torch.Tensor) -> str:
    name = device.current_name()
    return (
        f"Expected all tensors to be on the same device, but found at least two devices, {name}:0 and {value.device}!"
    )


def _dtype_beside(inputs: Sequence[Any], number: complex) -> torch.dtype:
    """The dtype in which an operator takes a number: that of its tensors, unless the number is of a wider kind."""
    tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
    # A condition does not decide.
    # As type promotion does: a number of the same kind (int with int32) does not widen its tensors.
    dtypes = [torch.result_type(t, number) for t in tensors if t.dtype is not torch.bool]
    return functools.reduce(torch.promote_types, dtypes) if dtypes else _dtype_of(number)


def _dtype_of(number: complex) -> torch.dtype:
    if isinstance(number, bool):
        return torch.bool
    if isinstance(number, int):
        return torch.int64
    return torch.get_default_dtype() if isinstance(number, float) else torch.complex64


def _resized(alias: Any, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Carries over to the device's tensor that the CPU's operator gave what it writes to another size."""
    if isinstance(alias, list):
        for one in alias:
            _resized(one, pairs)
    for seen, tensor in pairs:
        # The address as well: a storage that was grown lies elsewhere, with equal sizes.
        if seen is alias and (
            alias.size() != tensor.size() or alias.stride() != tensor.stride() or alias.data_ptr() != tensor.data_ptr()
        ):
            device.adopt(tensor, alias)


def _returned_arguments(schema: Any) -> tuple[tuple[int, str], ...] | None:
    """Position and name of the arguments that the operator returns; None if it returns something fresh."""
    written = {}
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            # Lists have no set of their own: they are never returned.
            written[next(iter(argument.alias_info.before_set), "")] = (i, argument.name)
    if not schema.returns:
        return ()
    found = []
    for value in schema.returns:
        alias = next(iter(value.alias_info.before_set), "") if value.alias_info is not None else ""
        if not alias or not value.alias_info.is_write:
            return None
        # In a schema, a result that is an argument has the argument's letter: `(a!)`.
        found.append(written[alias])
    return tuple(found)


def _output(value: torch.Tensor, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    storage = value.untyped_storage()
    for alias, tensor in pairs:
        if value is alias:
            return tensor
        # A view shares the memory of its base, as on any device.
        # torch keeps one Python object for a storage while it is referred to, as it is by the alias.
        if storage is alias.untyped_storage():
            return device.view_of(tensor, value)
    return device.wrap(value)


@functools.cache
def _names_on_cpu() -> tuple[str, ...]:
    reserved = {*device_kernels.ON_DEVICE, *device_kernels.METADATA, *_CPU_ONLY}
    # An operator without a kernel of its own for the CPU is composite: torch decomposes it into some that have one.
    return tuple(
        name
        for name in device.all_operators()
        if name not in reserved and not name.startswith(_OTHER_LAYOUTS) and device.has_kernel(name, "CPU")
    )


def make_kernel(name: str) -> CpuKernel:
    """The kernel of one overload."""
    kernel = CpuKernel(name)
    if name in device_kernels.ON_CPU:
        kernel.op = kernel.compute = device_kernels.ON_CPU[name]
    return kernel


def kernels_on_cpu() -> dict[str, CpuKernel]:
    """All kernels of the device that run the CPU's: every overload that has its own CPU kernel."""
    return {name: make_kernel(name) for name in (*_names_on_cpu(), *device_kernels.ON_CPU)}


class DeviceKernel:
    """A kernel that gets the device's tensors; flaws may stand in its place, before and after it."""

    __slots__ = ("after", "before", "compute", "name", "op")

    def __init__(self, name: str, op: Kernel) -> None:
        self.name = name
        self.op = self.compute = op
        self.before: Callable[..., None] | None = None
        self.after: Callable[[Any], Any] | None = None

    def reset(self) -> None:
        """Forgets all flaws."""
        self.compute, self.before, self.after = self.op, None, None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        if self.before is not None:
            self.before(*args, **kwargs)
        result = self.compute(*args, **kwargs)
        return result if self.after is None else self.after(result)


def kernels_on_device() -> dict[str, DeviceKernel]:
    """The kernels that get the device's tensors."""
    metadata = {name: device.native(device.overload(name)) for name in device_kernels.METADATA}
    return {name: DeviceKernel(name, kernel) for name, kernel in {**device_kernels.ON_DEVICE, **metadata}.items()}
