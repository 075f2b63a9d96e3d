"""The forms in which the inputs of a call are laid out, to run it in two ways."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shadowrun.sweep.inputs import is_plain, leaves

__all__ = ["Way", "as_table", "at", "flattened", "mapped", "packed"]

_ROW = 7


@dataclass(frozen=True, slots=True)
class Way:
    """The two ways in which a call was made.

    Attributes:
        args, kwargs: The call at once: flat vectors, contiguous tensors, the whole batch.
        change: ``strided`` or ``transposed``: how its tensors were laid out in the other way; empty in other parts.
        places: Inputs with a batch, by their places in `args`; none in other parts.
        item: Which of the batch ran alone.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    change: str = ""
    places: tuple[int, ...] = ()
    item: int = 0


def mapped(args: tuple[Any, ...], kwargs: dict[str, Any], change: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs with each tensor changed, also those in lists."""

    def each(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return change(value)
        return type(value)(each(v) for v in value) if type(value) in (list, tuple) else value

    return tuple(each(a) for a in args), {k: each(v) for k, v in kwargs.items()}


def packed(t: torch.Tensor) -> torch.Tensor:
    """The same, contiguous."""
    return t.contiguous() if is_plain(t) else t


def at(t: torch.Tensor, k: int) -> torch.Tensor:
    """Element `k` of a vector, as a vector; what has no dimensions stays."""
    return t[k : k + 1] if t.dim() else t


def as_table(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Vectors of one length in rows, as far as these are full: a vector has no other order in memory."""
    shapes = {t.shape for t in leaves([args, kwargs]) if t.dim()}
    if len(shapes) != 1 or len(next(iter(shapes))) != 1:
        return args, kwargs
    n_rows = next(iter(shapes))[0] // _ROW
    return mapped(args, kwargs, lambda t: t[: n_rows * _ROW].reshape(n_rows, _ROW) if t.dim() else t)


def flattened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], int] | None:
    """Inputs of an element-wise operator with one dimension; those without dimensions stay, they promote otherwise."""
    shapes = [t.shape for t in leaves([args, kwargs]) if t.dim()]
    try:
        shape = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None
    n = shape.numel()
    if not shapes or n < 2:
        return None
    args, kwargs = mapped(args, kwargs, lambda t: t.expand(shape).contiguous().reshape(-1) if t.dim() else t)
    return args, kwargs, n
