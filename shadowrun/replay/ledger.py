"""Whose time it was: the program's or ours, and what the overhead budget still allows.

What comparing costs is read from the replayer's own clock, plus what torch takes to hand a call to a dispatch mode. A
clock of one's own sees not all: caches are colder after us. So some steps are not watched, and what the watched ones
take longer than those says by which factor the clock is short. The first steps after a watched one are slower too (of
0.4 ms, twice as long the first, a tenth the fourth): they do not count as plain, and what they take longer is ours. The
rest of the time is the program's.
"""

from __future__ import annotations

import statistics
from collections import deque

__all__ = ["CALIBRATIONS", "Ledger"]

_RECENT_STEPS = 15
"""Medians over so many: a step with a pause (a checkpoint written, a new epoch) must not stand for the others."""
CALIBRATIONS = 3
"""Steps left alone that are enough to know how long one is."""
_LOOK_EVERY = 16
"""Of steps that nobody watches, few have a new median computed: that takes longer than all else there."""
_FACTORS = (1.0, 6.0)
_WAKE_NS, _WAKE_STEPS = 2e6, 4
"""For so long, and so many steps, after a watched step the program runs slower: its memory comes back into caches."""
_PASSED_NS = 11e3
"""What a step that nobody watches takes longer, unseen: to be told of its end, and modules' calls that pass us.

Measured with a budget that pays for nothing else (MLP of three layers, 0.23 ms: 1.06 to 1.07). Half of what a step
allows at most, or short steps would never be watched.
"""
_PASSED_BY_HOOK_NS = 7e3
"""What it takes more where the optimizer's hook ends it (1.08 to 1.09)."""
_LONG_STEP_NS = 10 * _WAKE_NS
"""In steps as long as this, what the wake takes is lost in the rest."""


