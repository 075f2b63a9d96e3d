"""Rows on their way to a data file: each text and form gets its number once, and all that waits is written at once."""

from __future__ import annotations

import itertools
import threading
from math import isnan
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from shadowrun.store.codec import encode_diff, encode_float, encode_form, storable
from shadowrun.store.rows import Rows, unpacked

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable, Mapping

    from shadowrun.store.codec import PackedDiff
    from shadowrun.store.packed import Packed
    from shadowrun.store.rows import Numbers
    from shadowrun.types import Phase, TensorDiff, TensorMeta, Verdict

# Hashing and comparing a dataclass calls Python; what these return is a tuple.
_FORM = attrgetter("dtype", "shape", "stride", "device", "layout")
_VERDICT = attrgetter("status", "cause", "explanation", "evidence", "confidence")

__all__ = ["INSERT_CALLS", "INTERNED", "Pending", "encode_row"]

MAX_REMEMBERED = 100_000
"""Rows of one table remembered for interning. Evidence, explanations and shapes may be new at every call, and memory
must not grow with the calls: past it, all are forgotten, and equal rows may get a second number."""

INTERNED = ("op", "site", "form", "tensor", "outcome", "verdict", "context")
"""Tables whose rows have numbers that other rows refer to."""

_UNIQUE = ("op", "site")
"""Tables that must hold each text once; they grow with the program, not with its calls."""

_INSERTS = {
    "op": "insert into op values (?, ?)",
    "site": "insert into site values (?, ?)",
    "form": "insert into form values (?, ?, ?, ?, ?, ?)",
    "tensor": "insert into tensor values (?, ?, ?, ?, ?)",
    "context": "insert into context values (?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "outcome": "insert into outcome values (?, ?, ?, ?, ?)",
    "verdict": "insert into verdict values (?, ?, ?, ?)",
    "packed_diff": f"insert into packed_diff values ({', '.join('?' * 20)})",  # noqa: S608
    "capture": "insert into capture values (?, ?, ?)",
    "capture gone": "delete from capture where file = ?",
    "region": "insert or ignore into region values (?, ?, ?, ?)",
    "step": "insert or replace into step (step, started_s, wall_s) values (?, ?, ?)",
    "skipped": "insert into skipped values (?, ?, ?, ?) "
    "on conflict (op_id, device, reason) do update set n = n + excluded.n",
    "meta": "insert or replace into meta values (?, ?)",
}
_NS = "cast(nullif(?, -1.0) * 1000.0 + 0.5 as integer)"  # times come as nanoseconds / 1000: exact
INSERT_CALLS = f"insert into call values (?, ?, ?, ?, {_NS}, {_NS}, nullif(?, -1.0), nullif(?, -1.0))"  # noqa: S608
"""From a row as `Rows` has it. SQLite makes whole numbers of those of its columns of whole numbers."""


