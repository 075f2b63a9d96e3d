"""Rows that wait for the next flush to a data file.

`Rows` buffers calls as packed float64 numbers, `PendingRows` buffers the rows of all other tables. Each text, form,
outcome and verdict is interned: it gets a row number once. One flush is one transaction.
"""

from __future__ import annotations

import itertools
import struct
import threading
from operator import attrgetter, index
from typing import TYPE_CHECKING, Any

from shadowrun.native import core
from shadowrun.store.codec import DIFF_PLACEHOLDERS, encode_diff, encode_float, encode_form, storable

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import numpy as np
    import numpy.typing as npt

    from shadowrun.store.packed_rows import PackedRows
    from shadowrun.types import Phase, TensorDiff, TensorMeta, Verdict

    Row = tuple[int, int, int, int, float, float, float, float]
    Numbers = tuple[float, float, float, float, float, float, float, float]
    Calls = npt.NDArray[np.float64]

__all__ = [
    "INSERT_CALLS",
    "INTERNED",
    "MAX_FIRST_NUMBER",
    "PendingRows",
    "PythonRows",
    "Rows",
    "tensor_key",
    "unpacked",
    "verdict_key",
]


_VERDICT = attrgetter("status", "cause", "explanation", "evidence", "confidence")


# Packed at once: eight Python objects per call would cost more time and memory than the rest of a row.
_ROW = struct.Struct("8d")  # whole numbers are exact up to 2^53
_pack = _ROW.pack

MAX_FIRST_NUMBER = 2**52
"""Greatest first number of a run: from here to 2^53, all whole numbers are exact in float64."""


