"""What looks at arguments have in common: which tensors are known, and where integers and elements lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["ArgumentCheck", "NamedArguments", "is_inside", "overlaps_itself", "tensors"]

NamedArguments: TypeAlias = "Mapping[str, Any]"
"""Arguments by name; None for what is not known yet."""
ArgumentCheck: TypeAlias = "Callable[[NamedArguments], Iterator[str]]"
"""Says why a call with these arguments would read or write outside of its tensors."""


def tensors(given: NamedArguments, *names: str) -> list[torch.Tensor] | None:
    """Dense tensors of these names; None if one of them is not known, or is another."""
    found = [given.get(name) for name in names]
    return found if all(isinstance(t, torch.Tensor) and t.layout is torch.strided for t in found) else None  # type: ignore[return-value]


def is_inside(t: torch.Tensor, low: int, high: int) -> bool:
    """Whether all integers are in a range, its end not included; those of another class of tensors are not known."""
    if type(t) not in (torch.Tensor, torch.nn.Parameter) or t.is_meta:
        return True
    return not t.numel() or (int(t.min()) >= low and int(t.max()) < high)


def overlaps_itself(t: torch.Tensor) -> bool:
    """Whether elements of a tensor may share memory: kernels take its memory for dense."""
    if t.layout is not torch.strided or t.numel() < 2:
        return False
    reach = 0
    # In the order of strides: each has to step over all that the smaller ones reach.
    for stride, n in sorted((s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (n - 1)
    return False
