"""Right values, and memory that is not as the operator's schema promises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shadowrun.platforms.sim.bench import Bench, fault

if TYPE_CHECKING:
    from shadowrun.platforms.sim.device import Kernel

__all__: list[str] = []


@fault("layer-norm-centres-its-input")
def _layer_norm(bench: Bench) -> None:
    def compute(kernel: Kernel, value: torch.Tensor, *args: Any) -> Any:
        results = kernel(value, *args)
        if value.numel():
            value.sub_(value.mean(-1, keepdim=True))
        return results

    bench.replace(compute, "aten::native_layer_norm")


@fault("mul-writes-past-the-view")
def _mul(bench: Bench) -> None:
    def compute(kernel: Kernel, target: torch.Tensor, other: Any) -> Any:
        result = kernel(target, other)
        is_number = not isinstance(other, torch.Tensor) or other.dim() == 0
        if target.numel() and is_number:
            behind = target.storage_offset() + 1
            behind += sum((n - 1) * s for n, s in zip(target.shape, target.stride(), strict=True))
            if (behind + 1) * target.element_size() <= target.untyped_storage().nbytes():
                kernel(target.as_strided((1,), (1,), behind), other)
        return result

    bench.replace(compute, "aten::mul_.Tensor", "aten::mul_.Scalar")


@fault("clone-aliases")
def _clone(bench: Bench) -> None:
    def compute(kernel: Kernel, value: torch.Tensor, **kwargs: Any) -> Any:
        return value if value.is_contiguous() else kernel(value, **kwargs)

    bench.replace(compute, "aten::clone")
