"""Views compute no values: what can differ is their form, and that is checked once per kind of call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shadowrun.types import Cause, Status, Verdict

if TYPE_CHECKING:
    from shadowrun.intercept.attribution import Place
    from shadowrun.intercept.plan import OpPlan
    from shadowrun.replay.recorder import Recorder

__all__ = ["ViewCheck", "view_on_meta"]

_META = torch.device("meta")
_Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
_MAX_KNOWN = 50_000


class ViewCheck:
    """Compares the form of a view on the target with what torch's meta kernels say it is.

    Args:
        recorder: Where a wrong form is recorded.
        strides: Whether the target's tensors have strides of their own (lazy's have not).
    """

    def __init__(self, recorder: Recorder, *, strides: bool) -> None:
        self._recorder = recorder
        self._strides = strides
        self._known: dict[Any, list[_Form] | None] = {}

    def check(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, place: Place, device: torch.device
    ) -> None:
        """Record a view whose form is wrong; right ones are counted by the caller."""
        if plan.mutated:
            return  # the input's form has changed already: there is nothing left to derive it from
        try:
            key = (plan.index, _freeze(args), _freeze(tuple(kwargs.items())))
            known = self._known.get(key, ())
        except TypeError:
            return
        if known == ():
            if len(self._known) > _MAX_KNOWN:
                self._known.clear()
            known = self._known[key] = _expected(plan, args, kwargs)
        if known is None:
            return
        seen = _forms(out)
        if len(seen) != len(known):
            self._record(plan, args, kwargs, place, device, f"{len(seen)} views instead of {len(known)}")
        for i, (actual, expected) in enumerate(zip(seen, known, strict=False)):
            wrong = [
                f"{what} {a} instead of {e}"
                for what, a, e in zip(("shape", "stride", "dtype"), actual, expected, strict=True)
                if a != e and (what != "stride" or (self._strides and _strides_matter(actual, expected)))
            ]
            if wrong:
                evidence = f"output {i} of a view has {', '.join(wrong)}"
                self._record(plan, args, kwargs, place, device, evidence)

    def _record(
        self,
        plan: OpPlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        place: Place,
        device: torch.device,
        evidence: str,
    ) -> None:
        context = self._recorder.context(plan, args, kwargs, place, device)
        self._recorder.verdict(context, Verdict(Status.MISMATCH, Cause.METADATA, "wrong form", evidence))


def view_on_meta(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the view would be: the same call on tensors without memory."""
    return plan.func(*[_to_meta(a) for a in args], **{k: _to_meta(v) for k, v in kwargs.items()})


def _expected(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[_Form] | None:
    try:
        return _forms(view_on_meta(plan, args, kwargs))
    except Exception:  # no meta kernel, or a layout that meta tensors cannot have: nothing to hold the view against
        return None


def _to_meta(a: Any) -> Any:
    if isinstance(a, torch.Tensor):
        base = torch.empty(0, dtype=a.dtype, device=_META)
        size = max(1, a.storage_offset() + 1 + sum((n - 1) * s for n, s in zip(a.shape, a.stride(), strict=True)))
        base.resize_(size if a.numel() else 0)
        return base.as_strided(a.shape, a.stride(), a.storage_offset() if a.numel() else 0)
    if isinstance(a, (list, tuple)):
        return [_to_meta(v) for v in a]
    return a


def _freeze(a: Any) -> Any:
    if isinstance(a, torch.Tensor):
        return (a.shape, a.stride(), a.dtype)
    if isinstance(a, (list, tuple)):
        return tuple([_freeze(v) for v in a])
    return a


def _forms(out: Any) -> list[_Form]:
    tensors = out if isinstance(out, (list, tuple)) else (out,)
    return [(tuple(t.shape), tuple(t.stride()), t.dtype) for t in tensors if isinstance(t, torch.Tensor)]


def _strides_matter(actual: _Form, expected: _Form) -> bool:
    """Strides of dimensions with one element, or of an empty tensor, address nothing."""
    if 0 in actual[0]:
        return False
    return any(n > 1 and a != e for n, a, e in zip(actual[0], actual[1], expected[1], strict=False))
