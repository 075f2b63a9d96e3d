"""Kernels that the device has and the CPU has not, or has in another form.

Memory and copies, metadata, and operators that torch calls on accelerators only: overrideable convolutions and the
fused cells of recurrent networks.
"""

from __future__ import annotations

from typing import Any

import torch

from shadowrun.sim import device
from shadowrun.sim.device import Kernel, NoTorchFunction
from shadowrun.sim.stream import STREAM

__all__ = [
    "METADATA",
    "ON_CPU",
    "ON_DEVICE",
    "as_cpu",
    "gru_cell",
    "gru_cell_backward",
    "lstm_cell",
    "lstm_cell_backward",
]


def lstm_cell(
    igates: torch.Tensor,
    hgates: torch.Tensor,
    cell: torch.Tensor,
    ibias: torch.Tensor | None = None,
    hbias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """New hidden state, new cell state, and the gates for backward; gates are ``(N, 4 H)``."""
    gates = igates + hgates
    if ibias is not None and hbias is not None:
        gates = igates + ibias + (hgates + hbias)
    # The order of the gates in torch's fused cells, which the weights of `nn.LSTM` have too.
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    new = f * cell + i * g
    return o * new.tanh(), new, torch.cat([i, f, g, o], 1)


def lstm_cell_backward(
    grad_h: torch.Tensor | None,
    grad_c: torch.Tensor | None,
    cell: torch.Tensor,
    new: torch.Tensor,
    workspace: torch.Tensor,
    has_bias: bool,
) -> Any:
    """Gradients of the gates, of the cell state and of a bias."""
    # Autograd asks with neither where the loss depends on no result; the operator returns undefined tensors there.
    if grad_h is None and grad_c is None:
        return None, None, None
    i, f, g, o = workspace.chunk(4, 1)
    grad_h = torch.zeros_like(new) if grad_h is None else grad_h
    grad_c = torch.zeros_like(new) if grad_c is None else grad_c
    tanh = new.tanh()
    grad_c = grad_c + grad_h * o * (1 - tanh * tanh)
    grads = (
        grad_c * g * i * (1 - i),
        grad_c * cell * f * (1 - f),
        grad_c * i * (1 - g * g),
        grad_h * tanh * o * (1 - o),
    )
    gates = torch.cat(grads, 1)
    return gates, grad_c * f, gates.sum(0) if has_bias else None


def gru_cell(
    igates: torch.Tensor,
    hgates: torch.Tensor,
    hidden: torch.Tensor,
    ibias: torch.Tensor | None = None,
    hbias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """New hidden state and what backward needs; gates are ``(N, 3 H)``."""
    if ibias is not None and hbias is not None:
        igates, hgates = igates + ibias, hgates + hbias
    (ir, iz, new), (hr, hz, hn) = igates.chunk(3, 1), hgates.chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (new + r * hn).tanh()
    return n + z * (hidden - n), torch.cat([r, z, n, hidden, hn], 1)


def gru_cell_backward(grad: torch.Tensor, workspace: torch.Tensor, has_bias: bool) -> Any:
    """Gradients of both gates, of the hidden state and of both biases."""
    # Forward and backward are both ours, so the layout of the workspace is free; CUDA's is another, and no one else
    # reads it.
    r, z, n, hidden, hn = workspace.chunk(5, 1)
    grad_n = grad * (1 - z) * (1 - n * n)
    grad_r, grad_z = grad_n * hn * r * (1 - r), grad * (hidden - n) * z * (1 - z)
    igates, hgates = torch.cat([grad_r, grad_z, grad_n], 1), torch.cat([grad_r, grad_z, grad_n * r], 1)
    biases = (igates.sum(0), hgates.sum(0)) if has_bias else (None, None)
    return igates, hgates, grad * z, *biases


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


# Autograd's zero gradient. Real zeros: a ZeroTensor has a null pointer, which kernels of the CPU would read.
def _zero_tensor(size: list[int], dtype: Any = None, **_: Any) -> torch.Tensor:
    with NoTorchFunction():
        return _wrap(torch.zeros(size, dtype=dtype, device=_CPU))


_wrap = device.wrap


def as_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU, on the same memory, wherever it is."""
    return tensor if tensor.is_cpu else device.to_cpu(tensor)


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    with NoTorchFunction():
        # The only door from the device to the host is a copy, so asynchrony shows nowhere else.
        if STREAM.asynchronous and target.is_cpu:
            if non_blocking and _can_be_deferred(source, target):
                value = torch.empty_like(target, memory_format=torch.contiguous_format)
                STREAM.defer_copy(target, value.copy_(as_cpu(source)))
                return target
            # A blocking copy waits for all that was enqueued before it.
            STREAM.synchronize()
        as_cpu(target).copy_(as_cpu(source))
    return target


def _can_be_deferred(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether a device's copy engine could make the copy alone, without a kernel that casts or packs first."""
    return target.is_contiguous() and target.dtype is source.dtype and target.size() == source.size()


def _copy_from_and_resize(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    with NoTorchFunction():
        if target.size() != source.size():
            target.resize_(source.size())
        return _copy_from(source, target)


def _resize(tensor: torch.Tensor, size: list[int], memory_format: Any = None) -> torch.Tensor:
    with NoTorchFunction():
        if memory_format is None and tensor.size() == torch.Size(size):
            return tensor  # with its strides, as `full.out` expects
        like = torch.empty(
            size, dtype=torch.uint8, device="meta", memory_format=memory_format or torch.contiguous_format
        )
        storage, offset = tensor.untyped_storage(), tensor.storage_offset()
        needed = (offset + like.numel()) * tensor.element_size() if like.numel() else 0
        # As torch's own `resize_`: a storage grows, and never shrinks.
        if needed > storage.nbytes():
            memory = torch.empty(needed, dtype=torch.uint8, device=_CPU)
            old = torch.empty(0, dtype=torch.uint8, device=_CPU).set_(as_cpu(tensor).untyped_storage())
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
    # The overrideable form is not given the size of the bias, which the operator of the CPU needs.
    transposed, groups = options[3], options[5]
    # A transposed convolution has the weight (in, out / groups, ...).
    bias_size = [weight.size(1) * groups if transposed else weight.size(0)]
    return _aten.convolution_backward.default(grad, source, weight, bias_size, *options)


# There is one stream: no other can reuse the memory too early.
def _record_stream(tensor: torch.Tensor, stream: Any) -> None: ...


ON_DEVICE: dict[str, Kernel] = {
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

ON_CPU: dict[str, Kernel] = {
    "aten::convolution_overrideable": _convolution,
    "aten::convolution_backward_overrideable": _convolution_backward,
    "aten::_thnn_fused_lstm_cell": lstm_cell,
    "aten::_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
    "aten::_thnn_fused_gru_cell": gru_cell,
    "aten::_thnn_fused_gru_cell_backward": gru_cell_backward,
}
"""Operators that the CPU does not have and that accelerators are asked for, on CPU tensors."""
