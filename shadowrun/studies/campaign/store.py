"""The store of a campaign: an SQLite file with one row for each variant, and one for each variant on each target.

Each process of a campaign writes a store of its own, a *shard*; `combine` makes one store of them. A variant that
passes takes some hundred bytes: its recipe is not kept, since its number makes it again. A store may come from an
untrusted source, and is validated as a whole before anything in it is read. It is consistent after a kill.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sqlite3
import struct
from typing import TYPE_CHECKING, Any, Final

from shadowrun.errors import DataFileError
from shadowrun.store.codec import decode_facts, storable
from shadowrun.store.lock import FileLock
from shadowrun.studies.campaign.tables import (
    KIND,
    OPS,
    STATUSES,
    CampaignInfo,
    Event,
    FindingRow,
    ResultRow,
    VariantRow,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

__all__ = ["CampaignStore", "other_campaign"]

_MAX_TEXT: Final = 400
# Ids have two bytes where they are many. Reasons with figures in them could be any number.
_MAX_NAMES: Final = 60_000
_MANY: Final = "(one of too many texts)"
_REFERENCE: Final = -1
_ID: Final = struct.Struct("<H")


class CampaignStore:
    """An open store; see `begin` and `open`."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self.path = path
        self._lock: FileLock | None = None
        self._names = {text: n for n, text in self._rows("select id, text from name")}
        self._ops = {(name, s): n for n, name, s in self._rows("select id, name_id, status from op")}
        sql = "select id, op, dtype, kind, cause, explanation, phase from outcome"
        self._outcomes = {tuple(key): n for n, *key in self._rows(sql)}

    @classmethod
    def begin(cls, path: Path, info: CampaignInfo) -> CampaignStore:
        """Open a store to write to: a new one, or one of the same campaign.

        Raises:
            DataFileError: It cannot be written, is none, is of another campaign, or another process writes it.
        """
        # Before the file is opened: a new file of no bytes must not be begun by two processes.
        lock = FileLock(path)
        if lock.contested:
            lock.release()
            raise KIND.unusable(
                path, "is being written by another process. Wait for it, or give each process its --shard"
            )
        try:
            connection, new = KIND.connect_to_write(path)
            store = cls(connection, path)
            if new:
                text = json.dumps(dataclasses.asdict(info), sort_keys=True, default=str)
                with store.written():
                    connection.execute("insert into meta values ('info', ?)", (text,))
            else:
                store._check_same(info)
        except BaseException:
            lock.release()
            raise
        store._lock = lock
        return store

    @classmethod
    def open(cls, path: Path) -> CampaignStore:
        """Open a store to read, also while it is written, after validating all of it.

        Raises:
            DataFileError: Missing, no store, damaged, or of a newer shadowrun.
        """
        connection = KIND.connect_to_read(path)
        store = cls(connection, path)
        try:
            store._check()
        except (ValueError, DataFileError, sqlite3.Error) as error:
            connection.close()
            raise KIND.damaged(path, error) from error
        return store

    def _check_same(self, info: CampaignInfo) -> None:
        try:
            self._check()
        except ValueError as error:
            self._connection.close()
            raise KIND.damaged(self.path, error) from error
        if self.info.campaign != info.campaign:
            self._connection.close()
            raise other_campaign(self.path)

    def _check(self) -> None:
        """Look at what no condition on a column says.

        Raises:
            ValueError: Names the fault.
        """
        decode_facts(CampaignInfo, self._text_of_info())
        n_targets = len(self.info.targets)
        for table in ("result", "finding"):
            ((most,),) = self._rows(f"select coalesce(max(target), 0) from {table}")  # noqa: S608 - names from above
            if most >= n_targets:
                raise ValueError(f"a row of {table} is of no target")
        for table in ("name", "op"):
            # Numbers are given one after the other, and those in blobs have two bytes.
            ((most, n),) = self._rows(f"select coalesce(max(id), 0), count(*) from {table}")  # noqa: S608 - from above
            if most > n or n > _MAX_NAMES + 1:
                raise ValueError(f"a row of {table} has a number that shadowrun does not give")
        for blobs, ids in (("mutators from variant", self._names), ("ops from result", self._ops)):
            known = set(ids.values())
            for (blob,) in self._rows(f"select distinct {blobs}"):
                if not known.issuperset(_ids(blob)):
                    raise ValueError("a row names what is not there")

    # -- writing -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def written(self) -> Iterator[None]:
        """One transaction: all of it is in the file after a kill, or nothing.

        Raises:
            DataFileError: Writing fails, for example on a full disk.
        """
        try:
            self._connection.execute("begin")
            yield
            self._connection.execute("commit")
        except sqlite3.Error as error:
            # After a full disk, the rollback may fail as well; SQLite rolls back when the file is opened again.
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("rollback")
            raise KIND.unusable(self.path, f"cannot be written any more: {error}. `resume` goes on") from error
        except BaseException:  # a second Ctrl-C: what comes after can still be written
            self._connection.execute("rollback")
            raise

    def add_variant(self, row: VariantRow) -> None:
        """Record a variant; one that is there stays."""
        self._connection.execute(
            "insert or ignore into variant values (?, ?, ?, ?, ?, ?, ?)",
            (
                *(row.number, self._name(row.program), row.identity, row.duplicate_of, self._name(row.invalid)),
                *(_packed(self._name(m) or 0 for m in row.mutators), storable(row.recipe)),
            ),
        )

    def invalidate(self, number: int, reason: str, recipe: str | None) -> None:
        """Record that the reference cannot run a variant."""
        sql = "update variant set invalid_id = ?, recipe = ? where number = ?"
        self._connection.execute(sql, (self._name(reason), recipe, number))

    def add_result(self, row: ResultRow, recipe: str | None = None) -> bool:
        """Record a result, with the recipe if it is to be kept; False if there is one already, which stays."""
        cursor = self._connection.execute(
            "insert or ignore into result values (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(row.number, row.target, row.status, self._name(row.reason or None), row.oracles, row.n_calls),
                *(row.cpu_us, _packed(self._op(*item) for item in row.ops.items())),
            ),
        )
        # The first result stays: a chunk may be run twice, and both results are of the same recipe.
        if not cursor.rowcount:
            return False
        for position, found in enumerate(row.findings):
            target = row.target if found.role == "target" else _REFERENCE
            values = (row.number, target, position, self._outcome(found), storable(found.message)[:_MAX_TEXT])
            self._connection.execute("insert into finding values (?, ?, ?, ?, ?)", values)
        if recipe is not None:
            self._connection.execute("update variant set recipe = ? where number = ?", (recipe, row.number))
        return True

    def add_event(self, event: Event) -> None:
        """Record that a process ended in a variant."""
        values = tuple(storable(v)[:_MAX_TEXT] if isinstance(v, str) else v for v in event)
        self._connection.execute("insert or ignore into event values (?, ?, ?, ?, ?, ?)", values)

    def add_session(self, started: str, jobs: int) -> int:
        """Record a start; gives its number for `set_session`."""
        sql = "insert into session (started, jobs, n_variants, wall_s, cpu_s) values (?, ?, 0, 0, 0)"
        return int(self._connection.execute(sql, (started, jobs)).lastrowid or 0)

    def set_session(self, number: int, n_variants: int, wall_s: float, cpu_s: float) -> None:
        """Record how long a start has run, and over how many variants."""
        sql = "update session set n_variants = ?, wall_s = ?, cpu_s = ? where id = ?"
        self._connection.execute(sql, (n_variants, wall_s, cpu_s, number))

    def keep_first_of_equals(self) -> None:
        """Make each variant a duplicate of the lowest number with its identity, and drop results of duplicates."""
        self._connection.execute("create temp table first (identity integer primary key, number integer)")
        self._connection.execute(
            "insert into first select identity, min(number) from variant where identity is not null group by identity "
            "having count(*) > 1"
        )
        self._connection.execute(
            "update variant set invalid_id = null, recipe = null, duplicate_of = "
            "(select first.number from temp.first where first.identity = variant.identity) "
            "where exists (select 1 from temp.first where first.identity = variant.identity "
            "and first.number < variant.number)"
        )
        duplicates = "(select number from variant where duplicate_of >= 0)"
        for table in ("finding", "result"):
            self._connection.execute(f"delete from {table} where number in {duplicates}")  # noqa: S608 - a constant
        self._connection.execute("drop table temp.first")

    def close(self) -> None:
        """Close it, and let another process write it."""
        self._connection.close()
        if self._lock is not None:
            self._lock.release()

    # -- reading -----------------------------------------------------------------------------------

    @property
    def info(self) -> CampaignInfo:
        """Of which campaign it is."""
        try:
            return decode_facts(CampaignInfo, self._text_of_info())
        except ValueError as error:
            raise KIND.damaged(self.path, error) from error

    def _text_of_info(self) -> str:
        rows = list(self._rows("select value from meta where key = 'info'"))
        return rows[0][0] if rows else ""

    def variants(self) -> Iterator[VariantRow]:
        """All variants, by number."""
        texts = {n: text for text, n in self._names.items()}
        for number, program, identity, of, invalid, mutators, recipe in self._rows(
            "select * from variant order by number"
        ):
            names = tuple(texts[n] for n in _ids(mutators))
            yield VariantRow(number, texts.get(program), identity, of, texts.get(invalid), names, recipe)

    def results(self) -> Iterator[ResultRow]:
        """All results with their findings, by number and target."""
        texts = {n: text for text, n in self._names.items()}
        ops = {n: (texts[name], status) for (name, status), n in self._ops.items()}
        findings: dict[tuple[int, int], list[FindingRow]] = {}
        for number, target, *found in self._rows(
            "select number, target, op, dtype, kind, cause, explanation, message, phase from finding join outcome "
            "on outcome.id = outcome_id order by number, target, position"
        ):
            row = FindingRow(*found)._replace(role="target" if target >= 0 else "reference")
            findings.setdefault((number, target), []).append(row)
        for number, target, status, reason, oracles, n_calls, cpu_us, used in self._rows(
            "select * from result order by number, target"
        ):
            yield ResultRow(
                *(number, target, status, texts.get(reason, ""), oracles, n_calls, cpu_us),
                dict(ops[n] for n in _ids(used)),
                # The reference is compared with itself once, with the first target.
                (*findings.get((number, target), ()), *(() if target else findings.get((number, _REFERENCE), ()))),
            )

    def events(self) -> Iterator[Event]:
        """Processes that ended, by number."""
        return (Event(*row) for row in self._rows("select * from event order by number, target, attempt"))

    def sessions(self) -> list[tuple[str, int, int, float, float]]:
        """Starts: time, jobs, variants, seconds, seconds of processor time."""
        return list(self._rows("select started, jobs, n_variants, wall_s, cpu_s from session order by id"))

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        """All that is read within is of one moment; another process that writes the store waits meanwhile."""
        self._connection.execute("begin")
        try:
            yield
        finally:
            self._connection.execute("rollback")

    def identities(self) -> Iterator[tuple[int, int]]:
        """Identity and number of the variants."""
        return self._rows("select identity, number from variant where identity is not null")

    def counts(self) -> dict[str, int]:
        """Variants, duplicates, invalid ones; results by status; findings, distinct ones; processes lost."""
        ((n, n_duplicates, n_invalid),) = self._rows(
            "select count(*), coalesce(sum(duplicate_of >= 0), 0), coalesce(sum(invalid_id is not null), 0) "
            "from variant"
        )
        found = dict(self._rows("select status, count(*) from result group by status"))
        ((n_findings, n_distinct),) = self._rows("select count(*), count(distinct outcome_id) from finding")
        ((n_lost,),) = self._rows("select count(*) from event")
        return {
            "variants": n,
            "duplicates": n_duplicates,
            "invalid": n_invalid,
            **{status: found.get(status, 0) for status in STATUSES},
            "findings": n_findings,
            "distinct findings": n_distinct,
            "processes lost": n_lost,
        }

    def settled_targets(self) -> Iterator[tuple[int, int]]:
        """Number of each variant, and how many of its targets are settled; all of them for duplicates and invalid."""
        all_of = len(self.info.targets)
        yield from self._rows(
            f"select number, {all_of} from variant where duplicate_of >= 0 or invalid_id is not null"  # noqa: S608
        )
        yield from self._rows("select number, count(*) from result group by number")

    # -- internal ------------------------------------------------------------------------------------

    def _name(self, text: str | None) -> int | None:
        if text is None:
            return None
        text = storable(text)[:_MAX_TEXT]
        number = self._names.get(text)
        if number is None and len(self._names) >= _MAX_NAMES and text != _MANY:
            return self._name(_MANY)
        if number is None:
            cursor = self._connection.execute("insert into name (text) values (?)", (text,))
            number = self._names[text] = int(cursor.lastrowid or 0)
        return number

    def _op(self, name: str, status: str) -> int:
        key = self._name(name) or 0, status
        number = self._ops.get(key)
        if number is None and len(self._ops) >= _MAX_NAMES - len(OPS) and name != _MANY:
            return self._op(_MANY, status)
        if number is None:
            cursor = self._connection.execute("insert into op (name_id, status) values (?, ?)", key)
            number = self._ops[key] = int(cursor.lastrowid or 0)
        return number

    def _outcome(self, found: FindingRow) -> int:
        texts = (found.op, found.dtype, found.kind, found.cause, found.explanation, found.phase)
        key = tuple(storable(text)[:_MAX_TEXT] for text in texts)
        number = self._outcomes.get(key)
        if number is None:
            sql = "insert into outcome (op, dtype, kind, cause, explanation, phase) values (?, ?, ?, ?, ?, ?)"
            number = self._outcomes[key] = int(self._connection.execute(sql, key).lastrowid or 0)
        return number

    def _rows(self, sql: str) -> Iterator[tuple[Any, ...]]:
        try:
            # All rows at once: damage raises here, and an open cursor would lock out the writer.
            return iter(self._connection.execute(sql).fetchall())
        except (sqlite3.DatabaseError, UnicodeError) as error:
            raise KIND.damaged(self.path, error) from error


def other_campaign(path: Path) -> DataFileError:
    """The error for a store of another campaign."""
    return DataFileError(
        f"{str(path)!r} is of another campaign: programs, seed, mutators, platforms or torch are others, so that its "
        "numbers mean other variants. Choose another folder.",
        slug="campaign-other",
    )


def _packed(ids: Iterable[int]) -> bytes:
    return b"".join(_ID.pack(n) for n in ids)


def _ids(blob: bytes) -> Iterator[int]:
    return (n for (n,) in _ID.iter_unpack(blob))
