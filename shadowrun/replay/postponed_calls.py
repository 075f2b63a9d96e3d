"""Calls that are judged later, a part at a time: under an overhead budget a diagnosis may take longer than a step.

Their inputs and results are copied, since the program continues and writes to its own. What waits is bounded; a call
that finds no room is judged at once.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import time
import weakref
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from shadowrun.intercept.torchapi import as_in_handler, storage_key
from shadowrun.operators.case import exact_copy
from shadowrun.replay.copies import tensors_in
from shadowrun.replay.input_copies import n_bytes
from shadowrun.types import Cause, Status, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.judge.judgement import Examined, Parts
    from shadowrun.operators.case import Case, Value

__all__ = ["PostponedCalls"]

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_MAX_WAITING = 16
# The bound is part of the stated memory: past it, a call is judged at once.
_MAX_BYTES = 64 << 20
# A part is not begun if the longest one of late would exceed the time by this factor.
_OVERSHOOT = 1.25
# For each call that is concluded: its parts come in one order, the longest often last, after a dozen short ones.
_FORGETS = 0.95
# Assumed until some parts were seen: the first ones also import what they need.
_FIRST_PARTS_NS = 2e6
_DROPPED = Verdict(Status.UNVERIFIED, None, "overhead budget: interrupted before it was judged")


@dataclass(frozen=True, slots=True)
class _Waiting:
    case: Case
    parts: Parts[Examined]
    compare_and_record: Callable[[Case, Examined], None]
    n_bytes: int


class PostponedCalls:
    """What waits to be judged, the oldest first.

    Args:
        wanted: Whether calls are to be judged later just now.
        full: Called where no more can wait.
    """

    def __init__(self, wanted: Callable[[], bool], full: Callable[[], None]) -> None:
        self._wanted = wanted
        self._full = full
        self._waiting: deque[_Waiting] = deque()
        self._n_bytes = 0
        # Of the last parts: a hypothesis takes from 0.1 ms to several steps of a small program.
        self._longest_ns = _FIRST_PARTS_NS
        _all.add(self)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def can_postpone(self, case: Case) -> bool:
        """Whether a call can wait: there is room for copies, and its tensors are of a kind that copies stand for."""
        if not self._wanted() or len(self._waiting) >= _MAX_WAITING:
            return False
        tensors = _tensors(case)
        # A copy of a subclass or a sparse tensor may be of another kind, and the judge would see that one.
        if not all(map(_is_plain, tensors)):
            return False
        return not _share_memory(case) and self._n_bytes + n_bytes(tensors) <= _MAX_BYTES

    def add(
        self, case: Case, judge: Callable[[Case], Parts[Examined]], compare_and_record: Callable[[Case, Examined], None]
    ) -> None:
        """Have a call judged later.

        Args:
            case: The call; `can_postpone` said yes.
            judge: Gives the parts of its judgement.
            compare_and_record: Records what comes of it; is given the copies.
        """
        # The program continues and writes to its own tensors.
        held = _copied(case)
        size = n_bytes(_tensors(held))
        self._n_bytes += size
        self._waiting.append(_Waiting(held, judge(held), compare_and_record, size))
        # At half of the bound, so that the next call finds room.
        if len(self._waiting) >= _MAX_WAITING or self._n_bytes >= _MAX_BYTES / 2:
            self._full()

    def judge_for(self, max_ns: float) -> None:
        """Judge what waits until the time is over; a part that has begun is finished, and the first one always begins.

        An interrupt leaves a record for each call that is not judged, and is raised again.
        """
        if not self._waiting:
            return
        began = time.perf_counter_ns()
        taken_ns = 0
        try:
            # The work is done where the program calls `step`, under modes of its own.
            with as_in_handler():
                while self._waiting and taken_ns < max_ns:
                    self._advance()
                    before_ns, taken_ns = taken_ns, time.perf_counter_ns() - began
                    self._longest_ns = max(taken_ns - before_ns, self._longest_ns)
                    if taken_ns + self._longest_ns > _OVERSHOOT * max_ns:
                        break
        except BaseException:
            while self._waiting:
                # The number was reserved when the call came: without a record there would be a gap.
                self._conclude((_DROPPED, (), ()))
            raise

    def forget(self) -> None:
        """In a forked child: what waits is its parent's."""
        self._waiting.clear()
        self._n_bytes = 0

    def _advance(self) -> None:
        try:
            next(self._waiting[0].parts)
        except StopIteration as end:
            # A generator returns its value in `StopIteration`.
            self._conclude(end.value)
        except Exception as error:
            text = f"judging a call that waited: {type(error).__name__}: {error}"[:500]
            self._conclude((Verdict(Status.ERROR, Cause.HARNESS, type(error).__name__, text), (), ()))

    def _conclude(self, examined: Examined) -> None:
        # Removed first: a record that fails must not be tried for ever.
        one = self._waiting.popleft()
        self._n_bytes -= one.n_bytes
        self._longest_ns *= _FORGETS
        with contextlib.suppress(Exception):
            one.compare_and_record(one.case, examined)


def _is_plain(t: torch.Tensor) -> bool:
    return type(t) in _PLAIN and t.is_cpu and t.layout is torch.strided and not t.is_quantized


def _tensors(case: Case) -> list[torch.Tensor]:
    values = (*case.args, *case.kwargs.values(), *case.actual, *case.expected, *(case.previous_actual or ()))
    return list(tensors_in(values))


def _copied(case: Case) -> Case:
    args, kwargs = case.fresh_inputs()
    return replace(case, args=args, kwargs=kwargs, actual=_each(case.actual), expected=_each(case.expected))


def _each(values: tuple[Value, ...]) -> tuple[Value, ...]:
    return tuple(exact_copy(v) if isinstance(v, torch.Tensor) else v for v in values)


def _share_memory(case: Case) -> bool:
    """Whether two of the inputs do, of a call that writes to one: copies would no longer."""
    if not case.mutated:
        return False
    inputs = {id(t): t for t in tensors_in((*case.args, *case.kwargs.values()))}
    return len({storage_key(t) for t in inputs.values()}) < len(inputs)


# Weak: the list must not keep the copies of a comparison that is over.
_all: weakref.WeakSet[PostponedCalls] = weakref.WeakSet()


@atexit.register
def _finish_all() -> None:
    """A program that never stopped its comparison has its last records written."""
    for postponed in list(_all):
        with contextlib.suppress(Exception):
            postponed.judge_for(math.inf)
