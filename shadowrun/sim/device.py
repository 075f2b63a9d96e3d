"""The simulated device in torch: PrivateUse1 tensors on the memory of CPU tensors, and the registration of kernels.

Every private torch API that the simulated accelerator uses is wrapped here, with what happens without it. All were seen
on torch 2.11.0 and 2.13.0.

The technique: export a CPU tensor by DLPack, change the device in the capsule from CPU to "extension
device", import it again. What comes back is a genuine PrivateUse1 tensor with a storage, strides and
dtype; views, in-place writes and autograd's saved variables work on it as on any other device. The CPU
storage stays attached to the device's storage, so going back costs one `set_`.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.library import Library

from shadowrun.torch_versions import need

__all__ = [
    "Kernel",
    "NoTorchFunction",
    "adopt",
    "all_operators",
    "below_autocast",
    "current_name",
    "has_kernel",
    "is_taken",
    "native",
    "overload",
    "patch_storages",
    "raw",
    "register",
    "register_fallthroughs",
    "rename",
    "schema",
    "set_up",
    "to_cpu",
    "unregister",
    "view_of",
    "wrap",
]

Kernel = Callable[..., Any]

KEY = "PrivateUse1"
need(
    *("torch._C.DisableTorchFunction", "torch._C.DispatchKeySet", "torch._C.DispatchKey.AutocastPrivateUse1"),
    *("torch._C.DispatchKey.CPU", "torch._C._ExcludeDispatchKeyGuard", "torch._C._ImperativeEngine"),
    *("torch._C._acc.DeviceGuard", "torch._C._acc.register_python_privateuseone_hook"),
    *("torch._C._acc.register_python_privateuseone_device_guard", "torch._C._autograd.DeviceType.PrivateUse1"),
    *("torch._C._construct_storage_from_data_pointer", "torch._C._dispatch_get_all_op_names"),
    *("torch._C._dispatch_has_kernel_for_dispatch_key", "torch._C._get_privateuse1_backend_name"),
    *("torch._C._from_dlpack", "torch._C._to_dlpack", "torch._conj", "torch._neg_view"),
    *("torch._register_device_module", "torch.autograd.Variable._execution_engine"),
    *("torch.ops.aten.add.Tensor._op_dk", "torch.utils.backend_registration._DummyPrivateUse1Hook"),
)

_CPU = torch.device("cpu")
# `kDLExtDev` of dlpack.h, which torch maps to PrivateUse1 in both directions.
_DL_EXTENSION = 12

# The offset of `DLTensor.device.device_type` after the `void* data` of DLPack's ABI.
_DEVICE_TYPE_OFFSET = 8
_int32_at = ctypes.c_int32.from_address
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]

# Private: `torch.utils.dlpack` refuses PrivateUse1 tensors and forbids capsules whose device was changed.
_to_dlpack = torch._C._to_dlpack
_from_dlpack = torch._C._from_dlpack

# Private: kernels run under the caller's torch-function modes (`with torch.device(...)` is one); without
# this guard `torch.empty` in a kernel would come back to the device and recurse.
NoTorchFunction = torch._C.DisableTorchFunction


def overload(name: str) -> Any:
    """The `OpOverload` called ``aten::add.Tensor``."""
    namespace, _, rest = name.partition("::")
    packet, _, variant = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), variant or "default")


def schema(op: Any) -> Any:
    """The schema of an overload (private; read once per operator)."""
    return op._schema


def raw(op: Any) -> Kernel:
    """The C entry of an overload: without `OpOverload.__call__`, which costs a Python frame (private)."""
    call: Kernel = op._op
    return call


def native(op: Any) -> Kernel:
    """The CPU kernel of an overload, callable on device tensors: for those that touch metadata only.

    Private (`_op_dk`): the same kernels serve every strided device in C++, but only C++ can register them
    for another key; without this, views would have to be rebuilt in Python.
    """
    call, key = op._op_dk, torch._C.DispatchKey.CPU

    def kernel(*args: Any, **kwargs: Any) -> Any:
        # The key is explicit, since the tensors are of another device than the kernel.
        return call(key, *args, **kwargs)

    return kernel


_set = native(overload("aten::set_.source_Storage_storage_offset"))


def _relabel(tensor: torch.Tensor) -> torch.Tensor:
    capsule = _to_dlpack(tensor)
    # In the capsule only: the tensor that was exported stays a tensor of the CPU.
    _int32_at(_capsule_pointer(capsule, b"dltensor") + _DEVICE_TYPE_OFFSET).value = _DL_EXTENSION
    return _from_dlpack(capsule)


def wrap(tensor: torch.Tensor) -> torch.Tensor:
    """The CPU tensor as a tensor of the device, on the same memory.

    Args:
        tensor: A strided CPU tensor that is not used elsewhere.

    Returns:
        A tensor of the device with the same dtype, sizes and strides.
    """
    # DLPack cannot express a lazy conjugation or negation.
    if tensor.dtype.is_complex and tensor.is_conj():
        tensor = tensor.resolve_conj()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    storage = tensor.untyped_storage()
    if tensor.storage_offset():
        # A capsule begins at the tensor's first element; the whole storage is relabelled, so that views can reach what
        # lies before.
        flat = _relabel(torch.empty(0, dtype=torch.uint8, device=_CPU).set_(storage))
        flat.untyped_storage()._shadow = storage  # type: ignore[attr-defined]
        result = _relabel(torch.empty(0, dtype=tensor.dtype, device=_CPU))
        _set(result, flat.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
        return result
    result = _relabel(tensor)
    # The CPU storage owns the memory: it must live as long as the device's storage.
    result.untyped_storage()._shadow = storage  # type: ignore[attr-defined]
    if result.stride() != tensor.stride():  # DLPack may normalise the strides of dimensions of size 1
        _set(result, result.untyped_storage(), 0, tensor.size(), tensor.stride())
    return result


def _shadow_of(storage: Any) -> Any:
    """The CPU storage on the memory of a device's storage that came without one."""
    if storage.device.type != current_name():
        msg = (
            # The words of torch's own check, which programs and tests look for.
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{current_name()}:0 and {storage.device}!"
        )
        raise RuntimeError(msg)
    # Private: the only way from an address to a storage without owning the memory.
    shadow = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), _CPU, storage.nbytes())
    storage._shadow = shadow
    return shadow


