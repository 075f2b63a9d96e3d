"""Calls without values to compare: views, whose form is checked, and what falls back all the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shadowrun.intercept.plan import Action
from shadowrun.intercept.torchapi import shares_memory
from shadowrun.strided import span
from shadowrun.types import Cause, Status, Verdict

if TYPE_CHECKING:
    from shadowrun.intercept.plan import OpPlan
    from shadowrun.replay.call import Call, CallRun
    from shadowrun.replay.context import RecordSink

__all__ = ["UncomparedCalls", "ViewCheck", "view_on_meta"]

_META = torch.device("meta")
_Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
# A program with changing shapes makes new keys for ever.
_MAX_KNOWN = 50_000


class UncomparedCalls:
    """Records the calls on a device that only one platform has, where they are run and not compared.

    Args:
        recorder: Where they are recorded.
        strides: See `ViewCheck`.
    """

    def __init__(self, recorder: RecordSink, *, strides: bool) -> None:
        self._recorder = recorder
        self._views = ViewCheck(recorder, strides=strides)

    def record(self, call: Call, own: CallRun) -> None:
        """Record a fallback or a wrong form of a view, and count every other call."""
        plan = call.plan
        # A call that the user left out is not recorded, whatever it did.
        if own.fallback is not None and call.reason == plan.reason:
            self._record_fallback(call, own)
            return
        if plan.action is Action.VIEW:
            self._views.check(call, own.out)
        self._recorder.skip(plan.name, call.role.device_name, call.reason)

    def _record_fallback(self, call: Call, own: CallRun) -> None:
        """A view of memory on the CPU is a copy for the program."""
        assert own.fallback is not None
        plan, (cause, evidence) = call.plan, own.fallback
        first = own.out[0] if isinstance(own.out, (list, tuple)) and own.out else own.out
        if plan.action is Action.VIEW and isinstance(first, torch.Tensor) and not shares_memory(first, call.args[0]):
            # A program that writes to it would see no change in the base: worse than slow.
            evidence += "; what should be a view is a copy: writing to it leaves its base as it is"
        verdict = Verdict(Status.FALLBACK, cause, "computed on the CPU", evidence)
        context = self._recorder.context(call)
        # A written argument has no longer the values that a repro would need.
        captured = None if plan.mutated else self._recorder.keep_inputs(plan, verdict, (call.args, call.kwargs))
        self._recorder.verdict(context, verdict, captured=captured)


class ViewCheck:
    """Compares the form of a view on the target with what torch's meta kernels say it is, once for each kind of call.

    Args:
        recorder: Where a wrong form is recorded.
        strides: Whether the target's tensors have strides (those of lazy devices have none).
    """

    def __init__(self, recorder: RecordSink, *, strides: bool) -> None:
        self._recorder = recorder
        self._strides = strides
        self._known: dict[Any, list[_Form] | None] = {}

    def check(self, call: Call, out: Any) -> None:
        """Record a view whose form is wrong; right ones are counted by the caller."""
        plan, args, kwargs = call.plan, call.args, call.kwargs
        if plan.mutated:
            return  # the input's form has changed already: there is nothing left to derive it from
        try:
            # The meta kernel takes longer than the view itself, so each form is asked once.
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
            self._record(call, f"{len(seen)} views instead of {len(known)}")
        for i, (actual, expected) in enumerate(zip(seen, known, strict=False)):
            wrong = [
                f"{what} {a} instead of {e}"
                for what, a, e in zip(("shape", "stride", "dtype"), actual, expected, strict=True)
                # Tensors of lazy devices have no strides.
                if a != e and (what != "stride" or (self._strides and _strides_matter(actual, expected)))
            ]
            if wrong:
                evidence = f"output {i} of a view has {', '.join(wrong)}"
                self._record(call, evidence)

    def _record(self, call: Call, evidence: str) -> None:
        context = self._recorder.context(call)
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
        base.resize_(a.storage_offset() + span(a.shape, a.stride()) if a.numel() else 0)
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
