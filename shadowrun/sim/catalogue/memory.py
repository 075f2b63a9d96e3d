"""Right values, and memory that is not as the operator's schema promises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from shadowrun.sim.flaw import FlawKind, randn
from shadowrun.strided import span
from shadowrun.types import Cause

if TYPE_CHECKING:
    from shadowrun.sim.device import Kernel
    from shadowrun.sim.flaw import KernelChanges

__all__ = ["flaw"]

flaw = FlawKind("memory", cause=Cause.MEMORY_EFFECTS)


def _trigger_layer_norm_centres_its_input(device: str) -> Any:
    x = randn(device, 4, 6)
    return x + F.layer_norm(x, (6,))


@flaw(
    "layer-norm-centres-its-input",
    "layer normalisation subtracts the mean in its input's own memory",
    issue="none: a kernel that takes its input for scratch memory",
    operators=("aten::native_layer_norm",),
    explanation="input overwritten",
    trigger=_trigger_layer_norm_centres_its_input,
)
def layer_norm_centres_its_input(kernels: KernelChanges) -> None:
    def compute(kernel: Kernel, value: torch.Tensor, *args: Any) -> Any:
        results = kernel(value, *args)
        if value.numel():
            # After the kernel has read it: the results are right, and only a later reader of the input sees the
            # fault.
            value.sub_(value.mean(-1, keepdim=True))
        return results

    kernels.replace(compute, "aten::native_layer_norm")


def _trigger_mul_writes_past_the_view(device: str) -> Any:
    table = randn(device, 4, 6)
    table[1:3].mul_(0.5)
    return table.abs()


@flaw(
    "mul-writes-past-the-view",
    "mul_ by a number also multiplies what lies after the last element",
    issue="none: a vector loop whose tail is not masked",
    operators=("aten::mul_.Tensor", "aten::mul_.Scalar"),
    explanation="memory outside the argument written",
    trigger=_trigger_mul_writes_past_the_view,
)
def mul_writes_past_the_view(kernels: KernelChanges) -> None:
    def compute(kernel: Kernel, target: torch.Tensor, factor: Any) -> Any:
        result = kernel(target, factor)
        # Another factor would have to be laid out like the element behind the end.
        is_number = not isinstance(factor, torch.Tensor) or factor.dim() == 0
        if target.numel() and is_number:
            after = target.storage_offset() + span(target.shape, target.stride())
            # Inside of the storage only: a write outside of it would damage this process.
            if (after + 1) * target.element_size() <= target.untyped_storage().nbytes():
                kernel(target.as_strided((1,), (1,), after), factor)
        return result

    kernels.replace(compute, "aten::mul_.Tensor", "aten::mul_.Scalar")


def _trigger_clone_aliases(device: str) -> Any:
    kept = randn(device, 4, 6)
    changed = kept.clone().add_(1)
    return kept.abs(), changed


@flaw(
    "clone-aliases",
    "clone of a contiguous tensor returns its input's own memory",
    issue="none: a copy that is put off and never made",
    operators=("aten::clone",),
    explanation="result shares memory with an input",
    trigger=_trigger_clone_aliases,
)
def clone_aliases(kernels: KernelChanges) -> None:
    def compute(kernel: Kernel, value: torch.Tensor, **kwargs: Any) -> Any:
        return value if value.is_contiguous() else kernel(value, **kwargs)

    kernels.replace(compute, "aten::clone")