class PythonRows:
    """Rows of eight numbers (float64, 64 bytes) each; native/call_rows.c has the same in C.

    Safe for several writers: `add` and `append` are atomic. Only one thread at a time may call `head` and `drop`; the
    rows that `head` returned stay at the front until `drop`.

    A row: (seq, step, context_id, verdict_id, ref_us, target_us, drift_abs, drift_rel); times in microseconds, -1 for
    what was not measured.

    Attributes:
        last_step: Step of the last row that `add` added; -1 before the first.
        next_seq: Returns the next call number; atomic.
    """

    __slots__ = ("_add", "_rows", "_step", "last_step", "next_seq")

    next_seq: Callable[[], int]

    def __init__(self) -> None:
        self._rows: list[bytes] = []
        self._add = self._rows.append
        self.start(0, 0)

    def start(self, seq: int, step: int) -> None:
        """Set the first call number and the current step."""
        first, self.step = index(seq), step
        self.last_step = -1
        # The bound method of a C iterator is atomic under the GIL and takes no Python frame.
        self.next_seq = itertools.count(first).__next__

    @property
    def step(self) -> int:
        """Step of the rows that `add` adds from now on."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = index(step)

    def __len__(self) -> int:
        return len(self._rows)

    def add(
        self,
        seq: int,
        context: int,
        verdict: int,
        ref_us: float,
        target_us: float,
        drift_abs: float = -1.0,
        drift_rel: float = -1.0,
        /,
    ) -> None:
        """Add a row of the current step.

        Raises:
            TypeError, OverflowError: A value is not a number, or is too large for a float.
        """
        step = self._step
        try:
            self._add(_pack(seq, step, context, verdict, ref_us, target_us, drift_abs, drift_rel))
        except struct.error as error:
            raise TypeError(f"rows hold numbers: {error}") from None
        self.last_step = step

    def append(self, row: Iterable[float], /) -> None:
        """Add a row of any step.

        Raises:
            TypeError, OverflowError: The row does not have eight items, or one is no float64 number.
        """
        try:
            self._add(_pack(*row))
        except struct.error as error:
            raise TypeError(f"a row has eight numbers: {error}") from None

    def head(self, n: int, /) -> bytes:
        """The `n` oldest rows as bytes, or all if there are fewer; see `unpacked`."""
        return b"".join(self._rows[: max(n, 0)])

    def drop(self, n: int, /) -> None:
        """Forget the `n` oldest rows, or all if there are fewer."""
        del self._rows[: max(n, 0)]

    def clear(self) -> None:
        """Forget all rows."""
        self._rows.clear()


if TYPE_CHECKING:
    Rows = PythonRows
else:
    Rows = PythonRows if core is None else core.RowBuffer


def unpacked(rows: bytes) -> Iterator[Numbers]:
    """The bytes that `Rows.head` returned, as rows of numbers."""
    return _ROW.iter_unpack(rows)


# Hashing and comparing a dataclass calls Python; what these return is a tuple.
_FORM = attrgetter("dtype", "shape", "stride", "device", "layout")


def verdict_key(verdict: Verdict, missing_kernel: str = "") -> tuple[Any, ...]:
    """What a verdict is known by."""
    return (*_VERDICT(verdict), missing_kernel)


def tensor_key(diff: TensorDiff) -> tuple[Any, ...]:
    """What the form of a difference is known by."""
    return (diff.name, _FORM(diff.actual), _FORM(diff.expected), diff.n_elements)


MAX_REMEMBERED = 100_000
"""Most rows of one table that are remembered for interning. Evidence, explanations and shapes may be new at every call,
and memory must stay bounded: above the limit all are forgotten, and equal rows may get a second number."""

INTERNED = ("op", "site", "form", "tensor", "outcome", "verdict", "context")
"""Tables whose rows have numbers that other rows refer to."""

# Tables that hold each text once (``unique``). Never forgotten: they grow with the program, not with its calls.
_UNIQUE = ("op", "site")

_INSERTS = {
    "op": "insert into op values (?, ?)",
    "site": "insert into site values (?, ?)",
    "form": "insert into form values (?, ?, ?, ?, ?, ?)",
    "tensor": "insert into tensor values (?, ?, ?, ?, ?)",
    "context": "insert into context values (?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "outcome": "insert into outcome values (?, ?, ?, ?, ?)",
    "verdict": "insert into verdict values (?, ?, ?, ?)",
    "diff": f"insert into diff values ({DIFF_PLACEHOLDERS})",  # noqa: S608
    "capture": "insert into capture values (?, ?, ?)",
    "capture gone": "delete from capture where file = ?",
    "api": "insert or ignore into api values (?, ?)",
    "moment": "insert or replace into moment values (?, ?, ?, ?, ?, ?, ?)",
    "region": "insert or ignore into region values (?, ?, ?, ?)",
    "step": "insert or replace into step (step, started_s, wall_s) values (?, ?, ?)",
    # Each flush brings the number since the flush before.
    "skipped": "insert into skipped values (?, ?, ?, ?) "
    "on conflict (op_id, device, reason) do update set n = n + excluded.n",
    "meta": "insert or replace into meta values (?, ?)",
}
_NS = "cast(nullif(?, -1.0) * 1000.0 + 0.5 as integer)"  # times come as nanoseconds / 1000: exact
_DRIFT = "nullif(coalesce(?, 'nan'), -1.0)"  # SQLite binds NaN as NULL
INSERT_CALLS = f"insert into call values (?, ?, ?, ?, {_NS}, {_NS}, {_DRIFT}, {_DRIFT})"  # noqa: S608
"""Inserts a row of `Rows`. The type affinity of the integer columns turns its float64 numbers back into integers."""


class PendingRows:
    """Rows that wait to be written, and the row numbers given so far.

    Attributes:
        rows: Calls.
        tables: Rows of all other tables.
        newest_verdict: The last verdict number given.
    """

    def __init__(self) -> None:
        self.rows = Rows()
        self.tables: dict[str, list[tuple[Any, ...]]] = {table: [] for table in _INSERTS}
        self.newest_verdict = 0
        self._lock = threading.RLock()
        self._ids: dict[str, dict[Any, int]] = {name: {} for name in INTERNED}
        self._next_id = {name: itertools.count(1) for name in INTERNED}

    def native_parts(self) -> dict[str, Any]:
        """What C adds to, or looks numbers up in; none of it is ever replaced by another object."""
        ids = self._ids
        return {
            "rows": self.rows,
            "diff_rows": self.tables["diff"],
            "verdict_numbers": ids["verdict"],
            "tensor_numbers": ids["tensor"],
        }

    def continue_from(self, known: Mapping[str, Mapping[str, int]], greatest: Mapping[str, int]) -> None:
        """Continue the numbering of an existing file.

        Args:
            known: Table to text to row number, for the tables of unique texts.
            greatest: Table to the greatest row number in it.
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
        key = verdict_key(verdict, missing_kernel)
        # Once without the lock: a `dict.get` is atomic, and most calls have a verdict that is known already.
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
        """Give all verdicts new numbers from now on: folding may have deleted the old rows."""
        self._ids["verdict"].clear()

    def diffs(self, seq: int, diffs: Iterable[TensorDiff]) -> None:
        """Add the differences of the tensors of call `seq`."""
        for position, diff in enumerate(diffs):
            self.tables["diff"].append(encode_diff(seq, position, self._tensor(diff), diff))

    def region(self, op: str, backend: str, n_operators: int, site: str) -> None:
        """Add the description of a compiled region."""
        with self._lock:
            self.tables["region"].append((self._intern("op", op), backend, n_operators, site))

    def api(self, context: int, name: str) -> None:
        """Add what the program called to make the calls of a context."""
        with self._lock:
            self.tables["api"].append((context, name))

    def skipped(self, counts: Mapping[tuple[str, str, str], int]) -> None:
        """Add numbers of skipped calls."""
        with self._lock:
            self.tables["skipped"].extend(
                (self._intern("op", op), device, reason, n) for (op, device, reason), n in counts.items()
            )

    def write(self, connection: sqlite3.Connection, packed: PackedRows | None = None) -> int:
        """Write all rows in one transaction, and forget them; returns the number of calls.

        Args:
            connection: The database.
            packed: Takes the calls instead of the database, if given.

        Raises:
            sqlite3.Error, OSError, OverflowError: The write failed; all rows wait for the next one.
        """
        # Other threads add rows during the write. The calls are counted first: the context and the verdict of a call
        # are always added before the call, so that no written call refers to a row that is not written.
        n_rows = len(self.rows)
        lengths = {table: len(rows) for table, rows in self.tables.items() if rows}
        calls = self.rows.head(n_rows)
        if lengths or (calls and packed is None):
            calls_in_table = b"" if packed is not None else calls
            try:
                self._insert(connection, lengths, calls_in_table)
            except UnicodeEncodeError:  # a lone surrogate in a name: too rare for a check of every text
                self._insert(connection, lengths, calls_in_table, escape=True)
        if packed is not None:
            packed.add(calls)
        # Dropped only after the commit: a failed transaction is tried again with the same rows.
        self.rows.drop(n_rows)
        for table, n in lengths.items():
            del self.tables[table][:n]
        return n_rows

    def _insert(
        self, connection: sqlite3.Connection, lengths: Mapping[str, int], calls: bytes, *, escape: bool = False
    ) -> None:
        """Insert calls, and the first `lengths[table]` rows of each table, in one transaction.

        Args:
            connection: The database.
            lengths: Table to number of rows.
            calls: Packed calls.
            escape: Escape characters that are not valid in UTF-8.
        """
        # `immediate` takes the write lock here, so that a busy reader makes this statement fail and not the commit.
        connection.execute("begin immediate")
        try:
            for table, n in lengths.items():
                rows = self.tables[table][:n]
                connection.executemany(_INSERTS[table], [tuple(map(storable, row)) for row in rows] if escape else rows)
            if calls:
                connection.executemany(INSERT_CALLS, unpacked(calls))
            connection.execute("commit")
        except BaseException:
            if connection.in_transaction:
                connection.execute("rollback")
            raise

    def drop(self) -> int:
        """Forget all rows that wait; returns the number of calls."""
        n_rows = len(self.rows)
        self.rows.clear()
        for rows in self.tables.values():
            rows.clear()
        return n_rows

    def _number(self, table: str, key: Any) -> int:
        """Give `key` the next row number, and remember it."""
        ids = self._ids[table]
        if len(ids) >= MAX_REMEMBERED and table not in _UNIQUE:
            ids.clear()
        number = ids[key] = next(self._next_id[table])
        return number

    def _intern(self, table: str, value: Any) -> int:
        number = self._ids[table].get(value)
        if number is None and table in _UNIQUE:
            # Two texts may be equal once escaped, and the column is unique.
            value = storable(value)
            number = self._ids[table].get(value)
        if number is None:
            number = self._number(table, value)
            columns = value if isinstance(value, tuple) else (value,)
            self.tables[table].append((number, *columns))
        return number

    def _tensor(self, diff: TensorDiff) -> int:
        key = tensor_key(diff)
        number = self._ids["tensor"].get(key)
        if number is None:
            # Asked again under the lock: another thread may have given the number in between.
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
