"""NaN, infinities, signed zeros, subnormals and the edges of the range."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shadowrun.platforms.sim import natives
from shadowrun.platforms.sim.bench import Bench, fault

if TYPE_CHECKING:
    from shadowrun.platforms.sim.device import Kernel

__all__: list[str] = []

_INF = float("inf")


@fault("maximum-drops-nan")
def _maximum(bench: Bench) -> None:
    def compute(op: Kernel, a: torch.Tensor, b: torch.Tensor) -> Any:
        if not (a.is_floating_point() and b.is_floating_point()):
            return op(a, b)
        return op(torch.where(a.isnan(), b, a), torch.where(b.isnan(), a, b))

    bench.family(compute, "aten::maximum", "aten::minimum")


@fault("reduced-max-drops-nan")
def _reduced_max(bench: Bench) -> None:
    def dropping(least: float) -> Any:
        def compute(kernel: Kernel, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return kernel(value.nan_to_num(least, _INF, -_INF) if value.is_floating_point() else value, *args, **kwargs)

        return compute

    bench.replace(dropping(-_INF), "aten::amax", "aten::amax.out", "aten::max", "aten::max.dim", "aten::max.dim_max")
    bench.replace(dropping(_INF), "aten::amin", "aten::amin.out", "aten::min", "aten::min.dim", "aten::min.dim_min")


@fault("clamp-nan-to-bound")
def _clamp(bench: Bench) -> None:
    def compute(op: Kernel, value: torch.Tensor, *bounds: Any, **kwargs: Any) -> Any:
        low = next((b for b in (*bounds, *kwargs.values()) if b is not None), 0.0)
        result = op(value, *bounds, **kwargs)
        return torch.where(value.isnan(), torch.full_like(result, low), result) if value.is_floating_point() else result

    bench.family(compute, "aten::clamp", "aten::clamp_min")


@fault("nan-to-zero-integer")
def _nan_to_integer(bench: Bench) -> None:
    def copy(kernel: Kernel, source: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if source.is_floating_point() and target.dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
            source = natives.here(source).nan_to_num(0.0, _INF, -_INF)
        return kernel(source, target, *args, **kwargs)

    bench.replace(copy, "aten::_copy_from")


@fault("tril-of-inf")
def _tril(bench: Bench) -> None:
    def compute(op: Kernel, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return value * op(torch.ones_like(value), *args, **kwargs)

    bench.family(compute, "aten::tril", "aten::triu")


@fault("baddbmm-beta-zero")
def _baddbmm(bench: Bench) -> None:
    def compute(op: Kernel, addend: torch.Tensor, *args: Any, beta: Any = 1, **kwargs: Any) -> Any:
        result = op(addend, *args, beta=beta, **kwargs)
        return result + beta * addend if beta == 0 else result

    bench.family(compute, "aten::baddbmm")


@fault("hypot-overflows")
def _hypot(bench: Bench) -> None:
    bench.family(lambda _, a, b: (a * a + b * b).sqrt(), "aten::hypot")


@fault("sinh-overflows")
def _sinh(bench: Bench) -> None:
    def compute(op: Kernel, value: torch.Tensor) -> Any:
        return (
            torch.where(value.abs().exp().isinf(), value.sign() * _INF, op(value))
            if value.is_floating_point()
            else op(value)
        )

    bench.family(compute, "aten::sinh")


@fault("cosh-overflows")
def _cosh(bench: Bench) -> None:
    def compute(op: Kernel, value: torch.Tensor) -> Any:
        return torch.where(value.abs().exp().isinf(), _INF, op(value)) if value.is_floating_point() else op(value)

    bench.family(compute, "aten::cosh")


@fault("exp-overflows-early")
def _exp(bench: Bench) -> None:
    bench.family(lambda op, value: torch.where(value >= 88.0, _INF, op(value)), "aten::exp")


@fault("round-loses-zero-sign")
def _round(bench: Bench) -> None:
    # Adding +0.0 turns -0.0 into +0.0 and nothing else.
    bench.family(lambda op, value: op(value) + 0.0 if value.is_floating_point() else op(value), "aten::round")


def _flush(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    # The sign stays, as on hardware with flush-to-zero.
    return torch.where(value.abs() < torch.finfo(value.dtype).tiny, torch.zeros_like(value).copysign(value), value)


@fault("mul-flushes-subnormals")
def _mul(bench: Bench) -> None:
    def compute(op: Kernel, a: Any, b: Any) -> Any:
        # Flushing packs an expanded input: the result is laid out as that of the inputs themselves.
        return op(a, b).copy_(_flush(op(_flush(a), _flush(b))))

    bench.family(compute, "aten::mul.Tensor")


@fault("sqrt-nan-is-zero")
def _sqrt(bench: Bench) -> None:
    def compute(op: Kernel, value: torch.Tensor) -> Any:
        return op(value.clamp(min=0)) if value.is_floating_point() else op(value)

    bench.family(compute, "aten::sqrt")
