"""The inputs of each case: made by a worker to run it, and made again by whoever wants to show one alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shadowrun.sweep import opinfo, probes, programs
from shadowrun.sweep.cases import ANY_DTYPE, PROBES, Part

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shadowrun.sweep.inputs import Sample

__all__ = ["Sampler"]


class Sampler:
    """Samples of one operator in one dtype; what several parts start from is made once.

    Args:
        name: Operator of torch's database, with its variant.
        dtype: ``float32``, or `ANY_DTYPE` for invalid inputs.
        seed: Of the sample inputs.
        limit: How many of the database's; None for all.
    """

    def __init__(self, name: str, dtype: str, seed: int, limit: int | None) -> None:
        self._name, self._dtype, self._seed, self._limit = name, dtype, seed, limit
        self._made: dict[bool, list[Sample]] = {}

    def of(self, part: Part) -> Iterator[tuple[int, Sample]]:
        """Samples of a part in its form, with their numbers."""
        if self._dtype == ANY_DTYPE:
            yield from enumerate(opinfo.invalid(self._name, self._seed, self._limit))
        elif part is Part.SLICE:
            yield from enumerate(probes.batches(self._name, self._dtype, self._samples))
        elif part in PROBES:
            info = opinfo.database()[self._name]
            yield from enumerate(probes.probes(self._name, info, self._dtype, self._samples))
        else:
            yield from programs.varied(self._samples(grad=part is Part.BACKWARD), part)

    def _samples(self, *, grad: bool = False) -> list[Sample]:
        if grad not in self._made:
            self._made[grad] = opinfo.samples(self._name, self._dtype, self._seed, self._limit, grad=grad)
        return self._made[grad]
