"""Three ways to run the same operators again: with other roundings, in float64, and with the same draws.

A graph of operators has no table of bounds, as one operator has. What rounding may do to its results is measured:
each operator's inputs are moved by about one unit in their last place, a few times (Monte-Carlo arithmetic; Parker
1997). That includes what cancels inside of the graph, which moving the graph's own inputs would miss.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from shadowrun.intercept.torchapi import DispatchMode
from shadowrun.numerics.precision import FORMATS
from shadowrun.numerics.tolerance import ulp_bound

__all__ = ["Draws", "OtherRoundings", "Redrawn", "Widened", "grouped_product", "is_random", "moved"]

_REAL: Final = {torch.complex64: torch.float32, torch.complex128: torch.float64, torch.complex32: torch.float16}
_WIDE: Final = {
    **dict.fromkeys(FORMATS, torch.float64),
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}


class Draws:
    """What random operators returned, in the order of their calls."""

    def __init__(self) -> None:
        self.kept: list[Any] = []


class Redrawn(DispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what random operators return."""

    def __init__(self, draws: Draws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if is_random(func, args, kwargs or {}):
            self._draws.kept.append(_each(out, lambda t: t.detach().clone()))
        return out


class OtherRoundings(DispatchMode):  # type: ignore[no-untyped-call]
    """Moves what each inexact operator returns by about one unit in the last place, up or down.

    Attributes:
        mantissa: Bits of the shortest mantissa among the results.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = generator
        self.mantissa = 52

    def _moved(self, t: torch.Tensor) -> torch.Tensor:
        if t.dtype in FORMATS:
            self.mantissa = min(self.mantissa, FORMATS[t.dtype].mantissa)
        return moved(t, self._generator)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not _computes(func, args, kwargs or {}):
            return out
        return _each(out, self._moved)


class Widened(DispatchMode):  # type: ignore[no-untyped-call]
    """Computes in float64 what comes in any floating dtype, with the draws of another run."""

    def __init__(self, draws: Draws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = iter(draws.kept)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_random(func, args, kwargs or {}):
            kept = next(self._draws, None)
            if kept is not None:
                if func._schema.is_mutable and isinstance(args[0], torch.Tensor):
                    return args[0].copy_(kept)
                return _each(kept, _wide)
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **(kwargs or {}))
        schema = func._schema.arguments
        args = tuple(
            _widened(schema[i].name if i < len(schema) else "", a, keep=_writes(schema, i)) for i, a in enumerate(args)
        )
        kwargs = {k: _widened(k, v, keep=False) for k, v in (kwargs or {}).items()}
        return _NO_FLOAT64.get(func._schema.name, func)(*args, **kwargs)


def grouped_product(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``aten::_grouped_mm`` (experts of a mixture), product by product, in any dtype.

    Args:
        a: ``[n, k]``, or ``[g, n, k]``.
        b: ``[k, m]``, or ``[g, k, m]``.
        offs: Where each group ends, int32 ``[g]``: rows of `a`, columns of `b`, or, where both are matrices, ``k``.
        bias: Added where it is given.
        out_dtype: Of the result; that of `a` by default.

    Returns:
        ``[n, m]`` where one of both is a matrix, else ``[g, n, m]``. What lies behind the last group is 0.
    """
    ends = [] if offs is None else offs.tolist()
    spans = list(zip([0, *ends], ends, strict=False))
    if a.dim() == b.dim() == 3:
        out = a @ b
    elif a.dim() == b.dim():
        out = torch.stack([a[:, i:j] @ b[i:j] for i, j in spans])
    elif b.dim() == 3:
        out = a.new_zeros(a.shape[0], b.shape[2])
        for (i, j), weight in zip(spans, b, strict=True):
            out[i:j] = a[i:j] @ weight
    else:
        out = a.new_zeros(a.shape[1], b.shape[1])
        for (i, j), weight in zip(spans, a, strict=True):
            out[:, i:j] = weight @ b[:, i:j]
    return (out if bias is None else out + bias).to(out_dtype or a.dtype)


def moved(t: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A copy with each element one unit in the last place or so away, up or down; other dtypes as they are."""
    dtype = _REAL.get(t.dtype, t.dtype)
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64) or t.layout is not torch.strided:
        return t
    signs = torch.randint(0, 2, t.shape, generator=generator, dtype=torch.int8).mul_(2).sub_(1)
    factor = signs.to(t.device, dtype).mul_(torch.finfo(dtype).eps).add_(1.0)
    return torch.empty_like(t).copy_(t * factor)  # in the order in which the elements of `t` lie


def _computes(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether it rounds: then its result may be another; what it copies was moved before."""
    if not isinstance(func, torch._ops.OpOverload) or func._schema.is_mutable or is_random(func, args, kwargs):
        return False
    if any(r.alias_info is not None for r in func._schema.returns):
        return False
    inputs = [t for a in args for t in (a if isinstance(a, (list, tuple)) else (a,)) if isinstance(t, torch.Tensor)]
    name = str(func.name())  # type: ignore[no-untyped-call]
    return bool(inputs) and (name.startswith("aten::_to_copy") or ulp_bound(name, [t.dtype for t in inputs]) != 0)


def is_random(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call of an operator draws; attention without dropout does not, though its operator is tagged so."""
    if not isinstance(func, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for i, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            return bool(args[i] if i < len(args) else kwargs.get("dropout_p", argument.default_value))
    return True


def _each(out: Any, change: Any) -> Any:
    if isinstance(out, torch.Tensor):
        return change(out)
    if isinstance(out, (list, tuple)):
        return type(out)(_each(v, change) for v in out)
    return out


def _wide(t: torch.Tensor) -> torch.Tensor:
    wide = _WIDE.get(t.dtype)
    return t if wide is None or wide is t.dtype else t.to(wide)


def _writes(schema: Any, i: int) -> bool:
    info = schema[i].alias_info if i < len(schema) else None
    return info is not None and bool(info.is_write)


def _widened(name: str, value: Any, *, keep: bool) -> Any:
    if isinstance(value, torch.dtype):
        return _WIDE.get(value, value)
    if name == "half_to_float":
        return False
    if isinstance(value, torch.Tensor):
        return value if keep else _wide(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_widened("", v, keep=keep) for v in value)
    return value


_NO_FLOAT64: Final = {"aten::_grouped_mm": grouped_product}
"""Operators without a float64 kernel (seen on 2.13), and what computes the same."""
