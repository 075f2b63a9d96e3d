"""Coverage: the share of a program's operators and calls, and of its functions of torch, that the target supports."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowrun.analysis.call_groups import CallGroups, Row, Skipped
from shadowrun.analysis.wording import plural
from shadowrun.store.records import REGION
from shadowrun.types import Status

if TYPE_CHECKING:
    from shadowrun.store.datafile import DataFile

__all__ = [
    "GRADES",
    "LACKING",
    "STATES",
    "ApiCoverage",
    "Coverage",
    "FunctionCoverage",
    "MissingKernel",
    "ModuleCoverage",
    "OperatorCoverage",
    "api_coverage",
    "operator_coverage",
    "state_of",
]

STATES = ("unsupported", "error", "fallback", "unverified", "supported")
"""States of an operator, worst first: the worst state of its calls."""

LACKING = STATES[:3]  # states in which the target does not compute the operator itself


@dataclass(frozen=True, slots=True)
class OperatorCoverage:
    """One operator.

    Attributes:
        op: Operator.
        state: One of unsupported, error, fallback, unverified, supported.
        n_calls, n_supported_calls: Calls, and those that ran on the target itself.
        missing_kernels: Kernels that the target lacked.
        target_us: Microseconds of its timed calls on the target.
    """

    op: str
    state: str
    n_calls: int
    n_supported_calls: int
    missing_kernels: tuple[str, ...]
    target_us: float


@dataclass(frozen=True, slots=True)
class ModuleCoverage:
    """One module of the program.

    Attributes:
        module: Path in the model; empty for calls outside of modules.
        n_calls, n_supported_calls: Calls, and those that ran on the target itself.
        lacking: Operators that are unsupported, raise or fall back in it, the worst first.
        target_us: Microseconds of its timed calls on the target.
    """

    module: str
    n_calls: int
    n_supported_calls: int
    lacking: tuple[str, ...]
    target_us: float


@dataclass(frozen=True, slots=True)
class MissingKernel:
    """A kernel to write, with the calls, operators and modules that need it."""

    kernel: str
    n_calls: int
    ops: tuple[str, ...]
    modules: tuple[str, ...]


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
        modules: Those with most unsupported calls first.
        fallback_share: Share of fallbacks in the time on the target, 0 to 1; 0 if nothing was timed.
        skipped: Skipped calls, and why.
        runs: Whether the program runs on the target; False if nothing was compared, or an exception ended it.
        verdict: `runs` in words.
    """

    operators: tuple[OperatorCoverage, ...]
    n_operators: int
    n_by_state: dict[str, int]
    n_calls: int
    n_supported_calls: int
    missing_kernels: tuple[MissingKernel, ...]
    modules: tuple[ModuleCoverage, ...]
    fallback_share: float
    skipped: tuple[Skipped, ...]
    runs: bool
    verdict: str

    @property
    def percent_operators(self) -> float:
        """Share of the operators that are fully supported, 0 to 100; 0 without operators."""
        return 100.0 * self.n_by_state["supported"] / self.n_operators if self.n_operators else 0.0

    @property
    def percent_calls(self) -> float:
        """Share of the calls that ran on the target itself, 0 to 100; 0 without calls."""
        return 100.0 * self.n_supported_calls / self.n_calls if self.n_calls else 0.0


