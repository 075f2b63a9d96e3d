"""Operators in another dtype than the program's: a platform with the setting ``compute=float64``.

The inputs of a call are widened on their device, the operator runs there, and its results are rounded to the dtypes
that it returns. A reference of this kind checks a device against itself; only what the judge must see leaves it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.intercept.plan import Action
from shadowrun.operators.case import exact_copy
from shadowrun.operators.facts import facts
from shadowrun.operators.vendor_ops import for_reference
from shadowrun.platforms.unsupported import limit_of_host
from shadowrun.replay.copies import copy_mutated, storage_groups, tensors_in, written_to
from shadowrun.torch_private import schema_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from shadowrun.intercept.plan import OpPlan

__all__ = ["NoWideKernel", "WideCompute"]

_WIDENED: Final[dict[torch.dtype, dict[torch.dtype, torch.dtype]]] = {
    torch.float32: dict.fromkeys((torch.float16, torch.bfloat16), torch.float32),
    torch.float64: {
        **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64),
        torch.complex64: torch.complex128,
    },
}
# Dtypes of results are learned once for each form of a call: a program with many forms would fill memory.
_MAX_FORMS = 4096
_NUMBERS = (bool, int, float, complex, type(None))


class NoWideKernel(RuntimeError):  # noqa: N818 (a reason, not an error)
    """The operator does not run in the wider dtype; the message says why."""


class WideCompute:
    """Runs calls in a wider dtype.

    Args:
        dtype: `torch.float32` or `torch.float64`; inputs of narrower dtypes are widened to it.
        max_bytes: Memory that the widened inputs of a call may take.
    """

    def __init__(self, dtype: torch.dtype, max_bytes: int) -> None:
        self._dtype, self._max_bytes = dtype, max_bytes
        self._widened = _WIDENED[dtype]
        self._returned: dict[Hashable, tuple[torch.dtype | None, ...]] = {}

    def __call__(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call on inputs that it may write to, as `OpPlan.run` does.

        Raises:
            NoWideKernel: The operator does not run in the wider dtype, or its inputs are too large there.
        """
        # Fused attention and its like have no kernel in float64; their counterparts have one.
        plan = for_reference(plan)
        if not self._widens(plan, args, kwargs):
            return plan.run(*args, **kwargs)
        dtypes = self._dtypes_of_results(plan, args, kwargs)
        memo: dict[int, torch.Tensor] = {}
        names = (a.name for a in schema_of(plan.func).arguments)
        wide = [self._widen(name, a, memo) for name, a in zip(names, args, strict=False)]
        named = {name: self._widen(name, v, memo) for name, v in kwargs.items()}
        try:
            out = plan.run(*wide, **named)
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            if limit_of_host(error):
                raise
            why = str(error).partition("\n")[0][:160]
            raise NoWideKernel(f"it does not run in {str(self._dtype)[6:]}: {why}") from error
        given = {id(t): t for t in tensors_in((*args, *kwargs.values()))}
        back = {id(widened): given[key] for key, widened in memo.items()}
        for t in written_to(plan, args, kwargs):
            _write(t, memo[id(t)])
        if out is None:  # `_foreach_add_` returns nothing
            return None
        if plan.n_returns == 1:
            return _narrowed(out, dtypes[0], back)
        return tuple(_narrowed(v, d, back) for v, d in zip(out, dtypes, strict=True))

    def _widens(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if plan.action is not Action.REPLAY or facts(plan.name).depends_on_dtype:
            return False
        found = list(tensors_in((*args, *kwargs.values())))
        # Kernels for tensors of other layouts may not exist, and what shares memory must go on doing so.
        if any(t.layout is not torch.strided or t.is_nested or t.is_quantized for t in found):
            return False
        if plan.mutated and storage_groups(written_to(plan, args, kwargs), args, kwargs):
            return False
        widened = [t for t in found if t.dtype in self._widened]
        if sum(t.numel() * self._widened[t.dtype].itemsize for t in widened) > self._max_bytes:
            raise NoWideKernel("budget: its inputs in the wider dtype exceed max_bytes")
        return bool(widened)

    def _dtypes_of_results(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[torch.dtype | None, ...]:
        """The dtypes that the operator returns; it runs once for each form of a call to show them."""
        form = plan.index, tuple(map(_form, args)), tuple((k, _form(v)) for k, v in kwargs.items())
        found = self._returned.get(form)
        if found is None:
            inputs = copy_mutated(plan, args, dict(kwargs), self._max_bytes) if plan.mutated else (args, kwargs)
            out = plan.run(*inputs[0], **inputs[1])
            found = tuple(map(_dtype, (out,) if plan.n_returns == 1 else out or ()))
            if len(self._returned) >= _MAX_FORMS:
                self._returned.clear()
            self._returned[form] = found
        return found

    def _widen(self, name: str, value: Any, memo: dict[int, torch.Tensor]) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in memo:
                memo[id(value)] = exact_copy(value, self._widened.get(value.dtype))
            return memo[id(value)]
        if isinstance(value, (list, tuple)):
            return [self._widen(name, v, memo) for v in value]
        # Refused for wide inputs, which need no conversion.
        if name == "half_to_float":
            return False
        # An argument such as `dtype=torch.bfloat16` would round the result before it is finished.
        return self._widened.get(value, value) if isinstance(value, torch.dtype) else value


def _form(value: Any) -> Hashable:
    """What the dtype of a result depends on: dtypes, whether a tensor has dimensions, types of numbers."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.dim() > 0
    if isinstance(value, (list, tuple)):
        return tuple(map(_form, value))
    return type(value).__name__ if isinstance(value, _NUMBERS) else str(value)


def _dtype(value: Any) -> torch.dtype | None:
    if isinstance(value, (list, tuple)):
        value = next((v for v in value if isinstance(v, torch.Tensor)), None)
    return value.dtype if isinstance(value, torch.Tensor) else None


def _narrowed(value: Any, dtype: torch.dtype | None, back: Mapping[int, torch.Tensor]) -> Any:
    """A result in the dtype that the operator returns; the argument itself where it is an alias of one."""
    if isinstance(value, (list, tuple)):
        return [_narrowed(v, dtype, back) for v in value]
    if not isinstance(value, torch.Tensor):
        return value
    alias = back.get(id(value))
    if alias is not None:
        return alias
    return value if dtype is None or value.dtype is dtype else exact_copy(value, dtype)


def _write(to: torch.Tensor, computed: torch.Tensor) -> None:
    if (to.shape, to.stride()) == (computed.shape, computed.stride()):
        to.copy_(computed)
    else:  # the operator gave an `out` argument the size of the result, and its strides
        made = exact_copy(computed, to.dtype)
        to.set_(made.untyped_storage(), 0, made.shape, made.stride())
