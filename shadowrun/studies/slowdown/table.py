"""Slowdown of operators and the expected time of a step, computed from measured times; and its report."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from shadowrun.report.bars import bar_chart
from shadowrun.report.document import Block, Column, Document, Figure, Limits, Note, Records, Section, Table
from shadowrun.report.document_blocks import naming
from shadowrun.report.issues import Issue, Issues
from shadowrun.report.sanitize import clip

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from shadowrun.report.document_blocks import Cell
    from shadowrun.studies.slowdown.timing import TimedCall

__all__ = ["FAIL_ON", "OperatorSlowdown", "Slowdown", "StepTime", "slowdown_document", "slowdown_issues"]

BOUNDS = (2.0, 10.0)
"""Ratios that published tables count; see docs/howto/slowdown.md."""


@dataclass(frozen=True, slots=True)
class OperatorSlowdown:
    """Slowdown of one operator over all its call signatures.

    Attributes:
        op: Operator.
        n_signatures: Signatures that were timed.
        n_calls: Calls of them in the run.
        ratio: Time of its calls on the target divided by that on the reference.
        lower, upper: The same from the quartiles of each signature's ratio.
        lost_us: Extra microseconds in one step on the target; negative if it is faster.
        worst: Signature with the greatest ratio.
    """

    op: str
    n_signatures: int
    n_calls: int
    ratio: float
    lower: float
    upper: float
    lost_us: float
    worst: TimedCall


@dataclass(frozen=True, slots=True)
class StepTime:
    """Expected time of the operators of one step, in microseconds, one after the other.

    Attributes:
        ref_us, target_us: On each platform.
        complete: Whether all its calls were timed; if not, both times exclude the others.
    """

    ref_us: float
    target_us: float
    complete: bool

    @property
    def ratio(self) -> float:
        """Target divided by reference; 1 if the reference took no time."""
        return self.target_us / self.ref_us if self.ref_us > 0 else 1.0


@dataclass(frozen=True, slots=True)
class Slowdown:
    """All measurements of a study.

    Attributes:
        operators: Operators by extra time in a step; of a database, by their ratio.
        failing: Signatures that the target cannot run.
        left_out: Signatures that could not be timed for other reasons.
        step: Expected time of a step.
        critical_ratio: Operators slower than this are reported separately.
        of_program: Whether the calls are those of a program. If not, there is one call of each operator of a database
            and no step, and the slowest operators come first.
    """

    operators: tuple[OperatorSlowdown, ...]
    failing: tuple[TimedCall, ...]
    left_out: tuple[TimedCall, ...]
    step: StepTime
    critical_ratio: float
    of_program: bool = True

    @classmethod
    def from_timings(
        cls, measured: Sequence[TimedCall], n_steps: int, critical_ratio: float, *, of_program: bool = True
    ) -> Slowdown:
        """Summarise measurements.

        Args:
            measured: One for each signature.
            n_steps: Steps of the run.
            critical_ratio: Operators slower than this are reported separately.
            of_program: Whether the calls are those of a program.
        """
        by_op: dict[str, list[TimedCall]] = defaultdict(list)
        for m in measured:
            if m.ratio is not None:
                by_op[m.call.op].append(m)
        timed = [m for ms in by_op.values() for m in ms]
        operators = [_operator(op, ms, n_steps) for op, ms in by_op.items()]
        return cls(
            # In a program, the time that is lost decides what to mend: a slow operator that is called once costs
            # nothing.
            operators=tuple(sorted(operators, key=lambda o: (-(o.lost_us if of_program else o.ratio), o.op))),
            failing=tuple(m for m in measured if m.on_target),
            left_out=tuple(m for m in measured if m.failed and not m.on_target),
            step=StepTime(
                sum(m.ref_us.median * m.call.n for m in timed if m.ref_us) / n_steps,
                sum(m.target_us.median * m.call.n for m in timed if m.target_us) / n_steps,
                len(timed) == len(measured),
            ),
            critical_ratio=critical_ratio,
            of_program=of_program,
        )

    @property
    def median_ratio(self) -> float:
        """Median of the operators' ratios; 1 if none was timed."""
        return statistics.median(o.ratio for o in self.operators) if self.operators else 1.0

    def slower(self, bound: float) -> tuple[OperatorSlowdown, ...]:
        """Operators slower by more than `bound`, the slowest first."""
        slow = [o for o in self.operators if o.ratio > bound]
        return tuple(sorted(slow, key=lambda o: -o.ratio))

    def surely_slower(self, bound: float) -> tuple[OperatorSlowdown, ...]:
        """Those of `slower` whose lower quartile exceeds the bound too: beyond the noise of the machine."""
        return tuple(o for o in self.slower(bound) if o.lower > bound)

    @property
    def faster(self) -> tuple[OperatorSlowdown, ...]:
        """Operators whose upper quartile is below 1: faster on the target, beyond the noise."""
        return tuple(o for o in self.operators if o.upper < 1)


