"""Measures the overhead of a comparison and the time of the program, and computes the credit of the overhead budget.

The replayer measures its own time; the time that torch takes to hand a call to a dispatch mode is added. The true
overhead is larger: the program runs slower afterwards, since its caches are cold. So some steps stay unwatched, for
calibration, and `factor` is the true overhead of a watched step divided by the measured one. The first steps after a
watched one are slower too (of 0.4 ms, the first by 100 %, the fourth by 10 %): they do not count as plain, and the
difference is overhead.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CALIBRATIONS", "OverheadClock"]

# Steps in a median: one step with a pause (a checkpoint written, a new epoch) must not count for the others.
_RECENT_STEPS = 15
CALIBRATIONS = 3
"""Unwatched steps that suffice to know the time of a plain one."""
# One in so many unwatched steps computes a new median, the slowest part of ending a step.
_LOOK_EVERY = 16
_FACTORS = (1.0, 6.0)
_MUCH = 3.0
# Most unmeasured overhead of the first step, per measured one: torch makes its operators ready for modes.
_MOST_UNSEEN = 2.0
_COLD_NS, _MAX_COLD_STEPS = 2e6, 4
"""Time, and number of steps, for which the program runs slower after a watched step, with cold caches."""
# How much slower they are, in plain steps, until that has been measured.
_SLOWER_AT_FIRST = (0.5, 0.2, 0.1, 0.1)
_TIMED_PLAIN = 2
# Unmeasured overhead of an unwatched step: its end, and the wrapper of `nn.Module.__call__`.
#
# Found with a budget that allows nothing more (MLP of three layers, 0.23 ms: 1.06 to 1.07). At most half of the
# allowance of a step is charged, or short steps would never be watched.
_PASSED_NS = 14e3
# The same for the optimizer's hook, if it ends the step (1.08 to 1.09).
_PASSED_BY_HOOK_NS = 7e3
# In steps of this length and above, cold caches make no difference.
_LONG_STEP_NS = 10 * _COLD_NS


class OverheadClock:
    """Splits time into overhead and the program's own. All times are nanoseconds of a monotonic clock.

    Args:
        share: Allowed overhead, as a part of the program's own time.

    Attributes:
        elapsed_ns: Time during which a comparison ran.
        spent_ns: Estimated overhead in it.
        factor: True overhead for each nanosecond of measured overhead.
        plain_step_ns: Time of a step without overhead.
        n_plain: Plain steps seen: neither watched nor slower after a watched one.
        since_plain: Steps since the last plain one.
    """

    def __init__(self, share: float) -> None:
        self.elapsed_ns = 0.0
        self.spent_ns = 0.0
        self.factor = 1.0
        self.plain_step_ns = 0.0
        self.n_plain = 0
        self.since_plain = 0
        self._share = share
        self._plain_ns = 0.0
        self._by_our_clock_ns = 0.0
        self._capped_ns = 0.0
        self._now = 0
        self._step_began = (0.0, 0.0, 0.0)
        self._n_steps = 0
        self._steps_plain_ns: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._unwatched_ns: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._first_ns: list[float] = []
        self._n_cold = 0
        self._cold_until_ns = 0.0
        self._cold_steps_ns: list[deque[float]] = [deque(maxlen=_RECENT_STEPS) for _ in range(_MAX_COLD_STEPS)]
        self._slower_ns = [-1.0] * _MAX_COLD_STEPS
        self._early: list[tuple[float, float]] = []
        self._ratios: deque[float] = deque(maxlen=_RECENT_STEPS)

    def start(self, now: int) -> None:
        """Begin to count time, and a new step: the part of a step before an interruption is dropped."""
        self._now = now
        self._step_began = (self.elapsed_ns, self._by_our_clock_ns, self.spent_ns)

    def advance(self, now: int) -> None:
        """Add the time since the last call."""
        self.elapsed_ns += now - self._now
        self._now = now

    def spend(self, by_our_clock_ns: float) -> None:
        """Count measured overhead; `factor` adds what is not measured."""
        self._by_our_clock_ns += by_our_clock_ns
        self.spent_ns += self.factor * by_our_clock_ns

    def spend_seen(self, ns: float) -> None:
        """Count overhead without `factor`: between steps, no operators of the program run slower."""
        self._by_our_clock_ns += ns
        self.spent_ns += ns

    @property
    def credit_ns(self) -> float:
        """Overhead that may still be spent; negative for a debt."""
        return self.earned_ns - self.spent_ns - self._capped_ns

    @property
    def earned_ns(self) -> float:
        """Overhead that the program's own time has allowed so far."""
        plain_ns = self.elapsed_ns - self.spent_ns
        self._plain_ns = max(self._plain_ns, plain_ns)  # a corrected estimate must not take back time of the program
        return self._share * self._plain_ns

    @property
    def spent_in_step_ns(self) -> float:
        """Overhead in the current step."""
        return self.spent_ns - self._step_began[2]

    @property
    def step_so_far_ns(self) -> float:
        """The program's own time in the current step."""
        return self.elapsed_ns - self._step_began[0] - self.spent_in_step_ns

    @property
    def allowed_ns(self) -> float:
        """Overhead that one step allows."""
        return self._share * self.plain_step_ns

    @property
    def calibrated(self) -> bool:
        """Whether the time of a plain step is known, at least from the first steps, which are slower."""
        return len(self._unwatched_ns) >= CALIBRATIONS or len(self._first_ns) >= CALIBRATIONS

    @property
    def knows_plain(self) -> bool:
        """Whether enough plain steps were seen."""
        return len(self._unwatched_ns) >= CALIBRATIONS

    @property
    def weighed(self) -> bool:
        """Whether `factor` has been measured."""
        return bool(self._ratios)

    def cap_credit(self, ceiling_ns: float) -> None:
        """Drop the credit above a ceiling: a step that spends the savings of many steps would be slow."""
        self._capped_ns += max(0.0, self.credit_ns - ceiling_ns)

    @property
    def n_cold_steps(self) -> float:
        """Number of slower steps after a watched one."""
        if self.plain_step_ns >= _LONG_STEP_NS:
            return 0.0
        return min(_COLD_NS / self.plain_step_ns, _MAX_COLD_STEPS) if self.plain_step_ns > 0 else 1.0

    def passed_ns(self, *, by_hook: bool) -> float:
        """Unmeasured overhead of an unwatched step; `by_hook` if an optimizer's hook ended it."""
        return min(_PASSED_NS + (_PASSED_BY_HOOK_NS if by_hook else 0.0), self.allowed_ns / 2)

    def end_step(self, *, watched: bool, by_hook: bool = False) -> None:
        """End a step, and update all estimates."""
        began_ns, spent_before_ns, estimated_before_ns = self._step_began
        if watched:
            self._correct(self.elapsed_ns - began_ns, self._by_our_clock_ns - spent_before_ns, estimated_before_ns)
        elapsed_ns, spent_ns = self.elapsed_ns - began_ns, self._by_our_clock_ns - spent_before_ns
        self._n_steps += 1
        self.since_plain += 1
        if watched:
            if not self.calibrated:
                self._early.append((elapsed_ns, spent_ns))
            self._steps_plain_ns.append(elapsed_ns - self.factor * spent_ns)
            self._weigh_watched(elapsed_ns, spent_ns)
            self.begin_cold_steps()
        else:
            unseen_ns = self.passed_ns(by_hook=by_hook) if self.knows_plain else 0.0
            self.spent_ns += unseen_ns
            self._steps_plain_ns.append(self._count_unwatched(began_ns, elapsed_ns - spent_ns - unseen_ns))
        if watched or self._n_steps <= CALIBRATIONS or not self._n_steps % _LOOK_EVERY:
            self.plain_step_ns = max(statistics.median(self._steps_plain_ns), 0.0)
        if self._early and self.calibrated:
            self._charge_early()
        self._step_began = (self.elapsed_ns, self._by_our_clock_ns, self.spent_ns)

    def _charge_early(self) -> None:
        """Charge the unmeasured overhead of steps that were watched before the time of a plain step was known."""
        # At most so much: work that a program does only in its first step is not overhead.
        plain_ns = min(self._first_ns or self._unwatched_ns)
        for elapsed_ns, seen_ns in self._early:
            self.spent_ns += min(max(elapsed_ns - plain_ns - seen_ns, 0.0), _MOST_UNSEEN * seen_ns)
        self._early.clear()

    def begin_cold_steps(self) -> None:
        """The caches are cold now: the next steps are slower."""
        self._cold_until_ns, self._n_cold = self.elapsed_ns + _COLD_NS, 0

    @property
    def in_cold_steps(self) -> bool:
        """Whether the next step may be slower, since a watched one came before it."""
        return self.elapsed_ns < self._cold_until_ns and self._n_cold < _MAX_COLD_STEPS

    def add_unwatched_steps(self, ends_ns: Sequence[int], by_our_clock_ns: float, *, by_hook: bool = False) -> None:
        """End unwatched steps of which only the times were noted.

        Args:
            ends_ns: End of each step.
            by_our_clock_ns: Time taken to count them.
            by_hook: Whether an optimizer's hook ended them.
        """
        n_timed, enough = 0, self.n_plain + _TIMED_PLAIN
        # The slower ones and a few more, one by one; to time all of them would take longer than it is worth.
        for ended_ns in ends_ns:
            if self.n_plain >= enough:
                break
            n_timed += 1
            self.advance(max(ended_ns, self._now))
            self.end_step(watched=False, by_hook=by_hook)
        # A call of another thread may have advanced the clock since the last of these steps ended.
        self.advance(max(ends_ns[-1], self._now))
        self.spend_seen(by_our_clock_ns)
        n_steps = len(ends_ns) - n_timed
        self.spent_ns += n_steps * self.passed_ns(by_hook=by_hook)
        self._n_steps += n_steps
        self.since_plain += n_steps
        self._step_began = (self.elapsed_ns, self._by_our_clock_ns, self.spent_ns)

    def _weigh_watched(self, elapsed_ns: float, spent_ns: float) -> None:
        """Update `factor` from a watched step, and the delays of the steps after a watched one."""
        if not self.calibrated:
            return
        plain_ns = statistics.median(self._unwatched_ns) if self.knows_plain else min(self._first_ns)
        if spent_ns > 0:
            self._ratios.append((elapsed_ns - plain_ns) / spent_ns)
            # Never below 1: that would take back time that was measured.
            self.factor = min(max(statistics.median(self._ratios), _FACTORS[0]), _FACTORS[1])
        for k, steps_ns in enumerate(self._cold_steps_ns):
            # From several steps only: a single one may be slow because the program paused.
            is_known = self.knows_plain and len(steps_ns) >= CALIBRATIONS
            self._slower_ns[k] = max(0.0, statistics.median(steps_ns) - plain_ns) if is_known else -1.0

    def _count_unwatched(self, began_ns: float, elapsed_ns: float) -> float:
        """Count an unwatched step; returns the program's own time in it."""
        if not self.calibrated:
            self._first_ns.append(elapsed_ns)
        k, self._n_cold = self._n_cold, self._n_cold + 1
        in_cold_steps = began_ns < self._cold_until_ns and k < _MAX_COLD_STEPS and elapsed_ns < _LONG_STEP_NS
        if not in_cold_steps:
            self.n_plain += 1
            self.since_plain = 0
            self._unwatched_ns.append(elapsed_ns)
            return elapsed_ns
        self._cold_steps_ns[k].append(elapsed_ns)
        slower_ns = self._slower_ns[k]
        if slower_ns < 0:
            slower_ns = _SLOWER_AT_FIRST[k] * self.plain_step_ns if self.knows_plain else 0.0
        ours_ns = min(slower_ns, elapsed_ns / 2)  # bounded as in `_correct`: on a busy machine it may be noise
        self.spent_ns += ours_ns
        return elapsed_ns - ours_ns

    def _correct(self, elapsed_ns: float, by_our_clock_ns: float, estimated_before_ns: float) -> None:
        """Bound the estimated overhead of a watched step: the program's own time is at least half a plain step."""
        # A whole plain step if the overhead is several times as much: the variation of steps does not matter then.
        estimated_ns = self.spent_ns - estimated_before_ns
        least_ns = self.plain_step_ns if by_our_clock_ns > _MUCH * self.plain_step_ns else self.plain_step_ns / 2
        too_much_ns = estimated_ns - max(elapsed_ns - least_ns, by_our_clock_ns)
        self.spent_ns -= max(0.0, too_much_ns)
