"""Has the C handler pass on the calls that an overhead budget leaves out.

A watched step passes on most of its calls, since it may compare only a few. Each takes 11 µs more through Python, and
7 µs through the C handler, of which 5.5 µs are torch's own for any mode (MLP of 0.34 ms).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from shadowrun.intercept.plan import OpKind
from shadowrun.replay.call import OVER_BUDGET

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.intercept.plan import OpPlan
    from shadowrun.schedule.budget import Budget
    from shadowrun.schedule.selection import Selection

__all__ = ["PassThrough"]

_clock = time.perf_counter_ns
# Reading a member of an enum takes ten times as long as a global name.
_NO_VALUES = OpKind.NO_VALUES
_CHARGE_EVERY = 16
_MAX_PASSED_NS = 10_000


class PassThrough:
    """What the C handler asks for each call in place of a `Selection`: whether the call is passed on.

    Args:
        budget: The overhead budget.
        selection: What the program wants compared.
        own_ns: Time that the C handler has spent so far.
        lock: The replayer's lock, which is another one after a fork.

    Attributes:
        everything: False, so that the C handler asks.
    """

    # native/dispatch.h reads the slot `everything`.
    __slots__ = ("_asked", "_budget", "_charged_ns", "_lock", "_n_passed", "_own_ns", "_selection", "everything")

    def __init__(
        self, budget: Budget, selection: Selection, own_ns: Callable[[], int], lock: Callable[[], Any]
    ) -> None:
        self.everything = False
        self._budget = budget
        self._selection = selection
        self._own_ns = own_ns
        self._lock = lock
        self._charged_ns = 0
        self._n_passed = 0
        self._asked = False

    def unwanted(self, plan: OpPlan) -> str:
        """Why the C handler passes this call on; empty where it leaves the call to Python, which may compare it."""
        # The C handler takes the lock after it has asked, and another thread may be in the budget.
        lock = self._lock()
        if not lock.acquire(False):
            return ""
        try:
            return self._reason(plan)
        finally:
            lock.release()

    def _reason(self, plan: OpPlan) -> str:
        budget, selection = self._budget, self._selection
        reason = "" if selection.everything else selection.unwanted(plan)
        if plan.kind is _NO_VALUES:
            budget.pass_view()
            self._n_passed += 1
            return reason or plan.reason
        # The clock of the budget may lag by a few calls.
        if self._n_passed >= _CHARGE_EVERY:
            self.charge()
        if budget.exhausted(_clock()) or reason:
            self._n_passed += 1
            return reason or OVER_BUDGET
        self.charge()
        self._asked = True
        return ""

    def exhausted(self, now: int) -> bool:
        """`Budget.exhausted` for a call that Python got, and that the budget may have been asked about already."""
        if self._asked:
            self._asked = False
            return False
        return self._budget.exhausted(now)

    def charge(self) -> None:
        """Count the time of the calls that were passed on since the last time."""
        n, self._n_passed = self._n_passed, 0
        if n:
            own_ns = self._own_ns()
            # The C handler's clock runs on while the thread waits for a processor: that is no overhead.
            self._budget.spend_on_passed(n, min(own_ns - self._charged_ns, n * _MAX_PASSED_NS))
            self._charged_ns = own_ns
