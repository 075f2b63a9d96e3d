"""Backward, optimizer, running statistics, duplicates, dropout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shadowrun.platforms.sim.bench import Bench, fault

if TYPE_CHECKING:
    from shadowrun.platforms.sim.device import Kernel

__all__: list[str] = []


@fault("relu-backward-leaks")
def _threshold_backward(bench: Bench) -> None:
    def compute(kernel: Kernel, grad: torch.Tensor, value: torch.Tensor, threshold: float) -> Any:
        return kernel(grad, value, threshold).add_(grad * (value <= threshold), alpha=0.01)

    bench.replace(compute, "aten::threshold_backward")


@fault("gelu-backward-constant")
def _gelu_backward(bench: Bench) -> None:
    def compute(_: Kernel, grad: torch.Tensor, x: torch.Tensor, **__: Any) -> Any:
        density = 0.3898 * torch.exp(-0.5 * x * x)  # 1 / sqrt(2 pi) is 0.3989
        return grad * (0.5 * (1 + torch.erf(x * 0.7071067811865476)) + x * density)

    bench.replace(compute, "aten::gelu_backward")


@fault("silu-backward-sign")
def _silu_backward(bench: Bench) -> None:
    def compute(_: Kernel, grad: torch.Tensor, x: torch.Tensor) -> Any:
        s = torch.sigmoid(x)
        return grad * s * (1 - x * (1 - s))

    bench.replace(compute, "aten::silu_backward")


@fault("biased-running-variance")
def _batch_norm(bench: Bench) -> None:
    def compute(kernel: Kernel, x: Any, weight: Any, bias: Any, mean: Any, var: Any, *args: Any) -> Any:
        training = args[0] if isinstance(args[0], bool) else True
        momentum = args[1] if isinstance(args[0], bool) else args[0]
        if var is None or not training:
            return kernel(x, weight, bias, mean, var, *args)
        before = var.clone()
        result = kernel(x, weight, bias, mean, var, *args)
        biased = x.float().var([d for d in range(x.dim()) if d != 1], correction=0).to(var.dtype)
        var.copy_(before * (1 - momentum) + biased * momentum)
        return result

    bench.replace(compute, "aten::native_batch_norm", "aten::_native_batch_norm_legit", "aten::_batch_norm_with_update")


@fault("embedding-loses-duplicates")
def _embedding(bench: Bench) -> None:
    def compute(_: Kernel, grad: Any, indices: Any, rows: int, padding: int, *__: Any) -> Any:
        result = grad.new_zeros(rows, grad.shape[-1])
        for row, index in zip(grad.reshape(-1, grad.shape[-1]), indices.reshape(-1).tolist(), strict=True):
            if index != padding:
                result[index] = row
        return result

    bench.replace(compute, "aten::embedding_dense_backward")


@fault("index-put-loses-duplicates")
def _index_put(bench: Bench) -> None:
    def compute(kernel: Kernel, target: Any, indices: Any, values: Any, accumulate: bool = False, *args: Any) -> Any:
        if accumulate:
            return kernel(target, indices, target[tuple(slice(None) if i is None else i for i in indices)] + values)
        return kernel(target, indices, values, accumulate, *args)

    bench.replace(compute, "aten::_index_put_impl_")


@fault("foreach-skips-last")
def _foreach(bench: Bench) -> None:
    def compute(kernel: Kernel, tensors: Any, firsts: Any, seconds: Any, scalars: Any) -> None:
        kernel(tensors[:-1], firsts[:-1], seconds[:-1], scalars[:-1])

    bench.replace(compute, "aten::_foreach_addcdiv_.ScalarList")


@fault("addcdiv-scaled")
def _addcdiv(bench: Bench) -> None:
    def compute(kernel: Kernel, target: Any, first: Any, second: Any, *, value: Any = 1) -> Any:
        return kernel(target, first, second, value=value * 1.001)

    bench.replace(compute, "aten::addcdiv_")


@fault("dropout-ignores-p")
def _dropout(bench: Bench) -> None:
    def compute(kernel: Kernel, value: torch.Tensor, p: float, train: bool | None) -> Any:
        result, mask = kernel(value, 0.5, train)
        return result * (0.5 / (1 - p)), mask

    bench.replace(compute, "aten::native_dropout")
