"""The graph of differences: where each arises, and what it reaches along the data flow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shadowrun.recording.model import NONE, Kind
from shadowrun.studies.diff.compare import ARISING, Outcome

if TYPE_CHECKING:
    import numpy.typing as npt

    from shadowrun.studies.diff.compare import Difference

__all__ = ["Flow", "Origin", "follow"]


@dataclass(frozen=True, slots=True)
class Origin:
    """A pair of calls whose difference arises in the call itself.

    Attributes:
        pair: Its number.
        n_reached: Pairs that differ by their inputs and have it as the earliest ancestor.
        depth: Calls on the longest way to one of these.
    """

    pair: int
    n_reached: int
    depth: int


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """How differences spread.

    Attributes:
        origins: In program order.
        origin: Of each pair that differs: number of the pair that its difference stems from, itself where it arises
            there; -1 of pairs that are equal, and of those that differ by what the program was given.
        depth: Calls between, 0 at the origin.
        parents: Of each pair: `parents_of`.
    """

    origins: tuple[Origin, ...]
    origin: npt.NDArray[np.int64]
    depth: npt.NDArray[np.int64]
    difference: Difference

    def parents_of(self, pair: int) -> list[int]:
        """Calls of the first recording that made the inputs of a pair, in the order of its arguments."""
        call = int(self.difference.alignment.pairs[pair, 0])
        recording = self.difference.first.recording
        rows = [row for row in recording.inputs_of(call).tolist() if row != NONE]
        made = [row for row in rows if recording.results["kind"][row] != Kind.LEAF]
        return list(dict.fromkeys(int(self.difference.first.call[row]) for row in made))


def follow(difference: Difference) -> Flow:
    """Find where each difference comes from."""
    values, pairs = difference.first, difference.alignment.pairs
    recording = values.recording
    n_calls = len(recording.calls)
    pair_of = np.full(n_calls, NONE, np.int64)
    pair_of[pairs[:, 0]] = np.arange(len(pairs))
    spreads = np.zeros(n_calls, bool)
    spreads[pairs[difference.where(Outcome.INPUT, Outcome.UNKNOWN), 0]] = True
    # A call that only the first recording has hands on what it got.
    spreads[difference.alignment.only_first] = True
    arises = np.zeros(n_calls, bool)
    arises[pairs[difference.where(*ARISING), 0]] = True
    origin, depth = [NONE] * n_calls, [0] * n_calls
    made_by = np.where(recording.results["kind"] != Kind.LEAF, values.call, NONE)
    inputs = recording.inputs
    parents = np.where(inputs != NONE, made_by[inputs], NONE).tolist() if len(made_by) else []
    first_input = recording.first_input.tolist()
    order = np.flatnonzero(spreads | arises)
    new = arises[order].tolist()
    # In the order of the calls: parents come before their children, so that one pass is enough.
    for call, is_new in zip(order.tolist(), new, strict=True):
        if is_new:
            origin[call] = call
            continue
        for parent in parents[first_input[call] : first_input[call + 1]]:
            if parent != NONE and origin[parent] != NONE:
                # Of several origins the earliest: it is the one to look at first.
                if origin[call] == NONE or origin[parent] < origin[call]:
                    origin[call] = origin[parent]
                depth[call] = max(depth[call], depth[parent] + 1)
    of_calls = np.array(origin, np.int64)
    of_pairs, depths = of_calls[pairs[:, 0]], np.array(depth, np.int64)[pairs[:, 0]]
    # An origin is a call of the first recording; a call without a partner (-1 in `pair_of`) is none.
    of_pairs = np.where(of_pairs == NONE, NONE, pair_of[of_pairs])
    sources = difference.where(*ARISING)
    # An origin counts itself.
    reached = np.bincount(of_pairs[of_pairs != NONE], minlength=len(pairs))[sources] - 1
    longest = np.zeros(len(pairs), np.int64)
    np.maximum.at(longest, of_pairs[of_pairs != NONE], depths[of_pairs != NONE])
    origins = tuple(map(Origin, sources.tolist(), reached.tolist(), longest[sources].tolist()))
    return Flow(origins, of_pairs, depths, difference)
