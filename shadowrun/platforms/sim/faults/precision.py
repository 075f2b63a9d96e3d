"""Fewer bits than the dtype promises, and other correct roundings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shadowrun.platforms.sim.bench import Bench, fault

if TYPE_CHECKING:
    from shadowrun.platforms.sim.device import Kernel

__all__: list[str] = []

_PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Position of the first factor."""

_CONVOLUTIONS = ("aten::convolution_overrideable", "aten::convolution_backward_overrideable")


def _to_bf16(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.bfloat16).to(torch.float32) if value.dtype == torch.float32 else value


def _to_tf32(value: torch.Tensor) -> torch.Tensor:
    """Rounds float32 to 10 bits of mantissa, to nearest."""
    if value.dtype != torch.float32:
        return value
    rounded = ((value.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
    return torch.where(value.isfinite(), rounded, value)


def _rounding_factors(bench: Bench, round_: Any) -> None:
    for name, first in _PRODUCTS.items():

        def compute(op: Kernel, *args: Any, first: int = first, **kwargs: Any) -> Any:
            factors = [round_(a) for a in args[first : first + 2]]
            return op(*args[:first], *factors, *args[first + 2 :], **kwargs)

        bench.family(compute, name)


@fault("matmul-in-bf16")
def _matmul_bf16(bench: Bench) -> None:
    _rounding_factors(bench, _to_bf16)


@fault("matmul-in-tf32")
def _matmul_tf32(bench: Bench) -> None:
    _rounding_factors(bench, _to_tf32)


@fault("convolution-in-tf32")
def _convolution_tf32(bench: Bench) -> None:
    def forward(kernel: Kernel, source: torch.Tensor, weight: torch.Tensor, *args: Any) -> Any:
        return kernel(_to_tf32(source), _to_tf32(weight), *args)

    def backward(kernel: Kernel, grad: torch.Tensor, source: torch.Tensor, weight: torch.Tensor, *args: Any) -> Any:
        return kernel(_to_tf32(grad), _to_tf32(source), _to_tf32(weight), *args)

    bench.replace(forward, _CONVOLUTIONS[0])
    bench.replace(backward, _CONVOLUTIONS[1])


def _product_in_half(a: torch.Tensor, b: torch.Tensor, step: int = 8) -> torch.Tensor:
    """A product whose partial sums over `step` terms are rounded to the dtype of the factors."""
    total = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=a.dtype)
    for start in range(0, a.shape[-1], step):
        part = a[..., start : start + step].float() @ b[..., start : start + step, :].float()
        total = (total.float() + part).to(a.dtype)
    return total


@fault("matmul-accumulates-in-half")
def _half(bench: Bench) -> None:
    def product(op: Kernel, a: torch.Tensor, b: torch.Tensor, **kwargs: Any) -> Any:
        half = a.dtype in (torch.float16, torch.bfloat16)
        return _product_in_half(a, b) if half else op(a, b, **kwargs)

    def sum_(op: Kernel, c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
        if a.dtype not in (torch.float16, torch.bfloat16):
            return op(c, a, b, beta=beta, alpha=alpha)
        return alpha * _product_in_half(a, b) + (beta * c if beta else 0)

    bench.family(product, "aten::mm", "aten::bmm")
    bench.family(sum_, "aten::addmm", "aten::baddbmm")


@fault("sum-in-other-order")
def _sum(bench: Bench) -> None:
    def compute(kernel: Kernel, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (
            kernel(value.flip(tuple(range(value.dim()))), *args, **kwargs)
            if _reduces_all(value, args)
            else (kernel(value.flip(tuple(args[0])), *args, **kwargs))
        )

    bench.replace(compute, "aten::sum.dim_IntList", "aten::sum.IntList_out")


def _reduces_all(value: torch.Tensor, args: tuple[Any, ...]) -> bool:
    return not args or not args[0] or len(args[0]) == value.dim()


@fault("tanh-one-ulp-off")
def _tanh(bench: Bench) -> None:
    def compute(op: Kernel, value: torch.Tensor) -> Any:
        result = op(value)
        if result.dtype not in (torch.float32, torch.float64):
            return result
        return torch.where(result.abs() < 1, result.nextafter(result.sign() * 1.0), result)

    bench.family(compute, "aten::tanh")