def operator_coverage(table: CallGroups, raised: str = "") -> Coverage:
    """Coverage of the operators that a run used; `raised` is the exception that ended it."""
    by_op: dict[str, list[Row]] = defaultdict(list)
    by_module: dict[str, list[Row]] = defaultdict(list)
    by_kernel: dict[str, list[Row]] = defaultdict(list)
    for row in table.rows:
        # Views compute nothing and compiled regions are no operators: both would raise the share.
        if row.outcome.status is Status.SKIPPED or row.context.op.startswith(REGION):
            continue
        by_op[row.context.op].append(row)
        by_module[row.context.module].append(row)
        if row.outcome.missing_kernel:
            by_kernel[row.outcome.missing_kernel].append(row)
    operators = sorted(
        (_operator(op, rows) for op, rows in by_op.items()), key=lambda o: (STATES.index(o.state), -o.n_calls, o.op)
    )
    counted = Counter(o.state for o in operators)
    states = {state: counted[state] for state in STATES}
    kernels = [_missing(kernel, rows) for kernel, rows in by_kernel.items()]
    modules = [_module(module, rows) for module, rows in by_module.items()]
    share = _fallback_share([row for rows in by_op.values() for row in rows])
    return Coverage(
        operators=tuple(operators),
        n_operators=len(operators),
        n_by_state=states,
        n_calls=sum(o.n_calls for o in operators),
        n_supported_calls=sum(o.n_supported_calls for o in operators),
        missing_kernels=tuple(sorted(kernels, key=lambda k: (-k.n_calls, k.kernel))),
        modules=tuple(sorted(modules, key=lambda m: (m.n_supported_calls - m.n_calls, m.module))),
        fallback_share=share,
        skipped=_skipped(table),
        # A fallback costs time only: the program still runs.
        runs=bool(operators) and not (raised or states["unsupported"] or states["error"]),
        verdict=_verdict(states, len(operators), share, raised),
    )


def state_of(row: Row) -> str:
    """State of the calls of a row, one of `STATES`."""
    if row.outcome.is_own_failure:  # the operator itself may have run
        return "unverified"
    if row.outcome.status is Status.UNVERIFIED:  # with a time it ran: random operators do
        return "supported" if row.group.n_target == row.group.n else "unverified"
    if row.outcome.status in (Status.MATCH, Status.MISMATCH):
        return "supported"
    return str(row.outcome.status)


def _operator(op: str, rows: list[Row]) -> OperatorCoverage:
    calls: Counter[str] = Counter()
    for row in rows:
        calls[state_of(row)] += row.group.n
    # The worst state of any call: a program needs all of them.
    state = next(state for state in STATES if calls[state])
    # One compared call proves that the kernel exists; unverified calls are counted separately.
    if state == "unverified" and calls["supported"]:
        state = "supported"
    kernels = tuple(dict.fromkeys(row.outcome.missing_kernel for row in rows if row.outcome.missing_kernel))
    return OperatorCoverage(op, state, calls.total(), calls["supported"], kernels, _target_us(rows))


def _module(module: str, rows: list[Row]) -> ModuleCoverage:
    # By state, then by name: an operator of several states is listed once, at its worst.
    states = [(STATES.index(state_of(row)), row.context.op) for row in rows if state_of(row) in LACKING]
    n_supported = sum(row.group.n for row in rows if state_of(row) == "supported")
    lacking = tuple(dict.fromkeys(op for _, op in sorted(states)))
    return ModuleCoverage(module, sum(row.group.n for row in rows), n_supported, lacking, _target_us(rows))


def _missing(kernel: str, rows: list[Row]) -> MissingKernel:
    ops: Counter[str] = Counter()
    for row in rows:
        ops[row.context.op] += row.group.n
    modules = tuple(sorted({row.context.module for row in rows} - {""}))
    return MissingKernel(kernel, ops.total(), tuple(op for op, _ in ops.most_common()), modules)


def _target_us(rows: list[Row]) -> float:
    # fsum: the sum does not depend on the order of the groups, which combining changes.
    return math.fsum(row.group.target_us_total for row in rows if row.group.n_target)


def _fallback_share(rows: list[Row]) -> float:
    total = _target_us(rows)
    return _target_us([row for row in rows if row.outcome.status is Status.FALLBACK]) / total if total else 0.0


