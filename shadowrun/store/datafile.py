"""`DataFile`: records streamed to SQLite, readable while they are written and after ``kill -9``."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sqlite3
import threading
import time
from typing import TYPE_CHECKING, Any

from shadowrun.errors import DataFileError
from shadowrun.store import opening
from shadowrun.store.codec import decode_info, encode_float, encode_info, encode_int
from shadowrun.store.groups import fold

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from shadowrun.types import Phase, RunInfo, TensorDiff, TensorMeta, Verdict

__all__ = ["FLUSH_ROWS", "DataFile"]

FLUSH_ROWS = 1000
FLUSH_S = 0.5
MAX_WAITING_ROWS = 200 * FLUSH_ROWS
"""Rows kept while another process locks the file; past them, recording is given up."""
CLOSE_TIMEOUT_S = 5.0
LOCKED_RETRY_S = 0.5
MAX_VERDICTS = 100_000
"""Verdicts remembered for interning. Evidence holds figures, so their number grows with the calls."""

_INSERTS = {
    "op": "insert into op values (?, ?)",
    "site": "insert into site values (?, ?)",
    "form": "insert into form values (?, ?, ?, ?, ?, ?)",
    "context": "insert into context values (?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "outcome": "insert into outcome values (?, ?, ?, ?, ?)",
    "verdict": "insert into verdict values (?, ?, ?, ?)",
    "diff": "insert into diff values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "step": "insert or replace into step values (?, ?, ?)",
    "skipped": "insert into skipped values (?, ?, ?, ?) "
    "on conflict (op_id, device, reason) do update set n = n + excluded.n",
    "meta": "insert or replace into meta values (?, ?)",
}
_INSERT_CALLS = "insert into call values (?, ?, ?, ?, ?, ?, ?, ?)"

Row = tuple[int, int, int, int, float, float, float, float]


class DataFile:
    """A data file, open for recording (`create`) or for reading (`open`).

    Everything that is added waits in lists until `flush`, which writes it in one transaction. Failures
    to write (disk full) end up in `failure`, never in the caller.

    Attributes:
        path: None for a run in memory.
        rows: Call rows that wait: (seq, step, context_id, verdict_id, ref_us, target_us, drift_abs,
            drift_rel). The hot path may append to it and call `flush` once it holds `FLUSH_ROWS`.
        failure: Why recording ended early; empty while all is well.
        n_records: Calls recorded in this process, those lost after a failure included.
        next_seq: First free call number (not 0 in a file that is appended to).
        next_step: First free step number.
        connection: For the analyses' queries.
    """

    def __init__(self, path: Path | None, connection: sqlite3.Connection, *, writable: bool) -> None:
        self.path = path
        self.connection = connection
        self.rows: list[Row] = []
        self.failure = ""
        self.n_records = 0
        self.next_seq = 0
        self.next_step = 0
        self._writable = writable
        self._max_records: int | None = None
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._flushed_at = time.monotonic()
        self._retry_at = 0.0
        self._newest_verdict = 0
        self._waiting: dict[str, list[tuple[Any, ...]]] = {table: [] for table in _INSERTS}
        self._ids: dict[str, dict[Any, int]] = {name: {} for name in ("op", "site", "form", "outcome", "verdict")}
        self._next_id = {name: itertools.count(1) for name in ("op", "site", "form", "outcome", "verdict", "context")}
        self._n_calls = 0
        self._fold_at = 0
        self._info: RunInfo | None = None
        self._earlier_s = (0.0, 0.0)

    @classmethod
    def create(
        cls,
        path: Path | None,
        info: RunInfo,
        *,
        append: bool = False,
        max_records: int = 50_000,
        fold: bool | None = None,
    ) -> DataFile:
        """Start recording.

        Args:
            path: File to write, None to stay in memory. An existing data file is replaced.
            info: What the run is; see `update_info`.
            append: Go on in an existing data file; numbers continue at `next_seq` and `next_step`.
            max_records: Calls kept one by one when folding; of older matches only sums are kept.
            fold: Whether to fold; None folds in memory only.

        Raises:
            DataFileError: The path cannot be written, is no shadowrun data file, or, when appending,
                holds a run of other platforms.
        """
        if append and path is not None and path.exists():
            data = cls(path, opening.connect_existing(path, write=True), writable=True)
            data._continue(info)
        else:
            data = cls(path, opening.connect_new(path), writable=True)
        if fold or (fold is None and path is None):
            data._max_records = data._fold_at = max_records
        data.update_info(info)
        data.flush()
        return data

    @classmethod
    def check(cls, path: Path, info: RunInfo, *, append: bool = False) -> None:
        """Refuse what `create` would refuse, as far as that can be told without writing.

        Raises:
            DataFileError: As `create`.
        """
        if append and path.exists():
            data = cls.open(path)
            try:
                data._check_platforms(info)
            finally:
                data.connection.close()
        else:
            opening.check_writable(path)

    @classmethod
    def open(cls, path: Path) -> DataFile:
        """Open for reading, also while another process records or after it was killed.

        Raises:
            DataFileError: Missing, unreadable, not a shadowrun data file, corrupt, or of a newer schema.
        """
        return cls(path, opening.connect_existing(path), writable=False)

    def __del__(self) -> None:
        connection = getattr(self, "connection", None)
        if connection is not None and self._pid == os.getpid():
            connection.close()

    def context_id(
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
        """Number of a new context; the caller remembers it for the calls that share the context."""
        with self._lock:
            number = next(self._next_id["context"])
            op_id, site_id = self._intern("op", op), self._intern("site", site)
            self._waiting["context"].append(
                (number, op_id, inputs, ",".join(dtypes), shapes, module, str(phase), site_id, device)
            )
            return number

    def verdict_id(self, verdict: Verdict, missing_kernel: str = "") -> int:
        """Number of a verdict.

        Numbers of verdicts without evidence stay good for the whole run; others should be used at once.
        """
        key = (verdict, missing_kernel)
        number = self._ids["verdict"].get(key)
        if number is not None:
            return number
        with self._lock:
            if len(self._ids["verdict"]) >= MAX_VERDICTS:
                self._ids["verdict"].clear()
            outcome = self._intern(
                "outcome", (str(verdict.status), str(verdict.cause or ""), verdict.explanation, missing_kernel)
            )
            number = self._ids["verdict"][key] = self._newest_verdict = next(self._next_id["verdict"])
            self._waiting["verdict"].append((number, outcome, verdict.evidence, encode_float(verdict.confidence)))
            return number

    def add(self, row: Row) -> None:
        """Record a call; `rows` says what the row holds."""
        self.rows.append(row)
        if len(self.rows) >= FLUSH_ROWS or time.monotonic() - self._flushed_at >= FLUSH_S:
            self.flush()

    def add_diffs(self, seq: int, diffs: Iterable[TensorDiff]) -> None:
        """Record how the tensors of call `seq` differed."""
        e, waiting = encode_float, self._waiting["diff"]
        for position, d in enumerate(diffs):
            waiting.append(
                (
                    seq, position, d.name, self._form(d.actual), self._form(d.expected), d.n_elements, d.n_different,
                    d.n_mismatched, e(d.max_abs), e(d.max_rel), e(d.rmse), encode_int(d.max_ulp), d.remaining_bits,
                    d.n_nan, d.n_inf, d.n_zero_sign, d.n_subnormal, json.dumps(d.worst_index), e(d.worst_actual),
                    e(d.worst_expected), e(d.excess_actual), e(d.excess_expected), d.detail,
                )
            )  # fmt: skip

    def add_skipped(self, counts: Mapping[tuple[str, str, str], int]) -> None:
        """Add to the numbers of calls that were skipped on purpose, by (op, device, reason)."""
        with self._lock:
            self._waiting["skipped"].extend(
                (self._intern("op", op), device, reason, n) for (op, device, reason), n in counts.items()
            )

    def add_step(self, step: int, started_s: float, wall_s: float) -> None:
        """Record when a training step began and how long it took."""
        self._waiting["step"].append((step, started_s, wall_s))

    @property
    def info(self) -> RunInfo:
        """What the run is, as of the last `update_info` or as the file tells."""
        if self._info is not None:
            return self._info
        row = next(self.query("select value from meta where key = 'info'"), None)
        if row is None:
            raise opening.corrupt(self.path, ValueError("it has no run information"))
        return decode_info(row[0])

    def update_info(self, info: RunInfo) -> None:
        """Replace the run's information; in a file that is appended to, earlier times are added."""
        with self._lock:
            wall, own = self._earlier_s
            self._info = dataclasses.replace(info, wall_s=info.wall_s + wall, own_s=info.own_s + own)
            self._waiting["meta"].append(("info", encode_info(self._info)))

    def flush(self) -> None:
        """Write what waits. Never raises: see `failure`."""
        if not self._writable:
            return
        if self._pid != os.getpid():  # a forked worker must not write to its parent's file
            self._drop()
            return
        with self._lock:
            self._flushed_at = time.monotonic()
            if self.failure:
                self._drop()
                return
            if self._flushed_at < self._retry_at:
                return
            # Calls are cut off first: what they refer to was put into its list before them.
            n_rows = len(self.rows)
            lengths = {table: len(rows) for table, rows in self._waiting.items()}
            try:
                self._write(n_rows, lengths)
            except (sqlite3.Error, OSError, OverflowError) as error:
                self._give_up(error)
                return
            self._n_calls += n_rows
            self.n_records += n_rows
            del self.rows[:n_rows]
            for table, n in lengths.items():
                del self._waiting[table][:n]
            if self._max_records is not None and self._n_calls > self._fold_at:
                self._fold(self._max_records)

    def close(self) -> None:
        """Flush, and mark the run as complete. What was recorded can still be read."""
        if not self._writable or self._pid != os.getpid():
            return
        if self._info is not None:
            self._info = dataclasses.replace(self._info, complete=True)
            self._waiting["meta"].append(("info", encode_info(self._info)))
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        self.flush()
        while self._waiting["meta"] and not self.failure and time.monotonic() < deadline:
            self._retry_at = 0.0
            self.flush()

    def query(self, sql: str, values: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        """Rows of a query, fetched at once so that no lock is held while they are used.

        Raises:
            DataFileError: The file is damaged.
        """
        with self._lock:
            try:
                return iter(self.connection.execute(sql, values).fetchall())
            except sqlite3.DatabaseError as error:
                raise opening.corrupt(self.path, error) from error

    def _intern(self, table: str, value: Any) -> int:
        ids = self._ids[table]
        number = ids.get(value)
        if number is None:
            number = ids[value] = next(self._next_id[table])
            columns = value if isinstance(value, tuple) else (value,)
            self._waiting[table].append((number, *columns))
        return number

    def _form(self, meta: TensorMeta) -> int:
        with self._lock:
            key = (meta.dtype, json.dumps(meta.shape), json.dumps(meta.stride), meta.device, meta.layout)
            return self._intern("form", key)

    def _write(self, n_rows: int, lengths: dict[str, int]) -> None:
        connection = self.connection
        connection.execute("begin immediate")
        try:
            for table, n in lengths.items():
                if n:
                    connection.executemany(_INSERTS[table], self._waiting[table][:n])
            connection.executemany(_INSERT_CALLS, map(_encode_row, self.rows[:n_rows]))
            connection.execute("commit")
        except BaseException:
            if connection.in_transaction:
                connection.execute("rollback")
            raise

    def _give_up(self, error: Exception) -> None:
        locked = isinstance(error, sqlite3.OperationalError) and "locked" in str(error)
        if locked and len(self.rows) < MAX_WAITING_ROWS:
            # A reader holds the file: all is kept, and the program does not wait at every call.
            self._retry_at = time.monotonic() + LOCKED_RETRY_S
            return
        self.failure = f"{error} (after {self.n_records} calls)"
        self._drop()

    def _drop(self) -> None:
        self.n_records += len(self.rows)
        self.rows.clear()
        for rows in self._waiting.values():
            rows.clear()

    def _fold(self, max_records: int) -> None:
        """Let a tenth more go than needed, so that folding is rare."""
        try:
            self.connection.execute("begin immediate")
            self._n_calls -= fold(self.connection, self._n_calls - max_records + max_records // 10)
            # Of the verdicts that nothing refers to any more, the newest may be about to be used.
            self.connection.execute(
                "delete from verdict where evidence <> '' and id < ? and id not in (select verdict_id from call)",
                (self._newest_verdict - FLUSH_ROWS,),
            )
            self.connection.execute("commit")
        except sqlite3.Error as error:
            self._give_up(error)
            return
        self._ids["verdict"].clear()
        # Where too few matches were left to fold, the next attempt waits until there may be more.
        self._fold_at = max(max_records, self._n_calls + max_records // 10)

    def _continue(self, info: RunInfo) -> None:
        """Take up the numbering of a file that is appended to."""
        self._check_platforms(info)
        earlier = self.info
        self._earlier_s = (earlier.wall_s, earlier.own_s)
        for table, key in (("op", "name"), ("site", "text")):
            self._ids[table] = {text: number for number, text in self.query(f"select id, {key} from {table}")}  # noqa: S608
        for table in self._next_id:
            self._next_id[table] = itertools.count(self._greatest("id", table) + 1)
        self.next_seq = self._greatest("seq", "call") + 1
        self.next_step = max(self._greatest("step", "call"), self._greatest("step", "step")) + 1

    def _check_platforms(self, info: RunInfo) -> None:
        earlier = self.info
        if (earlier.target, earlier.ref) != (info.target, info.ref):
            raise DataFileError(
                f"{str(self.path)!r} compares {earlier.target} with {earlier.ref}; a run of {info.target} "
                f"with {info.ref} cannot be appended. Choose another file.",
                slug="data-file-append",
            )

    def _greatest(self, column: str, table: str) -> int:
        row = next(self.query(f"select coalesce(max({column}), -1) from {table}"))  # noqa: S608 - names from above
        return int(row[0])


def _encode_row(row: Row) -> tuple[Any, ...]:
    drift_abs, drift_rel = row[6], row[7]
    if drift_abs == drift_abs and drift_rel == drift_rel:  # noqa: PLR0124 - the fastest NaN test
        return row
    return (*row[:6], encode_float(drift_abs), encode_float(drift_rel))
