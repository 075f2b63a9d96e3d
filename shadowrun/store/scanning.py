"""One pass over the calls of a data file, from which groups and medians are made.

Python and not SQL, which would sort all calls first: this takes a third of the time. A piece at a time, so that neither
memory nor the file's lock is held for long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Query = Callable[..., Iterable[tuple[Any, ...]]]
    Key = tuple[int, int, int]
    Observe = Callable[[int, list[float], list[float]], None]

__all__ = ["PIECE", "Sums", "scan"]

PIECE = 20_000
"""Rows fetched at once."""

_CALLS = f"""
select seq, step, context_id, outcome_id, ref_ns / 1000.0, target_ns / 1000.0
from call join verdict on verdict.id = verdict_id
where seq > ? and seq < ? and {{where}} order by seq limit {PIECE}
"""  # noqa: S608 - no value from outside enters it


class Sums:
    """Sums over calls; times that were not measured are not counted."""

    __slots__ = (
        "first_seq",
        "first_step",
        "n",
        "n_ref",
        "n_target",
        "ref_us_min",
        "ref_us_total",
        "target_us_min",
        "target_us_total",
    )

    def __init__(self, first_seq: int, first_step: int) -> None:
        self.first_seq = first_seq
        self.first_step = first_step
        self.n = self.n_ref = self.n_target = 0
        self.ref_us_total = self.target_us_total = 0.0
        self.ref_us_min = self.target_us_min = -1.0

    def add(self, n: int, refs: list[float], targets: list[float]) -> None:
        """Add the times of `n` calls."""
        self.n += n
        if refs:
            least = min(refs)
            self.ref_us_min = least if self.n_ref == 0 else min(self.ref_us_min, least)
            self.n_ref += len(refs)
            self.ref_us_total += sum(refs)
        if targets:
            least = min(targets)
            self.target_us_min = least if self.n_target == 0 else min(self.target_us_min, least)
            self.n_target += len(targets)
            self.target_us_total += sum(targets)


def scan(query: Query, block: int, where: str = "1", observe: Observe | None = None) -> dict[Key, Sums]:
    """Sums over the calls of each context and outcome, and of each run in a combined file.

    Args:
        query: Runs SQL.
        block: Length of the block of numbers that each run of a combined file has.
        where: Condition on calls.
        observe: Called with a context and times of some of its calls, on reference and target.
    """
    found: dict[Key, Sums] = {}
    last = -1
    while rows := list(query(_CALLS.format(where=where), (last, (last + 1) // block * block + block))):
        last = rows[-1][0]
        _add_piece(found, rows, last // block, observe)
        if len(rows) < PIECE:
            # The next call may be that of another run.
            following = next(iter(query("select min(seq) from call where seq > ?", (last,))))[0]
            if following is None:
                break
            last = following - 1
    return found


def _add_piece(found: dict[Key, Sums], rows: list[tuple[Any, ...]], source: int, observe: Observe | None) -> None:
    pieces: dict[tuple[int, int], tuple[list[float | None], list[float | None]]] = {}
    for seq, step, context, outcome, ref_us, target_us in rows:
        piece = pieces.get((context, outcome))
        if piece is None:
            piece = pieces[context, outcome] = ([], [])
            if (context, outcome, source) not in found:
                found[context, outcome, source] = Sums(seq, step)
        piece[0].append(ref_us)
        piece[1].append(target_us)
    for (context, outcome), (refs, targets) in pieces.items():
        measured = _measured(refs), _measured(targets)
        found[context, outcome, source].add(len(refs), *measured)
        if observe is not None:
            observe(context, *measured)


def _measured(times: list[float | None]) -> list[float]:
    return [us for us in times if us is not None]