def _operator(op: str, measured: list[TimedCall], n_steps: int) -> OperatorSlowdown:
    ref = target = lower = upper = 0.0
    for m in measured:
        assert m.ref_us is not None
        assert m.target_us is not None
        assert m.ratio is not None
        # Weighted by calls: a slow shape that a program rarely uses must not dominate.
        spent = m.ref_us.median * m.call.n
        ref += spent
        target += m.target_us.median * m.call.n
        lower += spent * m.ratio.lower
        upper += spent * m.ratio.upper
    worst = max(measured, key=lambda m: m.ratio.median if m.ratio else 0.0)
    ratio, least, most = (x / ref if ref > 0 else 1.0 for x in (target, lower, upper))
    # Medians of times and quartiles of ratios are computed separately: with noise they may cross.
    return OperatorSlowdown(
        op, len(measured), sum(m.call.n for m in measured), ratio, min(least, ratio), max(most, ratio),
        (target - ref) / n_steps, worst,
    )  # fmt: skip


# Report of the slowdown as a `Document`.

FORMAT = 2
"""Version of the JSON's form. History: 1, first version; 2, the key ``critical`` was ``intolerable``."""
MAX_NAMES = 20
MAX_INPUTS = 40
_LIMITS = Limits(20, 20, 300)
_REST = "-f csv lists all"


def slowdown_document(slowdown: Slowdown, title: str, issues: Issues | None = None) -> Document:
    """Report of all timed operators, and of the calls that could not be timed.

    Args:
        slowdown: What was measured.
        title: Target and reference.
        issues: The slow ones, for CI services.
    """
    blocks: list[Block] = [Note(line) for line in _summary(slowdown)]
    if slowdown.operators:
        blocks.append(Section("Operators", (*_bars(slowdown), _operators(slowdown)), count=len(slowdown.operators)))
    failures = [(m, f"the target: {m.failed}") for m in slowdown.failing] + [(m, m.failed) for m in slowdown.left_out]
    if failures:
        rows = tuple((m.call.op, clip(m.call.inputs, MAX_INPUTS), why) for m, why in failures)
        table = Table((Column("operator", "name"), Column("inputs"), Column("why")), rows, noun=_REST, limits=_LIMITS)
        blocks.append(Section("Not timed", (table,), count=len(failures)))
    return Document(
        f"slowdown of {title}", tuple(blocks), _data(slowdown, title), _records(slowdown, failures), issues=issues
    )


def _summary(slowdown: Slowdown) -> Iterator[Cell]:
    step, n = slowdown.step, len(slowdown.operators)
    part = "" if step.complete else ", without the calls that could not be timed"
    if slowdown.of_program:
        yield f"operators of a step: {_us(step.ref_us)} on the reference, {_us(step.target_us)} on the target"
        yield f"expected step: {step.ratio:.2f} times as long on the target{part}"
    else:
        n_failing, n_left_out = len(slowdown.failing), len(slowdown.left_out)
        yield f"{n} operators timed, {n_failing} fail on the target, {n_left_out} cannot be timed"
    if n:
        yield f"median operator: {slowdown.median_ratio:.2f} times as long"
    for bound in BOUNDS:
        # Both numbers: the published one is of medians, and a gate must not fail on noise.
        slower, surely = len(slowdown.slower(bound)), len(slowdown.surely_slower(bound))
        noise = f" ({slower - surely} of them within the noise)" if surely < slower else ""
        share = f" ({100 * slower / n:.1f} %)" if n and not slowdown.of_program else ""
        yield f"more than {bound:g} times slower: {slower} of {n} operators{share}{noise}"
    critical = slowdown.surely_slower(slowdown.critical_ratio)
    if critical:
        before = f"critical, more than {slowdown.critical_ratio:g} times: "
        yield naming(before, [o.op for o in critical], MAX_NAMES)
    yield f"faster than the reference: {len(slowdown.faster)} of {n}"


def _bars(slowdown: Slowdown) -> tuple[Figure, ...]:
    """Where a step loses its time; of the database, which operators are slowest."""
    if slowdown.of_program:
        rows = [(o.op, o.lost_us, _us(o.lost_us)) for o in slowdown.operators]
        return bar_chart(rows, "Time that a step loses, by operator", "time lost per step")
    rows = [(o.op, o.ratio, f"{o.ratio:.2f} times") for o in slowdown.operators]
    return bar_chart(rows, "The slowest operators", "times slower than on the reference")


def _operators(slowdown: Slowdown) -> Table:
    ratio = (Column("times slower", "number"), Column("spread", "number"))
    name, inputs = Column("operator", "name"), Column("slowest inputs")
    if slowdown.of_program:
        columns = (name, Column("calls", "number"), *ratio, Column("lost per step", "number"), inputs)
        rows = tuple((o.op, f"{o.n_calls:,}", *_ratio(o), _us(o.lost_us), _inputs(o)) for o in slowdown.operators)
    else:
        columns = (name, *ratio, Column("reference", "number"), Column("target", "number"), inputs)
        rows = tuple((o.op, *_ratio(o), *_times(o), _inputs(o)) for o in slowdown.operators)
    return Table(columns, rows, noun=f"operators: {_REST}", limits=_LIMITS)