def _skipped(table: CallGroups) -> tuple[Skipped, ...]:
    """Skipped calls, both counted and recorded ones."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for skip in table.skipped:
        counts[skip.op, skip.device, skip.reason] += skip.n
    for row in table.rows:
        if row.outcome.status is Status.SKIPPED:
            counts[row.context.op, row.context.device, row.outcome.explanation] += row.group.n
    return tuple(Skipped(*key, n) for key, n in sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _verdict(states: dict[str, int], n_operators: int, fallback_share: float, raised: str) -> str:
    # An exception comes first: what ran before it is a part of the program.
    if not n_operators:
        return (
            f"ended with {raised}, before any operator was compared"
            if raised
            else "is unknown: no operator was compared"
        )
    problems = []
    if states["unsupported"]:
        problems.append(f"{plural(states['unsupported'], 'operator')} missing")
    if states["error"]:
        problems.append(f"{plural(states['error'], 'operator')} raising errors")
    fallbacks = f"fallbacks on {plural(states['fallback'], 'operator')}" if states["fallback"] else ""
    if raised:
        return f"ended with {', '.join([raised, *problems, *filter(None, [fallbacks])])}"
    if problems:
        return "does not run: " + ", ".join([*problems, *filter(None, [fallbacks])])
    time = f" = {100 * fallback_share:.2g} % of the time" if fallback_share else ""
    return f"runs with {fallbacks}{time}" if fallbacks else "runs"


# Coverage by function: which functions and modules of torch that a program called run on the target.
#
# A function is *full* if the target ran all operators that it made, *partial* if some, and *none* if none. The
# published function study counts its functions in this way (success, partial failure, complete failure).

GRADES = ("none", "partial", "unverified", "full")
"""Grades of a function, worst first; unverified: no operator of it could be verified, and none is lacking."""


@dataclass(frozen=True, slots=True)
class FunctionCoverage:
    """One function or module.

    Attributes:
        function: As programs write it: ``F.linear``, ``nn.GRU``.
        grade: One of full, partial, none, unverified.
        n_calls, n_supported_calls: Calls of operators that it made, and those that ran on the target itself.
        n_mismatched_calls: Those of them with a wrong result.
        lacking: Operators that are unsupported, raise or fall back in it, the worst first.
        operators: All operators that it made and that were compared.
    """

    function: str
    grade: str
    n_calls: int
    n_supported_calls: int
    n_mismatched_calls: int
    lacking: tuple[str, ...]
    operators: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ApiCoverage:
    """Coverage by function.

    Attributes:
        functions: Those that need work first.
        n_by_grade: Grade to number of functions.
        n_other_calls: Calls of operators that no function of torch made, or of another thread.
    """

    functions: tuple[FunctionCoverage, ...]
    n_by_grade: dict[str, int]
    n_other_calls: int

    def percent(self, grade: str) -> float:
        """Share of a grade in the functions, 0 to 100; 0 without functions."""
        return 100.0 * self.n_by_grade[grade] / len(self.functions) if self.functions else 0.0


def api_coverage(table: CallGroups, data: DataFile) -> ApiCoverage:
    """Coverage of the functions that a run with ``api=True`` called."""
    names: dict[int, str] = dict(data.query("select context_id, name from api"))
    by_function: dict[str, list[Row]] = defaultdict(list)
    n_other = 0
    for row in table.rows:
        # Views and calls that were not selected say nothing about what the target has.
        if row.outcome.status is Status.SKIPPED:
            continue
        name = names.get(row.group.context_id)
        if name is None:
            n_other += row.group.n
        else:
            by_function[name].append(row)
    found = [_function(name, rows) for name, rows in by_function.items()]
    found.sort(key=lambda f: (GRADES.index(f.grade), -f.n_calls, f.function))
    counted = Counter(f.grade for f in found)
    return ApiCoverage(tuple(found), {grade: counted[grade] for grade in GRADES}, n_other)


def _function(name: str, rows: list[Row]) -> FunctionCoverage:
    calls: Counter[str] = Counter()
    for row in rows:
        calls[state_of(row)] += row.group.n
    n_lacking = sum(calls[state] for state in LACKING)
    # One supported call is enough: the unverified ones, such as random operators, lack nothing.
    grade = "full" if calls["supported"] else "unverified"
    if n_lacking:
        grade = "partial" if calls["supported"] else "none"
    lacking = sorted({(STATES.index(state_of(row)), row.context.op) for row in rows if state_of(row) in LACKING})
    return FunctionCoverage(
        name,
        grade,
        calls.total(),
        calls["supported"],
        sum(row.group.n for row in rows if row.outcome.status is Status.MISMATCH),
        tuple(dict.fromkeys(op for _, op in lacking)),
        tuple(sorted({row.context.op for row in rows})),
    )
