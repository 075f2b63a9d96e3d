"""How much of what a program uses the target has."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from shadowrun.analysis.table import Row, Skipped, Table
from shadowrun.analysis.words import plural
from shadowrun.store.records import REGION
from shadowrun.types import Status

__all__ = ["Coverage", "MissingKernel", "OperatorCoverage", "cover"]

STATES = ("unsupported", "error", "fallback", "unverified", "supported")
"""Of the states that an operator's calls had, the first of these is the operator's."""


@dataclass(frozen=True, slots=True)
class OperatorCoverage:
    """One operator: `state` is one of unsupported, error, fallback, unverified, supported."""

    op: str
    state: str
    n_calls: int
    n_supported_calls: int
    missing_kernels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MissingKernel:
    """A kernel to write, with the calls and operators that wait for it."""

    kernel: str
    n_calls: int
    ops: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Coverage:
    """Coverage by operators and by calls; views, other skipped operators and compiled regions are not counted in it.

    Attributes:
        operators: Those that need work first.
        n_operators: Operators compared.
        n_by_state: State to number of operators.
        n_calls: Calls compared.
        n_supported_calls: Those that ran on the target itself, right or wrong.
        missing_kernels: Those that most calls need first.
        skipped: What was left out, and why.
        runs: Whether the program would run on the target.
        verdict: The same in words.
    """

    operators: tuple[OperatorCoverage, ...]
    n_operators: int
    n_by_state: dict[str, int]
    n_calls: int
    n_supported_calls: int
    missing_kernels: tuple[MissingKernel, ...]
    skipped: tuple[Skipped, ...]
    runs: bool
    verdict: str

    @property
    def percent_operators(self) -> float:
        """Share of the operators that are fully supported, 0 to 100; 100 where none was used."""
        return 100.0 * self.n_by_state["supported"] / self.n_operators if self.n_operators else 100.0

    @property
    def percent_calls(self) -> float:
        """Share of the calls that ran on the target itself, 0 to 100; 100 where there was none."""
        return 100.0 * self.n_supported_calls / self.n_calls if self.n_calls else 100.0


def cover(table: Table) -> Coverage:
    """Coverage of the operators that a run used."""
    by_op: dict[str, list[Row]] = defaultdict(list)
    waiting: dict[str, Counter[str]] = defaultdict(Counter)
    for row in table.rows:
        if row.outcome.status is Status.SKIPPED or row.context.op.startswith(REGION):
            continue
        by_op[row.context.op].append(row)
        if row.outcome.missing_kernel:
            waiting[row.outcome.missing_kernel][row.context.op] += row.group.n
    operators = sorted(
        (_operator(op, rows) for op, rows in by_op.items()), key=lambda o: (STATES.index(o.state), -o.n_calls, o.op)
    )
    counted = Counter(o.state for o in operators)
    states = {state: counted[state] for state in STATES}
    kernels = [
        MissingKernel(kernel, ops.total(), tuple(op for op, _ in ops.most_common())) for kernel, ops in waiting.items()
    ]
    return Coverage(
        operators=tuple(operators),
        n_operators=len(operators),
        n_by_state=states,
        n_calls=sum(o.n_calls for o in operators),
        n_supported_calls=sum(o.n_supported_calls for o in operators),
        missing_kernels=tuple(sorted(kernels, key=lambda k: (-k.n_calls, k.kernel))),
        skipped=_skipped(table),
        runs=not (states["unsupported"] or states["error"]),
        verdict=_verdict(states, len(operators)),
    )


def _state(row: Row) -> str:
    if row.outcome.is_own_failure or row.outcome.status is Status.UNVERIFIED:
        return "unverified"
    if row.outcome.status in (Status.MATCH, Status.MISMATCH):
        return "supported"
    return str(row.outcome.status)


def _operator(op: str, rows: list[Row]) -> OperatorCoverage:
    calls: Counter[str] = Counter()
    for row in rows:
        calls[_state(row)] += row.group.n
    state = next(state for state in STATES if calls[state])
    # A kernel that ran and could be compared once exists; calls that could not be are counted apart.
    if state == "unverified" and calls["supported"]:
        state = "supported"
    kernels = tuple(dict.fromkeys(row.outcome.missing_kernel for row in rows if row.outcome.missing_kernel))
    return OperatorCoverage(op, state, calls.total(), calls["supported"], kernels)


def _skipped(table: Table) -> tuple[Skipped, ...]:
    """Counted skips and those recorded call by call, together."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for skip in table.skipped:
        counts[skip.op, skip.device, skip.reason] += skip.n
    for row in table.rows:
        if row.outcome.status is Status.SKIPPED:
            counts[row.context.op, row.context.device, row.outcome.explanation] += row.group.n
    return tuple(Skipped(*key, n) for key, n in sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _verdict(states: dict[str, int], n_operators: int) -> str:
    if not n_operators:
        return "unknown: no operator was compared"
    problems = []
    if states["unsupported"]:
        problems.append(f"{plural(states['unsupported'], 'operator')} missing")
    if states["error"]:
        problems.append(f"{plural(states['error'], 'operator')} raising errors")
    fallbacks = f"fallbacks on {plural(states['fallback'], 'operator')}" if states["fallback"] else ""
    if problems:
        return "does not run: " + ", ".join([*problems, *filter(None, [fallbacks])])
    return f"runs with {fallbacks}" if fallbacks else "runs"
