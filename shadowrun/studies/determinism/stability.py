"""What recordings of equal processes say: which calls gave other results on equal inputs. Imports no torch.

A call whose inputs differ already says nothing of its operator: it lies downstream of one that broke.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shadowrun.numerics.hash_ladder import mix
from shadowrun.recording.model import NONE, Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import numpy.typing as npt

    from shadowrun.numerics.hash_ladder import Hashes
    from shadowrun.recording.model import Key, Recording

__all__ = [
    "UNSTABLE_SHARE",
    "CallDigests",
    "Outcome",
    "Stability",
    "across_threads",
    "call_digests",
    "merged",
    "run_to_run",
]

UNSTABLE_SHARE: Final = 0.6
"""Least share of the most frequent result: below it, the mode does not stand for the platform."""
_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)


class Outcome(Enum):
    """Whether an operator repeats itself under a change."""

    BREAKS = "breaks"
    HOLDS = "holds"
    DOWNSTREAM = "downstream"
    """The inputs of all its calls differ already, so that nothing is known of it."""
    NOT_TESTED = "not tested"


class CallDigests(NamedTuple):
    """Hashes of what a call read and of what it made: equal if all bits are."""

    inputs: int
    results: int


@dataclass(slots=True)
class Stability:
    """One operator under one change: the number of its calls by outcome, and the call that broke most.

    Attributes:
        n_holds, n_breaks, n_downstream: Calls of the program by outcome.
        n_distinct: Results of the worst call: how many there are.
        mode: How often its most frequent result came.
        n_runs: How often it ran on equal inputs.
        where: What it breaks at: ``module, source line`` or thread counts, in the order in which they were seen.
    """

    n_holds: int = 0
    n_breaks: int = 0
    n_downstream: int = 0
    n_distinct: int = 1
    mode: int = 0
    n_runs: int = 0
    where: dict[str, None] = field(default_factory=dict)

    @property
    def outcome(self) -> Outcome:
        """One call that breaks is enough, and one that holds, where no other breaks."""
        if self.n_breaks:
            return Outcome.BREAKS
        if self.n_holds:
            return Outcome.HOLDS
        return Outcome.DOWNSTREAM if self.n_downstream else Outcome.NOT_TESTED

    @property
    def is_unstable(self) -> bool:
        """Whether the most frequent result of the worst call is too rare to stand for all."""
        return self.n_breaks > 0 and self.mode < UNSTABLE_SHARE * self.n_runs

    def add_break(self, counts: Counter[int], where: str) -> None:
        """Count a call with several results.

        Args:
            counts: How often each result came.
            where: What it breaks at.
        """
        self.n_breaks += 1
        self.where[where] = None
        if len(counts) > self.n_distinct:
            self.n_distinct, self.mode, self.n_runs = len(counts), max(counts.values()), counts.total()


def call_digests(recording: Recording) -> dict[Key, CallDigests]:
    """Hashes of the inputs and of the results of each call that computes something, by its key."""
    tensors = _tensor_hashes(recording)
    arguments = np.array([_text_hash(c.arguments) for c in recording.contexts], np.uint64)
    is_none = recording.inputs == NONE
    given = np.where(
        is_none, np.uint64(0), tensors[np.where(is_none, 0, recording.inputs)] if len(tensors) else np.uint64(0)
    )
    inputs = _joined(given, recording.first_input)
    with np.errstate(over="ignore"):
        # Numbers among the arguments count as inputs: another value of them may give other results.
        inputs += arguments[recording.calls["context"]] if len(arguments) else np.uint64(0)
    kinds = recording.results["kind"]
    # A view computes nothing, and memory that is not initialised has no ladder.
    is_made = ((kinds == Kind.RESULT) | (kinds == Kind.WRITTEN)) & (recording.results["n_rungs"] > 0)
    results = _joined(tensors, recording.first_result, skipped=~is_made)
    n_made = np.concatenate([np.zeros(1, np.int64), np.cumsum(is_made)])
    computes = n_made[recording.first_result[1:]] > n_made[recording.first_result[:-1]]
    calls = zip(recording.call_keys(), inputs.tolist(), results.tolist(), computes.tolist(), strict=True)
    return {key: CallDigests(given, made) for key, given, made, is_kept in calls if is_kept}


def _tensor_hashes(recording: Recording) -> Hashes:
    """One hash of the bits of each tensor; views have that of their base and their own form."""
    n = len(recording.results)
    source = np.arange(n)
    kinds, base = recording.results["kind"], recording.results["base"]
    is_view = (kinds == Kind.VIEW) & (base != NONE)
    while is_view[source].any():  # bases come before their views, so that this ends
        source = np.where(is_view[source], base[source], source)
    has_ladder = recording.results["n_rungs"] > 0
    first = np.where(has_ladder, recording.first_rung[:-1], 0)
    rungs = recording.rungs[first] if len(recording.rungs) else np.zeros(n, np.uint64)
    hashes: Hashes = np.where(has_ladder, rungs, np.uint64(0))
    return hashes[source] if n else hashes


def _joined(values: Hashes, first: npt.NDArray[np.int64], skipped: npt.NDArray[Any] | None = None) -> Hashes:
    """One hash for each stretch of values, in which their order counts; `skipped` values count as absent."""
    n_each = np.diff(first)
    kept = np.ones(len(values), np.int64) if skipped is None else (~skipped).astype(np.int64)
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(kept)])
    position = (before[:-1] - np.repeat(before[first[:-1]], n_each)).astype(np.uint64)
    with np.errstate(over="ignore"):
        # With the position: a sum alone would be the same after an exchange of two inputs.
        mixed = np.where(kept == 1, mix(values + (position + np.uint64(1)) * _GAMMA), np.uint64(0))
        total = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)])
        # Sums may wrap: their differences are right mod 2^64.
        joined: Hashes = total[first[1:]] - total[first[:-1]]
        return joined


def _text_hash(text: str) -> int:
    # Python's own hash of a text is another one in each process, and recordings come from several.
    data = np.frombuffer(text.encode(), np.uint8).astype(np.uint64)
    return int(_joined(data, np.array([0, len(data)]))[0])


def run_to_run(runs: Iterable[Mapping[Key, CallDigests]]) -> tuple[dict[str, Stability], int]:
    """Compare runs of one platform, by operator.

    Args:
        runs: The calls of each run.

    Returns:
        Outcomes by operator, and the number of calls that are not in every run.
    """
    found: dict[str, Stability] = defaultdict(Stability)
    n_missing = 0
    every = list(runs)
    for key, seen in _by_key(every).items():
        n_missing += len(seen) < len(every)
        # By inputs: a call whose inputs differ between runs says nothing of its own operator.
        groups = _results_by_inputs(seen)
        of_op = found[key.op]
        worst = max(groups.values(), key=len)
        if len(worst) > 1:
            of_op.add_break(worst, _place(key))
        # No two runs had the same inputs.
        elif len(groups) > 1 and len(groups) == len(seen):
            of_op.n_downstream += 1
        elif len(seen) > 1:
            of_op.n_holds += 1
            of_op.n_runs = max(of_op.n_runs, *(counts.total() for counts in groups.values()))
            of_op.mode = of_op.n_runs
    return dict(found), n_missing


def merged(platforms: Iterable[Mapping[str, Stability]]) -> dict[str, Stability]:
    """Outcomes of several thread counts in one: calls add up, and the one that broke most stands for all."""
    found: dict[str, Stability] = defaultdict(Stability)
    for outcomes in platforms:
        for op, other in outcomes.items():
            of_op = found[op]
            # Results of two thread counts may be equal, so that their numbers cannot be added: the worst count is
            # shown.
            if (other.n_distinct, other.n_runs) > (of_op.n_distinct, of_op.n_runs):
                of_op.n_distinct, of_op.mode, of_op.n_runs = other.n_distinct, other.mode, other.n_runs
            of_op.n_holds += other.n_holds
            of_op.n_breaks += other.n_breaks
            of_op.n_downstream += other.n_downstream
            of_op.where.update(other.where)
    return dict(found)


def across_threads(runs: Mapping[int, Iterable[Mapping[Key, CallDigests]]]) -> dict[str, Stability]:
    """Compare thread counts, by operator; calls that break from run to run with one count say nothing here.

    Args:
        runs: Of each thread count, the calls of each of its runs.
    """
    found: dict[str, Stability] = defaultdict(Stability)
    seen_by_threads = {threads: _by_key(list(calls)) for threads, calls in runs.items()}
    keys = dict.fromkeys(key for seen in seen_by_threads.values() for key in seen)
    for key in keys:
        groups = {n: _results_by_inputs(seen[key]) for n, seen in seen_by_threads.items() if key in seen}
        of_op = found[key.op]
        # What differs from run to run with one count of threads would differ between counts by chance.
        if len(groups) < 2 or any(len(counts) > 1 for group in groups.values() for counts in group.values()):
            continue
        results = {n: {inputs: next(iter(counts)) for inputs, counts in g.items()} for n, g in groups.items()}
        reference = next(iter(results.values()))
        common = [inputs for inputs in reference if all(inputs in r for r in results.values())]
        if not common:
            of_op.n_downstream += 1
            continue
        # One set of inputs that all thread counts had is enough: the digest says that they are equal.
        differing = [n for n, r in results.items() if r[common[0]] != reference[common[0]]]
        if differing:
            counts = Counter(r[common[0]] for r in results.values())
            for n in differing:
                of_op.where[f"{n} thread{'s' * (n != 1)}"] = None
            of_op.add_break(counts, next(reversed(of_op.where)))
        else:
            of_op.n_holds += 1
            of_op.n_runs = of_op.mode = max(of_op.n_runs, len(groups))
    return dict(found)


def _by_key(runs: list[Mapping[Key, CallDigests]]) -> dict[Key, list[CallDigests]]:
    seen: dict[Key, list[CallDigests]] = defaultdict(list)
    for calls in runs:
        for key, digests in calls.items():
            seen[key].append(digests)
    return seen


def _results_by_inputs(seen: Iterable[CallDigests]) -> dict[int, Counter[int]]:
    groups: dict[int, Counter[int]] = defaultdict(Counter)
    for inputs, results in seen:
        groups[inputs][results] += 1
    return groups


def _place(key: Key) -> str:
    return f"{key.module or 'no module'}, {key.phase}, step {key.step}"
