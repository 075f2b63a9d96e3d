"""Two recordings held against each other, from their files to all that a report says.

The graph of differences is part of it: where each arises, and what it reaches along the data flow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from shadowrun.recording.model import NONE, Kind
from shadowrun.studies.diff.align import align, matches
from shadowrun.studies.diff.compare import ARISING, Outcome, compare
from shadowrun.studies.diff.name_map import NameMap, compare_rows
from shadowrun.studies.diff.provenance import compare_provenance
from shadowrun.studies.diff.rounding import Rounding, judge_rounding
from shadowrun.studies.diff.step_outputs import output_distances
from shadowrun.studies.diff.values import Values

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from shadowrun.recording.model import Recording
    from shadowrun.studies.diff.compare import Difference
    from shadowrun.studies.diff.name_map import RowsFound
    from shadowrun.studies.diff.provenance import Provenance
    from shadowrun.studies.diff.rounding import Judgement
    from shadowrun.studies.diff.step_outputs import OutputDistance

__all__ = ["FAIL_ON", "Flow", "Origin", "RecordingDiff", "diff_recordings", "follow"]


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


MAX_JUDGED: Final = 100_000
"""Calls in which a difference arises, that are judged for rounding; the others count as unknown."""

# Share of matched calls below which two recordings are of different programs, or of different parts of one.
_FEW: Final = 0.5
_SHOWN: Final = 5

FAIL_ON: Final = ("any", "kernel", "algorithm", "not-rounding", "provenance", "missing")


@dataclass(frozen=True, slots=True, eq=False)
class RecordingDiff:
    """What two recordings have in common, and where they part.

    Attributes:
        labels: What reports call them.
        provenance: Whether they are of one program on one set of data.
        difference: Pairs of calls.
        flow: Where differences arise, and what they reach.
        judgements: Of pairs in which a difference arises: whether it is rounding-sized.
        rows: What the rules for rows found.
        outputs: Results of each step's last call that both have in all elements.
        warnings: What has to be known before the rest: other steps, another program, a recording that was cut short.
    """

    labels: tuple[str, str]
    provenance: Provenance
    difference: Difference
    flow: Flow
    judgements: Mapping[int, Judgement]
    rows: tuple[RowsFound, ...]
    outputs: tuple[OutputDistance, ...]
    warnings: tuple[str, ...]

    @property
    def n_missing(self) -> int:
        """Calls that one recording lacks."""
        return len(self.difference.alignment.only_first) + len(self.difference.alignment.only_second)

    def count_rounding(self, rounding: Rounding) -> int:
        """Pairs with this judgement; those beyond `MAX_JUDGED` are unknown."""
        # They are counted, so that the numbers of a report add up to the calls in which differences arise.
        n_left_out = len(self.flow.origins) - len(self.judgements) if rounding is Rounding.UNKNOWN else 0
        return sum(j.rounding is rounding for j in self.judgements.values()) + n_left_out

    def failures(self, kinds: frozenset[str]) -> list[str]:
        """Why the gate fails.

        Args:
            kinds: Of `FAIL_ON`.
        """
        counts = {outcome: self.difference.count(outcome) for outcome in Outcome}
        n_pairs = len(self.difference.alignment.pairs)
        rows = sum(not pair.equal for found in self.rows for pair in found.pairs)
        reasons = {
            "provenance": (0 if self.provenance.is_same else 1, f"provenance differs: {self.provenance.line}"),
            "missing": (self.n_missing, f"{self.n_missing:,} calls are in one recording only"),
            "kernel": (counts[Outcome.KERNEL], f"{counts[Outcome.KERNEL]:,} differ by another kernel"),
            "algorithm": (counts[Outcome.ALGORITHM], f"{counts[Outcome.ALGORITHM]:,} differ by the algorithm"),
            "not-rounding": (
                self.count_rounding(Rounding.NO),
                f"{self.count_rounding(Rounding.NO):,} differences are not rounding-sized",
            ),
        }
        differ = n_pairs - counts[Outcome.EQUAL]
        found = [text for kind, (n, text) in reasons.items() if n and kind in kinds]
        if "any" in kinds:
            found += [f"{differ:,} of {n_pairs:,} matched calls are not equal"] if differ else []
            found += [f"{rows:,} rows are not equal"] if rows else []
            found += [reasons[kind][1] for kind in ("missing", "provenance") if reasons[kind][0] and kind not in kinds]
        # Two recordings without a call in common prove nothing, nor does a rule without rows: they must not pass.
        found += [_nothing(r) for r in self.rows if kinds and not r.pairs]
        return found or (["no call of the two recordings could be compared"] if kinds and not n_pairs else [])


def diff_recordings(
    first: Recording, second: Recording, names: NameMap | None = None, labels: tuple[str, str] | None = None
) -> RecordingDiff:
    """Compare two recordings.

    Args:
        first: Of one platform.
        second: Of another.
        names: Names and rows that correspond.
        labels: What reports call them; their names by default.
    """
    names, labels = names or NameMap(), labels or (first.name, second.name)
    a, b = Values(first), Values(second)
    difference = compare(a, b, align(a, b, names.modules))
    rows = compare_rows(first, second, names)
    return RecordingDiff(
        labels,
        compare_provenance(first, second, names.modules),
        difference,
        follow(difference),
        judge_rounding(difference, MAX_JUDGED),
        rows,
        output_distances(difference),
        (
            *_warnings(difference, labels),
            *_unused(second, names, labels[1]),
            *(_nothing(found) for found in rows if not found.pairs),
        ),
    )


def _unused(second: Recording, names: NameMap, label: str) -> list[str]:
    """Lines of the map whose pattern no module of the second recording has: a slip, or the sides in the wrong order."""
    paths = {context.module for context in second.contexts}
    unused = [pattern for pattern in names.modules if not any(matches(pattern, path) for path in paths)]
    return [f"--map: {label} has no module {pattern!r}; its names come first in a line" for pattern in unused[:_SHOWN]]


def _nothing(found: RowsFound) -> str:
    """Why a rule compared no rows."""
    rule = found.rule
    sides = ((found.n_first, "first", rule.module, rule.op),
             (found.n_second, "second", rule.second_module or rule.module, rule.second_op or rule.op))  # fmt: skip
    for n, which, module, op in sides:
        if not n:
            return (
                f"no rows of {module} {op} are in the {which} recording: no call fits, all rows are skipped, or it was "
                "recorded without --rows"
            )
    return f"no rows of {rule.module} {rule.op} could be compared: modules, dtypes or lengths differ"


def _warnings(difference: Difference, labels: tuple[str, str]) -> list[str]:
    recordings = [v.recording for v in (difference.first, difference.second)]
    found = []
    empty = [label for label, r in zip(labels, recordings, strict=True) if not len(r.calls)]
    if empty:
        return [f"no calls are recorded in {' and '.join(empty)}"]
    n_pairs, n_calls = len(difference.alignment.pairs), max(len(r.calls) for r in recordings)
    steps = [set(np.unique(r.calls["step"]).tolist()) for r in recordings]
    ranks = [{p.rank for p in r.processes} for r in recordings]
    if not steps[0] & steps[1]:
        found.append(f"the recordings are of different steps: {_numbers(steps[0])} and {_numbers(steps[1])}")
    # Of the shorter one: a recording of fewer steps is not of another program.
    elif n_pairs < _FEW * min(len(r.calls) for r in recordings):
        found.append(
            f"only {n_pairs:,} of {n_calls:,} calls correspond: these may be recordings of different programs; "
            "--map names modules that correspond"
        )
    elif steps[0] != steps[1]:
        text = " and ".join(_numbers(s - t) for s, t in (steps, steps[::-1]) if s - t)
        found.append(f"only one recording has steps {text}")
    if ranks[0] != ranks[1]:
        found.append(f"the recordings are of different ranks: {_numbers(ranks[0])} and {_numbers(ranks[1])}")
    for label, recording in zip(labels, recordings, strict=True):
        cut = [p for p in recording.processes if not p.complete]
        if cut:
            found.append(f"{label} was not ended: its process was killed, or still runs")
    return found


def _numbers(values: set[int]) -> str:
    listed = sorted(values)
    return ", ".join(map(str, listed[:5])) + (f" … {listed[-1]}" if len(listed) > 5 else "")
