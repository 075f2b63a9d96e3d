"""Slow calls: when an operator may be called slow, and the runs that confirm it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.intercept.plan import OpPlan
    from shadowrun.replay.call import CallRun

__all__ = ["WORTH_TIMING_NS", "SlowCalls"]

# A ratio alone says nothing of a call of some microseconds: the launch of a kernel takes as long.
_SLOW_NS = 1_000_000

WORTH_TIMING_NS = _SLOW_NS
"""Two runs that took less together are never slow."""

# After so many confirmations the reruns, which the program waits for, prove nothing new.
_MAX_CONFIRMED = 8
# The best of a few decides: on a busy machine any single run may be slow.
_MAX_RERUNS = 6
# A truly slow call would be run six more times: the rerun stops when it has cost this much.
_MAX_RERUN_NS = 50_000_000


class SlowCalls:
    """Decides which calls are slow.

    Args:
        ratio: How many times longer the target takes than the reference, at least.

    Attributes:
        ratio: The same.
    """

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio
        self._confirmed: Counter[int] = Counter()
        self._acquitted: set[int] = set()

    def is_slow(self, actual_ns: int, expected_ns: int) -> bool:
        """Whether a call takes the target so long that its operator may be called slow."""
        return actual_ns >= max(self.ratio * expected_ns, expected_ns + _SLOW_NS)

    def is_confirmed(self, plan: OpPlan, actual_ns: int, expected_ns: int) -> bool:
        """Whether a call is slow, of an operator that was so when it was measured again."""
        return self._confirmed[plan.index] > 0 and self.is_slow(actual_ns, expected_ns)

    def confirmed(
        self,
        plan: OpPlan,
        actual_ns: int,
        expected_ns: int,
        again: Callable[[], CallRun],
        reference_again: Callable[[], CallRun],
    ) -> tuple[int, int]:
        """Times of the target's and the reference's run, measured again before an operator is called slow.

        The first of two runs wakes the thread pool, and on a busy machine waits for a processor: 12 ms for a
        call of 0.4 ms were seen. So a slow first run counts only if the runs after the reference's are slow too.

        A processor may be busy for longer than these runs take: at load 6 on two cores, 8 of 175 runs of six
        programs had an operator called slow that was not. So the reference runs once more beside each of them, and
        where it waits as well, that is the time to compare with.

        An operator is found slow by its fastest call, so one that was short once is not run again: on a busy machine
        most calls may seem slow, and on a device that is wrong in every third call, one more run of the same inputs
        may take the place of the wrong one.

        Args:
            plan: The operator.
            actual_ns: Time of the target's run.
            expected_ns: Time of the reference's run.
            again: Runs the call once more on the target.
            reference_again: Runs the call once more on the reference.
        """
        index = plan.index
        settled = index in self._acquitted or self._confirmed[index] >= _MAX_CONFIRMED
        if settled or not self.is_slow(actual_ns, expected_ns):
            return actual_ns, expected_ns
        best, spent = actual_ns, 0
        for _ in range(_MAX_RERUNS):
            ns = again().ns
            best, spent = min(best, ns), spent + ns
            # One fast run proves that the kernel is not slow: the first run had woken the thread pool.
            if not self.is_slow(best, expected_ns):
                if best < _SLOW_NS:
                    self._acquitted.add(index)  # what follows cannot make its fastest call longer
                return best, expected_ns
            busy_ns = reference_again().ns
            if not self.is_slow(best, busy_ns):
                return best, busy_ns
            if spent > _MAX_RERUN_NS:
                break
        self._confirmed[index] += 1
        return best, expected_ns
