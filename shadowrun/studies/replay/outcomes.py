"""What became of the calls of a recording on another machine, call by call and by operator."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from shadowrun.recording.model import NONE
from shadowrun.studies.diff.rounding import Rounding
from shadowrun.types import Status

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shadowrun.recording.model import Context
    from shadowrun.studies.diff.rounding import Judgement
    from shadowrun.studies.replay.propagated import PropagatedError
    from shadowrun.types import Verdict

__all__ = ["FAIL_ON", "NOT_RUN", "OperatorReplays", "Outcome", "Replay", "ReplayedCall"]

FAIL_ON: Final = ("any", "not-rounding", "mismatch", "error", "missing", "provenance")
_FAULTS: Final = (Status.MISMATCH, Status.UNSUPPORTED, Status.ERROR, Status.FALLBACK)


class Outcome(StrEnum):
    """What became of a call whose inputs the recording holds."""

    EQUAL = "equal"
    """Its results have the recorded bits."""
    ROUNDING = "rounding-sized"
    """They differ by no more than two right implementations may."""
    UNDECIDED = "not decided"
    """They differ, and digests and samples do not show whether by more than rounding."""
    BEYOND = "beyond rounding"
    FORM = "another form"
    """dtype, shape, strides or number of the results differ."""
    RAISED = "raised"
    NO_DIGEST = "no digest"
    """The recording has no digest of a result."""
    NOT_RUN = "not run"
    """The operator is not allowed or not here, or the inputs are damaged or too large."""


NOT_RUN: Final = (Outcome.NOT_RUN, Outcome.NO_DIGEST)
"""Outcomes that show nothing about the target."""
_FLAGGED: Final = (Outcome.BEYOND, Outcome.FORM, Outcome.RAISED)


@dataclass(slots=True)
class ReplayedCall:
    """A call whose inputs the recording holds.

    Attributes:
        call: Its number in the recording.
        step: Its training step.
        context: Operator, module, phase and line.
        outcome: Its results here against the recorded digests.
        why: What decided, or why it was not run.
        remaining: Remaining precision in bits, the least of its results; -1 where there is none.
        judgement: Distance from the recorded result; None where they are equal or nothing was compared.
        verdict: Its results here against the reference's here; None without one.
        is_output: The recording has all elements of a result: it was the last call of its step.
    """

    call: int
    step: int
    context: Context
    outcome: Outcome
    why: str = ""
    remaining: int = NONE
    judgement: Judgement | None = None
    verdict: Verdict | None = None
    is_output: bool = False

    @property
    def is_fault(self) -> bool:
        """Whether the judge found a fault of the target."""
        return self.verdict is not None and self.verdict.status in _FAULTS

    @property
    def is_flagged(self) -> bool:
        """Whether more than rounding parts it from the recording or from the reference."""
        # Either: the judge of this machine misses what its own reference shares, and digests miss what looks like
        # rounding.
        return self.outcome in _FLAGGED or self.is_fault

    @property
    def arbitration(self) -> str:
        """Which of the two machines is off, where the reference decides it: ``here``, ``recorded`` or empty."""
        if self.is_fault:
            return "here"
        # Right by the reference of this machine, and far from the recording: then the recording is off.
        is_right_here = self.verdict is not None and self.verdict.status is Status.MATCH
        return "recorded" if is_right_here and self.outcome in (Outcome.BEYOND, Outcome.FORM) else ""


@dataclass(slots=True)
class OperatorReplays:
    """All calls of one operator.

    Attributes:
        op: The operator.
        n_calls: Calls with results to compare.
        n_missing: Of these, calls without captured inputs.
        outcomes: Of the others.
        verdicts: Statuses by the judge.
        arbitration: ``here`` and ``recorded``, with counts.
        remaining: Least remaining precision in bits; -1 without a difference that has one.
        min_ulp, max_ulp: Bounds of the greatest distance; NaN where there are none.
        propagated: The error in a run of the program here; None without one.
    """

    op: str
    n_calls: int = 0
    n_missing: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    verdicts: Counter[Status] = field(default_factory=Counter)
    arbitration: Counter[str] = field(default_factory=Counter)
    remaining: int = NONE
    min_ulp: float = math.nan
    max_ulp: float = math.nan
    propagated: PropagatedError | None = None

    @property
    def n_flagged(self) -> int:
        """Calls in which more than rounding parts it from the recording."""
        return sum(self.outcomes[o] for o in _FLAGGED)

    def add(self, call: ReplayedCall) -> None:
        """Count a call that was replayed."""
        self.outcomes[call.outcome] += 1
        if call.verdict is not None:
            self.verdicts[call.verdict.status] += 1
        if call.arbitration:
            self.arbitration[call.arbitration] += 1
        if call.remaining != NONE:
            self.remaining = call.remaining if self.remaining == NONE else min(self.remaining, call.remaining)
        if call.judgement is not None:
            self.min_ulp = _greater(self.min_ulp, call.judgement.min_ulp)
            self.max_ulp = _greater(self.max_ulp, call.judgement.max_ulp)


def _greater(a: float, b: float) -> float:
    # NaN stands for not measured.
    return b if math.isnan(a) else a if math.isnan(b) else max(a, b)


@dataclass(frozen=True, slots=True)
class Replay:
    """A recording on another machine.

    Attributes:
        name: The recording.
        target, ref: Platforms of this machine; `ref` is empty where it is the target.
        recorded_on: What the recording says of its machine.
        calls: Those whose inputs it holds, in program order.
        n_missing: Calls without captured inputs, by operator.
        n_random: Calls that draw random numbers.
        n_without_values: Views, and calls whose results have no digest.
        n_unselected: Calls that were left out by the options of the user.
        propagated: By operator: the program run here as a whole; None where it was not.
        warnings: What has to be known before the rest.
        same_provenance: Whether the program run here was the recorded one, with the same inputs.
        n_left: Captured calls that were not reached before Ctrl-C.
        not_captured: Why inputs of kinds of calls are not in the recording, with counts.
    """

    name: str
    target: str
    ref: str
    recorded_on: str
    calls: Sequence[ReplayedCall]
    n_missing: Mapping[str, int]
    n_random: int = 0
    n_without_values: int = 0
    n_unselected: int = 0
    propagated: Mapping[str, PropagatedError] | None = None
    warnings: tuple[str, ...] = ()
    same_provenance: bool = True
    n_left: int = 0
    not_captured: Mapping[str, int] = field(default_factory=dict)

    @property
    def flagged(self) -> list[ReplayedCall]:
        """Calls in which more than rounding parts this machine from the recording or from the reference."""
        return [call for call in self.calls if call.is_flagged]

    def count(self, *outcomes: Outcome) -> int:
        """Calls with one of these outcomes."""
        return sum(call.outcome in outcomes for call in self.calls)

    def by_operator(self) -> list[OperatorReplays]:
        """All operators with results to compare: those that are flagged first, then those that differ, by name."""
        found: dict[str, OperatorReplays] = {}

        def replays_of(op: str) -> OperatorReplays:
            return found.setdefault(op, OperatorReplays(op))

        for call in self.calls:
            replays_of(call.context.op).n_calls += 1
            replays_of(call.context.op).add(call)
        for op, n in self.n_missing.items():
            replays_of(op).n_calls += n
            replays_of(op).n_missing += n
        # After the calls: the program here may call operators of which the recording has no inputs.
        for op, row in found.items():
            row.propagated = (self.propagated or {}).get(op)
        return sorted(found.values(), key=_order)

    def failures(self, kinds: Iterable[str]) -> list[str]:
        """Why the gate fails.

        Args:
            kinds: Of `FAIL_ON`.
        """
        kinds = frozenset(kinds)
        n_run = len(self.calls) - self.count(*NOT_RUN)
        beyond, raised = self.count(Outcome.BEYOND, Outcome.FORM), self.count(Outcome.RAISED)
        faults = sum(call.is_fault for call in self.calls)
        # What Ctrl-C left out is missing too: a gate must not pass on half of a recording.
        missing = sum(self.n_missing.values()) + len(self.calls) - n_run + self.n_left
        reasons = {
            "not-rounding": (beyond, f"{beyond:,} results differ from the recording by more than rounding"),
            "mismatch": (faults, f"{faults:,} calls are faults by the reference of this machine"),
            "error": (raised, f"{raised:,} calls raise here"),
            "missing": (missing, f"{missing:,} calls could not be replayed"),
            "provenance": (not self.same_provenance, "provenance differs: the program run here is another"),
        }
        found = [text for kind, (n, text) in reasons.items() if n and kind in kinds]
        if "any" in kinds:
            differ = n_run - self.count(Outcome.EQUAL)
            found += [f"{differ:,} of {n_run:,} replayed calls are not equal"] if differ else []
            spread = sum(p.n_differ for p in (self.propagated or {}).values())
            found += [f"{spread:,} calls of the program run here are not equal"] if spread else []
        # A file of which nothing could be run proves nothing: it must not pass.
        if kinds and not found and not n_run and not self.propagated:
            found = ["no call of the recording could be replayed"]
        return found


def _order(row: OperatorReplays) -> tuple[int, str]:
    faults = sum(row.verdicts[status] for status in _FAULTS)
    if row.n_flagged or faults:
        return 0, row.op
    differs = row.outcomes[Outcome.UNDECIDED] + row.outcomes[Outcome.ROUNDING]
    return (1 if differs else 2 if row.outcomes[Outcome.EQUAL] else 3), row.op


def outcome_of(rounding: Rounding) -> Outcome:
    """The outcome of results that differ in values."""
    return {
        Rounding.YES: Outcome.ROUNDING,
        Rounding.NO: Outcome.BEYOND,
        Rounding.UNKNOWN: Outcome.UNDECIDED,
    }[rounding]
