"""The overhead budget: which calls are replayed so that a step stays within a multiple of the plain step.

The ledger tells what may still be spent: the credit. Spent it is on call signatures (operator, dtypes, shapes, strides,
module, line) that were never verified, in the order in which they come; once all those of late are verified, on those
whose last check lies farthest back.

Where watching alone costs more than is allowed, one step is watched to its end on credit, the first among them, and
then none until the debt is paid: the mean over the steps is what stays within the budget then.

When a step is left out, and when each call of one is looked at, is drawn from a random generator of our own: a program
whose steps come in a fixed order (two of one network, one of the other) must not have the same of them left out always.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowrun.replay.ledger import CALIBRATIONS, Ledger

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

__all__ = ["Budget", "BudgetReport"]

_WINDOW_CALLS = 4096
"""A program without steps gets a new choice after that many calls."""
_CALIBRATE_EVERY = 24
_PLAIN_STEPS = 2
"""Plain steps that are waited for when steps are left out to see some."""
_DISCOVER_EVERY = 16
"""In the first window, and then about so often, each call is looked at, replayed or not: else one that comes where the
credit is always spent would be missed. It is also for how many windows a signature counts as one of late."""
_MOST_FOR_WATCHING = 1 / 3
_REPLAYS_FOR_WATCHING = 2.0
"""What goes into replays of a step that is watched on credit, for each nanosecond that went into watching it."""
_MOST_IN_STEP = 9.0
"""So many plain steps are spent on one step at most, unless a single call takes more."""
_CHOSEN_FOR_STEPS = 1.0
"""With more to choose from, what comes early in the step would be taken too often."""
_OVERDRAFT_NS = 5e6
"""So far into debt the steps go on being watched, one after the other, while some signatures were never verified."""
_SHORT_STEP_NS = 5e6
_MOST_REST = 64
"""So many steps pass at most without a look at the clock."""
_MOST_SIGNATURES = 50_000
"""Past them, those that came longest ago are forgotten: shapes that never come again would fill the memory."""


@dataclass(slots=True)
class _Signature:
    """What is known of one.

    Attributes:
        verified_in: Number of the window of its last check.
        met_in: Number of the window in which it came last.
        cost_ns: What its last check took.
    """

    verified_in: int
    met_in: int
    cost_ns: int = 0


@dataclass(frozen=True, slots=True)
class BudgetReport:
    """What became of a budget.

    Attributes:
        ratio: The step's time that was allowed, in plain steps.
        achieved: The time that it took, by the clock of the comparison.
        n_signatures: Signatures met.
        n_verified: Those of them that were replayed at least once.
        n_calls: Calls seen.
        n_replayed: Calls replayed.
        n_steps: Steps; 0 for a program that does not tell where they end.
        n_unwatched: Those of them that were left alone: not selected, not affordable, or to time a plain step.
        n_stretches: What stood for steps where the program told of none: from one call of its module to the next.
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


