"""Right values in the wrong form, and wrong values where the form is unusual."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shadowrun.platforms.sim.bench import Bench, fault

if TYPE_CHECKING:
    from shadowrun.platforms.sim.device import Kernel

__all__: list[str] = []


@fault("sigmoid-wrong-stride")
def _sigmoid(bench: Bench) -> None:
    def compute(kernel: Kernel, value: torch.Tensor) -> Any:
        result = kernel(value)
        return result.mT.contiguous().mT if result.dim() >= 2 else result

    bench.replace(compute, "aten::sigmoid")


@fault("argmax-int32")
def _argmax(bench: Bench) -> None:
    def compute(kernel: Kernel, *args: Any, **kwargs: Any) -> Any:
        return kernel(*args, **kwargs).to(torch.int32)

    bench.replace(compute, "aten::argmax", "aten::argmin")


@fault("logsumexp-float32")
def _logsumexp(bench: Bench) -> None:
    def compute(_: Kernel, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return torch.logsumexp(value.float() if value.dtype == torch.float64 else value, *args, **kwargs)

    bench.replace(compute, "aten::logsumexp")


@fault("leaky-relu-ignores-strides")
def _leaky_relu(bench: Bench) -> None:
    def compute(op: Kernel, value: torch.Tensor, *args: Any) -> Any:
        if value.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(value):
            return op(value, *args)
        strides = torch.empty(value.shape, device="meta").stride()
        misread = value.as_strided(value.shape, strides, value.storage_offset()).clone()
        return torch.empty_like(value).copy_(op(misread, *args))

    bench.family(compute, "aten::leaky_relu")


@fault("mul-inplace-lost")
def _mul_inplace(bench: Bench) -> None:
    def compute(kernel: Kernel, target: torch.Tensor, other: Any) -> Any:
        if not target.is_contiguous():
            kernel(target.contiguous(), other)
            return target
        return kernel(target, other)

    bench.replace(compute, "aten::mul_.Tensor")
