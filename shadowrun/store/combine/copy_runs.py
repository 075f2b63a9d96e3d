"""Copies the runs of one data file into another in SQL, and renumbers calls and foreign keys."""

from __future__ import annotations

import dataclasses
import sqlite3
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowrun.store import connect
from shadowrun.store.codec import encode_info, storable
from shadowrun.store.schema import DIFF_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from shadowrun.store.combine.combined_runs import SourceRun

__all__ = ["Part", "RunCopier"]

# Tables whose equal rows become one row: table to column to the table that the column refers to.
_SHARED: dict[str, dict[str, str]] = {
    "op": {"name": ""},
    "site": {"text": ""},
    "form": dict.fromkeys(("dtype", "shape", "stride", "device", "layout"), ""),
    "tensor": {"name": "", "actual_id": "form", "expected_id": "form", "n_elements": ""},
    "outcome": dict.fromkeys(("status", "cause", "explanation", "missing_kernel"), ""),
    "context": {
        "op_id": "op", "inputs": "", "dtypes": "", "shapes": "", "module": "", "phase": "", "site_id": "site",
        "device": "",
    },
}  # fmt: skip

_FOLDED = """n, first_seq + :shift, first_step, n_ref, ref_us_total, ref_us_min, n_target, target_us_total,
    target_us_min, max_abs, max_rel, max_ulp, remaining_bits, n_mismatched, n_nan, n_inf, severity,
    worst_seq + :shift, drift_abs, drift_rel"""

# Statements for each run; the calls of a run get their block of numbers.
_OF_RUN = (
    """
    insert into call select seq + :shift, step, m.new, verdict_id + :verdicts, ref_ns, target_ns, drift_abs, drift_rel
    from old.call join map_context m on m.old = context_id where seq >= :first and seq < :end order by seq
    """,
    f"""
    insert into diff select seq + :shift, position, m.new, {", ".join(DIFF_COLUMNS)}
    from old.diff join map_tensor m on m.old = tensor_id
    where seq >= :first and seq < :end order by seq, position
    """,  # noqa: S608 - names from above
    """
    insert into moment select seq + :shift, began_ns, target_at_ns, ref_at_ns, judge_at_ns, judged_ns, ended_ns
    from old.moment where seq >= :first and seq < :end order by seq
    """,
    f"""
    insert into folded select c.new, o.new, {_FOLDED}
    from old.folded join map_context c on c.old = context_id join map_outcome o on o.old = outcome_id
    where first_seq >= :first and first_seq < :end
    """,  # noqa: S608 - names from above
    """
    insert into step (step, started_s, wall_s, source_id) select step, started_s, wall_s, :number from old.step
    where source_id = :old_number order by step
    """,
)


# `where true`: in an insert from a select, SQLite's parser takes `on` for the condition of a join without it.
# `or ignore`: ranks compile the same graphs, and the first description of a name stays.
# Statements for each file, whose runs share these rows.
_OF_FILE = (
    """
    insert into verdict select v.id + :verdicts, o.new, evidence, confidence
    from old.verdict v join map_outcome o on o.old = outcome_id order by v.id
    """,
    """
    insert into skipped select o.new, device, reason, n from old.skipped join map_op o on o.old = op_id where true
    on conflict (op_id, device, reason) do update set n = n + excluded.n
    """,
    """
    insert or ignore into region select o.new, backend, n_operators, r.site
    from old.region r join map_op o on o.old = op_id
    """,
    """
    insert or ignore into api select m.new, name from old.api join map_context m on m.old = context_id
    """,
)


@dataclass(frozen=True, slots=True)
class Part:
    """A run in one of the files that are combined.

    Attributes:
        path: The file.
        run: The run, numbered as in that file.
        end_seq: End of its call numbers, which begin at ``run.first_seq``; exclusive.
        greatest: Greatest call number, counted from ``run.first_seq``.
    """

    path: Path
    run: SourceRun
    end_seq: int
    greatest: int