class Budget:
    """Decides call by call. Not safe for threads: the replayer's lock is held around it.

    Args:
        ratio: Time of a compared step that is allowed, in plain steps; above 1.
        handing_over_ns: What torch takes to hand a call to a dispatch mode.
        seed: Of the generator; the program's random streams are not touched.

    Attributes:
        watched: Whether the current step is; to be corrected by who could not do as `end_step` said.
    """

    def __init__(self, ratio: float, handing_over_ns: float, seed: int = 0) -> None:
        self.watched = True
        self._ratio = ratio
        self._handing_over_ns = handing_over_ns
        self._ledger = Ledger(ratio - 1)
        self._random = random.Random(seed)  # noqa: S311 - no secret
        # In the order in which they came last, as far as windows tell: who comes again in a later one moves to the end.
        self._signatures: dict[Hashable, _Signature] = {}
        self._new: set[Hashable] = set()
        self._chosen: set[Hashable] = set()
        self._chosen_in = 0
        self._chosen_ns = 0.0
        self._window = 0
        self._n_steps = self._n_stretches = self._n_unwatched = 0
        self._n_calls = self._n_replayed = 0
        self._n_signatures = self._n_verified = 0
        self._calls_before = 0
        self._replays_ns = self._spent_before_ns = 0.0
        self._watching_ns = self._looking_ns = self._looking_in_step_ns = 0.0
        self._first_looks_ns = 0.0
        self._has_new = False
        self._n_first_looks = 0
        self._sparse = False
        self._plain_wanted = 0
        self._discovers = True
        self._ended_watched = False

    # -- time --------------------------------------------------------------------------------------

    def start(self, now: int) -> None:
        """Begin to count time.

        Args:
            now: Nanoseconds, by any clock that only goes forward; so everywhere here.
        """
        self._ledger.start(now)

    def spend(self, now: int, own_ns: int) -> None:
        """A call is over.

        Args:
            now: Its end.
            own_ns: What it took beyond the program's own operator.
        """
        self._ledger.advance(now)
        self._ledger.spend(own_ns + self._handing_over_ns)

    def spend_on_step(self, began: int, now: int) -> None:
        """All that was ours, as ending a step is."""
        self._ledger.advance(now)
        # To take the mode off or put it on slows the program too; to go on without does not.
        spend = self._ledger.spend if self.watched or self._ended_watched else self._ledger.spend_seen
        spend(now - began)

    # -- calls -------------------------------------------------------------------------------------

    def exhausted(self, now: int) -> bool:
        """Whether nothing may be spent on the call that begins now."""
        self._n_calls += 1
        self._ledger.advance(now)
        if not self.watched:  # a call of a thread that the program started
            return True
        if not self._window:
            # Of the first step nobody knows how long it is; its calls tell by and by.
            self._sparse = self._n_calls * self._handing_over_ns > self._ledger.earned_ns * _MOST_FOR_WATCHING
        if not self._n_calls % _WINDOW_CALLS and not self._n_steps + self._n_stretches:
            self._end_window()
            self._sparse = False
        if self._discovers:
            return False
        return not self._fits(0.0) if self._sparse else self._ledger.credit_ns <= 0

    def _fits(self, cost_ns: float) -> bool:
        """Whether one more replay leaves a step on credit within what one may take; the first of a step always does."""
        if not (self._sparse and self._replays_ns):
            return True
        ledger = self._ledger
        plain_ns = ledger.plain_step_ns or ledger.step_so_far_ns
        replays_ns = self._replays_ns * ledger.factor
        looking_ns = max(self._looking_in_step_ns, ledger.spent_in_step_ns - replays_ns)
        return replays_ns + cost_ns * ledger.factor + looking_ns <= max(_MOST_IN_STEP, self._ratio - 1) * plain_ns

    def wants(self, signature: Hashable) -> bool:
        """Whether a call with this signature should be replayed, which then counts as done whatever comes of it."""
        known = self._signatures.get(signature)
        may_spend = self._sparse or self._ledger.credit_ns > 0
        if known is None:
            known = self._meet(signature)
        elif known.met_in != self._window:
            known.met_in = self._window
            self._signatures[signature] = self._signatures.pop(signature)
        is_new = signature in self._new
        # A first look takes longer than those that follow; how long, others tell.
        may_spend = may_spend and self._fits(
            self._first_looks_ns / max(self._n_first_looks, 1) if is_new else known.cost_ns
        )
        if is_new:
            if may_spend:
                self._new.discard(signature)
                self._n_verified += 1
        elif not (may_spend and signature in self._chosen):
            return False
        if may_spend:
            known.verified_in = self._window
            self._n_replayed += 1
            if signature in self._chosen:
                self._chosen.remove(signature)
                self._chosen_ns -= known.cost_ns * self._ledger.factor
        return may_spend

    def verified(self, signature: Hashable, cost_ns: int) -> None:
        """A call with this signature was replayed, at this cost."""
        self._replays_ns += cost_ns
        known = self._signatures.get(signature)
        if known is not None:
            if not known.cost_ns:
                self._first_looks_ns += cost_ns
                self._n_first_looks += 1
            known.cost_ns = cost_ns

    def _meet(self, signature: Hashable) -> _Signature:
        self._n_signatures += 1
        if len(self._signatures) >= _MOST_SIGNATURES:
            oldest = next(iter(self._signatures))
            del self._signatures[oldest]
            self._new.discard(oldest)
            self._chosen.discard(oldest)
        known = self._signatures[signature] = _Signature(self._window, self._window)
        self._new.add(signature)
        return known

    # -- steps -------------------------------------------------------------------------------------

    def end_step(self, now: int, *, must_watch: bool = False, may_watch: bool = True, is_stretch: bool = False) -> bool:
        """A step is over.

        Args:
            now: Its end.
            must_watch: The next one cannot be left out.
            may_watch: There is something to watch in the next one.
            is_stretch: It is what stands for a step.

        Returns:
            Whether the next one is to be watched.
        """
        ledger = self._ledger
        ledger.advance(now)
        if self.watched:
            self._looking_in_step_ns = max(ledger.spent_in_step_ns - self._replays_ns * ledger.factor, 0.0)
        ledger.end_step(watched=self.watched)
        self._ended_watched = self.watched
        self._n_stretches += is_stretch
        self._n_steps += not is_stretch
        if self.watched:
            self._end_window()
        else:
            self._n_unwatched += 1
        allowed_ns = ledger.allowed_ns
        # Then a step is watched to its end, on credit: else most would go into watching, and nothing into replays.
        self._sparse = self._watching_ns > allowed_ns * _MOST_FOR_WATCHING
        ceiling_ns = self._watching_ns + allowed_ns if self._sparse else 0.0
        ledger.forfeit(ceiling_ns)
        self.watched = must_watch or (may_watch and self._affords(ceiling_ns) and not self._calibrates())
        return self.watched

    @property
    def n_to_rest(self) -> int:
        """How many of the coming steps are left out whatever they bring: the debt is not paid before.

        To weigh each of them takes 10 µs and more, which is much of a short step.
        """
        ledger = self._ledger
        is_short = 0 < ledger.plain_step_ns < _SHORT_STEP_NS
        if self.watched or not is_short or not ledger.knows_plain or ledger.n_plain < self._plain_wanted:
            return 0
        if ledger.in_wake:  # how much slower they are is looked at
            return 0
        return max(0, min(int(-ledger.credit_ns / ledger.allowed_ns) - 1, _MOST_REST))

    def rested(self, now: int, n_steps: int, own_ns: int, *, by_hook: bool = False) -> None:
        """So many steps were left out without a look; arguments as for `Ledger.pass_over`."""
        self._ledger.pass_over(now, n_steps, own_ns, by_hook=by_hook)
        self._n_steps += n_steps
        self._n_unwatched += n_steps

    def _affords(self, ceiling_ns: float) -> bool:
        """Whether the coming step can be paid, at least afterwards; in it, the program's own time earns credit too."""
        credit_ns = self._ledger.credit_ns
        if not self._sparse:
            return credit_ns + self._ledger.allowed_ns / 2 >= 0
        if self._has_new and credit_ns > -_OVERDRAFT_NS:
            return True
        return credit_ns >= ceiling_ns * self._random.random() / 2

    def _calibrates(self) -> bool:
        """Whether the coming step is left out to see how long the plain step is, or that the one after it may."""
        ledger = self._ledger
        if not ledger.calibrated or ledger.n_plain < self._plain_wanted:
            return True
        # Those that are left out for their cost show it too, unless a watched step comes before all of them.
        every = _CALIBRATE_EVERY * (ledger.steps_in_wake + 1 if ledger.knows_plain else 0.5)
        if (self._sparse and ledger.since_plain < every) or self._random.random() >= 1 / every:
            return False
        self._plain_wanted = ledger.n_plain + (_PLAIN_STEPS if ledger.knows_plain else CALIBRATIONS)
        return True

    def _end_window(self) -> None:
        """Weigh what watching cost, and choose what comes next."""
        ledger = self._ledger
        n_calls, self._calls_before = self._n_calls - self._calls_before, self._n_calls
        self._watching_ns = n_calls * self._handing_over_ns * ledger.factor
        spent_ns, self._spent_before_ns = ledger.spent_ns - self._spent_before_ns, ledger.spent_ns
        self._looking_ns = max(spent_ns - self._replays_ns * ledger.factor, self._watching_ns)
        self._replays_ns = 0.0
        self._window += 1
        self._discovers = self._random.random() < 1 / _DISCOVER_EVERY
        # Where steps are watched on credit, the choice is what such a step may cost; else it lasts for several.
        is_used_up = not self._chosen or self._chosen_ns < ledger.allowed_ns / 2
        if self._sparse or is_used_up or self._window - self._chosen_in >= _DISCOVER_EVERY:
            self._choose()

    def _choose(self) -> None:
        """Choose what to verify again: what was not for longest, as much as is allowed; nothing, while any is new."""
        self._chosen.clear()
        self._chosen_in = self._window
        self._chosen_ns = 0.0
        of_late = list(self._of_late())
        self._has_new = bool(self._new) and any(signature in self._new for signature, _ in of_late)
        if self._has_new:
            return
        self._random.shuffle(of_late)
        of_late.sort(key=lambda item: item[1].verified_in)
        ledger = self._ledger
        most_ns = _REPLAYS_FOR_WATCHING * self._looking_ns if self._sparse else _CHOSEN_FOR_STEPS * ledger.allowed_ns
        for signature, known in of_late:
            self._chosen.add(signature)
            self._chosen_ns += known.cost_ns * ledger.factor
            if 0 < most_ns <= self._chosen_ns:
                break

    def _of_late(self) -> Iterator[tuple[Hashable, _Signature]]:
        """Those that came in the last windows."""
        for signature, known in reversed(self._signatures.items()):
            if known.met_in < self._window - _DISCOVER_EVERY:
                break
            yield signature, known

    def report(self) -> BudgetReport:
        """What became of it so far."""
        ledger = self._ledger
        plain_ns = ledger.elapsed_ns - ledger.spent_ns
        return BudgetReport(
            ratio=self._ratio,
            achieved=ledger.elapsed_ns / plain_ns if plain_ns > 0 else 1.0,
            n_signatures=self._n_signatures,
            n_verified=self._n_verified,
            n_calls=self._n_calls,
            n_replayed=self._n_replayed,
            n_steps=self._n_steps,
            n_unwatched=self._n_unwatched,
            n_stretches=self._n_stretches,
        )
