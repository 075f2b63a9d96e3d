"""Measures calls on two platforms alternately, so that load on the machine affects both.

A `Job` is what is timed: an operator call of a run, or a function of torch's database. A `Timer` times one job on one
platform, with warm-up and synchronisation. `measure` alternates two timers and summarises their samples.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from shadowrun.platforms.unsupported import first_sentence
from shadowrun.replay.copies import OverBudget, tensors_in
from shadowrun.replay.executor import Executor
from shadowrun.studies.sweep.inputs import copied
from shadowrun.studies.sweep.recorded_calls import MAX_BYTES, UnreadableCall

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.intercept.plan import OpPlan
    from shadowrun.platforms.device import Platform
    from shadowrun.studies.sweep.inputs import Sample

    Inputs = tuple[tuple[Any, ...], dict[str, Any]]
    from shadowrun.studies.slowdown.calls import Call, Entry

__all__ = ["FunctionJob", "Job", "OperatorJob", "Spread", "TimedCall", "Timer", "measure"]


class Job(Protocol):
    """A call that any platform can run."""

    @property
    def function(self) -> Callable[..., Any]:
        """The operator or function."""
        ...

    @property
    def writes(self) -> bool:
        """Whether it mutates its inputs: each call then needs fresh ones."""
        ...

    def moved(self, platform: Platform) -> Inputs:
        """Fresh inputs on a platform's device."""
        ...

    def remote_ns(self, platform: Platform, inputs: Inputs) -> int:
        """Nanoseconds of one call on a platform in a separate process."""
        ...


@dataclass(frozen=True)
class OperatorJob:
    """A call of an operator.

    Attributes:
        plan: The operator.
        args, kwargs: Inputs on the CPU; never mutated.
    """

    plan: OpPlan
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def function(self) -> Callable[..., Any]:
        """The operator."""
        return self.plan.func

    @property
    def writes(self) -> bool:
        """Whether its schema has a mutated argument."""
        return bool(self.plan.mutated)

    def moved(self, platform: Platform) -> Inputs:
        """Inputs on the platform.

        Raises:
            OverBudget: They are larger than `MAX_BYTES`.
        """
        return Executor(platform).to_device(self.plan, self.args, self.kwargs, platform.device, MAX_BYTES)

    def remote_ns(self, platform: Platform, inputs: Inputs) -> int:
        """Duration as measured by the worker process."""
        return Executor(platform).run(self.plan, *inputs).ns


@dataclass(frozen=True)
class FunctionJob:
    """A forward call of a function of torch's database.

    Attributes:
        function: Takes the sample's input, args and kwargs.
        sample: Inputs on the CPU.
    """

    function: Callable[..., Any]
    sample: Sample

    @property
    def writes(self) -> bool:
        """False: in-place functions such as ``zero_`` may mutate the same input repeatedly."""
        return False

    def moved(self, platform: Platform) -> Inputs:
        """Inputs on the platform."""
        x, args, kwargs = copied(self.sample, platform.device, grad=False)
        return (x, *args), kwargs

    def remote_ns(self, platform: Platform, inputs: Inputs) -> int:
        """Not possible: a worker process runs single operators only."""
        raise NotImplementedError(f"{platform} runs in a separate process, which takes no functions")


# Duration of a sample (many calls): well above the resolution of the clock.
_SAMPLE_NS = 300_000
_MAX_CALLS = 200
# Maximum number of calls in a sample if each needs fresh inputs: all copies are in memory at once.
_MAX_COPIES = 16
_WARM_UP = 3  # the first call loads or compiles the kernel, the second may choose an algorithm
_clock = time.perf_counter_ns


