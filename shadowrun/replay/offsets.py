"""Inputs laid out in memory as those of a call were: some kernels ignore where in its storage a tensor begins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.replay.oracle import tensors

if TYPE_CHECKING:
    from shadowrun.replay.case import Arguments

__all__ = ["at_offsets", "offsets"]

MOST_BYTES: Final = 64 << 20
"""Memory before a tensor that is laid out again."""


def offsets(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Storage offset of each tensor among arguments; 0 for those that have none or too much memory before them."""
    return tuple(_offset(t) for t in tensors(args, kwargs))


def _offset(t: torch.Tensor) -> int:
    if t.layout is not torch.strided or t.is_conj() or t.is_neg() or t._is_zerotensor() or not t.numel():
        return 0
    offset = int(t.storage_offset())
    return offset if offset * t.element_size() <= MOST_BYTES else 0


def at_offsets(args: tuple[Any, ...], kwargs: dict[str, Any], wanted: tuple[int, ...]) -> Arguments:
    """Lay tensors at other offsets of storages of their own, zeros before them.

    Args:
        args: Arguments with the tensors of `offsets`, in that order.
        kwargs: By name.
        wanted: Their offsets.
    """
    laid = {id(t): _laid(t, n) for t, n in zip(tensors(args, kwargs), wanted, strict=True) if n}

    def each(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return laid.get(id(value), value)
        return type(value)(map(each, value)) if isinstance(value, (list, tuple)) else value

    return tuple(map(each, args)), {name: each(value) for name, value in kwargs.items()}


def _laid(t: torch.Tensor, offset: int) -> torch.Tensor:
    span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    memory = torch.zeros(offset + span, dtype=t.dtype, device=t.device)
    memory.narrow(0, offset, span).copy_(t.as_strided((span,), (1,), t.storage_offset()))
    return memory.as_strided(t.shape, t.stride(), offset)