class Ledger:
    """Counts time. All times are nanoseconds, by any clock that only goes forward.

    Args:
        share: Part of the program's time that may be spent.

    Attributes:
        elapsed_ns: What passed while a comparison ran.
        spent_ns: Of it, what was ours.
        factor: What a nanosecond by our own clock really costs.
        plain_step_ns: What the program's own step takes.
        n_plain: Steps seen that were neither watched nor slower for a watched one before them.
        since_plain: Steps since the last of those.
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
        self._forfeited_ns = 0.0
        self._clock = 0
        self._step_began = (0.0, 0.0, 0.0)
        self._n_steps = 0
        self._steps_plain_ns: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._unwatched_ns: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._first_ns: list[float] = []
        self._n_in_wake = 0
        self._wake_ends_ns = 0.0
        self._in_wake_ns: list[deque[float]] = [deque(maxlen=_RECENT_STEPS) for _ in range(_WAKE_STEPS)]
        self._slower_ns = [0.0] * _WAKE_STEPS
        self._ratios: deque[float] = deque(maxlen=_RECENT_STEPS)

    def start(self, now: int) -> None:
        """Begin to count time, and a step: what was there of one before is no whole one."""
        self._clock = now
        self._step_began = (self.elapsed_ns, self._by_our_clock_ns, self.spent_ns)

    def advance(self, now: int) -> None:
        """Look at the clock."""
        self.elapsed_ns += now - self._clock
        self._clock = now

    def spend(self, by_our_clock_ns: float) -> None:
        """Time was ours, and more that nobody saw."""
        self._by_our_clock_ns += by_our_clock_ns
        self.spent_ns += self.factor * by_our_clock_ns

    def spend_seen(self, ns: float) -> None:
        """Time was ours, all of it: between the steps there is no program that we slow down."""
        self._by_our_clock_ns += ns
        self.spent_ns += ns

    @property
    def credit_ns(self) -> float:
        """What may be spent; negative: there are debts."""
        return self.earned_ns - self.spent_ns - self._forfeited_ns

    @property
    def earned_ns(self) -> float:
        """What the program's own time allowed so far."""
        plain_ns = self.elapsed_ns - self.spent_ns
        self._plain_ns = max(self._plain_ns, plain_ns)  # no estimate of ours makes it run backwards
        return self._share * self._plain_ns

    @property
    def spent_in_step_ns(self) -> float:
        """What was ours of the current step."""
        return self.spent_ns - self._step_began[2]

    @property
    def step_so_far_ns(self) -> float:
        """What was the program's own of the current step."""
        return self.elapsed_ns - self._step_began[0] - self.spent_in_step_ns

    @property
    def allowed_ns(self) -> float:
        """What a step allows."""
        return self._share * self.plain_step_ns

    @property
    def calibrated(self) -> bool:
        """Whether enough steps were left alone to tell how long a plain one is, be it from slower ones at first."""
        return len(self._unwatched_ns) >= CALIBRATIONS or len(self._first_ns) >= CALIBRATIONS

    @property
    def knows_plain(self) -> bool:
        """Whether enough plain steps were seen."""
        return len(self._unwatched_ns) >= CALIBRATIONS

    def forfeit(self, ceiling_ns: float) -> None:
        """Give credit above this up: that of long ago would be spent at once, and make one step slow."""
        self._forfeited_ns += max(0.0, self.credit_ns - ceiling_ns)

    @property
    def steps_in_wake(self) -> float:
        """How many steps after a watched one are slower."""
        if self.plain_step_ns >= _LONG_STEP_NS:
            return 0.0
        return min(_WAKE_NS / self.plain_step_ns, _WAKE_STEPS) if self.plain_step_ns > 0 else 1.0

    def end_step(self, *, watched: bool) -> None:
        """A step is over."""
        began_ns, spent_before_ns, estimated_before_ns = self._step_began
        if watched:
            self._correct(self.elapsed_ns - began_ns, self._by_our_clock_ns - spent_before_ns, estimated_before_ns)
        elapsed_ns, spent_ns = self.elapsed_ns - began_ns, self._by_our_clock_ns - spent_before_ns
        self._n_steps += 1
        self.since_plain += 1
        if watched:
            self._steps_plain_ns.append(elapsed_ns - self.factor * spent_ns)
            self._weigh_watched(elapsed_ns, spent_ns)
            self._wake_ends_ns, self._n_in_wake = self.elapsed_ns + _WAKE_NS, 0
        else:
            self._steps_plain_ns.append(self._count_unwatched(began_ns, elapsed_ns - spent_ns))
        if watched or self._n_steps <= CALIBRATIONS or not self._n_steps % _LOOK_EVERY:
            self.plain_step_ns = max(statistics.median(self._steps_plain_ns), 0.0)
        self._step_began = (self.elapsed_ns, self._by_our_clock_ns, self.spent_ns)

    @property
    def in_wake(self) -> bool:
        """Whether the coming step may be slower for a watched one before it."""
        return self.elapsed_ns < self._wake_ends_ns and self._n_in_wake < _WAKE_STEPS

    def pass_over(self, now: int, n_steps: int, by_our_clock_ns: float, *, by_hook: bool = False) -> None:
        """Steps that nobody watched, nor timed, are over; the next begins.

        Args:
            now: Their end.
            n_steps: How many.
            by_our_clock_ns: What counting them took.
            by_hook: An optimizer's hook told of them.
        """
        self.advance(max(now, self._clock))
        self.spend_seen(by_our_clock_ns)
        self.spent_ns += n_steps * min(_PASSED_NS + (_PASSED_BY_HOOK_NS if by_hook else 0.0), self.allowed_ns / 2)
        self._n_steps += n_steps
        self.since_plain += n_steps
        self._step_began = (self.elapsed_ns, self._by_our_clock_ns, self.spent_ns)

    def _weigh_watched(self, elapsed_ns: float, spent_ns: float) -> None:
        """Find how much longer a watched step took than a plain one, and those after it."""
        if not self.calibrated:
            return
        plain_ns = statistics.median(self._unwatched_ns) if self.knows_plain else min(self._first_ns)
        if spent_ns > 0:
            self._ratios.append((elapsed_ns - plain_ns) / spent_ns)
            self.factor = min(max(statistics.median(self._ratios), _FACTORS[0]), _FACTORS[1])
        for k, steps_ns in enumerate(self._in_wake_ns):
            # Of one alone, nobody can tell what was ours and what a pause of the program's.
            is_known = self.knows_plain and len(steps_ns) >= CALIBRATIONS
            self._slower_ns[k] = max(0.0, statistics.median(steps_ns) - plain_ns) if is_known else 0.0

    def _count_unwatched(self, began_ns: float, elapsed_ns: float) -> float:
        """Count a step that was not watched; returns what of it was the program's."""
        if not self.calibrated:
            self._first_ns.append(elapsed_ns)
        k, self._n_in_wake = self._n_in_wake, self._n_in_wake + 1
        in_wake = began_ns < self._wake_ends_ns and k < _WAKE_STEPS and elapsed_ns < _LONG_STEP_NS
        if not in_wake:
            self.n_plain += 1
            self.since_plain = 0
            self._unwatched_ns.append(elapsed_ns)
            return elapsed_ns
        self._in_wake_ns[k].append(elapsed_ns)
        ours_ns = min(self._slower_ns[k], elapsed_ns / 2)  # as in `_correct`: on a busy machine it may be all noise
        self.spent_ns += ours_ns
        return elapsed_ns - ours_ns

    def _correct(self, elapsed_ns: float, by_our_clock_ns: float, estimated_before_ns: float) -> None:
        """Of a watched step, at least half a plain step was the program's, whatever the factor says."""
        estimated_ns = self.spent_ns - estimated_before_ns
        too_much_ns = estimated_ns - max(elapsed_ns - self.plain_step_ns / 2, by_our_clock_ns)
        self.spent_ns -= max(0.0, too_much_ns)
