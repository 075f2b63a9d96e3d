"""Compiled regions: the graphs that `torch.compile` compiled, compared with eager as a whole."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowrun.analysis.advice import next_step
from shadowrun.analysis.findings import worst_diff
from shadowrun.analysis.summary import unique
from shadowrun.analysis.wording import plural, shell_command
from shadowrun.store.captured_inputs import captured_calls
from shadowrun.store.records import REGION
from shadowrun.types import Phase, Status

if TYPE_CHECKING:
    from collections.abc import Collection

    from shadowrun.analysis.call_groups import CallGroups, Row, Skipped
    from shadowrun.store.datafile import DataFile
    from shadowrun.types import TensorDiff

__all__ = ["RegionSummary", "Regions", "summarise_regions"]

MAX_SITES = 3
_WORST_FIRST = (Status.MISMATCH, Status.ERROR, Status.UNVERIFIED, Status.MATCH)
_PHASES = {phase: k for k, phase in enumerate(Phase)}


@dataclass(frozen=True, slots=True)
class RegionSummary:
    """One compiled graph in one phase of the training step.

    Attributes:
        name: ``compiled::graph 0``.
        phase: Forward, backward or optimizer: where the compiled code was called.
        backend: Its backend; empty if unknown.
        n_operators: Operators in the graph; -1 if torch kept no graph.
        site: First line of the user's code in it; its first caller if unknown.
        callers: The first lines that called it.
        n_calls, n_match, n_mismatch, n_unverified, n_error: Calls; errors are shadowrun's own failures.
        status: The worst of these.
        cause, explanation: Those of the calls with that status; *nearer the truth than eager* if eager is the less
            accurate one.
        worst: The worst difference of all; None if all were bit-identical.
        worst_seq: Number of its call, -1 if there is none.
        next_step: Recommended action; empty if none.
        commands: Commands that write a stand-alone script; empty without stored inputs or a data file.
    """

    name: str
    phase: Phase
    backend: str
    n_operators: int
    site: str
    callers: tuple[str, ...]
    n_calls: int
    n_match: int
    n_mismatch: int
    n_unverified: int
    n_error: int
    status: Status
    cause: str
    explanation: str
    worst: TensorDiff | None
    worst_seq: int
    next_step: str
    commands: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Regions:
    """All compiled regions of a run.

    Attributes:
        rows: Those that need work first.
        skipped: Calls of regions that were skipped on purpose, and why.
        line: ``3 compiled regions: 2 match, 1 mismatch``; empty if there is none.
    """

    rows: tuple[RegionSummary, ...]
    skipped: tuple[Skipped, ...]
    line: str


def summarise_regions(table: CallGroups, data: DataFile) -> Regions:
    """The compiled regions of a run."""
    known = _known(data)
    grouped: dict[tuple[str, Phase], list[Row]] = defaultdict(list)
    for row in table.rows:
        if row.context.op.startswith(REGION):
            grouped[row.context.op, row.context.phase].append(row)
    kept = {(context, outcome) for context, outcome, _ in captured_calls(data).values()}
    rows = [_region(*key, rows, known.get(key[0], ("", -1, "")), data, kept) for key, rows in grouped.items()]
    # A forward and a backward graph have one name: the phase keeps them in the order in which they ran.
    rows.sort(key=lambda r: (_WORST_FIRST.index(r.status), _natural(r.name), _PHASES[r.phase]))
    skipped = tuple(s for s in table.skipped if s.op.startswith(REGION))
    return Regions(tuple(rows), skipped, _line(rows, skipped))


def _known(data: DataFile) -> dict[str, tuple[str, int, str]]:
    # Files of older schemas lack the table; reports of these must still be made.
    if next(data.query("select 1 from sqlite_master where name = 'region'"), None) is None:  # before schema 4
        return {}
    sql = "select name, backend, n_operators, site from region join op on op.id = op_id"
    return {name: (backend, n, site) for name, backend, n, site in data.query(sql)}


def _region(
    name: str,
    phase: Phase,
    rows: list[Row],
    known: tuple[str, int, str],
    data: DataFile,
    kept: Collection[tuple[int, int]],
) -> RegionSummary:
    counts: Counter[Status] = Counter()
    for row in rows:
        counts[row.outcome.status] += row.group.n
    status = next((s for s in _WORST_FIRST if counts[s]), Status.MATCH)
    # A region is never unsupported or skipped where shadowrun recorded it; a file may say so.
    having = [row for row in rows if row.outcome.status is status] or rows
    worst = max(having, key=lambda r: r.group.severity)
    # A match with an explanation (more accurate than eager) is more informative than the one that differs most.
    # The last resort is `worst`: most regions match without any explanation.
    explained = next((r for r in rows if r.outcome.status is status and r.outcome.explanation), worst)
    shown = worst if status is not Status.MATCH else explained
    farthest = max(rows, key=lambda r: r.group.severity)
    seq = farthest.group.worst_seq if farthest.group.severity >= 0 else -1
    callers = unique(row.context.site for row in rows)
    backend, n_operators, line = known
    is_kept = any((row.group.context_id, row.group.outcome_id) in kept for row in rows)
    # A script reads captured inputs, and a run in memory has no file for them.
    has_script = status is Status.MISMATCH and is_kept and data.path is not None
    return RegionSummary(
        name=name,
        phase=phase,
        backend=backend,
        n_operators=n_operators,
        site=line or (callers[0] if callers else ""),
        callers=callers[:MAX_SITES],
        n_calls=counts.total(),
        n_match=counts[Status.MATCH],
        n_mismatch=counts[Status.MISMATCH],
        n_unverified=counts[Status.UNVERIFIED],
        n_error=counts[Status.ERROR],
        status=status,
        cause=str(shown.outcome.cause or ""),
        explanation=shown.outcome.explanation,
        worst=worst_diff(data, seq) if seq >= 0 else None,
        worst_seq=seq,
        next_step=_advice(name, status, shown),
        commands=(shell_command("repro", data.path, "--finding", name),) if has_script else (),
    )


def _advice(name: str, status: Status, row: Row) -> str:
    if status is Status.MATCH:
        return ""
    kind = "mismatch" if status is Status.MISMATCH else "unverified"
    why, call = row.outcome.explanation, f"call {row.group.first_seq}"
    return next_step(kind, row.outcome.cause, op=name, why=why, kernel="", site=row.context.site, call=call, ratio=0.0)


def _line(rows: list[RegionSummary], skipped: tuple[Skipped, ...]) -> str:
    parts = []
    if rows:
        counts = Counter(row.status for row in rows)
        each = ", ".join(f"{counts[s]} {_VERBS.get(s, str(s))}" for s in (Status.MATCH, *_WORST_FIRST[:3]) if counts[s])
        parts.append(f"{plural(len(rows), 'compiled region')}: {each}")
    n_skipped = sum(s.n for s in skipped)
    if n_skipped:
        parts.append(f"{plural(n_skipped, 'call')} of compiled regions not compared")
    return "; ".join(parts)


_VERBS = {Status.ERROR: "failed"}  # `2 error` is no English, `2 match` is


def _natural(name: str) -> tuple[int, str]:
    """Sort key: graph 2 before graph 10."""
    last = name.rpartition(" ")[2]
    # Names without a number come last; Python makes none of a text of more than 4300 digits.
    return (int(last) if last.isdecimal() and len(last) < 10 else 1 << 30, name)
