"""The overhead budget: which calls are replayed so that a step stays within a multiple of the plain step.

`OverheadClock` computes the credit: the time that may still be spent. It goes into call signatures (operator, dtypes,
shapes, strides, module, line) that were never verified, in the order of the calls. Once all recent signatures are
verified, it goes into those whose last check is the oldest.

Where watching a step costs more than its allowance, a step is watched to its end on credit, and the following steps
stay unwatched until the debt is paid. Then the mean over the steps stays within the budget.

A random generator decides which steps stay unwatched, and in which step every call is looked at. In a program whose
steps alternate (two of one network, one of another), a fixed period could miss the same steps always.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowrun.schedule.overhead_clock import CALIBRATIONS, OverheadClock

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

__all__ = ["Budget", "BudgetReport"]

# In a program without steps, a window of so many calls takes the place of a step.
_WINDOW_CALLS = 4096
_CALIBRATE_EVERY = 24
# Unwatched steps in a row that a calibration waits for.
_PLAIN_STEPS = 2
# In the first window, and then on average once in so many, every call is looked at: if not, a call in a part of the
# step where the credit is always spent would be missed. A signature counts as recent for so many windows.
_DISCOVER_EVERY = 16
_MAX_FOR_WATCHING = 1 / 3
# In a step on credit, time for replays per time for watching.
_REPLAYS_FOR_WATCHING = 2.0
# Most overhead of one step, in plain steps, unless a single call takes more.
_MAX_IN_STEP = 7.0
# An empty dispatch mode makes the first step of an MLP of 0.34 ms six times as long: little is left.
_MAX_IN_FIRST_STEP = 6.0
# Most time for judging postponed calls after one step, in plain steps; a call in progress is finished.
_MAX_FOR_JUDGING = 5.0
# Cost of the signatures chosen at once, in allowances of a step. With more, calls early in a step would be replayed
# more often than the others.
_CHOSEN_FOR_STEPS = 1.0
_RECENT_CALLS = 64
# `OverheadClock.factor` that is assumed until it has been measured; high, since caches are coldest at first.
_FACTOR_AT_FIRST = 2.0
_OVERDRAFT_NS, _OVERDRAFT = 5e6, 0.01
"""Debt up to which each step is watched while some signatures were never verified, and the same as a part of the
program's time so far: else the first few hundred short steps would exceed the budget."""
# Time of a first replay that is assumed until some were seen.
_FIRST_LOOK_NS = 1e6
_SHORT_STEP_NS = 5e6
# Most steps that end without a new decision.
_MAX_UNWATCHED = 64
# Above this, the least recent signatures are forgotten: with dynamic shapes, memory would grow without bound.
_MAX_SIGNATURES = 50_000


@dataclass(slots=True)
class _Signature:
    """State of a call signature.

    Attributes:
        verified_in: Number of the window of its last replay.
        met_in: Number of the window of its last call.
        cost_ns: Cost of its last replay.
    """

    verified_in: int
    met_in: int
    cost_ns: int = 0


@dataclass(frozen=True, slots=True)
class BudgetReport:
    """Result of a budget, stored in the data file under these names.

    Attributes:
        ratio: Allowed time of a step, in plain steps.
        achieved: Measured time of a step, in plain steps.
        n_signatures: Signatures met.
        n_verified: Signatures that were replayed at least once.
        n_calls: Calls seen.
        n_replayed: Calls replayed.
        n_steps: Steps; 0 for a program that does not mark their ends.
        n_unwatched: Unwatched steps: not selected, not affordable, or left alone for calibration.
        n_passes: How often all calls of a step were looked at, in one step or several; 0: not all signatures were met.
        n_stretches: Stretches from one call of the outermost module to the next, in a program without marked steps.
    """

    ratio: float
    achieved: float
    n_signatures: int
    n_verified: int
    n_calls: int
    n_replayed: int
    n_steps: int
    n_unwatched: int
    n_stretches: int
    n_passes: int


