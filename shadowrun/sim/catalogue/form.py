"""Right values with a wrong dtype or wrong strides, and wrong values for inputs with unusual strides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from shadowrun.sim.flaw import FlawKind, randn
from shadowrun.types import Cause

if TYPE_CHECKING:
    from shadowrun.sim.device import Kernel
    from shadowrun.sim.flaw import KernelChanges

__all__ = ["flaw"]

flaw = FlawKind("form")


@flaw(
    "sigmoid-wrong-stride",
    "sigmoid returns its result in column-major order",
    issue="none: kernels that keep the vendor's own layout",
    operators=("aten::sigmoid",),
    cause=Cause.METADATA,
    explanation="stride",
    trigger=lambda device: randn(device, 4, 5).sigmoid(),
)
def sigmoid_wrong_stride(kernels: KernelChanges) -> None:
    def compute(kernel: Kernel, value: torch.Tensor) -> Any:
        result = kernel(value)
        return result.mT.contiguous().mT if result.dim() >= 2 else result

    kernels.replace(compute, "aten::sigmoid")


@flaw(
    "argmax-int32",
    "argmax and argmin return int32",
    issue="none: torchax turns int64 into int32",
    operators=("aten::argmax", "aten::argmin"),
    cause=Cause.METADATA,
    explanation="dtype",
    trigger=lambda device: randn(device, 4, 5).argmax(1),
)
def argmax_int32(kernels: KernelChanges) -> None:
    def compute(kernel: Kernel, *args: Any, **kwargs: Any) -> Any:
        return kernel(*args, **kwargs).to(torch.int32)

    kernels.replace(compute, "aten::argmax", "aten::argmin")


@flaw(
    "logsumexp-float32",
    "logsumexp of float64 returns float32",
    issue="none: torchax turns float64 into float32",
    operators=("aten::logsumexp",),
    cause=Cause.METADATA,
    explanation="dtype",
    trigger=lambda device: randn(device, 4, 5, dtype=torch.float64).logsumexp(1),
)
def logsumexp_float32(kernels: KernelChanges) -> None:
    def compute(_: Kernel, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return torch.logsumexp(value.float() if value.dtype == torch.float64 else value, *args, **kwargs)

    kernels.replace(compute, "aten::logsumexp")


@flaw(
    "leaky-relu-ignores-strides",
    "leaky_relu reads a transposed input as if it were contiguous",
    issue="none: kernels that take a pointer and forget the strides",
    operators=("aten::leaky_relu", "aten::leaky_relu_"),
    cause=Cause.LAYOUT,
    explanation="input read as contiguous",
    trigger=lambda device: (F.leaky_relu(randn(device, 4, 5)), F.leaky_relu(randn(device, 4, 5).t())),
)
def leaky_relu_ignores_strides(kernels: KernelChanges) -> None:
    def compute(op: Kernel, value: torch.Tensor, *args: Any) -> Any:
        # Of an expanded tensor, contiguous strides would lead outside of its storage.
        if value.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(value):
            return op(value, *args)
        strides = torch.empty(value.shape, device="meta").stride()
        # A dense tensor without gaps: any order of its strides stays within its memory.
        misread = value.as_strided(value.shape, strides, value.storage_offset()).clone()
        return torch.empty_like(value).copy_(op(misread, *args))

    kernels.replace_variants(compute, "aten::leaky_relu")


def _trigger_mul_inplace_lost(device: str) -> Any:
    table = randn(device, 4, 6)
    table[:, ::2].mul_(2.0)
    return table.mul_(3.0)


@flaw(
    "mul-inplace-lost",
    "mul_ on a non-contiguous tensor writes to a copy",
    issue="none: in-place kernels on a contiguous copy that is never written back",
    operators=("aten::mul_.Tensor", "aten::mul_.Scalar"),
    cause=Cause.LAYOUT,
    trigger=_trigger_mul_inplace_lost,
)
def mul_inplace_lost(kernels: KernelChanges) -> None:
    def compute(kernel: Kernel, target: torch.Tensor, factor: Any) -> Any:
        if not target.is_contiguous():
            # The copy is written to and dropped.
            kernel(target.contiguous(), factor)
            return target
        return kernel(target, factor)

    kernels.replace(compute, "aten::mul_.Tensor")
