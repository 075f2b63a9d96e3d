"""What looks at arguments have in common: which tensors are known, and where integers and elements lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from shadowrun.intercept.torchapi import shares_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["ArgumentCheck", "NamedArguments", "integers", "is_inside", "overlaps_itself", "shared_result", "tensors"]

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


def integers(t: torch.Tensor) -> list[int]:
    """Integers of a tensor, in order.

    Read on the CPU: the lazy device has views above Functionalize only, and a handler works below it.
    """
    return [int(n) for n in t.cpu().reshape(-1).tolist()]


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


def shared_result(given: NamedArguments, results: frozenset[str]) -> str:
    """Why results that a call is given (``out=``) may take away the checks of its inputs; empty where they may not.

    Kernels look at indices before they write, and read them again afterwards. A result that is resized grows into what
    lies behind it in its memory, so all of that memory counts.

    Args:
        given: Arguments by name.
        results: Names of those that are results.
    """
    by_name = [(name, t) for name, value in given.items() for t in _dense_ones(value)]
    for name, out in by_name:
        for other, t in by_name if name in results else ():
            if t is out and other == name:
                continue
            # A sum is often written to its first term: no number of it is a place.
            holds_places = other in results or not (t.is_floating_point() or t.is_complex())
            is_same = _place(t) == _place(out) and not holds_places
            # By storage, not by address: two results of no elements may be resized in one storage.
            if not is_same and shares_memory(t, out):
                return f"{name}, which it writes, shares memory with {other}"
    return ""


def _place(t: torch.Tensor) -> tuple[Any, ...]:
    return t.dtype, t.data_ptr(), t.shape, t.stride()


def _dense_ones(value: Any) -> Iterator[torch.Tensor]:
    for v in value if isinstance(value, (list, tuple)) else (value,):
        if type(v) in (torch.Tensor, torch.nn.Parameter) and v.layout is torch.strided and not v.is_meta:
            yield v
