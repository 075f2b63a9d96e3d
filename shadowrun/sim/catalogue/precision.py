"""Fewer bits than the dtype promises; and two correct kernels that only round differently."""

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

# Position of the first factor.
_FIRST_FACTOR = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
# Their variants in place are wrong with them.
_PRODUCTS = (*_FIRST_FACTOR, "aten::addmm_", "aten::baddbmm_")

_CONVOLUTIONS = ("aten::convolution_overrideable", "aten::convolution_backward_overrideable")

flaw = FlawKind("precision", cause=Cause.REDUCED_PRECISION)


def _trigger_matmul(device: str) -> Any:
    hidden = F.linear(randn(device, 16, 64), randn(device, 32, 64, seed=1), randn(device, 32, seed=2))
    return (hidden @ randn(device, 32, 8, seed=3)).unsqueeze(0) @ randn(device, 1, 8, 8, seed=4)


def _to_bf16(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.bfloat16).to(torch.float32) if value.dtype == torch.float32 else value


def _rounding_factors(kernels: KernelChanges, round_: Any) -> None:
    for name, first in _FIRST_FACTOR.items():
        # A default binds the position of this round: a closure would see the last one.
        def compute(op: Kernel, *args: Any, first: int = first, **kwargs: Any) -> Any:
            factors = [round_(a) for a in args[first : first + 2]]
            return op(*args[:first], *factors, *args[first + 2 :], **kwargs)

        kernels.replace_variants(compute, name)


@flaw(
    "matmul-in-bf16",
    "float32 products round their inputs to bfloat16",
    issue="none: float32 matmul precision 'medium', as a device's default",
    operators=_PRODUCTS,
    explanation="inputs rounded to bf16",
    trigger=_trigger_matmul,
)
def matmul_in_bf16(kernels: KernelChanges) -> None:
    _rounding_factors(kernels, _to_bf16)


def _to_tf32(value: torch.Tensor) -> torch.Tensor:
    """Rounds float32 to 10 bits of mantissa, to nearest."""
    if value.dtype != torch.float32:
        return value
    # Of 23 bits, 10 stay: half of the last one that stays is added, and the 13 below it are cut off.
    rounded = ((value.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
    # Half a unit added to the bits of a NaN may carry into its sign: it would become a zero.
    return torch.where(value.isfinite(), rounded, value)


@flaw(
    "matmul-in-tf32",
    "float32 products round their inputs to TF32",
    issue="none: CUDA's allow_tf32",
    operators=_PRODUCTS,
    explanation="inputs rounded to tf32",
    trigger=_trigger_matmul,
)
def matmul_in_tf32(kernels: KernelChanges) -> None:
    _rounding_factors(kernels, _to_tf32)


def _trigger_convolution_in_tf32(device: str) -> None:
    weight = randn(device, 4, 3, 3, 3, seed=1).requires_grad_()
    F.conv2d(randn(device, 2, 3, 8, 8).requires_grad_(), weight).square().sum().backward()  # type: ignore[no-untyped-call]


@flaw(
    "convolution-in-tf32",
    "float32 convolutions round their inputs to TF32",
    issue="none: cuDNN's allow_tf32",
    operators=("aten::convolution", "aten::convolution_backward"),
    explanation="inputs rounded to tf32",
    trigger=_trigger_convolution_in_tf32,
)
def convolution_in_tf32(kernels: KernelChanges) -> None:
    def forward(kernel: Kernel, source: torch.Tensor, weight: torch.Tensor, *args: Any) -> Any:
        return kernel(_to_tf32(source), _to_tf32(weight), *args)

    def backward(kernel: Kernel, grad: torch.Tensor, source: torch.Tensor, weight: torch.Tensor, *args: Any) -> Any:
        return kernel(_to_tf32(grad), _to_tf32(source), _to_tf32(weight), *args)

    kernels.replace(forward, _CONVOLUTIONS[0])
    kernels.replace(backward, _CONVOLUTIONS[1])


def _product_in_half(a: torch.Tensor, b: torch.Tensor, step: int = 8) -> torch.Tensor:
    """A product whose partial sums over `step` terms are rounded to the dtype of the factors."""
    total = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=a.dtype)
    for start in range(0, a.shape[-1], step):
        part = a[..., start : start + step].float() @ b[..., start : start + step, :].float()
        # The accumulator is rounded after each step of a matrix unit, which adds some terms at once.
        total = (total.float() + part).to(a.dtype)
    return total


@flaw(
    "matmul-accumulates-in-half",
    "float16 and bfloat16 products add up in the same dtype",
    issue="none: CUDA's allow_fp16_accumulation",
    operators=_PRODUCTS,
    explanation="accumulation in half",
    trigger=lambda device: randn(device, 8, 512).bfloat16() @ randn(device, 512, 8, seed=1).bfloat16(),
)
def matmul_accumulates_in_half(kernels: KernelChanges) -> None:
    def product(op: Kernel, a: torch.Tensor, b: torch.Tensor, **kwargs: Any) -> Any:
        half = a.dtype in (torch.float16, torch.bfloat16)
        return _product_in_half(a, b) if half else op(a, b, **kwargs)

    def sum_(op: Kernel, c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
        if a.dtype not in (torch.float16, torch.bfloat16):
            return op(c, a, b, beta=beta, alpha=alpha)
        # As torch: with beta=0 the addend is not read, and its NaN does not count.
        return alpha * _product_in_half(a, b) + (beta * c if beta else 0)

    kernels.replace_variants(product, "aten::mm", "aten::bmm")
    kernels.replace_variants(sum_, "aten::addmm", "aten::baddbmm")


@flaw(
    "sum-in-other-order",
    "sum adds from the other end: correct, other rounding",
    issue="none: any other summation order",
    operators=("aten::sum", "aten::sum.dim_IntList"),
    statuses=("match",),
    cause=Cause.ROUNDING,
    explanation="accumulation order",
    trigger=lambda device: randn(device, 100_003).sum(),
)
def sum_in_other_order(kernels: KernelChanges) -> None:
    def compute(kernel: Kernel, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # No dims, or an empty list of them, means all.
        dims = range(value.dim()) if not args or not args[0] else args[0]
        return kernel(value.flip(tuple(dims)), *args, **kwargs)

    kernels.replace(compute, "aten::sum.dim_IntList", "aten::sum.IntList_out")


@flaw(
    "tanh-one-ulp-off",
    "tanh is one unit in the last place too large: within any vendor's bound",
    issue="none: the published maximum errors of math libraries",
    operators=("aten::tanh", "aten::tanh_"),
    statuses=("match",),
    cause=Cause.ROUNDING,
    trigger=lambda device: randn(device, 64).tanh(),
)
def tanh_one_ulp_off(kernels: KernelChanges) -> None:
    def compute(op: Kernel, value: torch.Tensor) -> Any:
        result = op(value)
        if result.dtype not in (torch.float32, torch.float64):
            return result
        # A tanh above 1, or a zero without its sign, would be wrong, and not only rounded in another way.
        inside = (result.abs() < 1) & (result != 0)
        return torch.where(inside, result.nextafter(result.sign() * 1.0), result)

    kernels.replace_variants(compute, "aten::tanh")
