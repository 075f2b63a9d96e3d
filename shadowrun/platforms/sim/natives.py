"""Kernels that are the device's own: memory, metadata, and operators that only accelerators are asked for."""

from __future__ import annotations

from typing import Any

import torch

from shadowrun.platforms.sim import cells, device
from shadowrun.platforms.sim.device import Kernel, NoTorchFunction
from shadowrun.platforms.sim.stream import STREAM

__all__ = ["COMPUTED", "METADATA", "NATIVES", "here"]

METADATA = (
    "aten::as_strided",
    "aten::view",
    "aten::view_as_real",
    "aten::view_as_complex",
    "aten::unfold",
    "aten::_reshape_alias",
    "aten::is_set_to",
    "aten::set_.source_Storage",
    "aten::set_.source_Storage_storage_offset",
    "aten::set_.source_Tensor",
)
"""Operators that read and write sizes, strides and storages only: the CPU's kernels serve as they are."""

_CPU = torch.device("cpu")
_aten = torch.ops.aten
_set = device.native(device.overload("aten::set_.source_Storage_storage_offset"))


def _empty(
    size: list[int],
    dtype: Any = None,
    layout: Any = None,  # noqa: ARG001
    device: Any = None,  # noqa: ARG001
    pin_memory: Any = None,  # noqa: ARG001
    memory_format: Any = None,
) -> torch.Tensor:
    with NoTorchFunction():
        return _wrap(
            torch.empty(size, dtype=dtype, device=_CPU, memory_format=memory_format or torch.contiguous_format)
        )


def _empty_strided(
    size: list[int],
    stride: list[int],
    dtype: Any = None,
    layout: Any = None,  # noqa: ARG001
    device: Any = None,  # noqa: ARG001
    pin_memory: Any = None,  # noqa: ARG001
) -> torch.Tensor:
    with NoTorchFunction():
        return _wrap(torch.empty_strided(size, stride, dtype=dtype, device=_CPU))


def _zero_tensor(size: list[int], dtype: Any = None, **_: Any) -> torch.Tensor:
    with NoTorchFunction():
        return _wrap(torch.zeros(size, dtype=dtype, device=_CPU))


_wrap = device.wrap


def here(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU, on the same memory, wherever it is."""
    return tensor if tensor.is_cpu else device.to_cpu(tensor)


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    with NoTorchFunction():
        if STREAM.asynchronous and target.is_cpu:
            if non_blocking and _can_be_put_off(source, target):
                value = torch.empty_like(target, memory_format=torch.contiguous_format)
                STREAM.put_off(target, value.copy_(here(source)))
                return target
            STREAM.synchronize()
        here(target).copy_(here(source))
    return target


def _can_be_put_off(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Copies that a device's copy engine can do by itself, without a kernel before."""
    return target.is_contiguous() and target.dtype is source.dtype and target.size() == source.size()


def _copy_from_and_resize(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    with NoTorchFunction():
        if target.size() != source.size():
            target.resize_(source.size())
        return _copy_from(source, target)


def _resize(tensor: torch.Tensor, size: list[int], memory_format: Any = None) -> torch.Tensor:
    with NoTorchFunction():
        like = torch.empty(
            size, dtype=torch.uint8, device="meta", memory_format=memory_format or torch.contiguous_format
        )
        storage, offset = tensor.untyped_storage(), tensor.storage_offset()
        needed = (offset + like.numel()) * tensor.element_size() if like.numel() else 0
        if needed > storage.nbytes():
            memory = torch.empty(needed, dtype=torch.uint8, device=_CPU)
            old = torch.empty(0, dtype=torch.uint8, device=_CPU).set_(here(tensor).untyped_storage())
            memory[: old.numel()].copy_(old)
            storage = _wrap(memory).untyped_storage()
        _set(tensor, storage, offset, like.size(), like.stride())
        return tensor


def _set_empty(tensor: torch.Tensor) -> torch.Tensor:
    with NoTorchFunction():
        fresh = _wrap(torch.empty(0, dtype=tensor.dtype, device=_CPU))
        _set(tensor, fresh.untyped_storage(), 0, fresh.size(), fresh.stride())
        return tensor


def _convolution(source: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *options: Any) -> torch.Tensor:
    result: torch.Tensor = _aten.convolution.default(source, weight, bias, *options)
    return result


def _convolution_backward(grad: torch.Tensor, source: torch.Tensor, weight: torch.Tensor, *options: Any) -> Any:
    transposed, groups = options[3], options[5]
    bias_size = [weight.size(1) * groups if transposed else weight.size(0)]
    return _aten.convolution_backward.default(grad, source, weight, bias_size, *options)


def _record_stream(tensor: torch.Tensor, stream: Any) -> None: ...


NATIVES: dict[str, Kernel] = {
    "aten::empty.memory_format": _empty,
    "aten::empty_strided": _empty_strided,
    "aten::_efficientzerotensor": _zero_tensor,
    "aten::_copy_from": _copy_from,
    "aten::_copy_from_and_resize": _copy_from_and_resize,
    "aten::resize_": _resize,
    "aten::set_": _set_empty,
    "aten::record_stream": _record_stream,
}
"""Kernels that get the device's own tensors."""

COMPUTED: dict[str, Kernel] = {
    "aten::convolution_overrideable": _convolution,
    "aten::convolution_backward_overrideable": _convolution_backward,
    "aten::_thnn_fused_lstm_cell": cells.lstm_cell,
    "aten::_thnn_fused_lstm_cell_backward_impl": cells.lstm_cell_backward,
    "aten::_thnn_fused_gru_cell": cells.gru_cell,
    "aten::_thnn_fused_gru_cell_backward": cells.gru_cell_backward,
}
"""Operators that the CPU does not have and that accelerators are asked for, on CPU tensors."""
