"""Timing calls on two platforms in turn, so that what disturbs the machine disturbs both."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowrun.platforms.unsupported import first_sentence
from shadowrun.replay.mirror import OverBudget
from shadowrun.slowdown.timing import Timer
from shadowrun.sweep.recorded import Unreadable

if TYPE_CHECKING:
    from shadowrun.platforms.device import Platform
    from shadowrun.slowdown.calls import Call
    from shadowrun.slowdown.database import Entry

__all__ = ["Measured", "Spread", "measure"]

LEAST_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of samples."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Of at least two values; quartiles by the inclusive method."""
        lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, lower, upper)


@dataclass(frozen=True, slots=True)
class Measured:
    """A call signature, timed or not.

    Attributes:
        call: The call.
        ref_us, target_us: Time of one call in microseconds; None where it was not timed.
        ratio: Of target to reference in each round; None where it was not timed.
        failed: Why it was not timed; empty where it was.
        on_target: The target failed, where the reference ran.
    """

    call: Call
    ref_us: Spread | None = None
    target_us: Spread | None = None
    ratio: Spread | None = None
    failed: str = ""
    on_target: bool = False


def measure(
    call: Call | Entry, target: Platform, ref: Platform, *, rounds: int, time_limit_s: float = 5.0, seed: int = 0
) -> Measured:
    """Time a call on both platforms, reference and target in turn.

    Args:
        call: What; the floats of a recorded call are drawn anew.
        target: Where; started.
        ref: And where else.
        rounds: Samples on each.
        time_limit_s: After this long, the rounds done are enough, if they are `LEAST_ROUNDS`.
        seed: Of the values.
    """
    try:
        job = call.job(seed)
        on_ref = Timer(ref, job)
    except OverBudget:
        return Measured(call.told, failed="its inputs are larger than 2 GiB")
    except Unreadable as reason:
        return Measured(call.told, failed=str(reason))
    except Exception as error:  # values that were drawn anew need not be valid ones
        return Measured(call.told, failed=f"the reference: {_words(error)}")
    try:
        on_target = Timer(target, job)
        pairs = _pairs(on_ref, on_target, rounds, time_limit_s)
    except OverBudget:
        return Measured(call.told, failed="its inputs are larger than 2 GiB")
    except Exception as error:
        return Measured(call.told, failed=_words(error), on_target=True)
    return Measured(
        call.told,
        Spread.of([r for r, _ in pairs]),
        Spread.of([t for _, t in pairs]),
        Spread.of([t / r if r > 0 else 1.0 for r, t in pairs]),
    )


def _pairs(on_ref: Timer, on_target: Timer, rounds: int, time_limit_s: float) -> list[tuple[float, float]]:
    until = time.perf_counter() + time_limit_s
    pairs: list[tuple[float, float]] = []
    for number in range(rounds):
        if number >= LEAST_ROUNDS and time.perf_counter() > until:
            break
        # Who is first changes from round to round: the first finds other things in the caches.
        if number % 2:
            t, r = on_target.sample_us(), on_ref.sample_us()
        else:
            r, t = on_ref.sample_us(), on_target.sample_us()
        pairs.append((r, t))
    return pairs


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {first_sentence(str(error))}"
