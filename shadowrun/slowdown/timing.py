"""Timing one call on one platform, with what that takes: warm-up, synchronisation, inputs that stay the same."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from shadowrun.replay.mirror import tensors_in

if TYPE_CHECKING:
    from shadowrun.platforms.device import Platform
    from shadowrun.slowdown.jobs import Job

__all__ = ["Timer"]

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
        job: What.

    Raises:
        Exception: Whatever the call raises there.
    """

    def __init__(self, platform: Platform, job: Job) -> None:
        self._platform = platform
        self._job = job
        self._reused = None if job.writes else job.moved(platform)
        quickest = min(self._sample(1) for _ in range(_WARM_UP))
        most = _MOST_CALLS if self._reused is not None else _MOST_COPIES
        self._n = int(min(most, max(1, _SAMPLE_NS // max(quickest, 1))))

    def sample_us(self) -> float:
        """Time of one call in microseconds, from its launch until its result is there: the mean of a sample."""
        return self._sample(self._n) / 1000

    def _sample(self, n: int) -> float:
        platform, function = self._platform, self._job.function
        calls = [self._reused or self._job.moved(platform) for _ in range(n)]
        if platform.remote is not None:
            return sum(self._job.remote_ns(platform, call) for call in calls) / n
        with torch.no_grad(), platform.context():
            platform.synchronize()
            start = _clock()
            for args, kwargs in calls:
                out = function(*args, **kwargs)
                if platform.functionalizes:
                    platform.materialise(list(tensors_in([out])))
            platform.synchronize()
            return (_clock() - start) / n
