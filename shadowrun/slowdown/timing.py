"""Timing one call on one platform, with what that takes: warm-up, synchronisation, inputs that stay the same."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.replay.execution import Executor
from shadowrun.replay.mirror import tensors_in

if TYPE_CHECKING:
    from shadowrun.intercept.plan import OpPlan
    from shadowrun.platforms.device import Platform

__all__ = ["MAX_BYTES", "Timer"]

MAX_BYTES = 2 << 30
"""Bytes that the inputs of one timed call may take on a platform."""

_SAMPLE_NS = 300_000
"""A sample is so many calls that it takes about this long: longer than clocks and schedulers are coarse."""
_MOST_CALLS = 200
_MOST_COPIES = 16
"""Calls in a sample where each needs inputs of its own, since it writes to them."""
_WARM_UP = 3
_clock = time.perf_counter_ns


class Timer:
    """Times a call on a platform, sample by sample. The first calls, which load and choose kernels, are not timed.

    Args:
        platform: Where.
        plan: The operator.
        args: Inputs on the CPU; they stay as they are.
        kwargs: Inputs by name.

    Raises:
        Exception: Whatever the operator raises there.
    """

    def __init__(self, platform: Platform, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._platform = platform
        self._executor = Executor(platform)
        self._plan = plan
        self._inputs = (args, kwargs)
        self._reused = self._moved() if not plan.mutated else None
        quickest = min(self._sample(1) for _ in range(_WARM_UP))
        most = _MOST_CALLS if self._reused is not None else _MOST_COPIES
        self._n = int(min(most, max(1, _SAMPLE_NS // max(quickest, 1))))

    def sample_us(self) -> float:
        """Time of one call in microseconds, from its launch until its result is there: the mean of a sample."""
        return self._sample(self._n) / 1000

    def _sample(self, n: int) -> float:
        calls = [self._reused or self._moved() for _ in range(n)]
        if self._platform.remote is not None:
            return sum(self._executor.run(self._plan, *call).ns for call in calls) / n
        platform, func = self._platform, self._plan.func
        with torch.no_grad(), platform.context():
            platform.synchronize()
            start = _clock()
            for args, kwargs in calls:
                out = func(*args, **kwargs)
                if platform.functionalizes:
                    platform.materialise(list(tensors_in([out])))
            platform.synchronize()
            return (_clock() - start) / n

    def _moved(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = self._inputs
        return self._executor.to_device(self._plan, args, kwargs, self._platform.device, MAX_BYTES)