def to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor on the memory of the device's tensor."""
    storage = tensor.untyped_storage()
    try:
        shadow = storage._shadow  # type: ignore[attr-defined]
    except AttributeError:
        # `wrap` did not make it: mostly a tensor of another device, which torch refuses with the message there.
        shadow = _shadow_of(storage)
    dtype = tensor.dtype
    alias = torch.empty(0, dtype=dtype, device=_CPU).set_(
        shadow, tensor.storage_offset(), tensor.size(), tensor.stride()
    )
    if dtype.is_complex and tensor.is_conj():
        alias = torch._conj(alias)
    if tensor.is_neg():
        alias = torch._neg_view(alias)
    return alias


def view_of(owner: torch.Tensor, alias: torch.Tensor) -> torch.Tensor:
    """A tensor of the device on `owner`'s storage with the form of the CPU tensor `alias`."""
    result = _relabel(torch.empty(0, dtype=alias.dtype, device=_CPU))
    _set(result, owner.untyped_storage(), alias.storage_offset(), alias.size(), alias.stride())
    return result


def adopt(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Makes `tensor` a tensor on the memory of the CPU tensor `value`, with its sizes and strides."""
    fresh = wrap(value)
    _set(tensor, fresh.untyped_storage(), fresh.storage_offset(), fresh.size(), fresh.stride())


def all_operators() -> list[str]:
    """Names of all operators of the namespace ``aten`` (private: no public list exists)."""
    return [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]


def has_kernel(name: str, key: str) -> bool:
    """Whether the operator has its own kernel for a dispatch key (private)."""
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    except RuntimeError:  # no such operator
        return False


def is_taken() -> bool:
    """Whether the process has another PrivateUse1 backend."""
    return torch._C._get_privateuse1_backend_name() != "privateuseone"


class _Guard(torch._C._acc.DeviceGuard):
    """The device guard (private). C++ asks it for the device's type, also while an exception unwinds.

    A Python exception that leaves an operator in backward is "in flight" then: any call into C would fail,
    and since the guard must not throw, the process would abort ("terminate called without an active
    exception"). So the exception is taken out of flight and raised again by `_Engine`.
    """

    def type_(self) -> Any:
        try:
            _probe()
        except BaseException as error:  # the one in flight: ctypes finds it when the call returns
            _in_flight.append(error)
        return _PRIVATE_USE_1


class _Engine(torch._C._ImperativeEngine):
    """The autograd engine (private), which raises the exceptions that `_Guard` has kept."""

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        _in_flight.clear()
        try:
            return super().run_backward(*args, **kwargs)
        except BaseException as error:
            _exit_slowly()
            # C++ says SystemError when the exception that it wants to pass on does not exist any more.
            if not isinstance(error, SystemError) or not _in_flight:
                raise
            original = _in_flight[0]
        finally:
            _in_flight.clear()
        raise original  # outside the handler, so that its context stays as it was


@functools.cache
def _exit_slowly() -> None:
    """Gives the device's thread time to release an exception, for which it needs the GIL, before Python ends."""
    atexit.register(time.sleep, 0.05)


_in_flight: list[BaseException] = []
_probe = ctypes.pythonapi.Py_IsInitialized
_PRIVATE_USE_1 = torch._C._autograd.DeviceType.PrivateUse1


def set_up(module: Any) -> None:
    """Registers the device module, hooks and guard, under torch's default name for the device.

    Private: without the Python hooks and guard, autograd finds no device thread and aborts the process. Until the
    device is renamed, torch does not count it as an accelerator: `torch.accelerator`, `torch.Event`, `torch.Stream`,
    `torch.device(0)` and pinned memory are what they are without it.
    """
    from torch.utils import backend_registration

    torch._register_device_module(current_name(), module)  # type: ignore[no-untyped-call]
    torch._C._acc.register_python_privateuseone_hook(backend_registration._DummyPrivateUse1Hook())
    torch._C._acc.register_python_privateuseone_device_guard(_Guard())
    torch.autograd.Variable._execution_engine = _Engine()


def rename(name: str, module: Any) -> None:
    """Renames PrivateUse1: from here on, torch counts the device as its accelerator, and programs can name it."""
    from torch.utils import backend_registration

    backend_registration.rename_privateuse1_backend(name)
    backend_registration.generate_methods_for_privateuse1_backend()
    module.__name__ = f"torch.{name}"
    torch._register_device_module(name, module)  # type: ignore[no-untyped-call]
    cls = torch.UntypedStorage
    setattr(cls, name, _storage_to_device)
    setattr(cls, f"is_{name}", property(lambda self: self.device.type == name))


def below_autocast(call: Kernel, *args: Any, **kwargs: Any) -> Any:
    """Calls with autocast off for this device (private: the public guards cannot exclude one key)."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]
    # Without the guard, the operator would be dispatched to its own autocast kernel again.
    with torch._C._ExcludeDispatchKeyGuard(keys):
        return call(*args, **kwargs)


def register_fallthroughs() -> list[Library]:
    """Lets calls pass the keys above the device where it has nothing to add.

    Without the first, copying a lazily conjugated tensor calls itself until the C stack overflows (no
    traceback). Without the second, every operator under autocast raises "Could not run ... 'Autocastsim'".
    """
    # The references keep the registrations alive: torch removes them with the last one.
    copies = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for key in ("Conjugate", "Negative"):
        copies.impl("_copy_from", torch.library.fallthrough_kernel, key)  # type: ignore[no-untyped-call]
    autocast = Library("_", "IMPL")  # type: ignore[no-untyped-call]
    autocast.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # type: ignore[no-untyped-call]
    return [copies, autocast]


def register(kernels: Iterable[tuple[str, Kernel]], key: str = KEY) -> Library:
    """Registers kernels for a dispatch key; they last until `unregister`."""
    library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name, kernel in kernels:
        library.impl(overload(name), kernel, key)  # type: ignore[no-untyped-call]
    return library


def unregister(library: Library) -> None:
    """Takes the kernels of a library away (private: the public way is to lose the last reference)."""
    library._destroy()  # type: ignore[no-untyped-call]


def _storage_to_device(storage: Any, device: Any = None, non_blocking: bool = False) -> Any:  # noqa: ARG001
    if storage.device.type == current_name():
        return storage
    # A new storage: torch's own copy between devices asks an allocator, and the device has none.
    made = torch.UntypedStorage(storage.nbytes(), device=current_name())  # type: ignore[no-untyped-call]
    return made.copy_(storage, False)


def patch_storages() -> None:
    """Makes `torch.UntypedStorage(n, device="sim")` and moves between storages work.

    No allocator can be registered from Python: without this, `torch.UntypedStorage(n, device="sim")`, hence
    `copy.deepcopy` and `torch.load`, ends in a segmentation fault.
    """
    cls = torch.UntypedStorage
    made: Kernel = cls.__new__

    def new(kind: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        name = current_name()
        if device is None or torch.device(device).type != name:
            return made(kind, *args, **kwargs) if device is None else made(kind, *args, device=device, **kwargs)
        # Torch calls it with a size or with a list of bytes; pickled storages come by the size.
        (size,) = args or (0,)
        with NoTorchFunction():
            if isinstance(size, int):
                return torch.empty(size, dtype=torch.uint8, device=name).untyped_storage()
            return torch.tensor(list(size), dtype=torch.uint8).to(name).untyped_storage()

    def to(self: Any, *, device: Any, non_blocking: bool = False) -> Any:
        if torch.device(device).type == current_name():
            return _storage_to_device(self)
        return (
            self.cpu() if torch.device(device).type == "cpu" else moved(self, device=device, non_blocking=non_blocking)
        )

    def clone(self: Any) -> Any:
        name = current_name()
        return new(cls, self.nbytes(), device=name).copy_(self) if self.device.type == name else cloned(self)

    moved: Kernel = cls.to
    cloned: Kernel = cls.clone
    # For the whole process: `copy.deepcopy` and `torch.load` create storages without any hook.
    cls.__new__ = staticmethod(new)  # type: ignore[assignment]
    cls.to, cls.clone = to, clone  # type: ignore[method-assign]


def current_name() -> str:
    """The name that the process's PrivateUse1 backend has (private)."""
    return torch._C._get_privateuse1_backend_name()