class Timer:
    """Times a call on a platform, sample by sample. The first calls, which load and choose kernels, are not timed.

    Args:
        platform: Platform that runs it.
        job: Call to time.

    Raises:
        Exception: Any exception of the call.
    """

    def __init__(self, platform: Platform, job: Job) -> None:
        self._platform = platform
        self._job = job
        self._reused = None if job.writes else job.moved(platform)
        # The minimum: warm-up and other load only ever add time.
        quickest = min(self._sample(1) for _ in range(_WARM_UP))
        most = _MAX_CALLS if self._reused is not None else _MAX_COPIES
        self._n = int(min(most, max(1, _SAMPLE_NS // max(quickest, 1))))

    def sample_us(self) -> float:
        """Microseconds of one call from its launch to its result: the mean of a sample."""
        return self._sample(self._n) / 1000

    def _sample(self, n: int) -> float:
        platform, function = self._platform, self._job.function
        # Before the clock starts: copying inputs to a device may take longer than the kernel.
        calls = [self._reused or self._job.moved(platform) for _ in range(n)]
        if platform.remote is not None:
            return sum(self._job.remote_ns(platform, call) for call in calls) / n
        # Without gradients, as kernels are called: autograd would add its own overhead to each call.
        with torch.no_grad(), platform.context():
            # An asynchronous device may still compute what was launched before.
            platform.synchronize()
            start = _clock()
            for args, kwargs in calls:
                out = function(*args, **kwargs)
                if platform.functionalizes:  # a lazy device would only record the call
                    platform.compute_now(list(tensors_in([out])))
            platform.synchronize()
            return (_clock() - start) / n


# The time limit never leaves fewer: of one or two samples, quartiles say nothing.
MIN_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of samples."""

    median: float
    lower: float
    upper: float

    @classmethod
    def from_values(cls, values: list[float]) -> Spread:
        """Of at least two values; quartiles by the inclusive method."""
        # Inclusive: the default extrapolates beyond the samples, for two of them to 0.75 and 2.25 of 1 and 2.
        lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, lower, upper)


@dataclass(frozen=True, slots=True)
class TimedCall:
    """A call signature, timed or not.

    Attributes:
        call: The call.
        ref_us, target_us: Time of one call in microseconds; None if it was not timed.
        ratio: Target divided by reference in each round; None if it was not timed.
        failed: Why it was not timed; empty if it was timed.
        on_target: Whether the target failed after the reference ran.
    """

    call: Call
    ref_us: Spread | None = None
    target_us: Spread | None = None
    ratio: Spread | None = None
    failed: str = ""
    on_target: bool = False


def measure(
    call: Call | Entry, target: Platform, ref: Platform, *, rounds: int, time_limit_s: float = 5.0, seed: int = 0
) -> TimedCall:
    """Time a call on both platforms, reference and target in turn.

    Args:
        call: The call to time; the floats of a recorded call are newly sampled.
        target: Platform to time, started.
        ref: Platform to time it against, started.
        rounds: Samples on each platform.
        time_limit_s: After this time no further round starts, once `MIN_ROUNDS` are done.
        seed: Seed of the values.
    """
    try:
        job = call.job(seed)
        # The reference first: new values that it refuses say nothing about the target.
        on_ref = Timer(ref, job)
    except OverBudget:
        return TimedCall(call.summary, failed="its inputs are larger than 2 GiB")
    except UnreadableCall as reason:
        return TimedCall(call.summary, failed=str(reason))
    except Exception as error:  # newly sampled values need not be valid
        return TimedCall(call.summary, failed=f"the reference: {_error_text(error)}")
    try:
        on_target = Timer(target, job)
        pairs = _pairs(on_ref, on_target, rounds, time_limit_s)
    except OverBudget:
        return TimedCall(call.summary, failed="its inputs are larger than 2 GiB")
    except Exception as error:
        return TimedCall(call.summary, failed=_error_text(error), on_target=True)
    return TimedCall(
        call.summary,
        Spread.from_values([r for r, _ in pairs]),
        Spread.from_values([t for _, t in pairs]),
        Spread.from_values([t / r if r > 0 else 1.0 for r, t in pairs]),
    )


def _pairs(on_ref: Timer, on_target: Timer, rounds: int, time_limit_s: float) -> list[tuple[float, float]]:
    until = time.perf_counter() + time_limit_s
    pairs: list[tuple[float, float]] = []
    for number in range(rounds):
        if number >= MIN_ROUNDS and time.perf_counter() > until:
            break
        # The order alternates, since the platform that runs second finds other cache contents.
        if number % 2:
            t, r = on_target.sample_us(), on_ref.sample_us()
        else:
            r, t = on_ref.sample_us(), on_target.sample_us()
        pairs.append((r, t))
    return pairs


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {first_sentence(str(error))}"
