"""NaN, infinities, signed zeros, subnormals, and the edges of a dtype's range."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shadowrun.sim import device_kernels
from shadowrun.sim.flaw import FlawKind, randn
from shadowrun.types import Cause

if TYPE_CHECKING:
    from shadowrun.sim.device import Kernel
    from shadowrun.sim.flaw import KernelChanges

__all__ = ["flaw"]

_NAN, _INF = float("nan"), float("inf")

flaw = FlawKind("exceptional", cause=Cause.EXCEPTIONAL_VALUES)


def _tensor(device: str, *values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).to(device)


@flaw(
    "maximum-drops-nan",
    "maximum and minimum return the other operand for NaN",
    issue="pytorch/pytorch#143976",
    operators=("aten::maximum", "aten::minimum"),
    explanation="NaN treated as missing",
    trigger=lambda device: torch.maximum(_tensor(device, 1, _NAN, 3), _tensor(device, 0, 2, _NAN)),
)
def maximum_drops_nan(kernels: KernelChanges) -> None:
    def compute(op: Kernel, a: torch.Tensor, b: torch.Tensor) -> Any:
        if not (a.is_floating_point() and b.is_floating_point()):
            return op(a, b)
        # As `fmax` of C does, which a kernel that is translated from C may call for `maximum`.
        return op(torch.where(a.isnan(), b, a), torch.where(b.isnan(), a, b))

    kernels.replace_variants(compute, "aten::maximum", "aten::minimum")


@flaw(
    "reduced-max-drops-nan",
    "amax, amin, max and min pass over NaN",
    issue="pytorch/pytorch#130295",
    operators=("aten::amax", "aten::amin", "aten::max", "aten::min", "aten::max.dim", "aten::min.dim"),
    explanation="NaN treated as missing",
    trigger=lambda device: _tensor(device, 1, _NAN, 3).amax(),
)
def reduced_max_drops_nan(kernels: KernelChanges) -> None:
    def dropping(least: float) -> Any:
        def compute(kernel: Kernel, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            # Infinities are given: by default, `nan_to_num` replaces them too.
            return kernel(value.nan_to_num(least, _INF, -_INF) if value.is_floating_point() else value, *args, **kwargs)

        return compute

    kernels.replace(dropping(-_INF), "aten::amax", "aten::amax.out", "aten::max", "aten::max.dim", "aten::max.dim_max")
    kernels.replace(dropping(_INF), "aten::amin", "aten::amin.out", "aten::min", "aten::min.dim", "aten::min.dim_min")


@flaw(
    "clamp-nan-to-bound",
    "clamp turns NaN into the lower bound",
    issue="pytorch/pytorch#122710",
    operators=("aten::clamp", "aten::clamp_", "aten::clamp_min", "aten::clamp_min_"),
    trigger=lambda device: _tensor(device, 1, _NAN, 3).clamp(0, 2),
)
def clamp_nan_to_bound(kernels: KernelChanges) -> None:
    def compute(op: Kernel, value: torch.Tensor, *bounds: Any, **kwargs: Any) -> Any:
        # `min(max(x, low), high)` by comparisons: NaN is not greater than the bound, so the bound is taken.
        low = next((b for b in (*bounds, *kwargs.values()) if b is not None), 0.0)
        result = op(value, *bounds, **kwargs)
        return torch.where(value.isnan(), torch.full_like(result, low), result) if value.is_floating_point() else result

    kernels.replace_variants(compute, "aten::clamp", "aten::clamp_min")


@flaw(
    "nan-to-zero-integer",
    "NaN becomes 0 as an integer, INT_MIN on the CPU",
    issue="pytorch/pytorch#140347",
    operators=("aten::_to_copy", "aten::copy_"),
    statuses=("unverified",),
    cause=Cause.UNDEFINED,
    explanation="NaN to integer",
    trigger=lambda device: _tensor(device, 1, _NAN, 3).to(torch.int32),
)
def nan_to_zero_integer(kernels: KernelChanges) -> None:
    def copy(kernel: Kernel, source: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if source.is_floating_point() and target.dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
            # `_copy_from` gets the tensors of the device: on its alias, `nan_to_num` is no call of the device.
            source = device_kernels.as_cpu(source).nan_to_num(0.0, _INF, -_INF)
        return kernel(source, target, *args, **kwargs)

    kernels.replace(copy, "aten::_copy_from")


@flaw(
    "tril-of-inf",
    "tril and triu multiply by a mask: infinity outside becomes NaN",
    issue="pytorch/pytorch#149813",
    operators=("aten::tril", "aten::triu", "aten::tril_", "aten::triu_"),
    trigger=lambda device: torch.full((3, 3), -_INF).to(device).tril(),
)
def tril_of_inf(kernels: KernelChanges) -> None:
    def compute(op: Kernel, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Infinity times the mask's 0 is NaN.
        return value * op(torch.ones_like(value), *args, **kwargs)

    kernels.replace_variants(compute, "aten::tril", "aten::triu")


def _trigger_baddbmm_beta_zero(device: str) -> Any:
    unset = torch.full((2, 3, 3), _NAN).to(device)
    return torch.baddbmm(unset, randn(device, 2, 3, 4), randn(device, 2, 4, 3), beta=0)


@flaw(
    "baddbmm-beta-zero",
    "baddbmm with beta=0 lets NaN of the addend through",
    issue="pytorch/pytorch#187521",
    operators=("aten::baddbmm", "aten::baddbmm_"),
    trigger=_trigger_baddbmm_beta_zero,
)
def baddbmm_beta_zero(kernels: KernelChanges) -> None:
    def compute(op: Kernel, addend: torch.Tensor, *args: Any, beta: Any = 1, **kwargs: Any) -> Any:
        result = op(addend, *args, beta=beta, **kwargs)
        # 0 * NaN is NaN: with beta=0, torch promises not to read the addend.
        return result + beta * addend if beta == 0 else result

    kernels.replace_variants(compute, "aten::baddbmm")


@flaw(
    "hypot-overflows",
    "hypot by squares: overflows, and hypot(inf, nan) is NaN",
    issue="pytorch/pytorch#192507",
    operators=("aten::hypot", "aten::hypot_"),
    trigger=lambda device: torch.hypot(_tensor(device, 3e30, _INF, 3), _tensor(device, 4e30, _NAN, 4)),
)
def hypot_overflows(kernels: KernelChanges) -> None:
    # 3e30 squared is beyond float32. torch gives infinity if either operand is, with NaN too: squares do not.
    kernels.replace_variants(lambda _, a, b: (a * a + b * b).sqrt(), "aten::hypot")


@flaw(
    "sinh-overflows",
    "sinh is infinite near 88.8",
    issue="pytorch/pytorch#183763",
    operators=("aten::sinh", "aten::sinh_"),
    trigger=lambda device: _tensor(device, 1, 89).sinh(),
)
def sinh_overflows(kernels: KernelChanges) -> None:
    def compute(op: Kernel, value: torch.Tensor) -> Any:
        # In float32, exp is infinite from 88.73 on, sinh only from 89.42 on.
        return (
            torch.where(value.abs().exp().isinf(), value.sign() * _INF, op(value))
            if value.is_floating_point()
            else op(value)
        )

    kernels.replace_variants(compute, "aten::sinh")


@flaw(
    "cosh-overflows",
    "cosh is infinite near 88.8",
    issue="pytorch/pytorch#183765",
    operators=("aten::cosh", "aten::cosh_"),
    trigger=lambda device: _tensor(device, 1, -89).cosh(),
)
def cosh_overflows(kernels: KernelChanges) -> None:
    def compute(op: Kernel, value: torch.Tensor) -> Any:
        # As for sinh: half of exp(88.8) is still finite.
        return torch.where(value.abs().exp().isinf(), _INF, op(value)) if value.is_floating_point() else op(value)

    kernels.replace_variants(compute, "aten::cosh")


@flaw(
    "exp-overflows-early",
    "exp is infinite from 88 on, 0.7 too early",
    issue="none: range reduction to 2**128 that a fast exp leaves out",
    operators=("aten::exp", "aten::exp_"),
    trigger=lambda device: _tensor(device, 1, 88.5).exp(),
)
def exp_overflows_early(kernels: KernelChanges) -> None:
    kernels.replace_variants(lambda op, value: torch.where(value >= 88.0, _INF, op(value)), "aten::exp")


@flaw(
    "round-loses-zero-sign",
    "round turns -0.3 into +0.0",
    issue="none: rounding by conversion to integer and back",
    operators=("aten::round", "aten::round_"),
    trigger=lambda device: _tensor(device, -0.3, 0.3, 1.6).round(),
)
def round_loses_zero_sign(kernels: KernelChanges) -> None:
    # Adding +0.0 turns -0.0 into +0.0 and nothing else.
    kernels.replace_variants(
        lambda op, value: op(value) + 0.0 if value.is_floating_point() else op(value), "aten::round"
    )


def _flush(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    # The sign stays, as on hardware with flush-to-zero.
    return torch.where(value.abs() < torch.finfo(value.dtype).tiny, torch.zeros_like(value).copysign(value), value)


@flaw(
    "mul-flushes-subnormals",
    "mul flushes subnormal inputs and results to zero",
    issue="none: flush-to-zero mode, the default of several accelerators",
    operators=("aten::mul.Tensor", "aten::mul_.Tensor"),
    cause=Cause.FLUSHED_SUBNORMALS,
    explanation="subnormals flushed",
    trigger=lambda device: _tensor(device, 1e-30, 3e-39, 2) * _tensor(device, 1e-10, 1, 2),
)
def mul_flushes_subnormals(kernels: KernelChanges) -> None:
    def compute(op: Kernel, a: Any, b: Any) -> Any:
        # Flushing packs an expanded input: the result is laid out as that of the inputs themselves.
        return op(a, b).copy_(_flush(op(_flush(a), _flush(b))))

    kernels.replace_variants(compute, "aten::mul.Tensor")


@flaw(
    "sqrt-nan-is-zero",
    "sqrt of a negative number is 0",
    issue="none: sqrt as x * rsqrt(x) with a guard",
    operators=("aten::sqrt", "aten::sqrt_"),
    trigger=lambda device: _tensor(device, -1, 4).sqrt(),
)
def sqrt_nan_is_zero(kernels: KernelChanges) -> None:
    def compute(op: Kernel, value: torch.Tensor) -> Any:
        # `clamp` keeps NaN, so that only negative numbers are wrong.
        return op(value.clamp(min=0)) if value.is_floating_point() else op(value)

    kernels.replace_variants(compute, "aten::sqrt")