class Pending:
    """What waits to be written.

    Attributes:
        rows: Calls.
        tables: Rows of all other tables.
        newest_verdict: Number that was given last.
    """

    def __init__(self) -> None:
        self.rows = Rows()
        self.tables: dict[str, list[tuple[Any, ...]]] = {table: [] for table in _INSERTS}
        self.newest_verdict = 0
        self._lock = threading.RLock()
        self._ids: dict[str, dict[Any, int]] = {name: {} for name in INTERNED}
        self._next_id = {name: itertools.count(1) for name in INTERNED}

    def go_on(self, known: Mapping[str, Mapping[str, int]], greatest: Mapping[str, int]) -> None:
        """Take up the numbering of an existing file.

        Args:
            known: Table to text to number, of those tables that hold one text only.
            greatest: Table to the greatest number in it.
        """
        for table, numbers in known.items():
            self._ids[table] = dict(numbers)
        for table, number in greatest.items():
            self._next_id[table] = itertools.count(number + 1)

    def context(
        self,
        op: str,
        inputs: str,
        dtypes: tuple[str, ...],
        shapes: str,
        module: str,
        phase: Phase,
        site: str,
        device: str,
    ) -> int:
        """Number of a new context."""
        with self._lock:
            number = next(self._next_id["context"])
            op_id, site_id = self._intern("op", op), self._intern("site", site)
            self.tables["context"].append(
                (number, op_id, inputs, ",".join(dtypes), shapes, module, str(phase), site_id, device)
            )
            return number

    def verdict(self, verdict: Verdict, missing_kernel: str) -> int:
        """Number of a verdict."""
        key = (*_VERDICT(verdict), missing_kernel)
        number = self._ids["verdict"].get(key)
        if number is not None:
            return number
        with self._lock:
            outcome = self._intern(
                "outcome", (str(verdict.status), str(verdict.cause or ""), verdict.explanation, missing_kernel)
            )
            number = self.newest_verdict = self._number("verdict", key)
            self.tables["verdict"].append((number, outcome, verdict.evidence, encode_float(verdict.confidence)))
            return number

    def forget_verdicts(self) -> None:
        """Give verdicts new numbers from now on: old ones may have left the file."""
        self._ids["verdict"].clear()

    def diffs(self, seq: int, diffs: Iterable[TensorDiff]) -> None:
        """Add how the tensors of call `seq` differed."""
        for position, diff in enumerate(diffs):
            self.tables["packed_diff"].append(encode_diff(seq, position, self._tensor(diff), diff))

    def region(self, op: str, backend: str, n_operators: int, site: str) -> None:
        """Add what is known of a compiled region."""
        with self._lock:
            self.tables["region"].append((self._intern("op", op), backend, n_operators, site))

    def skipped(self, counts: Mapping[tuple[str, str, str], int]) -> None:
        """Add numbers of skipped calls."""
        with self._lock:
            self.tables["skipped"].extend(
                (self._intern("op", op), device, reason, n) for (op, device, reason), n in counts.items()
            )

    def write(self, connection: sqlite3.Connection, packed: Packed | None = None) -> int:
        """Write what waits in one transaction, and forget it; returns the number of calls.

        Args:
            connection: Where to.
            packed: Where calls go instead.

        Raises:
            sqlite3.Error, OSError, OverflowError: It could not be written, and waits still.
        """
        # Calls are cut off first: what they refer to was put into its list before them.
        n_rows = len(self.rows)
        lengths = {table: len(rows) for table, rows in self.tables.items() if rows}
        calls = self.rows.head(n_rows)
        if lengths or (calls and packed is None):
            calls_in_table = b"" if packed is not None else calls
            try:
                self._insert(connection, lengths, calls_in_table)
            except UnicodeEncodeError:  # so rare that nothing looks for it before
                self._insert(connection, lengths, calls_in_table, odd=True)
        if packed is not None:
            packed.add(calls)
        self.rows.drop(n_rows)
        for table, n in lengths.items():
            del self.tables[table][:n]
        return n_rows

    def _insert(
        self, connection: sqlite3.Connection, lengths: Mapping[str, int], calls: bytes, *, odd: bool = False
    ) -> None:
        """Insert the first rows of tables, so many of each, and calls, all or nothing; `odd` if a text is not UTF-8."""
        connection.execute("begin immediate")
        try:
            for table, n in lengths.items():
                rows = self.tables[table][:n]
                rows = _packed(rows) if table == "packed_diff" else rows
                connection.executemany(_INSERTS[table], [tuple(map(storable, row)) for row in rows] if odd else rows)
            if calls:
                connection.executemany(INSERT_CALLS, _encoded(calls))
            connection.execute("commit")
        except BaseException:
            if connection.in_transaction:
                connection.execute("rollback")
            raise

    def drop(self) -> int:
        """Forget what waits; returns the number of calls."""
        n_rows = len(self.rows)
        self.rows.clear()
        for rows in self.tables.values():
            rows.clear()
        return n_rows

    def _number(self, table: str, key: Any) -> int:
        """A new number, which is remembered."""
        ids = self._ids[table]
        if len(ids) >= MAX_REMEMBERED and table not in _UNIQUE:
            ids.clear()
        number = ids[key] = next(self._next_id[table])
        return number

    def _intern(self, table: str, value: Any) -> int:
        number = self._ids[table].get(value)
        if number is None and table in _UNIQUE:
            value = storable(value)
            number = self._ids[table].get(value)
        if number is None:
            number = self._number(table, value)
            columns = value if isinstance(value, tuple) else (value,)
            self.tables[table].append((number, *columns))
        return number

    def _tensor(self, diff: TensorDiff) -> int:
        key = (diff.name, _FORM(diff.actual), _FORM(diff.expected), diff.n_elements)
        number = self._ids["tensor"].get(key)
        if number is None:
            with self._lock:
                number = self._ids["tensor"].get(key)
                if number is None:
                    actual, expected = self._form(diff.actual), self._form(diff.expected)
                    number = self._number("tensor", key)
                    self.tables["tensor"].append((number, diff.name, actual, expected, diff.n_elements))
        return number

    def _form(self, meta: TensorMeta) -> int:
        number = self._ids["form"].get(meta)
        if number is None:
            with self._lock:
                number = self._ids["form"].get(meta)
                if number is None:
                    number = self._number("form", meta)
                    self.tables["form"].append((number, *encode_form(meta)))
        return number


def _packed(rows: list[PackedDiff]) -> list[tuple[Any, ...]]:
    from shadowrun.store.fractions import encode_numbers  # imports numpy, which no reader needs

    return encode_numbers(rows)


def _encoded(calls: bytes) -> Iterable[tuple[Any, ...]]:
    """Rows as they are stored. To look at each takes a tenth of the time of writing, so all are looked at at once."""
    numbers, rows = memoryview(calls).cast("d"), unpacked(calls)
    return map(encode_row, rows) if isnan(sum(numbers[6::8]) + sum(numbers[7::8])) else rows


def encode_row(row: Numbers) -> tuple[Any, ...]:
    """A call's row as it is stored."""
    drift_abs, drift_rel = row[6], row[7]
    if drift_abs == drift_abs and drift_rel == drift_rel:  # noqa: PLR0124 - the fastest NaN test
        return row
    return (*row[:6], encode_float(drift_abs), encode_float(drift_rel))
