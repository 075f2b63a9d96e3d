"""The chunks of a campaign, as a pool of worker processes runs them: every variant ends in one row for each target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from shadowrun.studies.campaign.tables import Event, FindingRow, ResultRow, VariantRow
from shadowrun.studies.isolation.pool import FailureKind, RemainingTask
from shadowrun.studies.sweep.cases import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shadowrun.studies.campaign.store import CampaignStore
    from shadowrun.studies.isolation.pool import WorkerFailure

__all__ = ["ALONE", "Chunk", "ChunkWork"]

ALONE: Final = -1
"""Target of a case that is only being made."""
# Variants in which an operator ended its process twice: from then on one death is enough.
_CONFIRMED: Final = 3
# A process that dies before it begins a case blames none; after so many at one place, the case is given up, or the
# campaign would start processes without end.
_MAX_IDLE_DEATHS: Final = 3
_KINDS: Final = {
    FailureKind.CRASH: Kind.CRASH,
    FailureKind.TIMEOUT: Kind.TIMEOUT,
    FailureKind.OUT_OF_MEMORY: Kind.OUT_OF_MEMORY,
    FailureKind.DEVICE: Kind.CRASH,
}


@dataclass(frozen=True, slots=True)
class Chunk:
    """A range of recipes.

    Attributes:
        start, stop: Numbers.
        target: First target of the first recipe.
        attempt: 2 if the first recipe has ended a process before.
    """

    start: int
    stop: int
    target: int = 0
    attempt: int = 1


@dataclass(slots=True)
class _InHand:
    """What is known of a chunk that a worker runs.

    Attributes:
        at: Number and target of the first case without outcome.
        recipes: By number, of variants without all outcomes.
    """

    at: tuple[int, int]
    recipes: dict[int, str | None]


class ChunkWork:
    """Chunks, and what became of their variants.

    Args:
        store: Gets the rows.
        chunks: What to run.
        n_targets: Number of platforms under test.
        is_over: Whether to stop.
        on_saved: Called after rows were written.

    Attributes:
        n_variants: Variants settled since the start.
        n_findings: Findings since the start.
    """

    def __init__(
        self,
        store: CampaignStore,
        chunks: Iterator[Chunk],
        n_targets: int,
        is_over: Callable[[], bool] = lambda: False,
        on_saved: Callable[[], None] = lambda: None,
    ) -> None:
        self._store, self._chunks, self._n_targets = store, chunks, n_targets
        self._is_over, self._on_saved = is_over, on_saved
        self._in_hand: dict[Chunk, _InHand] = {}
        self._losses: dict[tuple[int, int], WorkerFailure] = {}
        self._confirmed: dict[tuple[str, str], int] = {}
        self._idle_deaths: dict[tuple[int, int], int] = {}
        self._rows: list[tuple[Any, str | None]] = []
        self.n_variants = self.n_findings = 0

    # -- what the pool asks ------------------------------------------------------------------------------

    def next(self) -> Chunk | None:
        """The next chunk."""
        return next(self._chunks, None)

    def line(self, task: Chunk) -> dict[str, Any]:
        """A chunk as its worker gets it."""
        self._in_hand[task] = _InHand((task.start, task.target), {})
        return {"start": task.start, "stop": task.stop, "target": task.target}

    def receive(self, task: Chunk, line: list[Any]) -> None:
        """A variant, or its result on a target."""
        hand = self._in_hand[task]
        if line[0] == "v":
            _, number, program, identity, before, invalid, mutators, recipe = line
            # Of all others, the result decides whether the recipe is kept; its number makes it again.
            kept = recipe if invalid else None
            self._rows.append((VariantRow(number, program, identity, before, invalid, tuple(mutators), kept), None))
            hand.recipes[number] = recipe
            # A duplicate has no results: the variant that was met first has them.
            if invalid or before >= 0:
                self._record_outcome(hand, number, self._n_targets - 1)
            return
        _, number, target, status, reason, findings, oracles, ops, n_calls, cpu_us = line
        recipe = hand.recipes.get(number)
        if status == "invalid":
            self._invalid(hand, number, target, reason)
            return
        found = [FindingRow(*f) for f in findings]
        failure = self._losses.pop((number, target), None)
        raises = any(f.kind == Kind.ERROR for f in found)  # alone too: it is what cost the device
        if failure is not None and _is_flaky(failure) and not (raises and failure.kind is FailureKind.DEVICE):
            found.append(_finding_of(failure, f"{failure.explanation}; not again in a fresh process"))
            status = "finding"
        self._result(hand, ResultRow(number, target, status, reason, oracles, n_calls, cpu_us, ops, found), recipe)

    def ended(self, task: Chunk) -> None:
        """All of a chunk was run."""
        del self._in_hand[task]

    def lost(self, task: Chunk, failure: WorkerFailure) -> RemainingTask[Chunk] | None:
        """Record the outcome of the case in hand, or have it tried again; gives what is left."""
        hand = self._in_hand.pop(task)
        case = None if failure.step.case is None else (failure.step.case[0], failure.step.case[1])
        # The process may have ended after it had sent the outcome.
        if case is None or (case[0], max(case[1], 0)) < hand.at:
            return self._after_idle_death(task, hand, failure)
        number, target = case
        # Only the first recipe of a second attempt is the one that was blamed: those after it have not been tried
        # before.
        again = task.attempt == 2 and number == task.start
        event = Event(number, target, 1 + again, failure.kind, failure.explanation, failure.step.op)
        self._rows.append((event, None))
        key = failure.step.op, failure.kind
        if not again and not (key[0] and self._confirmed.get(key, 0) >= _CONFIRMED):
            self._losses[number, max(target, 0)] = failure
            return RemainingTask(Chunk(number, task.stop, max(target, 0), 2), fresh=True)
        self._losses.pop((number, max(target, 0)), None)
        self._confirmed[key] = self._confirmed.get(key, 0) + 1
        self._record_process_end(hand, number, target, failure)
        return self._rest(task, hand)

    def pause(self) -> bool:
        """Write what has come in; True if it is over."""
        self.save()
        return self._is_over()

    def save(self) -> None:
        """Write what has come in.

        Raises:
            DataFileError: Writing fails, for example on a full disk.
        """
        if self._rows:
            with self._store.written():
                for row, recipe in self._rows:
                    self._write(row, recipe)
            self._rows.clear()
        self._on_saved()

    # -- internal ------------------------------------------------------------------------------------------

    def _write(self, row: Any, recipe: str | None) -> None:
        if isinstance(row, VariantRow):
            self._store.add_variant(row)
        elif isinstance(row, ResultRow):
            self._store.add_result(row, recipe)
        elif isinstance(row, Event):
            self._store.add_event(row)
        else:
            number, reason = row
            self._store.invalidate(number, reason, recipe)

    def _result(self, hand: _InHand, row: ResultRow, recipe: str | None) -> None:
        self._rows.append((row, None if row.status == "ok" else recipe))
        self.n_findings += len(row.findings)
        self._record_outcome(hand, row.number, row.target)

    def _record_outcome(self, hand: _InHand, number: int, target: int) -> None:
        """The case has an outcome."""
        hand.at = (number, target + 1) if target + 1 < self._n_targets else (number + 1, 0)
        if hand.at[1] == 0:
            hand.recipes.pop(number, None)
            self.n_variants += 1

    def _invalid(self, hand: _InHand, number: int, target: int, reason: str) -> None:
        recipe = hand.recipes.get(number)
        self._losses.pop((number, target), None)
        if target:
            # What the first target could be compared on was valid then.
            self._result(hand, ResultRow(number, target, "failed", f"the reference: {reason}"), recipe)
            return
        self._rows.append(((number, reason), recipe))
        self._record_outcome(hand, number, self._n_targets - 1)

    def _record_process_end(self, hand: _InHand, number: int, target: int, failure: WorkerFailure) -> None:
        """Record that a variant ends its process."""
        recipe = hand.recipes.get(number)
        if target == ALONE and number not in hand.recipes:
            reason = f"{failure.kind} while it was made: {failure.explanation}"
            self._rows.append((VariantRow(number, None, None, invalid=reason), None))
            self._record_outcome(hand, number, self._n_targets - 1)
        # A reference that ends its process says nothing against a target.
        elif not failure.step.on_target:
            self._invalid(hand, number, max(target, 0), f"{failure.kind} on the reference: {failure.explanation}")
        else:
            found = [_finding_of(failure, failure.explanation)]
            self._result(hand, ResultRow(number, target, "finding", findings=found), recipe)

    def _after_idle_death(self, task: Chunk, hand: _InHand, failure: WorkerFailure) -> RemainingTask[Chunk] | None:
        """The process ended between two cases."""
        self._idle_deaths[hand.at] = self._idle_deaths.get(hand.at, 0) + 1
        if self._idle_deaths[hand.at] >= _MAX_IDLE_DEATHS and hand.at[0] < task.stop:
            number, target = hand.at
            reason = f"{failure.kind} before it began: {failure.explanation}"
            if number in hand.recipes or target:
                self._result(hand, ResultRow(number, target, "failed", reason), hand.recipes.get(number))
            else:
                self._rows.append((VariantRow(number, None, None, invalid=reason), None))
                self._record_outcome(hand, number, self._n_targets - 1)
        return self._rest(task, hand)

    def _rest(self, task: Chunk, hand: _InHand) -> RemainingTask[Chunk] | None:
        number, target = hand.at
        return RemainingTask(Chunk(number, task.stop, target)) if number < task.stop else None


def _is_flaky(failure: WorkerFailure) -> bool:
    # SIGKILL comes from outside: the system out of memory, or a person. Time and memory depend on the machine's load.
    return (
        failure.step.on_target
        and failure.kind in (FailureKind.CRASH, FailureKind.DEVICE)
        and "SIGKILL" not in failure.explanation
    )


def _finding_of(failure: WorkerFailure, explanation: str) -> FindingRow:
    words = f"device lost: {explanation}" if failure.kind is FailureKind.DEVICE else explanation
    return FindingRow(failure.step.op, "", _KINDS[failure.kind], "", words, failure.message, "forward")
