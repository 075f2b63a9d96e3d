"""Flaws that only training meets: backward, optimizer, running statistics, duplicate indices, dropout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from shadowrun.sim.flaw import FlawKind, randn
from shadowrun.types import Cause

if TYPE_CHECKING:
    from shadowrun.sim.device import Kernel
    from shadowrun.sim.flaw import KernelChanges

__all__ = ["flaw"]

flaw = FlawKind("training", cause=Cause.IMPLEMENTATION)


def _backward(function: Any, device: str) -> None:
    # Plus 1: where relu is 0, the gradient of its square would be 0 as well, and nothing could leak.
    (function(randn(device, 64).requires_grad_()) + 1).square().sum().backward()


def _trigger_relu_backward_leaks(device: str) -> None:
    _backward(F.relu, device)


@flaw(
    "relu-backward-leaks",
    "the gradient of relu lets a hundredth through where the input was negative",
    issue="none: leaky_relu's backward kernel under relu's name",
    operators=("aten::threshold_backward",),
    trigger=_trigger_relu_backward_leaks,
)
def relu_backward_leaks(kernels: KernelChanges) -> None:
    def compute(kernel: Kernel, grad: torch.Tensor, value: torch.Tensor, threshold: float) -> Any:
        return kernel(grad, value, threshold).add_(grad * (value <= threshold), alpha=0.01)

    kernels.replace(compute, "aten::threshold_backward")


def _trigger_gelu_backward_constant(device: str) -> None:
    _backward(F.gelu, device)


@flaw(
    "gelu-backward-constant",
    "the gradient of gelu has a wrong constant",
    issue="none: a mistyped constant",
    operators=("aten::gelu_backward",),
    trigger=_trigger_gelu_backward_constant,
)
def gelu_backward_constant(kernels: KernelChanges) -> None:
    def compute(_: Kernel, grad: torch.Tensor, x: torch.Tensor, **__: Any) -> Any:
        density = 0.3898 * torch.exp(-0.5 * x * x)  # 1 / sqrt(2 pi) is 0.3989
        return grad * (0.5 * (1 + torch.erf(x * 0.7071067811865476)) + x * density)

    kernels.replace(compute, "aten::gelu_backward")


def _trigger_silu_backward_sign(device: str) -> None:
    _backward(F.silu, device)


@flaw(
    "silu-backward-sign",
    "the gradient of silu has a wrong sign in its second term",
    issue="none: a mistyped sign",
    operators=("aten::silu_backward",),
    trigger=_trigger_silu_backward_sign,
)
def silu_backward_sign(kernels: KernelChanges) -> None:
    def compute(_: Kernel, grad: torch.Tensor, x: torch.Tensor) -> Any:
        s = torch.sigmoid(x)
        return grad * s * (1 - x * (1 - s))

    kernels.replace(compute, "aten::silu_backward")


def _trigger_biased_running_variance(device: str) -> Any:
    layer = nn.BatchNorm2d(3).to(device)
    return layer(randn(device, 2, 3, 4, 4))


@flaw(
    "biased-running-variance",
    "batch normalisation stores the biased variance in running_var",
    issue="none: 1/n in the place of 1/(n-1)",
    operators=("aten::native_batch_norm", "aten::_native_batch_norm_legit", "aten::_batch_norm_with_update"),
    trigger=_trigger_biased_running_variance,
)
def biased_running_variance(kernels: KernelChanges) -> None:
    def compute(kernel: Kernel, x: Any, weight: Any, bias: Any, mean: Any, var: Any, *args: Any) -> Any:
        # `_batch_norm_with_update` has no flag `training`: it always trains.
        training = args[0] if isinstance(args[0], bool) else True
        momentum = args[1] if isinstance(args[0], bool) else args[0]
        if var is None or not training:
            return kernel(x, weight, bias, mean, var, *args)
        before = var.clone()
        result = kernel(x, weight, bias, mean, var, *args)
        # In float32: the kernel itself computes the statistics of 16-bit inputs in float32.
        biased = x.float().var([d for d in range(x.dim()) if d != 1], correction=0).to(var.dtype)
        var.copy_(before * (1 - momentum) + biased * momentum)
        return result

    kernels.replace(
        compute, "aten::native_batch_norm", "aten::_native_batch_norm_legit", "aten::_batch_norm_with_update"
    )


def _trigger_embedding_loses_duplicates(device: str) -> None:
    table = randn(device, 6, 4).requires_grad_()
    F.embedding(torch.tensor([1, 2, 1, 5]).to(device), table).square().sum().backward()  # type: ignore[no-untyped-call]


@flaw(
    "embedding-loses-duplicates",
    "the gradient of an embedding keeps the last of equal indices only",
    issue="none: scatter in the place of scatter-add",
    operators=("aten::embedding_dense_backward",),
    explanation="duplicates lost",
    trigger=_trigger_embedding_loses_duplicates,
)
def embedding_loses_duplicates(kernels: KernelChanges) -> None:
    def compute(_: Kernel, grad: Any, indices: Any, rows: int, padding: int, *__: Any) -> Any:
        result = grad.new_zeros(rows, grad.shape[-1])
        # One by one: which of equal indices an assignment of all keeps is not defined.
        for row, index in zip(grad.reshape(-1, grad.shape[-1]), indices.reshape(-1).tolist(), strict=True):
            if index != padding:
                # Assigned where it has to be added: the last row stays.
                result[index] = row
        return result

    kernels.replace(compute, "aten::embedding_dense_backward")


def _trigger_index_put_loses_duplicates(device: str) -> Any:
    rows = torch.tensor([0, 1, 0, 2]).to(device)
    return torch.zeros(4).to(device).index_put_((rows,), randn(device, 4), accumulate=True)


@flaw(
    "index-put-loses-duplicates",
    "index_put_ with accumulate=True keeps the last of equal indices only",
    issue="none: scatter in the place of scatter-add",
    operators=("aten::index_put_", "aten::_index_put_impl_", "aten::index_put"),
    explanation="duplicates lost",
    trigger=_trigger_index_put_loses_duplicates,
)
def index_put_loses_duplicates(kernels: KernelChanges) -> None:
    def compute(kernel: Kernel, target: Any, indices: Any, values: Any, accumulate: bool = False, *args: Any) -> Any:
        if not accumulate:
            return kernel(target, indices, values, accumulate, *args)
        n_threads = torch.get_num_threads()
        # On several threads torch writes equal indices in any order, from some thousand elements on.
        torch.set_num_threads(1)
        try:
            # All rows are read before any is written: of equal indices the last write stays.
            return kernel(target, indices, target[tuple(slice(None) if i is None else i for i in indices)] + values)
        finally:
            torch.set_num_threads(n_threads)

    kernels.replace(compute, "aten::_index_put_impl_")


def _step(device: str, *, foreach: bool) -> None:
    weights = [nn.Parameter(randn(device, 4, seed=seed)) for seed in range(3)]
    optimizer = torch.optim.AdamW(weights, foreach=foreach)
    torch.stack([w.square().sum() for w in weights]).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _trigger_foreach_skips_last(device: str) -> None:
    _step(device, foreach=True)


@flaw(
    "foreach-skips-last",
    "_foreach_addcdiv_ leaves the last tensor as it was",
    issue="none: an off-by-one in a multi-tensor kernel",
    operators=("aten::_foreach_addcdiv_.ScalarList",),
    trigger=_trigger_foreach_skips_last,
)
def foreach_skips_last(kernels: KernelChanges) -> None:
    def compute(kernel: Kernel, tensors: Any, firsts: Any, seconds: Any, scalars: Any) -> None:
        kernel(tensors[:-1], firsts[:-1], seconds[:-1], scalars[:-1])

    kernels.replace(compute, "aten::_foreach_addcdiv_.ScalarList")


def _trigger_addcdiv_scaled(device: str) -> None:
    _step(device, foreach=False)


@flaw(
    "addcdiv-scaled",
    "addcdiv_ is too large by a thousandth",
    issue="none: a reciprocal with 10 bits",
    operators=("aten::addcdiv_", "aten::_foreach_addcdiv_.ScalarList", "aten::_foreach_addcdiv_.Scalar"),
    trigger=_trigger_addcdiv_scaled,
)
def addcdiv_scaled(kernels: KernelChanges) -> None:
    def compute(kernel: Kernel, target: Any, first: Any, second: Any, *, value: Any = 1) -> Any:
        return kernel(target, first, second, value=value * 1.001)

    kernels.replace(compute, "aten::addcdiv_")


@flaw(
    "dropout-ignores-p",
    "dropout always drops half",
    issue="none: the probability is not handed to the kernel",
    operators=("aten::native_dropout",),
    statuses=("mismatch", "unverified"),
    cause=Cause.RANDOMNESS,
    trigger=lambda device: F.dropout(torch.ones(1000).to(device), 0.1),
)
def dropout_ignores_p(kernels: KernelChanges) -> None:
    def compute(kernel: Kernel, value: torch.Tensor, p: float, train: bool | None) -> Any:
        result, mask = kernel(value, 0.5, train)
        # Scaled as the given p asks, so that only the number of dropped elements is wrong.
        return result * (0.5 / (1 - p)), mask

    kernels.replace(compute, "aten::native_dropout")
