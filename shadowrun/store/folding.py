"""Letting matches go: a run in memory keeps sums of the oldest, so that its memory does not grow with its calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shadowrun.store.codec import encode_float, encode_int
from shadowrun.store.groups import Group, compute, merge, read_folded
from shadowrun.store.sources import ONE_RUN

if TYPE_CHECKING:
    import sqlite3

__all__ = ["Bound"]

_INSERT = "insert into folded values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"


class Bound:
    """How many calls are kept one by one.

    Args:
        max_records: So many, or some more where too few of them are matches.
    """

    def __init__(self, max_records: int) -> None:
        self._max_records = self._fold_at = max_records
        self._n_calls = 0

    def exceeded_by(self, n: int) -> bool:
        """Count `n` more calls; whether it is time to fold."""
        self._n_calls += n
        return self._n_calls > self._fold_at

    def fold(self, connection: sqlite3.Connection, newest_verdict: int) -> None:
        """Let a tenth more go than needed, so that folding is rare.

        Args:
            connection: The database.
            newest_verdict: Of the verdicts that nothing refers to any more, those from here on may be about to be used.

        Raises:
            sqlite3.Error: It could not be written.
        """
        spare = self._max_records // 10
        connection.execute("begin immediate")
        self._n_calls -= _fold(connection, self._n_calls - self._max_records + spare)
        connection.execute(
            "delete from verdict where evidence <> '' and id < ? and id not in (select verdict_id from call)",
            (newest_verdict,),
        )
        connection.execute("commit")
        # Where too few matches were left to fold, the next attempt waits until there may be more.
        self._fold_at = max(self._max_records, self._n_calls + spare)


def _fold(connection: sqlite3.Connection, n: int) -> int:
    """Replace the `n` oldest matches by their sums; returns how many there were to replace.

    Runs within the caller's transaction.
    """
    connection.execute("create temp table if not exists leaving (seq integer primary key)")
    connection.execute("delete from leaving")
    connection.execute(
        "insert into leaving select call.seq from call join verdict on verdict.id = verdict_id "
        "join outcome on outcome.id = outcome_id where status = 'match' order by call.seq limit ?",
        (n,),
    )
    run = connection.execute
    leaving = compute(run, ONE_RUN, where="call.seq in (select seq from leaving)")
    groups = merge([*leaving, *read_folded(run, ONE_RUN)])
    connection.execute("delete from folded")
    connection.executemany(_INSERT, map(_row, groups))
    connection.execute("delete from diff where seq in (select seq from leaving)")
    return connection.execute("delete from call where seq in (select seq from leaving)").rowcount


def _row(g: Group) -> tuple[int | float | str, ...]:
    e = encode_float
    return (
        g.context_id, g.outcome_id, g.n, g.first_seq, g.first_step, g.n_ref, e(g.ref_us_total), e(g.ref_us_min),
        g.n_target, e(g.target_us_total), e(g.target_us_min), e(g.max_abs), e(g.max_rel), encode_int(g.max_ulp),
        g.remaining_bits, g.n_mismatched, g.n_nan, g.n_inf, g.severity, g.worst_seq, e(g.drift_abs), e(g.drift_rel),
    )  # fmt: skip
