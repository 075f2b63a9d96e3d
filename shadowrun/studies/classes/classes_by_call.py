"""Classes along the graph: which calls make platforms differ, and which make them agree again.

A call is compared with its data-flow parents: with the calls that made its inputs, not with the call before it in the
trace, which may lie on another branch.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shadowrun.numerics.hash_ladder import mix
from shadowrun.recording.model import NONE, Kind
from shadowrun.studies.classes.equivalence import common_keys

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from shadowrun.numerics.hash_ladder import Hashes
    from shadowrun.recording.model import Key, Recording
    from shadowrun.studies.classes.platforms import Platform

__all__ = ["Change", "OperatorChanges", "along_graph", "by_operator"]


@dataclass(frozen=True, slots=True)
class Change:
    """A call that all platforms have.

    Attributes:
        key: Of the call.
        site: Source line on the first platform.
        parents: Calls that made its inputs, on the first platform.
        n_before: Classes of platforms by all of its inputs together.
        n_classes: Classes of platforms by its results.
        n_added: Classes that it adds: platforms with equal inputs have different results.
        n_merged: Classes that it removes: platforms with different inputs have equal results.
        precision_before: Least remaining precision of its inputs between any two platforms; None for no inputs.
        precision: Likewise of its results.
        mantissa: Stored mantissa bits of the result with the least remaining precision.
        kernels: Platforms by the name of the kernel that ran; empty where none was recorded.
    """

    key: Key
    site: str
    parents: tuple[Key, ...]
    n_before: int
    n_classes: int
    n_added: int
    n_merged: int
    precision_before: int | None
    precision: int
    mantissa: int
    kernels: dict[str, int]

    @property
    def trend(self) -> str:
        """``up``, ``same`` or ``down``: remaining precision of the results against the inputs; empty for no inputs."""
        if self.precision_before is None:
            return ""
        return ("down", "same", "up")[int(np.sign(self.precision - self.precision_before)) + 1]


@dataclass(frozen=True, slots=True)
class OperatorChanges:
    """What all calls of one operator do.

    Attributes:
        op: The operator.
        n_calls: Its calls.
        n_adding, n_added: Calls that add classes, and the classes.
        n_merging, n_merged: Likewise for those that remove classes.
        n_up, n_same, n_down: Calls that raise, keep or lower the remaining precision, of those whose inputs differ.
    """

    op: str
    n_calls: int
    n_adding: int
    n_added: int
    n_merging: int
    n_merged: int
    n_up: int
    n_same: int
    n_down: int


def along_graph(platforms: Sequence[Platform]) -> list[Change]:
    """All calls that every platform has and that make results, in the order of the first platform.

    Of platforms with several recordings, the first counts.
    """
    if not platforms:
        return []
    # A call that one platform lacks has no class there.
    keys, _ = common_keys(platforms)
    traces = [_Trace(platform.recordings[0]) for platform in platforms]
    calls = np.array([[platform.calls[0][key] for key in keys] for platform in platforms], np.int64)
    results = np.array([t.results[c] for t, c in zip(traces, calls, strict=True)])
    inputs = np.array([t.inputs[c] for t, c in zip(traces, calls, strict=True)])
    made = results.any(axis=0)
    first, all_keys = traces[0], tuple(traces[0].recording.call_keys())
    with np.errstate(over="ignore"):
        # `mix` of one side only: inputs and results are no longer interchangeable in the sum.
        both = mix(mix(inputs) + results)
    n_before, n_classes, n_both = (_n_distinct(column) for column in (inputs, results, both))
    changes = []
    for i in np.flatnonzero(made).tolist():
        at = calls[:, i].tolist()
        # Where all agree, one recording says what there is to say.
        those = traces if n_classes[i] > 1 else traces[:1]
        precision, mantissa = _least(those, [t.results_of(c) for t, c in zip(those, at, strict=False)])
        those = traces if n_before[i] > 1 else traces[:1]
        before = _least(those, [t.inputs_of(c) for t, c in zip(those, at, strict=False)])
        changes.append(
            Change(
                keys[i],
                first.recording.context_of(at[0]).site,
                tuple(dict.fromkeys(all_keys[call] for call in first.recording.parents_of(at[0]))),
                int(n_before[i]),
                int(n_classes[i]),
                # Distinct pairs beyond distinct inputs: equal inputs that led to several results.
                int(n_both[i] - n_before[i]),
                # Distinct pairs beyond distinct results: different inputs that led to one.
                int(n_both[i] - n_classes[i]),
                before[0] if before[1] >= 0 else None,
                precision,
                mantissa,
                _kernels(traces, at),
            )
        )
    return changes


def by_operator(changes: Sequence[Change]) -> list[OperatorChanges]:
    """What each operator does to classes and precision; those that add most classes first."""
    groups: dict[str, list[Change]] = defaultdict(list)
    for change in changes:
        groups[change.key.op].append(change)
    found = []
    for op, own in groups.items():
        trends = [c.trend for c in own if c.n_before > 1]
        found.append(
            OperatorChanges(
                op,
                len(own),
                sum(c.n_added > 0 for c in own),
                sum(c.n_added for c in own),
                sum(c.n_merged > 0 for c in own),
                sum(c.n_merged for c in own),
                *(trends.count(name) for name in ("up", "same", "down")),
            )
        )
    return sorted(found, key=lambda o: (-o.n_added, -o.n_merged, -o.n_calls))


class _Trace:
    """A recording with, for each call, one number for its inputs and one for its results; 0 where there are none."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        source = recording.sources
        sizes = np.diff(recording.first_rung)[source]
        identity = np.zeros(len(source), np.uint64)
        digested = sizes > 0
        identity[digested] = recording.rungs[recording.first_rung[source[digested]]]
        kinds = recording.results["kind"]
        # Views have no values of their own, and leaves were not made by the call.
        own = np.isin(kinds, (Kind.RESULT, Kind.WRITTEN, Kind.OVERWRITTEN)) & digested
        # Repeats of one inference (`importer`) are rows of one call: the first counts, or the number of repeats would
        # make a class.
        self.own = own & ~_is_repeat(recording)
        self.results = _combined(np.where(self.own, identity, np.uint64(0)), recording.first_result)
        # An input without a digest is the last number here, -1.
        given = np.append(identity, np.uint64(0))[recording.inputs]
        self.inputs = _combined(given, recording.first_input)

    def results_of(self, call: int) -> list[int]:
        return [row for row in self.recording.results_of(call) if self.own[row]]

    def inputs_of(self, call: int) -> list[int]:
        return [row for row in self.recording.inputs_of(call).tolist() if row != NONE]


