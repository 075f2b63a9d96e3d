"""Functions of the C extension on tensors; None where it is not built, or torch lacks what it needs."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.native import core, lacks

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    Equal = Callable[[Any, Any], bool]
    Key = Callable[[int, torch.device, tuple[str, str, str], tuple[Any, ...], dict[str, Any]], tuple[Any, ...]]

__all__ = ["context_key", "plainly_equal", "reads_places"]

_EXACT = frozenset({str, torch.dtype, torch.device, torch.layout, torch.memory_format})

plainly_equal: Equal | None = None
"""See `shadowrun.numerics.bits.plainly_equal`. Anything but a tensor is not equal."""

context_key: Key | None = None
"""See `shadowrun.recording.recorder.Recorder.context`."""

reads_places = False
"""Whether `core.place` knows where tensors lie, which `core.TensorRows` needs."""

_SHIM = ("aoti_torch_get_dim", "aoti_torch_get_sizes", "aoti_torch_get_dtype", "aoti_torch_get_device_type")
_SHIM_OF_PLACES = ("aoti_torch_get_strides", "aoti_torch_get_storage_offset", "aoti_torch_get_storage_size")
_LIBRARIES = ("libtorch_cpu.so", "libtorch_cpu.dylib", "torch_cpu.dll")


def _ask_without_python(core: ModuleType) -> bool:
    """Use torch's C shim for dtypes and shapes, if it gives what Python gives."""
    # The shim is part of torch's stable ABI (torch/csrc/inductor/aoti_torch/c/shim.h), seen on 2.11 and 2.13. Its
    # argument is the C++ object inside each tensor's Python object: `_cdata` is its address.
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # hidden from the program's modes
        empty = torch._C._VariableFunctions.empty
        samples = [empty((2, 3), dtype=torch.float16), empty((), dtype=torch.int64), empty((0, 4), dtype=torch.bool)]
        samples += [samples[0].t(), torch.nn.Parameter(samples[0])]
        addresses = _addresses_in_torch(*_SHIM)
        by_python = [_key(core, sample) for sample in samples]
        if not core.setup_shim(samples[0], getattr(samples[0], "_cdata", 0), *addresses):
            return False
        if [_key(core, sample) for sample in samples] == by_python:
            return True
        return bool(core.setup_shim(samples[0], 0, *addresses))


def _read_places(core: ModuleType) -> bool:
    # "Find out where a C++ tensor keeps its storage, and that all places are what Python says. Seen on 2.11 and
    # 2.13.""" Without it, recordings look tensors up in Python: the same rows, more slowly.
    storage = torch.UntypedStorage
    functions = torch.Tensor.untyped_storage, storage._weak_ref, storage._free_weak_ref, storage._expired
    core.setup_storage_rows(functions)
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # hidden from the program's modes
        empty = torch._C._VariableFunctions.empty
        samples = [empty((2, 3), dtype=torch.float16), empty((), dtype=torch.int64), empty((0, 4), dtype=torch.bool)]
        samples += [samples[0].t(), samples[0][1:], torch.nn.Parameter(samples[0].detach().zero_())]
        by_python = [_place(sample) for sample in samples]
        pairs = tuple((sample, place[0]) for sample, place in zip(samples, by_python, strict=True))
        if core.setup_places(pairs, *_addresses_in_torch(*_SHIM_OF_PLACES)):
            if [core.place(sample) for sample in samples] == by_python:
                return True
            core.setup_places((), 0, 0, 0)
    return False


def _place(t: torch.Tensor) -> tuple[Any, ...]:
    storage = t.untyped_storage()
    form = tuple(t.shape), t.stride(), t.dtype
    return storage._cdata, storage.nbytes(), t._version, t.storage_offset(), *form


def _addresses_in_torch(*functions: str) -> list[int]:
    """Addresses of functions of torch's C++ library, by name; all 0 where one is missing."""
    for name in _LIBRARIES:
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
            return [ctypes.cast(getattr(library, function), ctypes.c_void_p).value or 0 for function in functions]
    return [0] * len(functions)


def _key(core: ModuleType, sample: torch.Tensor) -> object:
    return core.context_key(0, None, ("", "", ""), (sample,), {})


if core is not None and core.setup_tensors(torch.Tensor, torch.nn.Parameter, _EXACT, torch.strided):
    plainly_equal, context_key = core.plainly_equal, core.context_key
    _answers = False
    with contextlib.suppress(Exception):  # a torch that lacks a part of it
        _answers = _ask_without_python(core)
    if not _answers:
        lacks.append("torch's C shim")
    with contextlib.suppress(Exception):
        reads_places = _answers and _read_places(core)
    if _answers and not reads_places:
        lacks.append("the places of tensors in their storages")
elif core is not None:
    lacks.append("DLPack's exchange API: no call goes by it")
