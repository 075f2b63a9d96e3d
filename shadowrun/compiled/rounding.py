"""Dispatch modes that run the same operators with perturbed rounding, in float64, or with recorded random numbers.

One operator has a bound from a table; a graph of operators has none. Its rounding error is measured: the result of each
operator is perturbed by about one unit in the last place, several times (Monte-Carlo arithmetic; Parker 1997). This
includes cancellation inside the graph, which perturbed inputs of the graph would miss.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.intercept.torchapi import DispatchMode
from shadowrun.numerics.precision import FORMATS
from shadowrun.operators.facts import facts, ulp_bound
from shadowrun.torch_private import schema_of

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "Float64Mode",
    "PerturbedRounding",
    "RandomRecorder",
    "RandomResults",
    "filled_memory",
    "grouped_product",
    "is_random",
    "perturbed",
]

_REAL: Final = {torch.complex64: torch.float32, torch.complex128: torch.float64, torch.complex32: torch.float16}
_WIDE: Final = {
    **dict.fromkeys(FORMATS, torch.float64),
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}


class RandomResults:
    """What random operators returned, in the order of their calls."""

    def __init__(self) -> None:
        self.kept: list[Any] = []


class RandomRecorder(DispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what random operators return."""

    def __init__(self, random_results: RandomResults) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._random_results = random_results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if is_random(func, args, kwargs or {}):
            self._random_results.kept.append(_each(out, lambda t: t.detach().clone()))
        return out


class PerturbedRounding(DispatchMode):  # type: ignore[no-untyped-call]
    """Perturbs the result of each inexact operator by about one unit in the last place, up or down.

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
        return perturbed(t, self._generator)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # A copy or a view rounds nothing; perturbing its result would count one rounding twice.
        if not _computes(func, args, kwargs or {}):
            return out
        return _each(out, self._moved)


@contextlib.contextmanager
def filled_memory(number: int | None = None) -> Iterator[None]:
    """New memory holds NaN, and the largest number of integers: results with these depend on what no kernel writes.

    Torch fills it where algorithms have to be deterministic.

    Args:
        number: It holds this instead; torch has no such switch, so that this reaches ``torch.empty`` and its like only.
    """
    if number is not None:
        with _ConstantMemory(number):
            yield
        return
    was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an operator that is not deterministic still runs
            torch.use_deterministic_algorithms(True, warn_only=True)
            memory.fill_uninitialized_memory = True
            yield
    finally:
        torch.use_deterministic_algorithms(was[0], warn_only=was[1])
        memory.fill_uninitialized_memory = filled


class _ConstantMemory(DispatchMode):  # type: ignore[no-untyped-call]
    """New memory that the program asks for (``torch.empty``) holds a number; what a kernel takes itself does not."""

    def __init__(self, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._number = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # `resize_` too leaves memory as it is, but what it returns has values that the program gave it.
        if (
            isinstance(func, torch._ops.OpOverload)
            and not schema_of(func).is_mutable
            and facts(schema_of(func).name).uninitialised
        ):
            out.fill_(self._number)
        return out


class Float64Mode(DispatchMode):  # type: ignore[no-untyped-call]
    """Computes in float64 what comes in any floating dtype, with the random numbers of another run."""

    def __init__(self, random_results: RandomResults) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # By order, not by operator: the float64 run calls the same operators in the same order.
        self._random_results = iter(random_results.kept)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_random(func, args, kwargs or {}):
            # None where this run has more random operators than the recorded one: these run.
            kept = next(self._random_results, None)
            if kept is not None:
                # An in-place random operator (`uniform_`) has to write the recorded numbers into its argument.
                if schema_of(func).is_mutable and isinstance(args[0], torch.Tensor):
                    return args[0].copy_(kept)
                return _each(kept, _wide)
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **(kwargs or {}))
        schema = schema_of(func).arguments
        args = tuple(
            _widened(schema[i].name if i < len(schema) else "", a, keep=_writes(schema, i)) for i, a in enumerate(args)
        )
        kwargs = {k: _widened(k, v, keep=False) for k, v in (kwargs or {}).items()}
        # One operator without a float64 kernel would leave the whole graph without a float64 result.
        return _NO_FLOAT64.get(schema_of(func).name, func)(*args, **kwargs)


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
        ``[n, m]`` where one of both is a matrix, else ``[g, n, m]``. Rows after the last group are 0.
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


def perturbed(t: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A copy with each element one unit in the last place or so away, up or down; other dtypes as they are."""
    dtype = _REAL.get(t.dtype, t.dtype)
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64) or t.layout is not torch.strided:
        return t
    # A separate generator: the program's random stream must give eager's numbers in each run.
    signs = torch.randint(0, 2, t.shape, generator=generator, dtype=torch.int8).mul_(2).sub_(1)
    # 1 ± eps is exact in the dtype itself, so that the product moves each element by one or two units.
    signs = signs.to(t.device, dtype)
    if not t.is_complex():
        # What ends at 1 (a sigmoid, a share, a cosine) stays there: its reader may refuse any number beyond, as
        # `binary_cross_entropy` does.
        signs.masked_fill_(t.abs() == 1, -1.0)
    limits = torch.finfo(dtype)
    moved = t * signs.mul(limits.eps).add_(1.0)
    # A subnormal number has no unit of its own size: it moves by the smallest one.
    is_subnormal = (t.abs() < limits.tiny) & (t != 0) if not t.is_complex() else None
    if is_subnormal is not None and is_subnormal.any():
        moved = torch.where(is_subnormal, t + signs * (limits.tiny * limits.eps), moved)
    return torch.empty_like(t).copy_(moved)  # with the strides of `t`


def _computes(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether it rounds: then its result may be another; what it copies was perturbed before."""
    if not isinstance(func, torch._ops.OpOverload) or schema_of(func).is_mutable or is_random(func, args, kwargs):
        return False
    if any(r.alias_info is not None for r in schema_of(func).returns):
        return False
    inputs = [t for a in args for t in (a if isinstance(a, (list, tuple)) else (a,)) if isinstance(t, torch.Tensor)]
    name = str(func.name())  # type: ignore[no-untyped-call]
    # A conversion rounds, though the operator table has it as a copy.
    return bool(inputs) and (name.startswith("aten::_to_copy") or ulp_bound(name, [t.dtype for t in inputs]) != 0)


def is_random(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call is random; attention without dropout is not, though its operator is tagged so."""
    if not isinstance(func, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for i, argument in enumerate(schema_of(func).arguments):
        # The tag belongs to the operator, so attention has it with and without dropout.
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
        # A dtype among the arguments would round the result back to it.
        return _WIDE.get(value, value)
    # Softmax takes this for 16-bit inputs only, and gets float64 here.
    if name == "half_to_float":
        return False
    if isinstance(value, torch.Tensor):
        # An argument that is written must stay the same tensor: the graph reads it again afterwards.
        return value if keep else _wide(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_widened("", v, keep=keep) for v in value)
    return value


# Operators without a float64 kernel (seen on 2.13), and what computes the same.
_NO_FLOAT64: Final = {"aten::_grouped_mm": grouped_product}