def _is_repeat(recording: Recording) -> npt.NDArray[Any]:
    """Rows with the kind and position of an earlier row of their call."""
    results = recording.results
    call = np.repeat(np.arange(len(recording.calls)), np.diff(recording.first_result))
    # Both columns have 8 bits, so that three numbers fit into one, and one sort finds the repeats of all calls.
    place = (call * 256 + results["kind"]) * 256 + results["position"]
    first = np.zeros(len(results), bool)
    first[np.unique(place, return_index=True)[1]] = True
    # 255 is all further results (`_BEYOND` of equivalence.py), which are no repeats.
    found: npt.NDArray[Any] = ~first & (results["position"] != 255)
    return found


def _combined(values: Hashes, first: npt.NDArray[np.int64]) -> Hashes:
    """One number for the values of each call that depends on their order; zeros do not count."""
    n = np.diff(first)
    with np.errstate(over="ignore"):
        place = np.arange(len(values), dtype=np.int64) - np.repeat(first[:-1], n)
        mixed = np.where(values == 0, np.uint64(0), mix(values + mix(place.astype(np.uint64))))
        total = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)])
        # Differences of running sums are exact, since unsigned integers wrap around.
        found: Hashes = total[first[1:]] - total[first[:-1]]
        return found


def _n_distinct(columns: Hashes) -> npt.NDArray[Any]:
    """Number of distinct values in each column."""
    ordered = np.sort(columns, axis=0)
    found: npt.NDArray[Any] = 1 + (ordered[1:] != ordered[:-1]).sum(axis=0)
    return found


def _least(traces: Sequence[_Trace], rows: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Least remaining precision over tensors at the same place, and the mantissa bits there; (0, -1) for no tensors."""
    least, bits = 0, -1
    for ladders in _aligned(traces, rows):
        lengths = {len(ladder) for ladder in ladders}
        if lengths == {0}:
            continue
        mantissa = max(lengths) - 1
        found = 0
        if len(lengths) == 1:
            stacked = np.stack(ladders)
            equal = np.flatnonzero((stacked == stacked[0]).all(axis=0))
            found = mantissa - int(equal[0]) if equal.size else 0
        # Integers have one rung: equal or not, they say nothing of precision.
        if mantissa and (bits < 0 or mantissa - found > bits - least):
            least, bits = found, mantissa
    return least, bits


def _aligned(traces: Sequence[_Trace], rows: Sequence[Sequence[int]]) -> Iterator[list[Hashes]]:
    for at_place in zip(*rows, strict=False):
        yield [trace.recording.ladder(row) for trace, row in zip(traces, at_place, strict=True)]


def _kernels(traces: Sequence[_Trace], calls: Sequence[int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for trace, call in zip(traces, calls, strict=True):
        if (number := int(trace.recording.calls["kernel"][call])) != NONE:
            name = trace.recording.kernels[number]
            found[name] = found.get(name, 0) + 1
    return found