def _ratio(o: OperatorSlowdown) -> tuple[str, str]:
    return f"{o.ratio:.2f}", f"{o.lower:.2f} to {o.upper:.2f}"


def _times(o: OperatorSlowdown) -> tuple[str, str]:
    ref, target = (_us(spread.median) if spread else "" for spread in (o.worst.ref_us, o.worst.target_us))
    return ref, target


def _inputs(o: OperatorSlowdown) -> str:
    return clip(o.worst.call.inputs, MAX_INPUTS)


def _us(us: float) -> str:
    sign, us = ("-" if us < 0 else ""), abs(us)
    return f"{sign}{us:.3g} µs" if us < 1e3 else f"{sign}{us / 1e3:.3g} ms" if us < 1e6 else f"{sign}{us / 1e6:.3g} s"


def _data(slowdown: Slowdown, title: str) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "of": title,
        "step": {**dataclasses.asdict(slowdown.step), "ratio": slowdown.step.ratio} if slowdown.of_program else None,
        "median_ratio": slowdown.median_ratio,
        "n_operators": len(slowdown.operators),
        "n_slower": {f"{bound:g}": len(slowdown.slower(bound)) for bound in BOUNDS},
        "n_surely_slower": {f"{bound:g}": len(slowdown.surely_slower(bound)) for bound in BOUNDS},
        "critical": {
            "ratio": slowdown.critical_ratio,
            "ops": [o.op for o in slowdown.surely_slower(slowdown.critical_ratio)],
        },
        "operators": [
            {f.name: getattr(o, f.name) for f in dataclasses.fields(o) if f.name != "worst"}
            | {"worst": _measured_data(o.worst)}
            for o in slowdown.operators
        ],
        "failing": list(map(_measured_data, slowdown.failing)),
        "left_out": list(map(_measured_data, slowdown.left_out)),
    }


def _measured_data(m: TimedCall) -> dict[str, Any]:
    figures = {f.name: getattr(m, f.name) for f in dataclasses.fields(m) if f.name != "call"}
    return {**figures, "call": {k: getattr(m.call, k) for k in ("op", "inputs", "n", "shapes")}}


def _records(slowdown: Slowdown, failures: list[tuple[TimedCall, str]]) -> Records:
    rows: list[tuple[object, ...]] = [
        (o.op, o.n_calls, *(f"{x:.4g}" for x in (o.ratio, o.lower, o.upper, o.lost_us)), o.worst.call.inputs, "")
        for o in slowdown.operators
    ]
    rows += [(m.call.op, "", "", "", "", "", m.call.inputs, why) for m, why in failures]
    head = ("operator", "calls", "ratio", "lower", "upper", "lost_us_per_step", "worst_inputs", "failed")
    return Records(head, tuple(rows))


# Slow operators, and those that the target cannot run, as `Issues`.

FAIL_ON: Final = ("critical", "error")
"""Operators slower than the critical ratio beyond the noise; calls that the target cannot run."""


def slowdown_issues(slowdown: Slowdown, suite: str, fail_on: Collection[str], file: str = "") -> Issues:
    """One issue for each operator that is slower beyond the noise, and for each call that the target cannot run.

    Args:
        slowdown: What was measured.
        suite: Target and reference.
        fail_on: Of `FAIL_ON`.
        file: Name of the data file: a measured call has no source line.
    """
    rows = (*_slow(slowdown, suite, fail_on), *_failed(slowdown, suite, fail_on))
    named = {issue.name for issue in rows}
    passed = tuple(o.op for o in slowdown.operators if o.op not in named)
    return Issues(suite, rows, passed, file)


def _slow(slowdown: Slowdown, suite: str, fail_on: Collection[str]) -> Iterator[Issue]:
    critical = {o.op for o in slowdown.surely_slower(slowdown.critical_ratio)}
    # Beyond the noise alone: a line in an alert that comes and goes from run to run is switched off.
    for o in slowdown.surely_slower(BOUNDS[0]):
        bound = slowdown.critical_ratio if o.op in critical else BOUNDS[0]
        yield Issue(
            kind="slow",
            cause="critical" if o.op in critical else "",
            name=o.op,
            message=clip(f"{o.op}, {suite}: {o.ratio:.2f} times slower, more than {bound:g} beyond the noise"),
            level="error" if "critical" in fail_on and o.op in critical else "warning",
            key=("slow", o.op),
            lines=(
                ("spread", f"{o.lower:.2f} to {o.upper:.2f}"),
                ("calls", f"{o.n_calls:,}"),
                ("slowest inputs", clip(o.worst.call.inputs)),
            ),
        )


def _failed(slowdown: Slowdown, suite: str, fail_on: Collection[str]) -> Iterator[Issue]:
    for m in slowdown.failing:
        yield Issue(
            kind="error",
            cause="",
            name=m.call.op,
            message=clip(f"{m.call.op}, {suite}: the target cannot run it: {m.failed}"),
            level="error" if "error" in fail_on else "warning",
            key=("error", m.call.op, m.call.inputs),
            lines=(("inputs", clip(m.call.inputs)),),
        )
