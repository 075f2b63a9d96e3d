"""Folding: a run in memory is bounded by replacing its oldest matches and skipped calls by their sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shadowrun.store.codec import encode_float, encode_int
from shadowrun.store.combine.combined_runs import ONE_RUN
from shadowrun.store.groups import Group, compute, merge, read_folded
from shadowrun.store.write_buffer import INSERT_CALLS

if TYPE_CHECKING:
    import sqlite3

    from shadowrun.store.packed_rows import PackedRows
    from shadowrun.store.write_buffer import Calls

__all__ = ["RecordLimit"]

_INSERT = "insert into folded values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"

_PLAIN_VERDICTS = """
select verdict.id, outcome_id from verdict join outcome on outcome.id = outcome_id
where (status = 'match' and cause = '' and explanation = '' or status = 'skipped')
    and missing_kernel = '' and evidence = ''
"""
_DIFFERENT = "select distinct seq from diff where seq >= ? and seq < ?"
# Rows of ``folded`` before they are merged: merging at each fold would take longer than the rest of it.
_MAX_UNMERGED = 5000


class RecordLimit:
    """Limit of the calls that are kept one by one.

    Args:
        max_records: The limit; exceeded if too few calls are matches, since other calls are always kept.
        packed: New calls are in `PackedRows`, not in the database.
    """

    def __init__(self, max_records: int, *, packed: bool = False) -> None:
        self._max_records = self._fold_at = max_records
        self._n_calls = 0
        self._all_in_database = self._in_database = not packed
        self._n_unmerged = 0

    def exceeded_by(self, n: int) -> bool:
        """Count `n` more calls; whether it is time to fold."""
        self._n_calls += n
        return self._n_calls > self._fold_at

    def fold(self, connection: sqlite3.Connection, newest_verdict: int, packed: PackedRows | None) -> None:
        """Fold the oldest matches.

        Args:
            connection: The database.
            newest_verdict: Verdicts from this number on are kept: calls that are not yet written may refer to them.
            packed: Calls that came after those in the database, if any are packed.

        Raises:
            sqlite3.Error: The database could not be written.
        """
        # A tenth more than necessary, so that folding is rare.
        spare = self._max_records // 10
        excess = self._n_calls - self._max_records + spare
        connection.execute("begin immediate")
        n_folded = 0
        if self._in_database:
            n_folded = _fold(connection, excess)
            self._in_database = self._all_in_database or n_folded == excess
            _forget_verdicts(connection, newest_verdict, [] if packed is None else packed.verdicts())
        if packed is not None and n_folded < excess:
            n_folded += self._fold_packed(connection, packed.take(excess - n_folded))
            if n_folded < excess:  # matches within rounding error have rows of `diff`, and are in the database by now
                n_folded += _fold(connection, excess - n_folded)
        connection.execute("commit")
        self._n_calls -= n_folded
        # Where too few matches were left to fold, the next attempt waits until there may be more.
        self._fold_at = max(self._max_records, self._n_calls + spare)

    def settle(self, connection: sqlite3.Connection, packed: PackedRows) -> None:
        """Move packed calls into the database, where queries see them.

        Raises:
            sqlite3.Error: The database could not be written.
        """
        connection.execute("begin immediate")
        self._put(connection, packed.take(len(packed)))
        connection.execute("commit")

    def _fold_packed(self, connection: sqlite3.Connection, calls: Calls) -> int:
        """Fold the calls that match bit for bit, and move the others into the database; returns the number folded."""
        from shadowrun.store.packed_rows import plain_among, sums_of  # imports numpy, which no reader needs

        if not len(calls):
            return 0
        outcomes = dict(connection.execute(_PLAIN_VERDICTS).fetchall())
        span = int(calls[:, 0].min()), int(calls[:, 0].max()) + 1
        different = [seq for (seq,) in connection.execute(_DIFFERENT, span)]
        plain = plain_among(calls, outcomes, different)
        groups = sums_of(calls[plain], outcomes)
        self._n_unmerged += len(groups)
        if self._n_unmerged > _MAX_UNMERGED:
            groups = merge([*groups, *read_folded(connection.execute, ONE_RUN)])
            self._n_unmerged = 0
            connection.execute("delete from folded")
        connection.executemany(_INSERT, map(_row, groups))
        self._put(connection, calls[~plain])
        return int(plain.sum())

    def _put(self, connection: sqlite3.Connection, calls: Calls) -> None:
        if len(calls):
            self._in_database = True
            connection.executemany(INSERT_CALLS, calls.tolist())


def _fold(connection: sqlite3.Connection, n: int) -> int:
    """Replace the `n` oldest matches by their sums, in the transaction of the caller; returns how many."""
    connection.execute("create temp table if not exists leaving (seq integer primary key)")
    connection.execute("delete from leaving")
    connection.execute(
        "insert into leaving select call.seq from call join verdict on verdict.id = verdict_id "
        "join outcome on outcome.id = outcome_id where status in ('match', 'skipped') order by call.seq limit ?",
        (n,),
    )
    run = connection.execute
    leaving = compute(run, ONE_RUN, where="call.seq in (select seq from leaving)")
    # Merged with the earlier sums, so that `folded` has one row for each context and outcome.
    groups = merge([*leaving, *read_folded(run, ONE_RUN)])
    connection.execute("delete from folded")
    connection.executemany(_INSERT, map(_row, groups))
    connection.execute("delete from diff where seq in (select seq from leaving)")
    return connection.execute("delete from call where seq in (select seq from leaving)").rowcount


def _forget_verdicts(connection: sqlite3.Connection, newest: int, used: list[float]) -> None:
    """Delete verdicts with evidence, which may be new at every call, that no call refers to."""
    connection.execute("create temp table if not exists used (id integer primary key)")
    connection.execute("delete from used")
    connection.executemany("insert into used values (?)", ((number,) for number in used))
    connection.execute(
        "delete from verdict where evidence <> '' and id < ? and id not in (select verdict_id from call) "
        "and id not in (select id from used)",
        (newest,),
    )


def _row(g: Group) -> tuple[int | float | str, ...]:
    e = encode_float
    return (
        g.context_id, g.outcome_id, g.n, g.first_seq, g.first_step, g.n_ref, e(g.ref_us_total), e(g.ref_us_min),
        g.n_target, e(g.target_us_total), e(g.target_us_min), e(g.max_abs), e(g.max_rel), encode_int(g.max_ulp),
        g.remaining_bits, g.n_mismatched, g.n_nan, g.n_inf, g.severity, g.worst_seq, e(g.drift_abs), e(g.drift_rel),
    )  # fmt: skip
