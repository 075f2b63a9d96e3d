"""Median times of operators, in bounded memory."""

from __future__ import annotations

import random
import statistics
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["Medians"]

MAX_TIMES = 2**14
"""Times of one operator on one platform that are kept; of more, as many that are spread evenly stand for all."""


class Medians:
    """Collects times call by call; see `shadowrun.store.groups.read_groups`.

    Args:
        ops: Context to operator.
    """

    def __init__(self, ops: Mapping[int, str]) -> None:
        self._ops = ops
        # Drawn anew for each report, but always alike: reports on the same file are the same.
        self._random = random.Random(0)  # noqa: S311 - nothing is to be kept secret
        self._times: dict[str, tuple[_Times, _Times]] = {}

    def observe(self, context: int, refs: list[float], targets: list[float]) -> None:
        """Add times of calls of a context, on reference and target."""
        op = self._ops[context]
        times = self._times.get(op)
        if times is None:
            times = self._times[op] = (_Times(self._random), _Times(self._random))
        times[0].add(refs)
        times[1].add(targets)

    def by_op(self) -> dict[str, tuple[float, float]]:
        """Operator to its median time in microseconds on reference and target; -1 where none was timed."""
        medians = {op: (ref.median(), target.median()) for op, (ref, target) in sorted(self._times.items())}
        return {op: pair for op, pair in medians.items() if pair != (-1.0, -1.0)}


class _Times:
    """All times, or a sample: sorted and thinned, which moves the median by a rank or two of thousands."""

    __slots__ = ("_kept", "_one_of", "_random")

    def __init__(self, source: random.Random) -> None:
        self._kept = array("d")
        self._one_of = 1
        self._random = source

    def add(self, times: list[float]) -> None:
        self._kept.extend(self._one_in(self._one_of, times) if self._one_of > 1 else times)
        while len(self._kept) > MAX_TIMES:
            self._kept = array("d", self._one_in(2, self._kept))
            self._one_of *= 2

    def median(self) -> float:
        return statistics.median(self._kept) if self._kept else -1.0

    def _one_in(self, n: int, times: Iterable[float]) -> list[float]:
        # Begins at random: where few times come at once, they must not be left out, or taken, always.
        return sorted(times)[self._random.randrange(n) :: n]
