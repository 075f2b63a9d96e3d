"""The short way of plain calls: one new tensor or number comes back, or the first argument is written to.

Nearly all calls of a training step are such. Every microsecond here is paid thousands of times a second, so this is
written out for speed; whatever is out of the ordinary goes the long way.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.intercept.own_call import own_call
from shadowrun.intercept.torchapi import shares_memory, unheard
from shadowrun.numerics import memory
from shadowrun.numerics.bits import plainly_equal
from shadowrun.replay.ending import WORTH_TIMING_NS, Ending
from shadowrun.replay.execution import Ran
from shadowrun.replay.room import BYTES_PER_NS, are_too_large, may_run_again
from shadowrun.replay.spares import Spare, Spares

if TYPE_CHECKING:
    from shadowrun.intercept.attribution import Place
    from shadowrun.intercept.plan import OpPlan
    from shadowrun.replay.stage import Role, Stage

__all__ = ["ShortWay"]

_clock = time.perf_counter_ns
_FEW = memory.FEW
_FRESH = frozenset({torch.Tensor, float, int, bool, complex})
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_NUMBERS = frozenset({float, int, bool, type(None)})  # to ask these whether they are tensors takes 0.5 µs each


class ShortWay:
    """Observes plain calls on the CPU, which both platforms are, and which one of them is as the process has it.

    Args:
        stage: The parts of the comparison.
        ending: Records what became of a call.

    Attributes:
        ending: As given.
        spares: Memory that is kept for copies.
        max_bytes: Bound of the results of a call beside which there is a second.
    """

    def __init__(self, stage: Stage, ending: Ending) -> None:
        self._target, self._ref = stage.target, stage.ref
        self._recorder = stage.recorder
        self._comparing = stage.comparing
        self._watched = stage.comparing.watched
        self._effects = stage.comparing.effects
        self.ending = ending
        self.spares = Spares(stage.config.max_bytes)
        self._forms = self.spares.by_form
        self.max_bytes = stage.config.max_bytes

    def clear(self) -> None:
        """Let go of the memory that is kept for copies."""
        self.spares.clear()

    def fresh(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], role: Role, place: Place
    ) -> tuple[Any, int] | None:
        """One new tensor or number comes back, nothing is written to.

        Returns:
            What the user gets, and nanoseconds of his own call; None where nothing was done.
        """
        try:
            context = self._recorder.context(plan, args, kwargs, place, role.device)
        except Exception:  # the long way records why
            return None
        run = plan.run
        start = _clock()
        out = own_call(run, args, kwargs)
        ended = _clock()
        ns = ended - start
        on_target = role.on_target
        other = self._ref if on_target else self._target
        try:
            if ns * BYTES_PER_NS > self.max_bytes and self.is_too_large(plan, context, out):
                return out, ns
            theirs = unheard(run, (), args, kwargs) if other.plain else other.call(plan, args, kwargs)
            other_ns = _clock() - ended
            plainly = type(out) is torch.Tensor and plainly_equal(out, theirs)
            known = context <= self._effects.newest and plan.index not in self._watched
            if plainly and known and ns + other_ns < WORTH_TIMING_NS:
                if on_target:
                    self._recorder.match(context, other_ns / 1000, ns / 1000)
                else:
                    self._recorder.match(context, ns / 1000, other_ns / 1000)
            else:
                mine, replayed = Ran(args, kwargs, out, ns), Ran(args, kwargs, theirs, other_ns)
                self.end_fresh(plan, context, mine, replayed, role, plainly=plainly)
        except Exception as error:
            self.ending.fail(plan, args, kwargs, role, place, error)
        return out, ns

    def is_too_large(self, plan: OpPlan, context: int, out: Any) -> bool:
        """Whether there shall be no second result beside the one of a call, which is recorded then."""
        if not are_too_large(plan, out, self.max_bytes):
            return False
        self.ending.too_large(plan, context)
        return True

    def end_fresh(self, plan: OpPlan, context: int, mine: Ran, theirs: Ran, role: Role, *, plainly: bool) -> None:
        """Record a call of `fresh` that took long, or whose results are not plainly equal: numbers, say."""
        out = mine.out
        equal = plainly or (type(out) in _FRESH and self._comparing.equal(out, theirs.out))
        known = context <= self._effects.newest and plan.index not in self._watched
        if equal and known and mine.ns + theirs.ns < WORTH_TIMING_NS:
            ours, other = mine.ns / 1000, theirs.ns / 1000
            self._recorder.match(context, *((other, ours) if role.on_target else (ours, other)))
            return
        self.ending.end(plan, context, (mine.args, mine.kwargs), mine, theirs, role, equal=equal)

    def in_place(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], role: Role, place: Place
    ) -> tuple[Any, int] | None:
        """The first argument is written to, and shares its memory with no other; else as `fresh`."""
        first = args[0]
        try:
            shape = first.shape
            spare = self._forms.get((first.dtype, shape)) or self.spares.make(first)
            at = first.data_ptr()
            if spare is None or not at or not first.is_contiguous() or first.is_neg():
                return None
            for a in args[1:]:
                kind = type(a)
                if kind in _PLAIN or (kind not in _NUMBERS and isinstance(a, torch.Tensor)):
                    if shares_memory(first, a):
                        return None
                elif kind is list or kind is tuple:
                    return None
            context = self._recorder.context(plan, args, kwargs, place, role.device)
            work, work_at, n_bytes = spare.work, spare.work_at, spare.n_bytes
            if n_bytes <= _FEW:
                move, differs = memory.move_few, memory.few_differ
            else:
                move, differs = memory.move, memory.differs
            move(spare.before_at, at, n_bytes)
        except Exception:  # the long way copies with more care, and records why it cannot
            return None
        run = plan.run
        try:
            start = _clock()
            out = own_call(run, args, kwargs)
            ns = _clock() - start
        except Exception as error:
            self.spares.drop(spare)
            before = ((spare.before, *args[1:]), kwargs)
            if not may_run_again(error, plan, args, kwargs, before):
                raise
            spare = None
            del before, work  # the copies are let go of
        if spare is None:
            return self.ending.without_copies(plan, args, kwargs, role, place)
        on_target = role.on_target
        other = self._ref if on_target else self._target
        try:
            move(work_at, spare.before_at, n_bytes)
            other_args = (work, *args[1:])
            start = _clock()
            theirs = unheard(run, (), other_args, kwargs) if other.plain else other.call(plan, other_args, kwargs)
            other_ns = _clock() - start
            if (
                # A call may have given either of them another form or other memory: what they had may be gone.
                first.data_ptr() == at
                and work.data_ptr() == work_at
                and first.shape == shape == work.shape
                and not differs(at, work_at, n_bytes)
                and ns + other_ns < WORTH_TIMING_NS
                and context <= self._effects.newest
                and plan.index not in self._watched
            ):
                if on_target:
                    self._recorder.match(context, other_ns / 1000, ns / 1000)
                else:
                    self._recorder.match(context, ns / 1000, other_ns / 1000)
                return out, ns
            mine, replayed = Ran(args, kwargs, out, ns), Ran(other_args, kwargs, theirs, other_ns)
            self.end_in_place(plan, context, mine, replayed, role, spare)
        except Exception as error:
            self.spares.drop(spare)  # its memory may be another since the replay
            self.ending.fail(plan, args, kwargs, role, place, error)
        return out, ns

    def end_in_place(self, plan: OpPlan, context: int, mine: Ran, theirs: Ran, role: Role, spare: Spare) -> None:
        """Record a call of `in_place` that took long, or whose results are not plainly equal."""
        self.spares.drop(spare)  # it is needed longer than this call takes
        first, work = mine.args[0], spare.work
        pristine = ((spare.before, *mine.args[1:]), mine.kwargs)
        equal = plainly_equal(first, work) or self._comparing.equal(first, work)
        self.ending.end(plan, context, pristine, mine, theirs, role, equal=equal)