class RunCopier:
    """Copies runs into a new data file.

    Args:
        connection: To an empty data file.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        for table, columns in _SHARED.items():
            names = ", ".join(columns)
            # In temporary tables, with an index on all columns that the data file itself does not need.
            connection.execute(f"create temp table new_{table} (id integer primary key, {names}, unique ({names}))")
            connection.execute(f"create temp table map_{table} (old integer primary key, new integer not null)")

    def copy(self, parts: Sequence[Part], number: int, block: int) -> list[SourceRun]:
        """Copy all runs of one file, in one transaction.

        Args:
            parts: The runs, all of one file.
            number: Number of the first run in the new file.
            block: Call numbers that each run gets.

        Returns:
            The runs, numbered as in the new file.

        Raises:
            DataFileError: The file is damaged.
            sqlite3.Error: The new file cannot be written.
        """
        connection, path = self._connection, parts[0].path
        runs = [
            dataclasses.replace(part.run, number=n, first_seq=n * block) for n, part in enumerate(parts, start=number)
        ]
        # Statements name columns of the present schema; the user's file keeps its own.
        with connect.up_to_date(path) as present:
            connection.execute("attach database ? as old", (f"{present.absolute().as_uri()}?mode=ro",))
            try:
                # One transaction a file: a damaged one leaves nothing of itself in the new file.
                connection.execute("begin")
                self._copy_file(list(zip(parts, runs, strict=True)))
                connection.execute("commit")
            except sqlite3.DatabaseError as error:
                if connection.in_transaction:
                    connection.execute("rollback")
                if _is_full(error):
                    raise
                raise connect.corrupt(path, error) from error
            finally:
                connection.execute("detach database old")
        return runs

    def finish(self, sources: Iterable[SourceRun], info: str) -> None:
        """Write the tables that all runs share."""
        run = self._connection.execute
        run("begin")
        # Last: until the last file is read, an equal row of it may have to be found here.
        for table in _SHARED:
            run(f"insert into {table} select * from new_{table} order by id")  # noqa: S608 - names from above
        self._connection.executemany(
            "insert into source values (?, ?, ?, ?)",
            # A file name may have bytes that are not UTF-8.
            ((s.number, storable(s.file), encode_info(s.info), s.first_seq) for s in sources),
        )
        run("insert into meta values ('info', ?)", (info,))
        run("commit")

    def _copy_file(self, runs: Sequence[tuple[Part, SourceRun]]) -> None:
        run = self._connection.execute
        for table, columns in _SHARED.items():
            self._share(table, columns)
        # Shifted and not shared: evidence has figures of one call, so that hardly two verdicts are equal.
        (verdicts,) = run("select coalesce(max(id), 0) from main.verdict").fetchone()
        for sql in _OF_FILE:
            run(sql, {"verdicts": verdicts})
        for part, new in runs:
            first, end = part.run.first_seq, part.end_seq
            values = {"shift": new.first_seq - first, "first": first, "end": end, "verdicts": verdicts}
            values |= {"number": new.number, "old_number": part.run.number}
            for sql in _OF_RUN:
                run(sql, values)

    def _share(self, table: str, columns: dict[str, str]) -> None:
        """Map each row of a table to the equal row of the new file, which is inserted if there is none."""
        values = ", ".join(f"m_{name}.new as {name}" if other else f"t.{name}" for name, other in columns.items())
        joins = " ".join(
            f"join map_{other} m_{name} on m_{name}.old = t.{name}" for name, other in columns.items() if other
        )
        rows = f"select t.id as old, {values} from old.{table} t {joins}"  # noqa: S608 - names from above
        names = ", ".join(columns)
        run = self._connection.execute
        # In the old order, so that the same files always give the same numbers.
        run(f"insert or ignore into new_{table} ({names}) select {names} from ({rows}) order by old")  # noqa: S608
        run(f"delete from map_{table}")  # noqa: S608
        run(f"insert into map_{table} select r.old, n.id from ({rows}) r join new_{table} n using ({names})")  # noqa: S608


def _is_full(error: sqlite3.DatabaseError) -> bool:
    """Whether the new file cannot be written; all other errors come from the file that is read."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the primary code, without the extended one
    return code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY)