class Budget:
    """Decides for each call whether it is replayed. Not thread-safe: callers hold the replayer's lock.

    Args:
        ratio: Allowed time of a compared step, in plain steps; above 1.
        handing_over_ns: Time that torch takes to hand a call to a dispatch mode.
        seed: Seed of the random generator; the program's random streams are not touched.

    Attributes:
        watched: Whether the current step is watched; the caller corrects it if it could not do as `end_step` said.
    """

    def __init__(self, ratio: float, handing_over_ns: float, seed: int = 0) -> None:
        self.watched = True
        self._ratio = ratio
        self._handing_over_ns = handing_over_ns
        self._clock = OverheadClock(ratio - 1)
        # Of its own and seeded: the program's streams stay, and two runs of one program choose the same calls.
        self._random = random.Random(seed)  # noqa: S311 - no secret
        # Ordered by the window of the last call: a signature that comes again in a later window moves to the end.
        self._signatures: dict[Hashable, _Signature] = {}
        self._new: set[Hashable] = set()
        self._operators: set[Hashable] = set()
        self._chosen: set[Hashable] = set()
        self._chosen_in = 0
        self._chosen_ns = 0.0
        self._window = 0
        self._n_steps = self._n_stretches = self._n_unwatched = 0
        self._n_calls = self._n_replayed = 0
        self._n_signatures = self._n_verified = 0
        self._calls_before = 0
        self._replays_ns = self._spent_before_ns = 0.0
        self._watching_ns = self._looking_ns = 0.0
        self._passing_ns = handing_over_ns
        self._passes = self._is_full = False
        self._n_passes = 0
        self._n_looked = self._n_over = self._looked_at = self._looked_at_next = self._calls_in_step = 0
        self._first_looks_ns = 0.0
        self._has_new = False
        self._n_first_looks = 0
        self._sparse = False
        self._plain_wanted = 0
        self._discovers = True
        self._ended_watched = self._by_hook = False
        self._draw = self._wanted_ns = 0.0

    # -- time --------------------------------------------------------------------------------------

    def start(self, now: int) -> None:
        """Begin to count time.

        Args:
            now: Nanoseconds of a monotonic clock, as all times here.
        """
        self._clock.start(now)

    def spend(self, now: int, own_ns: int) -> None:
        """Count the overhead of a call.

        Args:
            now: End of the call.
            own_ns: Time beyond that of the program's operator.
        """
        self._clock.advance(now)
        self._clock.spend(own_ns + self._handing_over_ns)
        if self._passes:
            took_ns = (own_ns + self._handing_over_ns) * self._clock.factor
            self._passing_ns += (took_ns - self._passing_ns) / _RECENT_CALLS

    def spend_on_passed(self, n_calls: int, own_ns: int) -> None:
        """Count the overhead of calls that were passed on, which `spend` has not counted."""
        spent_ns = own_ns + n_calls * self._handing_over_ns
        self._clock.spend(spent_ns)
        mean_ns = spent_ns * self._clock.factor / n_calls
        self._passing_ns += (mean_ns - self._passing_ns) * min(n_calls / _RECENT_CALLS, 1.0)

    def spend_on_step(self, began: int, now: int) -> None:
        """Count the overhead of ending a step."""
        self._clock.advance(now)
        # `factor` applies only next to a watched step: between two unwatched ones, the caches stay warm.
        spend = self._clock.spend if self.watched or self._ended_watched else self._clock.spend_seen
        spend(now - began)

    # -- calls -------------------------------------------------------------------------------------

    def exhausted(self, now: int) -> bool:
        """Whether no time may be spent on the call that begins now."""
        self._n_calls += 1
        self._clock.advance(now)
        if not self.watched:  # the mode is off on this thread; the call is from another thread of the program
            return True
        if not self._window:
            # The first step has no plain time yet: its measured time is mostly due to cold caches.
            self._sparse = self._ratio - 1 < 1 / _MAX_FOR_WATCHING
        if not self._n_calls % _WINDOW_CALLS and not self._n_steps + self._n_stretches:
            self._end_window()
            self._sparse = False
        over = self._is_over() if self._sparse else not self._discovers and self._clock.credit_ns <= 0
        self._passes = over
        self._n_looked += not over
        self._n_over += over
        return over

    def pass_view(self) -> None:
        """Count a call that has no values to compare."""
        self._n_calls += 1

    def _is_over(self) -> bool:
        """Whether a step on credit leaves this call out: it was looked at in an earlier step, or the step is full."""
        if self._is_full or self._n_in_step <= self._looked_at:
            return True
        # At least one call of each watched step is looked at: else a step that is too expensive would never advance.
        if self._fits(0.0) or not self._n_looked:
            return False
        self._fill()
        return True

    def _fill(self) -> None:
        """Stop looking at calls in this step; the next watched step continues with this call."""
        self._looked_at_next = self._looked_at_next or self._n_in_step - 1
        # Before calibration, the step is not closed: the credit grows with the program's time in it.
        self._is_full = self._clock.calibrated

    @property
    def _n_in_step(self) -> int:
        return self._n_calls - self._calls_before

    def _fits(self, cost_ns: float) -> bool:
        """Whether a step on credit can pay this cost, and pass the rest of its calls on."""
        clock = self._clock
        # In the first step, a lower bound: a call takes at least as long as its way through the dispatcher.
        plain_ns = clock.plain_step_ns or min(clock.step_so_far_ns, self._n_in_step * self._handing_over_ns)
        passing_ns = max(self._calls_in_step - self._n_in_step, 0) * self._passing_ns
        factor = clock.factor if clock.weighed else _FACTOR_AT_FIRST
        taken_ns = factor * (clock.spent_in_step_ns / clock.factor + cost_ns) + passing_ns
        most = _MAX_IN_STEP if self._window else _MAX_IN_FIRST_STEP
        return taken_ns <= max(most, self._ratio - 1) * plain_ns

    def selects(self, signature: Hashable, operator: Hashable = None) -> bool:
        """Whether a call with this signature should be replayed; if so, it counts as verified.

        In steps on credit, each operator is replayed only once until all calls of a step were looked at: a faulty
        operator is mostly wrong in all of its calls. None stands for an operator that has no other calls.
        """
        known = self._signatures.get(signature)
        may_spend = self._sparse or self._clock.credit_ns > 0
        if known is None:
            known = self._meet(signature)
        elif known.met_in != self._window:
            known.met_in = self._window
            # To the end: `_meet` forgets from the front, and `_of_late` reads from the back.
            self._signatures[signature] = self._signatures.pop(signature)
        is_new = signature in self._new
        # A first replay is slower (it compiles kernels, fills caches): take the mean cost of first replays so far.
        mean_ns = (_FIRST_LOOK_NS + self._first_looks_ns) / (1 + self._n_first_looks)
        cost_ns = mean_ns if is_new else known.cost_ns
        waits = self._sparse and is_new and not self._n_passes and operator in self._operators
        if waits or not (may_spend and (is_new or signature in self._chosen)):
            return False
        # The first call looked at in a step is replayed at any cost: one that costs more than a step allows would
        # never be replayed. Not in the first step, which is slow enough.
        if self._sparse and (self._n_looked > 1 or not self._window) and not self._fits(cost_ns):
            self._fill()
            return False
        known.verified_in = self._window
        self._n_replayed += 1
        if is_new:
            self._new.discard(signature)
            self._n_verified += 1
            if operator is not None:
                self._operators.add(operator)
        if signature in self._chosen:
            self._chosen.remove(signature)
            self._chosen_ns -= known.cost_ns * self._clock.factor
        return True

    def verified(self, signature: Hashable, cost_ns: int) -> None:
        """Record the cost of a replay."""
        self._replays_ns += cost_ns
        known = self._signatures.get(signature)
        if known is not None:
            # The mean over first replays is the estimate for a signature that was not replayed yet.
            if not known.cost_ns:
                self._first_looks_ns += cost_ns
                self._n_first_looks += 1
            known.cost_ns = cost_ns

    def _meet(self, signature: Hashable) -> _Signature:
        self._n_signatures += 1
        if len(self._signatures) >= _MAX_SIGNATURES:
            # Dictionaries keep their order, and a signature that comes again goes to the end: the first is the least
            # recent.
            oldest = next(iter(self._signatures))
            del self._signatures[oldest]
            self._new.discard(oldest)
            self._chosen.discard(oldest)
        known = self._signatures[signature] = _Signature(self._window, self._window)
        self._new.add(signature)
        return known

    # -- steps -------------------------------------------------------------------------------------

    def end_step(
        self,
        now: int,
        *,
        must_watch: bool = False,
        may_watch: bool = True,
        is_stretch: bool = False,
        by_hook: bool = False,
    ) -> bool:
        """End a step, and decide on the next one.

        Args:
            now: End of the step.
            must_watch: The next step cannot be left out.
            may_watch: Calls of the next step are selected for comparison.
            is_stretch: A stretch ended, not a step.
            by_hook: An optimizer's hook ended the step.

        Returns:
            Whether the next step is to be watched.
        """
        clock = self._clock
        clock.advance(now)
        clock.end_step(watched=self.watched, by_hook=by_hook)
        self._by_hook = by_hook
        self._ended_watched = self.watched
        self._n_stretches += is_stretch
        self._n_steps += not is_stretch
        if self.watched:
            self._end_window()
            self._draw = self._random.random()
        else:
            self._n_unwatched += 1
        allowed_ns = clock.allowed_ns
        # If watching takes much of the allowance, steps are watched on credit, to their ends: if not, all time would
        # go into watching, and none into replays.
        self._sparse = not clock.calibrated or self._watching_ns > allowed_ns * _MAX_FOR_WATCHING
        ceiling_ns = self._watching_ns + allowed_ns if self._sparse else 0.0
        clock.cap_credit(ceiling_ns)
        # Drawn once for each watched step, so that the steps until then can be counted together.
        self._wanted_ns = ceiling_ns * self._draw / 2
        self.watched = must_watch or (may_watch and self._can_pay() and not self._calibrates())
        return self.watched

    @property
    def postpones(self) -> bool:
        """Whether calls are judged between steps: in steps on credit, a diagnosis may exceed what a step may take."""
        return self._sparse

    @property
    def judging_ns(self) -> float:
        """Time for judging postponed calls at the end of one step."""
        clock = self._clock
        if clock.credit_ns <= -self._overdraft_ns:
            return 0.0
        if self._sparse:
            return _MAX_FOR_JUDGING * clock.plain_step_ns
        return max(clock.credit_ns, 0.0) + clock.allowed_ns / 2

    def judged(self, took_ns: float) -> None:
        """Count the judging of calls between two steps, which makes the next step slower, as a watched step does."""
        self._replays_ns += took_ns / self._clock.factor
        self._clock.begin_cold_steps()

    def fill_step(self) -> None:
        """Too many calls are postponed: the rest of the step is looked at in a later step."""
        if self._sparse:
            self._fill()

    @property
    def n_unwatched_next(self) -> int:
        """How many of the next steps stay unwatched in any case, since the debt is not paid earlier."""
        clock = self._clock
        # Short steps only: a decision at the end of each takes 10 µs and more, which long ones do not notice.
        is_short = 0 < clock.plain_step_ns < _SHORT_STEP_NS
        if self.watched or not is_short or not clock.knows_plain:
            return 0
        earned_ns = clock.allowed_ns - clock.passed_ns(by_hook=self._by_hook)
        wanted_ns = -self._overdraft_ns if self._has_new else self._wanted_ns
        return max(0, min(int((wanted_ns - clock.credit_ns) / earned_ns) - 1, _MAX_UNWATCHED))

    def add_unwatched_steps(self, ends_ns: Sequence[int], own_ns: int, *, by_hook: bool = False) -> None:
        """Count unwatched steps; arguments as for `OverheadClock.add_unwatched_steps`."""
        self._clock.add_unwatched_steps(ends_ns, own_ns, by_hook=by_hook)
        self._ended_watched = False
        self._n_steps += len(ends_ns)
        self._n_unwatched += len(ends_ns)

    def _can_pay(self) -> bool:
        """Whether the next step can be paid, at the latest afterwards: the program's time in it earns credit too."""
        credit_ns = self._clock.credit_ns
        if not self._sparse:
            return credit_ns + self._clock.allowed_ns / 2 >= 0
        if self._has_new and credit_ns > -self._overdraft_ns:
            return True
        return credit_ns >= self._wanted_ns

    @property
    def _overdraft_ns(self) -> float:
        clock = self._clock
        return min(_OVERDRAFT_NS, _OVERDRAFT * (clock.elapsed_ns - clock.spent_ns))

    def _calibrates(self) -> bool:
        """Whether the next step stays unwatched for calibration, to time a plain step."""
        clock = self._clock
        if not clock.calibrated or clock.n_plain < self._plain_wanted:
            return True
        # Steps left out for their cost show it too, unless each comes after a watched step, whose caches are cold.
        every = _CALIBRATE_EVERY * (clock.n_cold_steps + 1 if clock.knows_plain else 0.5)
        if (self._sparse and clock.since_plain < every) or self._random.random() >= 1 / every:
            return False
        self._plain_wanted = clock.n_plain + (_PLAIN_STEPS if clock.knows_plain else CALIBRATIONS)
        return True

    def _end_window(self) -> None:
        """End a window: compute the cost of watching, and choose the next signatures."""
        clock = self._clock
        n_calls, self._calls_before = self._n_in_step, self._n_calls
        self._calls_in_step = n_calls
        self._looked_at, self._looked_at_next = self._looked_at_next, 0
        # A pass is over where nothing is left for a later step, and nothing was passed for want of credit.
        self._n_passes += not self._looked_at and (self._sparse or not self._n_over)
        self._n_looked, self._n_over, self._is_full = 0, 0, False
        self._watching_ns = n_calls * self._handing_over_ns * clock.factor
        spent_ns, self._spent_before_ns = clock.spent_ns - self._spent_before_ns, clock.spent_ns
        self._looking_ns = max(spent_ns - self._replays_ns * clock.factor, self._watching_ns)
        self._replays_ns = 0.0
        self._window += 1
        self._discovers = self._random.random() < 1 / _DISCOVER_EVERY
        # In steps on credit, the choice is for one step; if not, it lasts for several.
        is_used_up = not self._chosen or self._chosen_ns < clock.allowed_ns / 2
        if self._sparse or is_used_up or self._window - self._chosen_in >= _DISCOVER_EVERY:
            self._choose()

    def _choose(self) -> None:
        """Choose signatures to verify again, the oldest verification first; none while new signatures wait."""
        self._chosen.clear()
        self._chosen_in = self._window
        self._chosen_ns = 0.0
        of_late = list(self._of_late())
        is_new = bool(self._new) and any(signature in self._new for signature, _ in of_late)
        self._has_new = is_new or (self._sparse and not self._n_passes)
        if self._has_new:
            return
        # Shuffled before the stable sort: among equals, the order of calls would prefer those early in the step.
        self._random.shuffle(of_late)
        of_late.sort(key=lambda item: item[1].verified_in)
        clock = self._clock
        max_ns = _REPLAYS_FOR_WATCHING * self._looking_ns if self._sparse else _CHOSEN_FOR_STEPS * clock.allowed_ns
        for signature, known in of_late:
            self._chosen.add(signature)
            self._chosen_ns += known.cost_ns * clock.factor
            if 0 < max_ns <= self._chosen_ns:
                break

    def _of_late(self) -> Iterator[tuple[Hashable, _Signature]]:
        """Signatures that came in the last windows."""
        for signature, known in reversed(self._signatures.items()):
            if known.met_in < self._window - _DISCOVER_EVERY:
                break
            yield signature, known

    def report(self) -> BudgetReport:
        """The result so far."""
        clock = self._clock
        plain_ns = clock.elapsed_ns - clock.spent_ns
        return BudgetReport(
            ratio=self._ratio,
            achieved=clock.elapsed_ns / plain_ns if plain_ns > 0 else 1.0,
            n_signatures=self._n_signatures,
            n_verified=self._n_verified,
            n_calls=self._n_calls,
            n_replayed=self._n_replayed,
            n_steps=self._n_steps,
            n_unwatched=self._n_unwatched,
            n_stretches=self._n_stretches,
            n_passes=self._n_passes,
        )
